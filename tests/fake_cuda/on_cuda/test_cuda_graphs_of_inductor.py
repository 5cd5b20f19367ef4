"""``torch.compile(mode="reduce-overhead")`` where saved tensors move: without CUDA graphs, and without an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import eager_offload as eo
from benchmarks.models import Llama, Shape
from eager_offload.compile.backend import eager_offload as backend
from eager_offload.errors import said_in_process

SETTINGS: dict[str, Any] = {"tier": "host", "keep_last_bytes": 0, "min_bytes": 1 << 16}


@pytest.fixture(scope="module", autouse=True)
def _one_cache() -> Iterator[None]:
    """What one test has compiled, another may find."""
    with fresh_cache():
        yield


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    said_in_process.discard("cuda_graphs")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model() -> nn.Module:
    """Two layers with flash attention, which returns a tuple."""
    shape = Shape(layers=2, width=128, hidden=256, heads=2, shared_heads=1, vocabulary=128)
    return Llama(shape).to("cuda", torch.bfloat16)


def product(x: Tensor) -> Tensor:
    return (x.exp() @ x.t()).cos().sum()


def rows(*sizes: int) -> list[Tensor]:
    """What ``product`` takes."""
    return [torch.zeros(size, 128, device="cuda", requires_grad=True) for size in sizes]


def reduced(function: Any) -> Any:
    return torch.compile(function, mode="reduce-overhead", dynamic=False)


def train(call: Callable[..., Tensor], around: AbstractContextManager[object], inputs: list[Tensor]) -> list[str]:
    """A step for each input; what was warned of."""
    with (
        warnings.catch_warnings(record=True) as told,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
    ):
        warnings.simplefilter("always")
        for one in inputs:
            torch.compiler.cudagraph_mark_step_begin()
            with around:
                loss = call(one)
            torch.autograd.backward(loss, inputs=[one] if one.requires_grad else None)
            one.grad = None
            del loss
        torch.cuda.synchronize()
    return [str(one.message) for one in told if "eager_offload" in str(one.message)]


def assert_without_cuda_graphs(offload: eo.Offload, told: list[str]) -> None:
    stats = offload.stats(synchronize=True)
    assert stats.reloaded_bytes == stats.offloaded_bytes > 0
    assert [("reduce-overhead" in one, "graphs.capture_step" in one) for one in told] == [(True, True)]
    assert counters["inductor"]["cudagraph_skips"] > 0
    assert "cudagraph_recorded_non_static_inputs" not in counters["inductor"], "none, in forward and backward"
    assert "cudagraph_partitions" not in counters["inductor"], "and compiled as without"


@pytest.mark.parametrize(
    ("way", "cache"), [("around", "autograd's"), ("compile", "inductor's"), ("backend", "autograd's")]
)
def test_a_graph_with_transfers_runs_without_cuda_graphs(way: str, cache: str, model: nn.Module) -> None:
    """Compiled anew, or found in a cache of the compiler: the ways with one configuration share them."""
    with functorch_config.patch(enable_autograd_cache=cache == "autograd's"):
        if way == "backend":
            call = torch.compile(model, backend=backend, options={**SETTINGS, "triton.cudagraphs": True})
            offload = eo.Offload.serving(**SETTINGS)
        else:
            offload = eo.Offload(**SETTINGS)
            call = reduced(model) if way == "around" else offload.compile(model, mode="reduce-overhead", dynamic=False)
        told = train(
            call,
            offload if way == "around" else nullcontext(),
            [torch.zeros(2, 257, dtype=torch.int64, device="cuda")] * 3,
        )
    assert_without_cuda_graphs(offload, told)
    offload.close()


def test_sizes_that_change_are_told_of_once_and_a_graph_without_transfers_keeps_its_cuda_graphs() -> None:
    """Where what it keeps is counted, too, which is an operation of the host's."""
    offload, few = eo.Offload(**SETTINGS), eo.Offload(**SETTINGS | {"min_bytes": 1 << 40})
    call = torch.compile(product, mode="reduce-overhead")
    assert_without_cuda_graphs(offload, train(call, offload, rows(256, 256, 512, 768)))
    assert counters["stats"]["unique_graphs"] == 2
    counters.clear()
    torch._dynamo.reset()
    assert train(reduced(product), few, rows(256) * 3) == []
    assert few.stats(synchronize=True).kept_bytes
    assert "cudagraph_skips" not in counters["inductor"]
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == 2, "of forward, and of backward"
    few.close()
    offload.close()
