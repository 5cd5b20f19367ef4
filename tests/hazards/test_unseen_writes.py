"""H37: writes that no version counter sees. Autograd saves by reference, so a save means the bytes of its own time or
of a later one, and a copy that started before it is not what it means.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.programs import REGIMES, Around, Regime, assert_identical, assert_moved, copies_given_at_once, leaf
from tests.hazards.wrappers import parts_of, two

SIDE = 64
SQUARE = SIDE * SIDE * 4


def preserving(h: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(h), torch.no_grad():
        h.mul_(0.1)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda h: h.data.clamp_(-0.5, 0.5),
    "numpy": lambda h: h.detach().numpy().__imul__(0.1),
    "no version": preserving,
}
#: What is saved again of it.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda h: h,
    "a transpose": lambda h: h.t(),
    "a slice": lambda h: h[3:5],
    "a row": lambda h: h[3],
}


def everything_has_left(around: Around) -> None:
    offload = getattr(around, "offload", around)
    if isinstance(offload, Offload):
        assert offload.stats(synchronize=True).bytes_out > 0


@pytest.mark.parametrize("regime", REGIMES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("how", WRITES)
def test_h37_what_is_saved_after_a_write_has_its_bytes(how: str, view: str, regime: Regime, backend: Backend) -> None:
    backend.sources_change = True

    def program(around: Around) -> object:
        x, w = leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=2)
        with around:
            h = x * 2
            metric = (h * h).mean()  # saves it, and is never asked for
            other = (x @ x).tanh().sum()
            everything_has_left(around)
            WRITES[how](h)
            y = (VIEWS[view](h) * VIEWS[view](w)).sum() + other
        del h
        everything_has_left(around)
        return *torch.autograd.grad(y, [w, x]), metric

    offload = backend.offload(**regime.fields)
    assert_identical(program(nullcontext()), program(regime.around(offload)))
    assert_moved(assert_settled(offload), 0.7)


def test_h37_a_wrapper_whose_inside_is_written(backend: Backend) -> None:
    backend.sources_change = True

    def program(around: Around) -> object:
        x, w = (two(lambda seed, s=s: leaf(SIDE, SIDE, seed=seed + s, grad=False)).requires_grad_() for s in (0, 5))
        with around:
            h = x * 2
            first = h * h
            other = (x * 3).sin()
            everything_has_left(around)
            for part in parts_of(h):
                part.data.mul_(0.1)
            y = (h * w).sum() + other.sum()
        del h
        (gradient,) = torch.autograd.grad(y, w)
        assert first.requires_grad
        return parts_of(gradient)

    offload = backend.offload()
    assert_identical(program(nullcontext()), program(offload))
    assert_moved(assert_settled(offload), 0.7)


def gated(around: Around) -> Tensor:
    """A step in which one tensor is saved, then another, then the first again; all of it is used."""
    x, w = leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=2)
    with around:
        h = x * 2
        gate = (h @ w).sigmoid()
        y = (gate * (h @ w.t())).sum()
        del h, gate
    y.backward()
    return x.grad


def test_h37_what_is_saved_again_in_each_step_leaves_once_when_that_is_known(backend: Backend) -> None:
    """In the first step the library does not know that it is saved again, so it is taken anew."""
    expected, offload = gated(nullcontext()), backend.offload(step_plans="auto")
    moved = []
    for _ in range(4):
        before = offload.stats().bytes_out
        with copies_given_at_once(backend):
            assert_identical(expected, gated(offload))
        moved.append(offload.stats(synchronize=True).bytes_out - before)
    assert moved == [5 * SQUARE, 3 * SQUARE, 3 * SQUARE, 3 * SQUARE], "the input and the gate twice at first"
    assert_moved(assert_settled(offload))


@pytest.mark.parametrize("saved_again", [False, True])
def test_h37_what_is_written_after_a_copy_is_not_seen_by_earlier_saves_once_the_source_is_gone(
    saved_again: bool, backend: Backend
) -> None:
    """What no library can see: without offload backward reads what was written, for either save."""
    backend.sources_change = True
    x, w = leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=2)
    before, after = x.detach() * 2, x.detach() * 20
    offload = backend.offload()
    with offload:
        h = x * 2
        y = (h * w).sum()
    offload.stats(synchronize=True)
    h.data.mul_(10)
    (seen,) = torch.autograd.grad(y, w, retain_graph=True)
    assert torch.equal(seen, after), "the original still lives, and is what backward is given"
    with offload:
        z = (h * w).sum() if saved_again else None
    del h
    offload.stats(synchronize=True)
    (gradient,) = torch.autograd.grad(y, w)
    assert torch.equal(gradient, before)
    if z is not None:
        (gradient,) = torch.autograd.grad(z, w)
        assert torch.equal(gradient, after)
    assert offload.stats(synchronize=True).bytes_out >= (1 + saved_again) * SQUARE
