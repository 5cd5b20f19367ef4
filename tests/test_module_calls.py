"""H61: a copy of a module whose calls something stands around calls, and trains, its own modules and parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel

import eager_offload as eo
from eager_offload.integrations.calls import OffloadedCalls
from eager_offload.planning.apply import checkpointed
from tests.copies import pickled, saved


class Halves(nn.Module):
    """Has a layer that may be of a class that copies its attributes by itself, and one after it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        return self.last(found[0] if isinstance(found, tuple) else found).exp().mean()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(32, 32),
    "lstm": lambda: nn.LSTM(32, 32),
    "parametrized": lambda: register_parametrization(nn.Linear(32, 32), "weight", nn.Tanh()),
    "ddp": lambda: nn.parallel.DistributedDataParallel(nn.Linear(32, 32)),
}


@contextmanager
def offloaded(model: Halves, offload: eo.Offload) -> Iterator[eo.Offload]:
    """What integrations do with a model, here with a layer that they may be given."""
    calls = OffloadedCalls(model.layer, offload)
    yield offload
    calls.remove()


@contextmanager
def skipped(model: Halves, offload: eo.Offload) -> Iterator[eo.Offload]:
    """What ``skip`` does."""
    skipping = eo.Offload(offload.config, skip="layer")
    skipping.skip_in(model)
    yield skipping
    skipping.close()


@contextmanager
def computed_again(model: Halves, offload: eo.Offload) -> Iterator[eo.Offload]:
    """What ``plan.apply`` does."""
    with checkpointed(model, ["layer"]):
        yield offload


AROUND = pytest.mark.parametrize("around", [offloaded, skipped, computed_again])
Around = Callable[[Halves, eo.Offload], AbstractContextManager[eo.Offload]]


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def offload(tmp_path: Any) -> Iterator[eo.Offload]:
    made = eo.Offload(min_bytes=0, tier="disk", disk_path=tmp_path, keep_last_bytes=0)
    yield made
    made.close()


def averaged(value: Halves) -> Any:
    return AveragedModel(value).module


def assert_own(model: Halves, other: Halves) -> None:
    """``other`` computes with its own parameters, and gradients go there."""
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    loss = other(torch.ones(4, 8, 32))
    assert loss == 1, "of zeros"
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in other.last.parameters())


#: torch pickles no parametrized module.
COPIES = [
    (layer, make)
    for layer in LAYERS
    for make in (copy.deepcopy, averaged, *([] if layer == "parametrized" else [pickled, saved]))
]


@AROUND
@pytest.mark.parametrize(("layer", "make"), COPIES)
def test_h61_a_copy_calls_its_own_and_the_original_goes_on(
    layer: str, make: Callable[[Any], Any], around: Around, offload: eo.Offload
) -> None:
    def gradients(inside: AbstractContextManager[Any]) -> list[Tensor]:
        with inside:
            loss = model(torch.ones(16, 8, 32))
        return list(torch.autograd.grad(loss, list(model.parameters())))

    model = Halves(LAYERS[layer]())
    plain = gradients(nullcontext())
    with around(model, offload) as serving:
        other = make(model)
        assert_own(model, other)
        assert_own(model, make(other))
        assert all(map(torch.equal, gradients(serving), plain))
        assert serving.stats(synchronize=True).bytes_out > 0
    assert_own(model, other)
    assert "_compiled_call_impl" not in vars(model.layer)


def replica(module: nn.Module) -> Any:
    """A copy of a module's attributes, as regional compilation and ``nn.DataParallel`` make one."""
    other: Any = type(module).__new__(type(module))
    vars(other).update(vars(module), _parameters=dict(vars(module)["_parameters"]), _modules=dict(module._modules))
    return other


class Scale(nn.Module):
    """Has nothing but a number that is no parameter, so that a shallow copy differs by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.by = 2.0

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.by).exp()


@AROUND
@pytest.mark.parametrize("make", [copy.copy, replica])
@pytest.mark.parametrize("when", ["before", "after"])
def test_h61_a_shallow_copy_calls_its_own(
    make: Callable[[Any], Any], when: str, around: Around, offload: eo.Offload
) -> None:
    x, model = torch.ones(8, 32), Halves(Scale())
    with around(model, offload):
        other = make(model.layer)
        other.by = 0.0
        if when == "before":
            assert other(x).equal(torch.ones(8, 32))
            again = make(other)
            again.by = 1.0
            assert again(x).equal(x.exp())
        assert model.layer(x).equal((2 * x).exp())
    assert other(x).equal(torch.ones(8, 32))
    del model
    assert other(x).equal(torch.ones(8, 32))
