"""Steps that are like those before them but for one thing: what a table says of them must change no bit."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.programs import Flag, Run, leaf, program, raises
from tests.programs.parts.functions import custom
from tests.programs.parts.wrappers import Dissolving

_SIDE = 32
#: What a layer does with what the one before it returns.
LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda y: (y * 0.1).exp(),
    "product": lambda y: y * y.sin(),
    "matrix": lambda y: (y @ y.t()).tanh(),
    "mask": lambda y: y * torch.ones_like(y),
    "halves": lambda y: torch.cat([half.sigmoid() for half in y.chunk(2)]),
    "small": lambda y: y + y[:1].square().sum(),
    "twice": lambda y: torch.cat([y.sigmoid(), y.cos()]).view(2, *y.size()).sum(0),
    "noise": lambda y: torch.rrelu(y * 2, training=True),  # saved before it is filled
    "in place": lambda y: (y * 2).add_(1).hypot_(torch.ones_like(y)),
}
FIRST = ["exp", "product", "matrix", "mask", "exp", "halves", "twice", "exp"]


def branches(run: Run, layers: Sequence[str], seed: int = 1, *, order: bool = True) -> list[Tensor | None]:
    """The gradients of a step with two branches; ``order``: which of them backward comes to first."""
    torch.manual_seed(seed)
    x, w = leaf(_SIDE, _SIDE, seed=seed), leaf(_SIDE, _SIDE, seed=seed + 1)
    with run.around:
        y, z = x * 2, w * 3
        for name in layers:
            y, z = LAYERS[name](y), z.cos()
        losses = [y.sum(), z.sum()]
    del y, z
    for loss in losses if order else losses[::-1]:
        loss.backward()  # type: ignore[no-untyped-call]
    return [x.grad, w.grad]


_OTHERS: dict[str, list[Callable[[Run], object]]] = {
    "of-another-size": [lambda run: branches(run, [FIRST[0], "halves", *FIRST[2:]])],
    "with-one-layer-more": [lambda run: branches(run, [*FIRST, "exp"])],
    "with-one-layer-less": [lambda run: branches(run, FIRST[:-1])],
    "differentiated-in-another-order": [lambda run: branches(run, FIRST, order=False)],
    "of-another-kind-in-turn": [lambda run: branches(run, ["matrix", "exp", "mask"])] * 3,
}
for _name, _changed in _OTHERS.items():

    @program(f"H54-a-step-{_name}", Flag.EAGER)
    def _(run: Run, changed: list[Callable[[Run], object]] = _changed) -> object:
        results = [branches(run, FIRST, seed) for seed in range(2)]
        for step in changed:
            results += [step(run), branches(run, FIRST, 3)]
        return results


# -- steps of one argument --------------------------------------------------------------------------------------------


def _steps(
    name: str, forward: Callable[[Any], Sequence[Tensor]], cases: Sequence[Any], *flags: Flag, moved: float = 0.9
) -> None:
    """Adds a program of one step for each of ``cases``; ``forward`` returns what is differentiated, and leaves."""

    @program(f"H54-{name}", Flag.EAGER, *flags, moved=moved)
    def _(run: Run) -> object:
        results = []
        for case in cases:
            with run.around:
                result, *leaves = forward(case)
                loss = result.sum()
            del result
            loss.backward()  # type: ignore[no-untyped-call]
            results.append([one.grad for one in leaves])
        return results


def _shared(same: bool) -> Sequence[Tensor]:
    x = leaf(_SIDE, _SIDE)
    y = x * 2
    return y.sin() + (y if same else x * 3).cos(), x


def _needing(grad: bool) -> Sequence[Tensor]:
    x, w = leaf(_SIDE, _SIDE, grad=grad), leaf(_SIDE, _SIDE, seed=2)
    return ((x * 2) * (w * 3)).exp(), w


def _trained(frozen: bool) -> Sequence[Tensor]:
    """A layer that is frozen saves its weight; one that trains saves its input, of the same size."""
    weight, x = nn.Parameter(leaf(_SIDE, _SIDE, seed=3).detach(), requires_grad=not frozen), leaf(_SIDE, _SIDE)
    x.requires_grad_(frozen)
    return ((x * 2) @ weight).sin().cos(), x if frozen else weight


def _marked(how: str) -> Sequence[Tensor]:
    x = leaf(_SIDE, _SIDE)
    y = (x * 2).exp()
    if how in ("keep", "prefer"):
        (eo.keep if how == "keep" else eo.prefer_offload)(y)
    with eo.no_offload() if how == "region" else nullcontext():
        z = y.sin()
    return (y * z).tanh().cos(), x


_steps("a-storage-that-is-shared-no-more", _shared, [True, True, False])
_steps("a-storage-that-is-shared-now", _shared, [False, False, True])
_steps("a-tensor-that-needs-no-gradient-now", _needing, [True, True, False])
_steps("a-layer-that-trains-after-it-was-frozen", _trained, [True, True, True, False, False, False])
for _how in ("keep", "prefer", "region"):
    _steps(f"{_how}-in-one-step-of-some", _marked, ["", "", _how, ""], moved=0.6)
    _steps(f"{_how}-in-all-steps-but-one", _marked, [_how, _how, "", _how], moved=0.4)


class _LooksTwice(torch.autograd.Function):
    """A product whose backward looks at ``saved_tensors`` for each gradient: each time all of them are unpacked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient * ctx.saved_tensors[1], gradient * ctx.saved_tensors[0]


