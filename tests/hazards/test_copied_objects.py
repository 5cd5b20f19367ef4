"""H48: an ``Offload``, and what holds one, is copied and pickled: each a new object of the same configuration."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import eager_offload as eo
from tests.copies import pickled, saved
from tests.hazards.backends import Backend, SimulatedBackend, assert_settled, hooks_are_gone
from tests.hazards.programs import assert_identical, assert_moved
from tests.programs import leaf


class Layers(nn.Module):
    """Offloads by itself."""

    def __init__(self, offload: eo.Offload | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.offload = offload

    def forward(self, x: Tensor) -> Tensor:
        with self.offload or nullcontext():
            return self.second(self.first(x * 2).tanh().exp()).square().sum()


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(leaf(8, 16)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


every_way = pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled, saved])


def assert_new(copied: eo.Offload, original: eo.Offload, disk: Backend) -> None:
    """It is of its own, and moves bytes: those, and no others, count for it."""
    disk.offloads.append(copied)
    assert copied is not original
    assert copied.config == original.config
    assert copied.stats().saved_bytes == 0
    assert copied._offloaders.tiers() == [], "opened before anything has moved"
    before = original.stats(synchronize=True)
    assert_identical(gradients(Layers()), gradients(Layers(copied)))
    assert_moved(assert_settled(copied))
    assert original.stats(synchronize=True) == before


@every_way
def test_h48_one_that_is_entered_and_has_graphs_of_its_own(make: Callable[..., Any], disk: Backend) -> None:
    offload, x = disk.offload(), leaf(16, 16)
    with offload:
        loss = (x * 2).exp().square().sum()
        copied = make(offload)
        with pytest.raises(eo.OffloadError, match="did not enter"):
            copied.__exit__(None, None, None)
    assert hooks_are_gone()
    assert_new(copied, offload, disk)
    loss.backward()
    assert_identical(torch.autograd.grad((x * 2).exp().square().sum(), x)[0], x.grad)
    del loss
    assert_moved(assert_settled(offload))


@every_way
def test_h48_modules_that_hold_one(make: Callable[..., Any], disk: Backend) -> None:
    offload = disk.offload()
    block = Layers(offload)
    model = nn.ModuleList([block, block, Layers(offload)])
    copied = make(model)
    if make is not copy.copy:  # which has the same modules
        assert copied[0].offload is not offload
        assert copied[0].offload is copied[2].offload, "one stays one"
    for one in (*model, *copied):
        assert_identical(gradients(Layers()), gradients(one))
    for used in {offload, copied[0].offload}:
        disk.offloads.append(used)
        assert_moved(assert_settled(used))


class Named(eo.Offload):
    """A subclass with attributes, a slot and an ``__init__`` of its own, and one attribute from before that of ours."""

    __slots__ = ("kind",)

    def __init__(self, name: str, kind: str, /, *, steps: list[int], **fields: Any) -> None:
        self.before = name
        super().__init__(**fields)
        self.kind, self.steps, self.me = kind, steps, self


@pytest.mark.filterwarnings("ignore:eager_offload. nothing of this Offload:RuntimeWarning")
@every_way
def test_h48_what_a_subclass_adds_goes_along(make: Callable[..., Any], disk: Backend) -> None:
    offload = Named("a", "b", steps=[1], **vars(disk.offload().config))
    disk.offloads.append(offload)
    gradients(Layers(offload))
    copied = make(offload)
    assert type(copied) is Named
    assert (copied.before, copied.kind, copied.steps) == ("a", "b", [1])
    assert (copied.steps is offload.steps) is (make is copy.copy)
    assert copied.me is (offload if make is copy.copy else copied)
    assert vars(copied).keys() == vars(offload).keys()
    copied.me = offload.me = None
    assert_new(copied, offload, disk)


def test_h48_a_runtime_is_shared_by_copies_and_cannot_be_pickled() -> None:
    with SimulatedBackend() as backend:
        offload = backend.offload()
        for make in (copy.copy, copy.deepcopy):
            assert make(offload)._offloaders.given_runtime is backend.runtime
        with pytest.raises(eo.OffloadError, match=r"SimulatedRuntime.* cannot be pickled.*pickle its config"):
            pickle.dumps(offload)


def test_h48_a_path_that_is_not_there_is_an_error_when_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    offload = eo.Offload(disk_path=tmp_path / "spill", min_bytes=0)
    sent = pickle.dumps(Layers(offload))
    offload.close()
    (tmp_path / "spill").rmdir()
    model = pickle.loads(sent)  # on another machine
    with pytest.raises(eo.ConfigError, match="spill"):
        gradients(model)
    assert hooks_are_gone()


@pytest.mark.filterwarnings("ignore:eager_offload. compiled code waits:RuntimeWarning")
@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled, AveragedModel])
def test_h48_compiled_modules(make: Callable[..., Any], disk: Backend) -> None:
    torch._dynamo.reset()
    offload, expected = disk.offload(), gradients(torch.compile(Layers(), backend="aot_eager"))
    model = offload.compile(Layers(), backend="aot_eager")
    copied = make(model)
    served = copied.module.eager_offload if make is AveragedModel else copied.eager_offload
    assert model.eager_offload is offload
    assert (served is offload) is (make is copy.copy)
    disk.offloads.append(served)
    for one, its in ((copied, served), (model, offload)):
        assert_identical(expected, gradients(one))
        stats = assert_settled(its)
        assert stats.compiled_regions > 0
        assert stats.bytes_out > 0
