"""H34: backward returns a saved tensor as the gradient, and what becomes ``.grad`` is changed in place afterwards: by a
hook, by clipping, by accumulation. No other code may see that, and no later backward may take it for a change of what
was saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from eager_offload import SavedTensorModifiedError
from tests.hazards.backends import Backend, offloader_of
from tests.hazards.programs import REGIMES, Around, leaf, same_gradients
from tests.hazards.wrappers import Scaled, parts_of, two
from tests.threads import collect

SIDE = 32


class _Scaling(torch.autograd.Function):
    """The sum of ``w * x`` whose gradient is ``x`` itself, since that of a sum is 1."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, change: Callable[[Tensor], object]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.change = change
        values = [a * b for a, b in zip(parts_of(w.detach()), parts_of(x.detach()), strict=True)]
        return torch.stack([value.sum() for value in values]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.change(x)
        return x, None, None


def scaled(w: Tensor, x: Tensor, change: Callable[[Tensor], object] = lambda x: None) -> Tensor:
    return _Scaling.apply(w, x, change)


def made(seed: int) -> Tensor:
    return leaf(SIDE, SIDE, seed=seed, grad=False)


def halve(weight: Tensor) -> None:
    weight.grad.mul_(0.5)


SAVED: dict[str, Callable[[], Tensor]] = {
    "a tensor": lambda: made(3),
    "a view of most of it": lambda: made(3).view(-1).view(SIDE, SIDE),
    "a slice that travels alone": lambda: leaf(8, SIDE, SIDE, seed=3, grad=False)[3],
    "elements that are gathered": lambda: leaf(8, SIDE, 4 * SIDE, seed=3, grad=False)[3, :, ::4],
    "another layout": lambda: made(3).t(),
    "a wrapper": lambda: two(lambda seed: made(3 + seed)),
    "a wrapper with a scale": lambda: Scaled(made(3), torch.tensor(1.5), "m"),
}
#: What of it the program keeps.
KEPT: dict[str, Callable[[Tensor], Tensor | None]] = {
    "it": lambda x: x,
    "a view of it": lambda x: x[:],
    "nothing": lambda x: None,
}


@pytest.mark.sampled(5, quick=True)
@pytest.mark.parametrize("keeps", KEPT)
@pytest.mark.parametrize("case", SAVED)
def test_h34_what_becomes_the_gradient_is_seen_by_nothing_else(case: str, keeps: str, backend: Backend) -> None:
    backend.sources_change = True  # a gradient that autograd has taken and the program does not ask for

    def program(around: Around) -> object:
        weights = [(SAVED[case]().detach() * (1 + i)).requires_grad_() for i in range(2)]
        seen = []
        for weight in weights:
            weight.register_post_accumulate_grad_hook(halve)
        for backwards in (3, 1, 2):
            x = SAVED[case]()
            with around:
                loss = sum(scaled(weight, x) for weight in [*weights, weights[0] * 1])
            kept = KEPT[keeps](x)
            del x
            for left in reversed(range(backwards)):
                loss.backward(retain_graph=left > 0)
                seen += [part.clone() for weight in weights for part in parts_of(weight.grad)]
                seen += [part.clone() for part in ([] if kept is None else parts_of(kept))]
                for weight in weights:
                    weight.grad.mul_(0.9)
                    weight.grad = None if left % 2 else weight.grad
        return seen

    same_gradients(program, backend, held=keeps != "nothing", reloads=keeps == "nothing")


@pytest.mark.parametrize("keeps", KEPT)
def test_h34_a_gradient_that_is_asked_for_is_what_autograd_gives(keeps: str, backend: Backend) -> None:
    """``torch.autograd.grad`` hands out the saved tensor itself, where that lives."""

    def program(around: Around) -> object:
        w, x = leaf(SIDE, SIDE), made(3)
        with around:
            y = scaled(w, x) + (w * 2).sin().sum()
        kept = KEPT[keeps](x)
        del x
        (first,) = torch.autograd.grad(y, w, retain_graph=True)
        (second,) = torch.autograd.grad(y, w)
        return first, second, kept

    same_gradients(program, backend, reloads=keeps == "nothing")


@pytest.mark.parametrize("keeps", KEPT)
@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_h34_what_backward_changes_in_place_is_still_found(regime: Any, keeps: str, backend: Backend) -> None:
    backend.sources_change = True
    offload = backend.offload(**regime.fields)
    w, x = leaf(SIDE, SIDE), made(3)
    with regime.around(offload):
        y = scaled(w, x, lambda x: x.mul_(2)) + (w * 2).sin().sum()
    kept = KEPT[keeps](x)
    del x
    y.backward(retain_graph=True)
    with pytest.raises(SavedTensorModifiedError, match="at version 1; expected version 0"):
        y.backward()
    del kept
    assert offload.stats(synchronize=True).bytes_out > 0


def test_h34_two_gradients_that_autograd_adds_up_change_nothing_that_is_saved(backend: Backend) -> None:
    """Autograd adds into the first, in place, if it holds the only reference."""

    def program(around: Around) -> object:
        w, x = leaf(SIDE, SIDE), made(3)
        with around:
            y = scaled(w, x) + scaled(w, x) + scaled(w * 1, x)
        del x
        for backward in range(3):
            y.backward(retain_graph=backward < 2)
        return w.grad

    same_gradients(program, backend)


def test_h34_what_a_retained_graph_was_given_goes_when_it_is_used_up_or_backward_is_over(backend: Backend) -> None:
    offload, given, alive = backend.offload(prefetch_bytes=0), list[weakref.ref[torch.UntypedStorage]](), list[int]()
    w = leaf(SIDE, SIDE)

    def look(x: Tensor) -> None:
        alive.append(sum(ref() is not None for ref in given))
        given.append(weakref.ref(x.untyped_storage()))

    with offload:
        y = w * 1
        for seed in range(4):
            y = y + scaled(w, made(seed), look)
    offload.stats(synchronize=True)
    y.sum().backward(retain_graph=True)
    assert len(alive) == 4
    assert max(alive) <= 1, "autograd adds up what it has of a gradient so far"
    collect()
    assert [ref() for ref in given] == [None] * 4
    del y
    assert not any(offloader_of(offload).census())


HOOKS: dict[str, Callable[[Tensor, Tensor, Any], RemovableHandle]] = {
    "of the leaf": lambda w, x, node: w.register_hook(lambda _: node._saved_other),
    "of what passes it on": lambda w, x, node: x.register_hook(lambda _: node._saved_other),
    "of the node itself": lambda w, x, node: node.register_hook(lambda *_: (node._saved_other, None)),
}


@pytest.mark.parametrize("keeps", KEPT)
@pytest.mark.parametrize("hook", HOOKS)
def test_h34_a_hook_returns_what_an_operator_of_torch_has_saved(hook: str, keeps: str, backend: Backend) -> None:
    """Autograd clones it, since the node still has it."""

    def program(around: Around) -> object:
        w, mask = leaf(SIDE, SIDE), made(3)
        with around:
            x = w + 0
            product = x * mask
            loss = (product * 1).sum()
        handle = HOOKS[hook](w, x, product.grad_fn)
        kept = KEPT[keeps](mask)
        del mask
        seen = []
        for _ in range(3):
            loss.backward(retain_graph=True)
            seen.append(w.grad.clone())
            w.grad.mul_(0.5)
            w.grad.data.mul_(0.5)  # which no version tells of
        handle.remove()
        return seen, kept

    same_gradients(program, backend, held=keeps != "nothing", reloads=keeps == "nothing")
