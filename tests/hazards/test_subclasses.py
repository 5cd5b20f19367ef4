"""H13, H01: wrapper subclasses. What is inside moves, and backward is given the same wrapper again, or raises."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import eager_offload as eo
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.functions import watching
from tests.hazards.probes import Transfers
from tests.hazards.programs import Around, Settled, assert_moved, leaf, one_step, same_gradients
from tests.hazards.wrappers import KINDS, Dissolving, Kind, Scaled, kinds, parts_of, wrapped
from tests.threads import collect

# -- exact ------------------------------------------------------------------------------------------------------------


@kinds
def test_h13_what_is_inside_moves_and_gradients_are_exact(kind: Kind, backend: Backend) -> None:
    def program(offload: Around) -> object:
        x, w = wrapped(kind, 32, 32), nn.Parameter(wrapped(kind, 32, 32, seed=1))
        with Transfers(backend.runtime) as transfers:
            with offload:
                h = ((x * 2).tanh() @ w).relu()
                y = h.view(4, 8, 32).transpose(1, 2).softmax(-1) * (h @ w.t()).view(4, 32, 8).sin()
            del h
            y.sum().backward()
            for part in parts_of(w):
                assert not transfers.read(part.untyped_storage()), "a parameter was moved"
        return x.grad, w.grad, y.detach()

    for stats in same_gradients(program, backend):
        assert stats.kept_bytes["parameter"] > 0
        assert stats.offloaded_bytes + stats.shared_bytes >= 6 * kind.inside * 32 * 32 * 4


@kinds
def test_h13_backward_is_given_the_wrapper_that_was_saved(kind: Kind, backend: Backend) -> None:
    @one_step
    def program() -> Sequence[object]:
        seen: list[object] = []

        def look(tensor: Tensor) -> None:
            inside = parts_of(tensor)
            seen.extend([type(tensor).__name__, *tensor.size(), *tensor.stride(), tensor.requires_grad, inside])
            seen.extend((*part.stride(), part.data_ptr() % 64) for part in inside)
            seen.append(tensor.unit if isinstance(tensor, Scaled) else "")

        x, h = leaf(16, 16), wrapped(kind, 16, 24) * 3
        return watching(x, look, h, h.t(), h.detach(), h[2:7, ::2]), x, seen

    same_gradients(program, backend)


# -- what is counted --------------------------------------------------------------------------------------------------


@kinds
def test_h13_three_consumers_share_one_copy(kind: Kind, backend: Backend) -> None:
    @one_step
    def program() -> tuple[Tensor, ...]:
        x = wrapped(kind, 4, 8, 16)
        weights = [nn.Parameter(wrapped(kind, 16, 16, seed=seed)) for seed in (1, 2, 3, 4, 5)]
        h = x * 2
        return sum((nn.functional.linear(h, w) * 1.0 for w in weights), start=h.sum()), x, *weights

    for stats in same_gradients(program, backend):
        assert stats.bytes_out == kind.inside * 4 * 8 * 16 * 4, "copied more than once"
        assert stats.offloaded_tensors == kind.inside
        assert stats.shared_bytes == 4 * stats.offloaded_bytes
        assert "alive" not in stats.kept_bytes


@kinds
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
    del y


def test_h13_a_wrapper_that_detach_does_not_make_again_stays_whole(backend: Backend) -> None:
    @one_step
    def program() -> tuple[Tensor, ...]:
        x, w = leaf(16, 16), Dissolving(leaf(16, 16, grad=False), torch.ones(1), "")
        return (w * (x * 2).tanh()).exp(), x

    same_gradients(program, backend)


# -- what counts as a change ------------------------------------------------------------------------------------------


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
    collect()
    assert_moved(assert_settled(offload), 0.0)


@kinds
def test_h13_a_change_between_two_saves_is_not_mistaken_for_the_first(kind: Kind, backend: Backend) -> None:
    """The first save is never asked for, so autograd does not mind; the second has to have the new values."""
    backend.sources_change = True

    @one_step
    def program() -> tuple[Tensor, ...]:
        x = wrapped(kind, 16, 16)
        h = x * 2
        _unused = h.square()  # lives until the forward is over
        other = (x * 5).tanh().exp()  # the copies of the first save have started by now
        h.mul_(3)
        return h.square().sum() + other.sum(), x

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

    @one_step
    def program() -> tuple[Tensor, ...]:
        x = wrapped(KINDS[0], 16, 16)
        h = x * 2
        _unused = h.square()  # lives until the forward is over
        other = (x * 5).tanh().exp()
        h.mul_(3)
        again = _Rewrapped.apply(h)
        assert again._version == 0
        return again.square().sum() + other.sum(), x

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
    collect()
