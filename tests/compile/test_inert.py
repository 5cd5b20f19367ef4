"""What the library puts into torch does nothing where there is no ``Offload``, and goes where it can."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.variables.ctx_manager as banning
import torch._functorch._aot_autograd.graph_compile as splitting
import torch.utils.checkpoint as checkpointing
from torch._inductor import config
from torch.autograd.graph import saved_tensors_hooks

import eager_offload as eo
from eager_offload.compile import order
from eager_offload.compile.order import OrderTransfers

pytestmark = pytest.mark.xdist_group("inert")


def patched_for_contexts() -> dict[str, object]:
    return {
        "hooks": saved_tensors_hooks.__enter__,
        "caching": checkpointing._CachingTorchDispatchMode.__init__,
        "cached": checkpointing._CachedTorchDispatchMode.__init__,
        "splits": splitting.maybe_inline_graph_saved_tensors_hooks,
        "bans": banning.DisabledSavedTensorsHooksVariable._call_func,
    }


def make_offload(path: Path, **fields: Any) -> eo.Offload:
    return eo.Offload(disk_path=path, min_bytes=0, keep_last_bytes=0, **fields)


def test_what_is_there_for_contexts_goes_with_the_last_of_them(tmp_path: Path) -> None:
    before, one, other = patched_for_contexts(), make_offload(tmp_path), make_offload(tmp_path)
    for _ in range(2):
        one.__enter__()
        ours = patched_for_contexts()
        assert not {name for name in before if ours[name] is before[name]}
        other.__enter__()
        one.__exit__(None, None, None)
        assert patched_for_contexts() == ours, "the other one is still in force"
        with pytest.raises(ZeroDivisionError), one:
            raise ZeroDivisionError
        other.__exit__(None, None, None)
        assert patched_for_contexts() == before
    for each in (one, other):
        each.close()


def test_options_of_inductor_go_back_when_the_last_offload_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "_users", weakref.WeakSet())  # those of other tests may be open
    order.uninstall(monkeypatch)
    before = config.post_grad_custom_post_pass
    assert not isinstance(before, OrderTransfers)
    one, other = make_offload(tmp_path), make_offload(tmp_path)
    for _ in range(2):
        for each in (one, other):
            with each:
                pass
        one.close()
        assert isinstance(config.post_grad_custom_post_pass, OrderTransfers), "a backward is compiled after its context"
        other.close()
        assert config.post_grad_custom_post_pass == before


def test_passes_leave_a_graph_of_no_offload_as_it_is() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x.sin().cos()).graph
    before = [str(node) for node in graph.nodes]
    OrderTransfers()(graph)
    assert [str(node) for node in graph.nodes] == before