def _looking_twice(_: int) -> Sequence[Tensor]:
    x = leaf(_SIDE, _SIDE)
    y = x * 2
    for _ in range(3):
        y = _LooksTwice.apply(y.sin(), y.cos())
    return y, x


def _differentiated_inside(_: int) -> Sequence[Tensor]:
    """What backward saves is of the same forward."""
    x = leaf(_SIDE, _SIDE)
    y = (x * 0.5).exp().sin().exp()
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return gradient.square(), x


_steps("a-function-that-looks-twice", _looking_twice, range(3))
# Its backward, inside of the function, asks at once for what has just been saved, and for what that still holds.
_steps("a-graph-of-gradients", _differentiated_inside, range(3), Flag.HELD, moved=0.8)

for _counts in ((1, 1, 2, 1), (2, 2, 1, 2), (2, 2, 3, 2)):

    @program(f"H54-backwards-{'-'.join(map(str, _counts))}", Flag.EAGER)
    def _(run: Run, counts: Sequence[int] = _counts) -> object:
        results = []
        for count in counts:
            x = leaf(_SIDE, _SIDE)
            with run.around:
                loss = (x * 0.5).exp().sin().exp().sum()
            for _ in range(count):
                loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            del loss
            results.append(x.grad)
        return results


@program("H54-a-parameter-that-an-operator-has-changed", Flag.EAGER)
def _(run: Run) -> object:
    """It has a node then, which owns the handle: a cycle that no collector sees, if what saves it holds it."""
    results, storages = [], []
    for goes_backward in (True, True, False):
        x, w = leaf(_SIDE, _SIDE), leaf(_SIDE, _SIDE, seed=2)
        frozen, other = (nn.Parameter(_noise(_SIDE, _SIDE), requires_grad=False) for _ in range(2))
        with run.around:
            frozen.mul_(w)
            loss = ((x * 2).sin() * other * other + frozen.exp_()).sum()
        storages.append(weakref.ref(frozen.untyped_storage()))
        del frozen
        if goes_backward:
            loss.backward()
        del loss
        results.append(x.grad)
    assert [storage() for storage in storages] == [None] * 3
    return results


for _before in (0, 1):

    @program(f"H54-a-change-after-{_before}-backwards", Flag.EAGER, Flag.SOURCES_CHANGE, moved=0.6)
    def _(run: Run, before: int = _before) -> object:
        results = []
        for changes in (False, False, True):
            x = leaf(_SIDE, _SIDE)
            with run.around:
                y = x * 2
                loss = y.sin().exp().sum()
            for _ in range(before):
                loss.backward(retain_graph=True)
            if changes:
                y.add_(1)
            with raises("modified by an inplace operation") if changes else nullcontext():
                loss.backward()
            del loss, y
            results.append(x.grad)
        return results


# -- what only looks like what was there ------------------------------------------------------------------------------


def _noise(*size: int) -> Tensor:
    return leaf(*size, seed=5, grad=False)


def _at_an_odd_address(_: Tensor) -> Tensor:
    values = _noise(_SIDE, _SIDE).view(torch.uint8).flatten()
    return torch.frombuffer(bytearray([0, *values.tolist()]), dtype=torch.float32, offset=1).view(_SIDE, _SIDE)


def _quantized(_: Tensor) -> Tensor:
    return torch.quantize_per_tensor(_noise(_SIDE, _SIDE), 0.1, 3, torch.quint8)


def _ones(saved: Tensor) -> Tensor:
    return torch.ones(saved.size())


#: What takes the place of what was saved, what is read of it, and of the first if that is not noise.
_LIKE: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "half-a-storage": (lambda y: _noise(_SIDE, _SIDE)[_SIDE // 2 :], torch.mean),
    "a-part-of-a-larger-storage": (lambda y: _noise(2 * _SIDE, _SIDE)[_SIDE:], torch.clone),
    "an-odd-address": (_at_an_odd_address, torch.clone),
    "zeros-that-are-nowhere": (lambda y: torch._efficientzerotensor(_SIDE, _SIDE), _ones),
    "another-class": (lambda y: Dissolving(_noise(_SIDE, _SIDE), torch.ones(1), ""), torch.clone),
    "a-view-of-a-weight": (lambda y: nn.Parameter(_noise(_SIDE, _SIDE)).t(), torch.clone, lambda y: y * 3),
    "nested": (
        lambda y: torch.nested.nested_tensor([*_noise(_SIDE, _SIDE).chunk(2)]),
        lambda saved: torch.cat(saved.unbind()) if saved.is_nested else saved,
    ),
    "quantized": (
        _quantized,
        lambda saved: saved.dequantize().float(),
        lambda y: _noise(_SIDE, _SIDE).mul(40).to(torch.uint8),
    ),
}


def _looks_like(later: Callable[[Tensor], Tensor], read: Callable[[Tensor], Tensor], first: Any = None) -> Any:
    def forward(is_later: bool) -> Sequence[Tensor]:
        x = leaf(_SIDE, _SIDE)
        y = x * 2
        given = later(y) if is_later else first(y) if first is not None else _noise(_SIDE, _SIDE)
        scaled = custom(y.sin(), lambda ctx, gradient: math.prod(map(read, ctx.saved_tensors), start=gradient), given)
        return scaled.exp(), x

    return forward


for _name, _functions in _LIKE.items():
    _steps(f"{_name}-in-the-place-of-a-tensor", _looks_like(*_functions), [False, False, True], Flag.HOST, moved=0.5)
