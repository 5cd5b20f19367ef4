"""H13, H62: what is inside of wrappers moves; attributes go with the graph, and no code of a subclass runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.programs import Around, Settled, assert_identical
from tests.programs import leaf
from tests.programs.layouts import noise
from tests.programs.parts.functions import watching
from tests.programs.parts.wrappers import KINDS, Image, Kind, Scaled, parts_of, with_unit, wrapped, wrapped_pair

NBYTES = 16 * 16 * 4


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_h13_bytes_are_on_the_device_only_while_they_are_used(kind: Kind, backend: Backend) -> None:
    def look(tensor: Tensor) -> None:
        storages.extend(weakref.ref(part.untyped_storage()) for part in parts_of(tensor) if part.numel() > 1)

    offload, storages = backend.offload(prefetch_bytes=0), list[Callable[[], object]]()
    with Settled(offload):
        h = wrapped(kind, 16, 16) * 2
        look(h)
        y = watching(leaf(16, 16), look, h)
        del h
    assert [storage() for storage in storages] == [None] * kind.inside, "what was saved is still there"
    y.sum().backward(retain_graph=True)
    assert [storage() for storage in storages] == [None] * 2 * kind.inside, "what was brought back is still there"


def test_h13_a_change_of_what_is_inside_behind_the_wrappers_back_raises(backend: Backend) -> None:
    backend.sources_change = True
    offload, x = backend.offload(), wrapped_pair(16, 16)
    with Settled(offload):
        h = x * 2
        y = (h * h).sum()
    parts_of(h)[0].add_(1)
    with pytest.raises(eo.SavedTensorModifiedError):
        y.backward()


def saved_by_another(offload: eo.Offload, look: Callable[[Tensor], object], *tensors: Tensor) -> Tensor:
    """The sum of an operator that saves ``tensors``, all of which have left."""
    with Settled(offload):
        return watching((leaf(16, 16) * 3).tanh(), look, *tensors).sum()


def test_h62_what_lives_is_given_itself(backend: Backend) -> None:
    offload, seen = backend.offload(), list[Tensor]()
    tensors = [with_unit(noise(16, 16)), with_unit(noise(16, 16).as_subclass(Image))]
    saved_by_another(offload, seen.append, *tensors).backward()
    assert [one is other for one, other in zip(seen, tensors, strict=True)] == [True, True]
    assert offload.stats().bytes_out >= 2 * NBYTES


def test_h62_attributes_go_with_the_graph(backend: Backend) -> None:
    offload, saved = backend.offload(), noise(16, 16)
    gc.disable()
    try:
        saved.held = nn.Identity()
        ref = weakref.ref(saved.held)
        saved.result = saved_by_another(offload, lambda tensor: None, saved)  # the graph that holds the handle
        y = saved.result
        del saved
        y.backward()
        del y
        assert ref() is None
    finally:
        gc.enable()
    assert assert_settled(offload).bytes_out > 0


class Loud(Tensor):
    """A subclass that hears of all that is done to its tensors, and makes none by itself."""

    heard: ClassVar[list[object]] = []

    def __new__(cls, *args: Any) -> Loud:
        raise AssertionError("it is made by as_subclass alone")

    def __getattr__(self, name: str) -> Any:
        Loud.heard.append(name)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: object) -> None:
        Loud.heard.append(name)
        super().__setattr__(name, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Loud.heard.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore:eager_offload. nothing moved:RuntimeWarning")
@pytest.mark.parametrize("grad", [False, True], ids=["of a constant", "of a result"])
@pytest.mark.parametrize("kind", ["moves", "small", "parameter"])
def test_h62_no_code_of_a_subclass_runs(kind: str, grad: bool, users_backend: Backend) -> None:
    offload, found = users_backend.offload(min_bytes=1 << 20 if kind == "small" else 0), list[type]()
    x = leaf(16, 16, grad=grad)
    tensor = (x if kind == "parameter" else x * 2).as_subclass(Loud)
    if kind == "parameter":
        tensor = nn.Parameter(tensor, requires_grad=grad)
    y = leaf(1) * 1
    Loud.heard.clear()
    with Settled(offload):
        y = watching(y, lambda saved: found.append(type(saved)), tensor)
    del tensor, x
    y.backward()
    assert Loud.heard == []
    assert offload.stats().bytes_out == (NBYTES if kind == "moves" else 0)
    assert found == [Tensor if grad else Loud]  # autograd makes an alias of what requires grad


class Opaque(Scaled):
    """A wrapper that does not say what it is made of."""

    @property
    def __tensor_flatten__(self) -> Any:
        raise AttributeError("__tensor_flatten__")


def test_h62_a_wrapper_that_does_not_say_what_it_is_made_of_stays_and_is_not_called_sparse(tmp_path: Path) -> None:
    def step(around: Around) -> list[object]:
        x, seen = leaf(64, 64), list[object]()
        opaque = Opaque(noise(64, 64), torch.ones(1), "metres")
        with around:
            y = watching(x, lambda tensor: seen.append([type(tensor), tensor.unit]), opaque)
        y.sum().backward()
        return [x.grad, seen]

    offload = eo.Offload(tier="disk", disk_path=tmp_path, min_bytes=0, keep_last_bytes=0)
    assert_identical(step(nullcontext()), step(offload))
    assert offload.stats().kept_bytes == {"layout": 64 * 64 * 4}
    with pytest.warns(RuntimeWarning, match="__tensor_flatten__") as caught:
        offload.close()
    assert not [one for one in caught if "sparse" in str(one.message)]
