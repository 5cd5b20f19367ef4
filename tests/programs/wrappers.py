"""Subclasses of ``Tensor``: wrappers of others, ragged batches, and those that only have attributes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tests.programs import Flag, Run, leaf, program
from tests.programs.layouts import noise
from tests.programs.parts.blocks import trained
from tests.programs.parts.functions import as_given, watching
from tests.programs.parts.wrappers import KINDS, Dissolving, Image, Scaled, parts_of, with_unit, wrapped


def _in_operators(x: Tensor, w: Tensor) -> Tensor:
    h = ((x * 2).tanh() @ w).relu()
    return h.view(4, 4, 16).transpose(1, 2).softmax(-1) * (h @ w.t()).view(4, 16, 4).sin()


def _look(seen: list[object], tensor: Tensor) -> None:
    inside = parts_of(tensor)
    seen.extend([type(tensor).__name__, *tensor.size(), *tensor.stride(), tensor.requires_grad, inside])
    seen.extend((*part.stride(), part.data_ptr() % 64) for part in inside)
    seen.append(tensor.unit if isinstance(tensor, Scaled) else "")


def _saved_by_a_function(x: Tensor, wrapper: Tensor, seen: list[object]) -> Tensor:
    h = wrapper * 3
    return watching(x, partial(_look, seen), h, h.t(), h.detach(), h[2:, ::2])


def _saved_by_five_consumers(x: Tensor, *weights: Tensor) -> Tensor:
    h = (x * 2).view(2, 8, 16)
    return sum((F.linear(h, w) * 1.0 for w in weights), start=h.sum())


def _program(name: str, forward: Callable[..., Tensor], inputs: Callable[[], list[Any]], *flags: Flag) -> None:
    @program(name, Flag.EAGER, *flags)
    def _(run: Run) -> object:
        given = inputs()
        with run.around:
            y = forward(*given)
        shown = y.detach()
        y.sum().backward()
        return shown, [one.grad if isinstance(one, Tensor) and one.requires_grad else one for one in given]


for _kind in KINDS:
    _name, _of = f"H13-{_kind.name.replace(' ', '-')}", partial(wrapped, _kind, 16, 16)
    _program(f"{_name}-in-operators", _in_operators, lambda of=_of: [of(), nn.Parameter(of(seed=1))])
    _program(f"{_name}-is-given-as-saved", _saved_by_a_function, lambda of=_of: [leaf(16, 16), of(), []])
    _program(
        f"{_name}-saved-by-five-consumers",
        _saved_by_five_consumers,
        lambda of=_of: [of(), *(nn.Parameter(of(seed=seed)) for seed in range(5))],
    )
_program(
    "H13-a-wrapper-that-detach-does-not-make-again",
    lambda x, w: (w * (x * 2).tanh()).exp(),
    lambda: [leaf(16, 16), Dissolving(leaf(16, 16, grad=False), torch.ones(1), "")],
)


@program("H13-H21-a-transformer-of-ragged-batches", Flag.EAGER, Flag.HOST)
def _(run: Run) -> object:
    """They are wrappers of their values and offsets."""
    model = nn.ModuleList([nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)])

    def loss(number: int) -> Tensor:
        lengths = ((3, 9, 5), (7, 2), (4, 4, 8, 1))[number]
        parts = [leaf(length, 16, seed=10 * number + length, grad=False) for length in lengths]
        x = model[0](torch.nested.nested_tensor(parts, layout=torch.jagged))
        heads = model[1](x).unflatten(-1, (2, -1)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)
        return model[3](F.gelu(model[2](x))).values().square().mean()

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


def _tell(seen: list[object], tensor: Any) -> None:
    """Says what is Python's about a tensor, and what autograd knows of it."""
    own = {name: value for name, value in sorted(vars(tensor).items()) if not isinstance(value, Tensor)}
    seen.append([type(tensor).__name__, str(own), str(getattr(tensor, "unit", "")), tensor.is_leaf])
    if is_traceable_wrapper_subclass(tensor):
        seen.append(parts_of(tensor))
    else:
        seen.append(as_given(tensor)[1:])
        tensor.looked_at = len(seen)  # which the next one sees


for _name, _makes in _TOLD.items():

    def _with_attributes(x: Tensor, seen: list[object], makes: Any = tuple(_makes)) -> Tensor:
        y = (x * 3).tanh()
        for make in makes:
            saved = make()
            y = watching(y, partial(_tell, seen), saved, noise(16, 16), saved)
            saved.set_later = [1]
        return y

    def _used(x: Tensor, make: Any = _makes[0]) -> Tensor:
        saved = make()
        return ((saved * x).sin() * saved).exp().as_subclass(Tensor)

    _program(f"H62-{_name}-with-attributes", _with_attributes, lambda: [leaf(16, 16), []])
    _program(f"H62-{_name}-in-operators", _used, lambda: [leaf(16, 16)])
