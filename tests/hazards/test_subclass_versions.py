"""H13, H01: what counts as a change of a wrapper, and what does not."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import eager_offload as eo
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.programs import Around, Settled, assert_moved, leaf, same_gradients
from tests.hazards.wrappers import KINDS, Kind, Scaled, kinds, parts_of, watching, wrapped


@kinds
@pytest.mark.parametrize("settled", [True, False], ids=["gone", "on the way"])
def test_h13_a_wrapper_changed_in_place_raises_as_autograd_would(kind: Kind, settled: bool, backend: Backend) -> None:
    backend.sources_change = True

    def program(offload: Around) -> None:
        x = wrapped(kind, 16, 16)
        with offload:
            h = x * 2
            y = h.exp() * h
        h.mul_(10)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(nullcontext())
    offload = backend.offload()
    with pytest.raises(eo.SavedTensorModifiedError, match="modified by an inplace operation"):
        program(Settled(offload) if settled else offload)
    gc.collect()
    assert_moved(assert_settled(offload), 0.0)


@kinds
def test_h13_a_change_between_two_saves_is_not_mistaken_for_the_first(kind: Kind, backend: Backend) -> None:
    """The first save is never asked for, so autograd does not mind; the second has to have the new values."""
    backend.sources_change = True

    def program(offload: Around) -> object:
        x = wrapped(kind, 16, 16)
        with offload:
            h = x * 2
            unused = h.square()
            other = (x * 5).tanh().exp()  # the copies of the first save have started by now
            h.mul_(3)
            y = h.square().sum() + other.sum()
        del h, unused, other
        y.backward()
        return parts_of(x.grad)

    same_gradients(program, backend)


class _Rewrapped(torch.autograd.Function):
    """Another wrapper of the same tensors, which counts versions of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return TwoTensor(x.a, x.b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_h13_another_wrapper_of_the_same_tensors_is_not_mistaken_for_the_first(backend: Backend) -> None:
    backend.sources_change = True

    def program(offload: Around) -> object:
        x = wrapped(KINDS[0], 16, 16)
        with offload:
            h = x * 2
            unused = h.square()
            other = (x * 5).tanh().exp()
            h.mul_(3)
            again = _Rewrapped.apply(h)
            assert again._version == 0
            y = again.square().sum() + other.sum()
        del h, unused, other, again
        y.backward()
        return parts_of(x.grad)

    same_gradients(program, backend)


def test_h13_a_change_of_what_is_inside_behind_the_wrappers_back_raises(backend: Backend) -> None:
    backend.sources_change = True
    offload, x = backend.offload(), wrapped(KINDS[0], 16, 16)
    with Settled(offload):
        h = x * 2
        y = (h * h).sum()
    parts_of(h)[0].add_(1)
    with pytest.raises(eo.SavedTensorModifiedError):
        y.backward()
    del h, y


class Renewed(Scaled):
    """Has a ``detach`` of its own, which starts to count versions anew."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.detach:
            (wrapper,) = args
            return Renewed(wrapper.values.detach(), wrapper.scale, wrapper.unit)
        return super().__torch_function__(func, types, args, kwargs or {})


def renewed(version: int, *, grad: bool) -> Renewed:
    wrapper = Renewed(leaf(16, 16, grad=False), torch.ones(1), "")
    for _ in range(version):
        wrapper.mul_(2)
    return wrapper.requires_grad_(grad)


@pytest.mark.parametrize("frozen", [False, True], ids=["moves", "stays"])
def test_h13_versions_are_autograds_own_whatever_detach_does(frozen: bool, backend: Backend) -> None:
    backend.sources_change = True

    def program(offload: Around, changes: int) -> Tensor | None:
        x, w = leaf(16, 16), renewed(3, grad=False)
        held = nn.Parameter(w, requires_grad=False) if frozen else w
        with offload:
            y = watching((x * 2).tanh(), lambda tensor: None, held).exp()
        for _ in range(changes):
            held.mul_(2)
        y.sum().backward()
        return x.grad

    same_gradients(lambda offload: program(offload, 0), backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(nullcontext(), 1)
    with pytest.raises(eo.SavedTensorModifiedError):
        program(backend.offload(), 1)
    gc.collect()
