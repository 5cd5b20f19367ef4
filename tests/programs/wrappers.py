"""Subclasses of ``Tensor``: wrappers of others, ragged batches, and those that only have attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tests.hazards.functions import as_given, watching
from tests.hazards.programs import trained
from tests.hazards.wrappers import KINDS, Dissolving, Image, Kind, Scaled, parts_of, with_unit, wrapped
from tests.programs import Flag, Run, leaf, program
from tests.programs.layouts import noise


def _add(kind: Kind) -> None:
    name = kind.name.replace(" ", "-")

    @program(f"H13-{name}-in-operators", Flag.EAGER)
    def _(run: Run) -> object:
        x, w = wrapped(kind, 16, 16), nn.Parameter(wrapped(kind, 16, 16, seed=1))
        with run.around:
            h = ((x * 2).tanh() @ w).relu()
            y = h.view(4, 4, 16).transpose(1, 2).softmax(-1) * (h @ w.t()).view(4, 16, 4).sin()
        del h
        y.sum().backward()
        return x.grad, w.grad, y.detach()

    @program(f"H13-{name}-is-given-as-saved", Flag.EAGER)
    def _(run: Run) -> object:
        seen = list[object]()

        def look(tensor: Tensor) -> None:
            inside = parts_of(tensor)
            seen.extend([type(tensor).__name__, *tensor.size(), *tensor.stride(), tensor.requires_grad, inside])
            seen.extend((*part.stride(), part.data_ptr() % 64) for part in inside)
            seen.append(tensor.unit if isinstance(tensor, Scaled) else "")

        x = leaf(16, 16)
        with run.around:
            h = wrapped(kind, 16, 24) * 3
            y = watching(x, look, h, h.t(), h.detach(), h[2:7, ::2]).sum()
            del h
        y.backward()
        return x.grad, seen

    @program(f"H13-{name}-saved-by-five-consumers", Flag.EAGER)
    def _(run: Run) -> object:
        x, weights = wrapped(kind, 4, 8, 16), [nn.Parameter(wrapped(kind, 16, 16, seed=seed)) for seed in range(5)]
        with run.around:
            h = x * 2
            y = sum((F.linear(h, w) * 1.0 for w in weights), start=h.sum())
            del h
        y.sum().backward()
        return x.grad, [w.grad for w in weights]


for _kind in KINDS:
    _add(_kind)


@program("H13-a-wrapper-that-detach-does-not-make-again", Flag.EAGER)
def _(run: Run) -> object:
    x, w = leaf(16, 16), Dissolving(leaf(16, 16, grad=False), torch.ones(1), "")
    with run.around:
        y = (w * (x * 2).tanh()).exp().sum()
    y.backward()
    return x.grad


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


@program("H13-H21-a-transformer-of-ragged-batches", Flag.EAGER, Flag.HOST, Flag.DIFFERS)
def _(run: Run) -> object:
    """They are wrappers of their values and offsets."""
    model = _Block()

    def loss(step: int) -> Tensor:
        lengths = ((3, 9, 5), (7, 2), (4, 4, 8, 1))[step]
        parts = [leaf(length, 16, seed=10 * step + length, grad=False) for length in lengths]
        return model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().square().mean()

    return trained(model.parameters(), run.around, loss, torch.optim.AdamW)


# -- types and attributes ---------------------------------------------------------------------------------------------


class _Slotted(Tensor):
    """A subclass with an attribute that is in no dictionary."""

    __slots__ = ("unit",)
    unit: str


#: What is saved, out of memory of its own.
_TOLD: dict[str, list[Callable[[], Any]]] = {
    "plain": [
        lambda: with_unit(noise(16, 16)),
        lambda: with_unit(noise(16, 16) > 0),
        lambda: with_unit(noise(16, 16)[2:].t()),
        lambda: with_unit(noise(64, 64)[3, ::2]),
        lambda: with_unit(noise(16, 16).to(torch.complex64).mul(1 + 2j).conj()),
        lambda: nn.Buffer(noise(16, 16), persistent=False),
    ],
    "subclasses": [
        lambda: with_unit(noise(16, 16).as_subclass(Image)),
        lambda: with_unit(noise(8, 16).as_subclass(Image)).t(),
        lambda: with_unit(noise(16, 16).as_subclass(_Slotted)),
    ],
    "wrappers": [
        lambda: with_unit(TwoTensor(noise(16, 16), noise(16, 16) * 2)),
        lambda: Scaled(noise(16, 16), torch.ones(1), "metres"),
    ],
}


def _told(tensor: Any) -> list[object]:
    """Says what is Python's about a tensor, and what autograd knows of it."""
    inside = [] if type(tensor) in (Image, _Slotted) else parts_of(tensor)
    own = {name: value for name, value in sorted(vars(tensor).items()) if not isinstance(value, Tensor)}
    return [type(tensor).__name__, str(own), str(getattr(tensor, "unit", "")), tensor.is_leaf, *inside]


def _add_told(name: str) -> None:
    @program(f"H62-{name}-with-attributes", Flag.EAGER)
    def _(run: Run) -> object:
        x, seen = leaf(16, 16), list[object]()

        def look(tensor: Any) -> None:
            seen.append(_told(tensor))
            if not is_traceable_wrapper_subclass(tensor):
                seen.append(as_given(tensor)[1:])
                tensor.looked_at = len(seen)  # which the next one sees

        with run.around:
            y = (x * 3).tanh()
            for make in _TOLD[name]:
                saved = make()
                y = watching(y, look, saved, noise(16, 16), saved)
                saved.set_later = [1]
            del saved
        y.sum().backward()
        return y.detach(), x.grad, seen

    @program(f"H62-{name}-in-operators", Flag.EAGER)
    def _(run: Run) -> object:
        x, saved = leaf(16, 16), _TOLD[name][0]()
        with run.around:
            y = ((saved * x).sin() * saved).exp()
        del saved
        y.sum().backward()
        return parts_of(y.detach().as_subclass(Tensor)), x.grad


for _name in _TOLD:
    _add_told(_name)
