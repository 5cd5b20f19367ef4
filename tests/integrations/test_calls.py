"""Calls of a module in a context: always left again, never in the way of copies, pickles and compilers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from eager_offload._torch import top_pack_hook
from eager_offload.integrations.calls import OffloadedCalls
from tests.integrations.moving import moved
from tests.threads import collect


class Model(nn.Module):
    """Saves tensors that move; ``fails`` is raised in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.fails: BaseException | None = None

    def forward(self, batch: Tensor) -> Tensor:
        hidden = torch.relu(self.first(batch)).exp()
        if self.fails is not None:
            raise self.fails
        return self.second(hidden).sum()


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(256, 64, generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_call_moves_bytes_and_changes_no_gradient(offload: eo.Offload, batch: Tensor) -> None:
    model = Model()
    expected = gradients(model, batch)
    calls = OffloadedCalls(model, offload)
    assert all(map(torch.equal, gradients(model, batch), expected))
    assert moved(offload) > 0
    calls.remove()
    calls.remove()
    offload.reset_stats()
    assert all(map(torch.equal, gradients(model, batch), expected))
    assert moved(offload) == 0
    assert "_compiled_call_impl" not in vars(model)


def test_nothing_moves_without_training_or_gradients(offload: eo.Offload, batch: Tensor) -> None:
    model = Model()
    hooked: list[bool] = []
    model.first.register_forward_pre_hook(lambda *_: hooked.append(top_pack_hook() is not None))
    OffloadedCalls(model, offload)
    with torch.no_grad():
        model(batch)
    model.eval()
    model(batch).backward()
    assert hooked == [False, False], "not even entered"
    assert offload.stats().saved_tensors == 0
    model.train()
    model(batch).backward()
    assert hooked[2:] == [True]
    assert moved(offload) > 0


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_a_call_the_context_is_left(
    offload: eo.Offload, batch: Tensor, kind: type[BaseException]
) -> None:
    model = Model()
    OffloadedCalls(model, offload)
    model.fails = kind("in forward")
    with pytest.raises(kind):
        model(batch)
    assert top_pack_hook() is None
    model.fails = None
    model(batch).backward()
    assert moved(offload) > 0


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("first", ["calls", "module", "nothing"])
def test_a_module_goes_with_its_last_reference(offload: eo.Offload, first: str, is_compiled: bool) -> None:
    model = Model()
    if is_compiled:
        model.compile(backend="aot_eager")  # a cycle of torch's own
    calls, alive = OffloadedCalls(model, offload), weakref.ref(model)
    gc.disable()
    try:
        if first == "calls":
            calls.remove()
        del model
        if is_compiled:
            collect()
        assert alive() is None
    finally:
        gc.enable()
    if first == "module":
        calls.remove()


def test_what_was_put_around_it_later_stays_when_it_goes(offload: eo.Offload, batch: Tensor) -> None:
    model = Model()
    below, above = OffloadedCalls(model, offload), OffloadedCalls(model, other := eo.Offload(min_bytes=1 << 30))
    below.remove()
    model(batch).backward()
    assert offload.stats().saved_tensors == 0
    assert other.stats().saved_tensors > 0
    above.remove()
    model(batch).backward()
    assert offload.stats().saved_tensors == 0


@pytest.mark.parametrize("compile_", ["torch.compile(model)", "model.compile()"])
def test_a_compiled_module_is_one_graph_that_moves_bytes(offload: eo.Offload, batch: Tensor, compile_: str) -> None:
    model = Model()
    called: nn.Module = model
    if compile_ == "model.compile()":
        model.compile(fullgraph=True, backend="aot_eager")
    else:
        called = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = gradients(called, batch)
    OffloadedCalls(called, offload)
    assert all(map(torch.equal, gradients(called, batch), expected))
    stats = offload.stats(synchronize=True)
    assert (stats.compiled_regions, stats.bytes_out > 0) == (1, True)


def test_threads_of_data_parallel_are_refused_at_once(offload: eo.Offload) -> None:
    with pytest.raises(eo.ConfigError, match="torchrun"):
        OffloadedCalls(nn.DataParallel(Model()), offload)
