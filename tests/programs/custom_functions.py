"""Functions of the user's own: what they save is read several times, and returned as the gradient.

What becomes ``.grad`` is changed in place afterwards: by a hook, by clipping, by accumulation. No other code may see
that, and no later backward may take it for a change of what was saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tests.programs import Flag, Run, leaf, program, step
from tests.programs.parts.functions import as_given, custom
from tests.programs.parts.wrappers import Scaled, parts_of, two

# A checkpoint of torch gives each saved tensor once.
_ONCE = [Flag.EAGER, Flag.NO_CAPTURE, Flag.NO_CHECKPOINT]
for _hold in (False, True):

    @step(f"H08-read-three-times-in-one-backward-and-{'held' if _hold else 'dropped'}", *_ONCE)
    def _(hold: bool = _hold) -> tuple[Callable[..., Tensor], list[Any]]:
        def forward(x: Tensor, seen: list[object]) -> Tensor:
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                held = []
                for _ in range(3):
                    read = ctx.saved_tensors
                    seen.extend(map(as_given, read))
                    held += [read] if hold else []
                return gradient

            return custom(x, backward, (x * 3).detach(), (x * 5).detach().t())

        return forward, [leaf(32, 32), []]


def scaled(w: Tensor, x: Tensor) -> Tensor:
    """Returns the sum of ``w * x``. Its gradient is ``x`` itself."""

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return saved

    pairs = [*zip(parts_of(w.detach()), parts_of(x.detach()), strict=True)]
    return custom(w, backward, x, forward=lambda w: torch.stack([(a * b).sum() for a, b in pairs]).sum())


def _made(seed: int = 3) -> Tensor:
    return leaf(32, 32, seed=seed, grad=False)


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


def _parts(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [part.clone() for one in tensors if one is not None for part in parts_of(one)]


def _add(case: str, keeps: str) -> None:
    # The last one is a gradient that autograd has taken and the program does not ask for.
    flags = [Flag.EAGER, Flag.SOURCES_CHANGE, *([] if keeps == "nothing" else [Flag.HELD, Flag.NOTHING_BACK])]

    @program(f"H34-{case}-is-the-gradient-and-{keeps}-is-kept", *flags)
    def _(run: Run) -> object:
        weights = [(_SAVED[case]().detach() * (1 + i)).requires_grad_() for i in range(2)]
        seen = []
        for weight in weights:
            weight.register_post_accumulate_grad_hook(lambda weight: [weight.grad.mul_(0.5)].clear())
        for backwards in (3, 1, 2):
            x = _SAVED[case]()
            with run.around:
                loss = sum(scaled(weight, x) for weight in [*weights, weights[0] * 1])
            kept = KEPT[keeps](x)
            del x
            for left in reversed(range(backwards)):
                loss.backward(retain_graph=left > 0)
                seen += _parts([*(weight.grad for weight in weights), kept])
                for weight in weights:
                    weight.grad.mul_(0.9)
                    weight.grad = None if left % 2 else weight.grad
        return seen

    @program(f"H34-{case}-is-asked-for-and-{keeps}-is-kept", *flags)
    def _(run: Run) -> object:
        """``torch.autograd.grad`` hands out the saved tensor itself, where that lives."""
        x = _SAVED[case]()
        w = (x * 2).requires_grad_()
        with run.around:
            y = scaled(w, x)
        kept = KEPT[keeps](x)
        del x
        return _parts([*torch.autograd.grad(y, w, retain_graph=True), *torch.autograd.grad(y, w), kept])


for _keeps in KEPT:
    for _case in _SAVED if _keeps == "nothing" else ("a-tensor", "a-wrapper"):
        _add(_case, _keeps)

#: Each returns the saved tensor from a hook.
_HOOKS: list[Callable[[Tensor, Tensor, Any], RemovableHandle]] = [
    lambda w, x, node: w.register_hook(lambda _: node._saved_other),
    lambda w, x, node: x.register_hook(lambda _: node._saved_other),
    lambda w, x, node: node.register_hook(lambda *_: (node._saved_other, None)),
]


@program("H34-hooks-return-what-an-operator-has-saved", Flag.EAGER, Flag.HELD)
def _(run: Run) -> object:
    """Autograd clones it, since the node still has it."""
    seen: list[Tensor] = []
    # Those first that keep nothing: a step after one that does is expected to keep as much.
    for keep, register in itertools.product(reversed(KEPT.values()), _HOOKS):
        w, mask = leaf(32, 32), _made()
        with run.around:
            x = w + 0
            product = x * mask
            loss = (product * 1).sum()
        handle, kept = register(w, x, product.grad_fn), keep(mask)
        del mask
        for _ in range(3):
            loss.backward(retain_graph=True)
            seen += _parts([w.grad, kept])
            w.grad.mul_(0.5)
            w.grad.data.mul_(0.5)  # which no version tells of
        handle.remove()
        del x, product, loss, handle, kept
    return seen


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
