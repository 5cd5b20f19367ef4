"""H65: where the user makes errors of warnings, none is raised in the midst of a transfer, a compilation or hooks of
others: it comes when a ``with`` is left or entered, or when one is closed, and what was done is exact."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import eager_offload as eo
from eager_offload.errors import warn
from eager_offload.tiers.disk import DiskSlot

NBYTES = 1 << 20


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings(category=RuntimeWarning, action="error"):
        yield


@pytest.fixture
def offload() -> Iterator[eo.Offload]:
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)
    yield offload
    offload.close()


def leaf() -> Tensor:
    return torch.linspace(-1, 1, NBYTES // 4).requires_grad_()


def forward(x: Tensor, inside: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Tensor:
    h = (x * 2).sin().cos()
    with inside():
        return h.sin().exp().sum()


def train(offload: eo.Offload, forward: Callable[[Tensor], Tensor] = forward, count: int = 3) -> str:
    """Steps of which each gradient is looked at; returns the texts of the warnings that were raised, each when a
    ``with`` was left or entered, and by nothing else."""
    raised, steps, plain = [], 0, leaf()
    forward(plain).backward()
    while steps < count:
        x, loss = leaf(), None
        try:
            with offload:
                loss = forward(x)
        except RuntimeWarning as warning:
            names = [frame.name for frame in traceback.extract_tb(warning.__traceback__)]
            assert names[:2] in (["train", "__exit__"], ["train", "__enter__"])
            raised.append(str(warning))
        if loss is not None:
            loss.backward()
            assert torch.equal(x.grad, plain.grad)
            steps += 1
    assert not offload.stats(synchronize=True).is_approximate, "nothing was crashed by it"
    assert all(not offloader.is_crashed for offloader in offload._offloaders.all())
    return "\n".join(raised)


@pytest.mark.parametrize("plans", [True, False, "auto"])
def test_h65_a_shortage_raises_where_the_context_is_left(plans: Any) -> None:
    offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0, host_budget="3MiB", step_tables=plans)
    assert train(offload, count=5).count("no room for") == 1
    assert offload.stats().bytes_out > 0
    assert offload.stats().kept_bytes["budget"] > 0


def test_h65_what_a_thread_of_the_library_has_to_say_waits_for_a_line_of_the_users(offload: eo.Offload) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        thread = threading.Thread(target=warn, args=("from where no line of the user's led",))
        thread.start()
        thread.join()
        assert not caught
        assert not train(offload)
    assert [(one.filename, str(one.message)[:28]) for one in caught] == [(__file__, "eager_offload: from where no")]
    assert offload.stats().bytes_out > 0


def test_h65_a_transfer_that_fails_raises_at_the_next_with(offload: eo.Offload) -> None:
    def fail(slot: DiskSlot, source: Any) -> None:
        raise OSError(28, "No space left on device")

    assert train(offload) == ""
    moved = offload.stats().bytes_out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskSlot, "write", fail)
        raised = train(offload)
    raised += train(offload)
    assert raised.count("offloading failed") == 1
    assert offload.stats().bytes_out > moved > 0


def test_h65_hooks_that_hide_ours_are_entered_all_the_same(offload: eo.Offload) -> None:
    assert train(offload, lambda x: forward(x, save_on_cpu)).count("other saved-tensor hooks") == 1
    assert offload.stats().bytes_out > 0


def test_h65_compiled_code_that_has_no_room() -> None:
    offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0, host_budget="512KiB")
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)

    def inside(x: Tensor) -> Tensor:
        with eo.no_offload():
            return compiled(x)

    raised = train(offload, inside)
    assert offload.stats().compiled_regions > 0
    offload.close()
    for text in ("compiled code waits for each", "in a no_offload() region", "no room for"):
        assert raised.count(text) == 1


def test_h65_a_warning_that_is_left_is_raised_by_close_which_has_closed(offload: eo.Offload) -> None:
    train(offload, count=1)
    warn("told late")
    with pytest.raises(RuntimeWarning, match="told late"):
        offload.close()
    assert offload._offloaders.tiers() == []


def test_h65_one_with_an_exception_of_the_users_hides_nothing(offload: eo.Offload) -> None:
    def step() -> None:
        with offload:
            warn("told late")
            raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        step()
    with pytest.raises(RuntimeWarning, match="told late"), offload:
        raise AssertionError("not entered")
