"""H62: what backward is given in the place of a saved tensor is of its type, and has its attributes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload.active import unpack
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.functions import as_given, watching
from tests.hazards.programs import Around, Settled, assert_identical, leaf, named, noise, one_step, same_gradients
from tests.hazards.test_lifetime import without_gc
from tests.hazards.wrappers import Scaled, parts_of


class Image(Tensor):
    """A subclass as libraries of images and series have them: attributes, which results are given too."""

    unit: str = "none"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Image):
            result.__dict__.update(next((vars(one) for one in args if isinstance(one, Image)), {}))
        return result


class Slotted(Tensor):
    """A subclass with an attribute that is in no dictionary."""

    __slots__ = ("unit",)
    unit: str


class Loud(Tensor):
    """A subclass that hears of all that is done to its tensors, and makes none by itself."""

    heard: ClassVar[list[object]] = []

    def __new__(cls, *args: Any) -> Loud:
        raise AssertionError("it is made by as_subclass alone")

    def __init__(self, *args: Any) -> None:
        raise AssertionError("it is made by as_subclass alone")

    def __getattr__(self, name: str) -> Any:
        Loud.heard.append(name)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: object) -> None:
        Loud.heard.append(name)
        super().__setattr__(name, value)

    def detach(self) -> Tensor:
        Loud.heard.append("detach")
        return super().detach()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Loud.heard.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


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
        return return_and_correct_aliasing(
            func, args, kwargs or {}, tree_map_only(Tensor, Opaque, func(*plain[0], **plain[1]))
        )


def with_unit(tensor: Any, unit: str = "metres") -> Tensor:
    tensor.unit = unit
    return tensor


class Case(NamedTuple):
    name: str
    #: Makes what is saved, out of memory of its own.
    make: Callable[[], Tensor]


CASES = [
    Case("a tensor", lambda: with_unit(noise(16, 16))),
    Case("a mask", lambda: with_unit(noise(16, 16) > 0)),
    Case("a view", lambda: with_unit(noise(16, 16)[2:].t())),
    Case("a small part", lambda: with_unit(noise(64, 64)[3, ::2])),
    Case("a conjugate", lambda: with_unit(noise(16, 16).to(torch.complex64).mul(1 + 2j).conj())),
    Case("a buffer", lambda: nn.Buffer(noise(16, 16), persistent=False)),
    Case("of a subclass", lambda: with_unit(noise(16, 16).as_subclass(Image))),
    Case("of a subclass transposed", lambda: with_unit(noise(8, 16).as_subclass(Image)).t()),
    Case("of a subclass with slots", lambda: with_unit(noise(16, 16).as_subclass(Slotted))),
    Case("a wrapper", lambda: with_unit(TwoTensor(noise(16, 16), noise(16, 16) * 2))),
    Case("a wrapper with a scale", lambda: Scaled(noise(16, 16), torch.ones(1), "metres")),
]


def told(tensor: Any) -> list[object]:
    """What is Python's about a tensor, and what autograd knows of it."""
    inside = [] if type(tensor) in (Image, Slotted) else parts_of(tensor)
    own = {name: value for name, value in sorted(vars(tensor).items()) if not isinstance(value, Tensor)}
    return [type(tensor).__name__, str(own), str(getattr(tensor, "unit", "")), tensor.is_leaf, *inside]


@pytest.mark.sampled(5, quick=True)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_h62_backward_is_given_the_type_and_the_attributes_of_what_was_saved(case: Case, backend: Backend) -> None:
    @one_step
    def program() -> list[object]:
        x, seen = leaf(16, 16), list[object]()

        def look(tensor: Tensor) -> None:
            seen.append(told(tensor))
            if not is_traceable_wrapper_subclass(tensor):
                seen.append(as_given(tensor)[1:])
                tensor.looked_at = len(seen)  # which the next one sees

        saved = case.make()
        y = watching((x * 3).tanh(), look, saved, noise(16, 16), saved)
        saved.set_later = [1]
        return [y, x, seen]

    same_gradients(program, backend)


