"""H13, H62: what is inside of wrappers moves; attributes go with the graph, and no code of a subclass runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

import eager_offload as eo
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.functions import watching
from tests.hazards.programs import Around, Settled, assert_identical, leaf, noise
from tests.hazards.wrappers import KINDS, Image, Kind, parts_of, with_unit, wrapped, wrapped_pair


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_h13_bytes_are_on_the_device_only_while_they_are_used(kind: Kind, backend: Backend) -> None:
    def look(tensor: Tensor) -> None:
        storages.extend(weakref.ref(part.untyped_storage()) for part in parts_of(tensor) if part.numel() > 1)

    offload, storages = backend.offload(prefetch_bytes=0), list[weakref.ref[torch.UntypedStorage]]()
    with Settled(offload):
        h = wrapped(kind, 16, 16) * 2
        look(h)
        y = watching(leaf(16, 16), look, h)
        del h
    assert [ref() for ref in storages] == [None] * kind.inside, "what was saved is still there"
    y.sum().backward(retain_graph=True)
    assert [ref() for ref in storages] == [None] * 2 * kind.inside, "what was brought back is still there"


def test_h13_a_change_of_what_is_inside_behind_the_wrappers_back_raises(backend: Backend) -> None:
    backend.sources_change = True
    offload, x = backend.offload(), wrapped_pair(16, 16)
    with Settled(offload):
        h = x * 2
        y = (h * h).sum()
    parts_of(h)[0].add_(1)
    with pytest.raises(eo.SavedTensorModifiedError):
        y.backward()


def test_h62_what_lives_is_given_itself(backend: Backend) -> None:
    offload, seen = backend.offload(), list[Tensor]()
    tensors = [with_unit(noise(16, 16)), with_unit(noise(16, 16).as_subclass(Image))]
    with Settled(offload):
        y = watching((leaf(16, 16) * 3).tanh(), seen.append, *tensors)
    y.sum().backward()
    assert [one is other for one, other in zip(seen, tensors, strict=True)] == [True, True]
    assert offload.stats().bytes_out >= 2 * 16 * 16 * 4


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
    assert offload.stats().bytes_out == (16 * 16 * 4 if kind == "moves" else 0)
    assert found == [Tensor if grad else Loud]  # autograd makes an alias of what requires grad


class Held:
    """What an attribute leads to."""


@pytest.mark.usefixtures("_no_collector")
def test_h62_attributes_go_with_the_graph(backend: Backend) -> None:
    offload, held = backend.offload(), Held()
    ref = weakref.ref(held)
    with Settled(offload):
        saved: Any = noise(16, 16)
        saved.held = held
        y = watching((leaf(16, 16) * 3).tanh(), lambda tensor: None, saved).sum()
        saved.result = y  # the graph that holds the handle
    del saved, held
    y.backward()
    del y
    assert ref() is None
    assert assert_settled(offload).bytes_out > 0


class Opaque(Tensor):
    """A wrapper that does not say what it is made of."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Opaque:
        made = torch.Tensor._make_wrapper_subclass(cls, values.size(), dtype=values.dtype, device=values.device)
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(Opaque, lambda one: one.values, (args, kwargs or {}))
        result = tree_map_only(Tensor, Opaque, func(*plain[0], **plain[1]))
        return return_and_correct_aliasing(func, args, kwargs or {}, result)


def test_h62_a_wrapper_that_does_not_say_what_it_is_made_of_stays_and_is_not_called_sparse(tmp_path: Any) -> None:
    def step(around: Around) -> list[object]:
        x, seen = leaf(64, 64), list[object]()
        with around:
            y = watching(x, lambda tensor: seen.append([type(tensor), tensor.unit]), with_unit(Opaque(noise(64, 64))))
        y.sum().backward()
        return [x.grad, seen]

    offload = eo.Offload(tier="disk", disk_path=tmp_path, min_bytes=0, keep_last_bytes=0)
    assert_identical(step(nullcontext()), step(offload))
    assert offload.stats().kept_bytes == {"layout": 64 * 64 * 4}
    with pytest.warns(RuntimeWarning, match="__tensor_flatten__") as caught:
        offload.close()
    assert not [one for one in caught if "sparse" in str(one.message)]
