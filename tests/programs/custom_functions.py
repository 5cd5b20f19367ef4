"""Functions of the user's own: what they save is read several times, and returned as the gradient.

What becomes ``.grad`` is changed in place afterwards: by a hook, by clipping, by accumulation. No other code may see
that, and no later backward may take it for a change of what was saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tests.hazards.functions import as_given, custom
from tests.hazards.wrappers import Scaled, parts_of, two
from tests.programs import Flag, Run, leaf, program

for _hold in (False, True):

    @program(f"H08-read-three-times-in-one-backward-and-{'held' if _hold else 'dropped'}", Flag.EAGER)
    def _(run: Run, hold: bool = _hold) -> object:
        x, seen = leaf(32, 32), list[list[object]]()

        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            held = []
            for _ in range(3):
                read = ctx.saved_tensors
                seen.extend(map(as_given, read))
                held += [read] if hold else []
            return gradient

        with run.around:
            y = custom(x, backward, (x * 3).detach(), (x * 5).detach().t()).sum()
        y.backward()
        return x.grad, seen


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
    """Returns the sum of ``w * x``; backward returns ``x`` once it has called ``change`` with it."""
    return _Scaling.apply(w, x, change)


def _made(seed: int = 3) -> Tensor:
    return leaf(32, 32, seed=seed, grad=False)


def _halve(weight: Tensor) -> None:
    weight.grad.mul_(0.5)


_SAVED: dict[str, Callable[[], Tensor]] = {
    "a-tensor": _made,
    "a-slice-that-travels-alone": lambda: leaf(8, 32, 32, seed=3, grad=False)[3],
    "elements-that-are-gathered": lambda: leaf(8, 32, 128, seed=3, grad=False)[3, :, ::4],
    "another-layout": lambda: _made().t(),
    "a-wrapper": lambda: two(lambda seed: _made(3 + seed)),
    "a-wrapper-with-a-scale": lambda: Scaled(_made(), torch.tensor(1.5), "m"),
}
#: What of it the program keeps.
KEPT: dict[str, Callable[[Tensor], Tensor | None]] = {
    "it": lambda x: x,
    "a-view-of-it": lambda x: x[:],
    "nothing": lambda x: None,
}


def _flags(keeps: str) -> list[Flag]:
    # The last one is a gradient that autograd has taken and the program does not ask for.
    return [Flag.EAGER, *([] if keeps == "nothing" else [Flag.HELD, Flag.NOTHING_BACK]), Flag.SOURCES_CHANGE]


def _add_returned(case: str, keeps: str) -> None:
    @program(f"H34-{case}-is-the-gradient-and-{keeps}-is-kept", *_flags(keeps))
    def _(run: Run) -> object:
        weights = [(_SAVED[case]().detach() * (1 + i)).requires_grad_() for i in range(2)]
        seen = []
        for weight in weights:
            weight.register_post_accumulate_grad_hook(_halve)
        for backwards in (3, 1, 2):
            x = _SAVED[case]()
            with run.around:
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


#: Each returns the saved tensor from a hook.
_HOOKS: dict[str, Callable[[Tensor, Tensor, Any], RemovableHandle]] = {
    "the-leaf": lambda w, x, node: w.register_hook(lambda _: node._saved_other),
    "what-passes-it-on": lambda w, x, node: x.register_hook(lambda _: node._saved_other),
    "the-node-itself": lambda w, x, node: node.register_hook(lambda *_: (node._saved_other, None)),
}


def _add_hooks(keeps: str) -> None:
    @program(f"H34-hooks-return-what-an-operator-has-saved-and-{keeps}-is-kept", *_flags(keeps))
    def _(run: Run) -> object:
        """Autograd clones it, since the node still has it."""
        seen: list[Any] = []
        for register in _HOOKS.values():
            w, mask = leaf(32, 32), _made()
            with run.around:
                x = w + 0
                product = x * mask
                loss = (product * 1).sum()
            handle, kept = register(w, x, product.grad_fn), KEPT[keeps](mask)
            del mask
            for _ in range(3):
                loss.backward(retain_graph=True)
                seen.append(w.grad.clone())
                w.grad.mul_(0.5)
                w.grad.data.mul_(0.5)  # which no version tells of
            handle.remove()
            seen.append(None if kept is None else kept.clone())
            del x, product, loss, handle, kept
        return seen

    @program(f"H34-a-gradient-that-is-asked-for-and-{keeps}-is-kept", *_flags(keeps))
    def _(run: Run) -> object:
        """``torch.autograd.grad`` hands out the saved tensor itself, where that lives."""
        w, x = leaf(32, 32), _made()
        with run.around:
            y = scaled(w, x) + (w * 2).sin().sum()
        kept = KEPT[keeps](x)
        del x
        (first,) = torch.autograd.grad(y, w, retain_graph=True)
        (second,) = torch.autograd.grad(y, w)
        return first, second, kept


for _keeps in KEPT:
    _add_hooks(_keeps)
    for _case in _SAVED if _keeps == "nothing" else ("a-tensor", "a-wrapper"):
        _add_returned(_case, _keeps)


@program("H34-two-gradients-that-autograd-adds-up", Flag.EAGER)
def _(run: Run) -> object:
    """Autograd adds into the first, in place, if it holds the only reference."""
    w, x = leaf(32, 32), _made()
    with run.around:
        y = scaled(w, x) + scaled(w, x) + scaled(w * 1, x)
    del x
    for backward in range(3):
        y.backward(retain_graph=backward < 2)
    return w.grad