def test_h62_what_lives_is_given_itself(backend: Backend) -> None:
    offload, seen = backend.offload(), list[Tensor]()
    tensors = [with_unit(noise(16, 16)), with_unit(noise(16, 16).as_subclass(Image))]
    with Settled(offload):
        y = watching((leaf(16, 16) * 3).tanh(), seen.append, *tensors)
    y.sum().backward()
    assert [one is other for one, other in zip(seen, tensors, strict=True)] == [True, True]
    assert offload.stats().bytes_out >= 2 * 16 * 16 * 4


@pytest.mark.parametrize("grad", [False, True], ids=["of a constant", "of a result"])
@pytest.mark.parametrize("kind", ["moves", "small", "parameter"])
def test_h62_no_code_of_a_subclass_runs(kind: str, grad: bool, backend: Backend) -> None:
    offload = backend.offload(min_bytes=1 << 20 if kind == "small" else 0)
    x = leaf(16, 16, grad=grad)
    tensor = (x if kind == "parameter" else x * 2).as_subclass(Loud)
    if kind == "parameter":
        tensor = nn.Parameter(tensor, requires_grad=grad)
    Loud.heard.clear()
    with Settled(offload):
        handle = offload._hooks.pack(tensor)
    del tensor, x
    found = [unpack(handle), unpack(handle)]
    assert Loud.heard == []
    assert offload.stats().bytes_out == (16 * 16 * 4 if kind == "moves" else 0)
    assert [type(one) for one in found] == ([Tensor] * 2 if grad and kind != "parameter" else [Loud] * 2)
    del handle, found


def test_h62_steps_of_a_subclass_follow_a_plan(backend: Backend) -> None:
    offload = backend.offload(step_plans=True)

    def step(around: Around, seed: int) -> list[Tensor]:
        x, image = leaf(16, 16), with_unit(leaf(16, 16, seed=seed, grad=False).as_subclass(Image))
        with around:
            y = ((image * x).sin() * image).exp()
        y.sum().backward()
        assert x.grad is not None
        return [y.detach().as_subclass(Tensor), x.grad.as_subclass(Tensor)]

    for seed in range(4):
        for one, other in zip(step(nullcontext(), seed), step(Settled(offload), seed), strict=True):
            assert torch.equal(one, other)
    stats = assert_settled(offload)
    assert stats.followed_forwards == 3
    assert stats.plan_misses == {}
    assert stats.bytes_in > 0


@pytest.mark.parametrize("kind", [Tensor, Image], ids=["plain", "a subclass"])
@pytest.mark.parametrize("side", [32, 1024], ids=["small", "large"])
@pytest.mark.parametrize("moves", [False, True], ids=["defaults", "all moves"])
def test_h62_a_checkpoint_computes_again_with_what_its_inputs_were(kind: Any, side: int, moves: bool) -> None:
    layer = nn.Linear(side, side)

    def block(x: Tensor, mask: Any) -> Tensor:
        return torch.where(mask, 0.0, layer(x) * mask.scale)

    def step(around: Around) -> list[Tensor | None]:
        layer.zero_grad()
        mask: Any = (leaf(side, side, seed=2, grad=False) > 0).as_subclass(kind)
        with around:
            mask.scale = 2.0
            y = checkpoint(block, torch.ones(side, side), mask, use_reentrant=False).sum()
        del mask
        y.backward()
        return [y.detach().as_subclass(Tensor), layer.weight.grad, layer.bias.grad]

    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0) if moves else eo.Offload()
    for one, other in zip(step(nullcontext()), step(offload), strict=True):
        assert torch.equal(one, other)
    assert (offload.stats(synchronize=True).bytes_out > 0) == moves
    offload.close()


class Held:
    """What an attribute leads to."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


def test_h62_attributes_go_with_the_graph(backend: Backend) -> None:
    offload = backend.offload()
    with without_gc():
        held = Held()
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
