"""Changes in place: where autograd raises so do we, and nowhere else; and writes that no version counter sees.

What a program of ``MODIFIED`` saves is changed and read in backward: autograd raises. In those of ``UNMODIFIED`` nothing
is all of that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

from eager_offload import Offload, SavedTensorModifiedError
from tests.hazards.functions import custom, watching
from tests.hazards.wrappers import KINDS, Renewed, Rewrapped, parts_of, wrapped, wrapped_pair
from tests.programs import Flag, Run, leaf, program

_Body = Callable[[Run], object]

MODIFIED: dict[str, _Body] = {}
UNMODIFIED: dict[str, _Body] = {}


def _modified(name: str, *flags: Flag, moved: float = 0.9) -> Callable[[_Body], None]:
    """Adds a program that raises to the corpus: training goes on behind it."""

    def added(body: _Body) -> None:
        MODIFIED[name] = body

        @program(name, Flag.EAGER, Flag.SOURCES_CHANGE, Flag.HELD, *flags, moved=moved)
        def _(run: Run) -> object:
            message = error_of(body, run)
            assert "modified by an inplace operation" in message, message
            w = leaf(64, 64)
            with run.around:
                y = (w * 2).sin().cos()
            y.sum().backward()
            return w.grad

    return added


def _unmodified(name: str, *flags: Flag, moved: float = 0.9) -> Callable[[_Body], None]:
    def added(body: _Body) -> None:
        UNMODIFIED[name] = body
        program(name, Flag.EAGER, Flag.SOURCES_CHANGE, Flag.NOTHING_BACK, *flags, moved=moved)(body)

    return added


def error_of(body: _Body, run: Run) -> str:
    """Returns what autograd says of ``body``, or the library in its place."""
    try:
        body(run)
    except RuntimeError as error:
        expected = RuntimeError if isinstance(run.around, nullcontext) else SavedTensorModifiedError
        assert type(error) is expected, error
        return str(error)
    raise AssertionError("nothing is raised")


def _plain() -> Tensor:
    return leaf(64, 64, seed=2, grad=False)


def _product(w: Tensor, x: Tensor) -> Tensor:
    return w * x


def _after(
    save: Callable[[Tensor, Tensor], Tensor],
    change: Callable[[Tensor, Tensor], object],
    *,
    inside: bool = False,
    w: tuple[int, ...] = (64, 64),
    x: Callable[[], Tensor] = _plain,
) -> _Body:
    """Saves, changes, and returns the gradient of ``w``.

    Args:
        save: makes an output of a leaf and of what ``x`` makes.
        change: is given the latter and the output, inside of the context or behind it.
    """

    def body(run: Run) -> object:
        weight, other = leaf(*w), x()
        with run.around:
            y = save(weight, other)
            if inside:
                change(other, y)
        if not inside:
            change(other, y)
        y.sum().backward()
        return weight.grad

    return body


def _zero_where_positive(x: Tensor, y: Tensor) -> None:
    x[x > 0] = 0


for _name, _body in {
    "an-input": _after(_product, lambda x, y: x.mul_(10), inside=True),
    "an-input-after-the-context": _after(_product, lambda x, y: x.mul_(10)),
    "an-output": _after(lambda w, x: w.exp(), lambda x, y: y.add_(1), inside=True),
    "an-output-after-the-context": _after(lambda w, x: (w * 2).exp(), lambda x, y: y.add_(1)),
    "changed-and-changed-back": _after(_product, lambda x, y: x.mul_(2).div_(2)),
    "an-added-zero": _after(_product, lambda x, y: x.add_(0)),
    "a-base-through-a-view": _after(_product, lambda x, y: x[0].zero_()),
    "a-small-view-through-its-base": _after(lambda w, x: w * x[3], lambda x, y: x[0].zero_(), w=(64,)),
    "a-transpose-through-its-base": _after(lambda w, x: w * x.t(), lambda x, y: x.zero_()),
    "a-detached-alias": _after(_product, lambda x, y: x.detach().add_(1), x=lambda: leaf(64, 64, seed=2) * 2),
    "an-out-argument": _after(_product, lambda x, y: torch.add(x, 1, out=x)),
    "an-assignment-by-index": _after(_product, _zero_where_positive),
    "in-inference-mode": _after(_product, lambda x, y: torch.inference_mode()(x.mul_)(10)),
    "only-its-shape": _after(
        _product, lambda x, y: x.t_(), w=(32, 64), x=lambda: leaf(32, 64, seed=2, grad=False)
    ),
    "an-index": _after(lambda w, x: F.embedding(x, w), lambda x, y: x.fill_(0), x=lambda: torch.arange(64)),
    "a-leaf-that-requires-grad": _after(
        lambda w, x: x * w.exp(), lambda x, y: torch.no_grad()(x.mul_)(2), x=lambda: leaf(64, 64, seed=2)
    ),
}.items():  # fmt: skip
    _modified(f"H01-{_name}")(_body)
_modified("H01-a-sparse-tensor", Flag.HOST)(
    _after(
        lambda w, x: torch.sparse.mm(x, w.exp()), lambda x, y: x.mul_(2), x=lambda: torch.eye(64).to_sparse()
    )
)  # fmt: skip


@_modified("H01-an-intermediate-with-a-history")
def _(run: Run) -> object:
    a, w = leaf(64, 64), leaf(64, 64, seed=2)
    with run.around:
        h = a * 2
        y = h @ w
        h.relu_()
    (y + h).sum().backward()
    return w.grad


@_modified("H01-the-earlier-of-two-saves")
def _(run: Run) -> object:
    w, x = leaf(64, 64), _plain()
    with run.around:
        first = w * x
        x.mul_(2)
        second = w * x
    (first + second).sum().backward()
    return w.grad


@_modified("H01-what-every-layer-saves")
def _(run: Run) -> object:
    x, mask = leaf(32, 32), torch.ones(32, 32)
    with run.around:
        y = x + 1.0
        for layer in range(16):
            y = (y * mask).sin()
            if layer == 7:
                mask.mul_(2.0)
    y.sum().backward()
    return x.grad


@_modified("H01-a-parameter-by-its-optimizer")
def _(run: Run) -> object:
    layer, x = nn.Linear(64, 64), leaf(64, 64)
    with run.around:
        y = layer(x * 2).tanh()
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    y.sum().backward()
    return x.grad


@_modified("H01-between-two-backwards")
def _(run: Run) -> object:
    w, x = leaf(64, 64), _plain()
    with run.around:
        y = (w * x).sum()
    y.backward(retain_graph=True)
    x.mul_(2)
    y.backward()
    return w.grad


@_modified("H01-H34-by-its-own-backward")
def _(run: Run) -> object:
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        result = gradient * saved
        saved.mul_(2)
        return result

    w, x = leaf(64, 64), _plain()
    with run.around:
        y = custom(w, backward, x + 1).sum()
    y.backward(retain_graph=True)
    y.backward()
    return w.grad


for _kind in KINDS:

    @_modified(f"H13-{_kind.name.replace(' ', '-')}", moved=0.0)
    def _(run: Run, kind: Any = _kind) -> object:
        x = wrapped(kind, 16, 16)
        with run.around:
            h = x * 2
            y = h.exp() * h
        h.mul_(10)
        y.sum().backward()
        return None


@_modified("H13-versions-are-autograds-own-whatever-detach-does", moved=0.0)
def _(run: Run) -> object:
    x, w = leaf(16, 16), Renewed(leaf(16, 16, grad=False), torch.ones(1), "")
    w.mul_(2).mul_(2)
    with run.around:
        y = watching((x * 2).tanh(), lambda tensor: None, w).exp()
    w.mul_(2)
    y.sum().backward()
    return x.grad


# -- what raises nowhere ----------------------------------------------------------------------------------------------

_unmodified("H01-a-clone-of-what-is-saved")(_after(_product, lambda x, y: x.clone().mul_(10), inside=True))


@_unmodified("H01-an-optimizer-whose-parameters-are-not-read")
def _(run: Run) -> object:
    layer, x = nn.Linear(64, 64), leaf(64, 64, grad=False)
    with run.around:
        y = layer(x).tanh()
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    y.sum().backward()
    return layer.weight.grad


@_unmodified("H01-a-branch-that-backward-never-visits")
def _(run: Run) -> object:
    w, x = leaf(64, 64), _plain()
    with run.around:
        unused = w * x
        used = (w * 3).tanh()
    x.mul_(10)
    used.sum().backward()
    return unused.detach(), w.grad


@_unmodified("H01-a-save-that-no-gradient-needs")
def _(run: Run) -> object:
    a, b = leaf(64, 64), leaf(64, 64, seed=2)
    with run.around:
        u, v = a * 2, b * 3
        y = u.square().sum() + v.square().sum()
    u.detach().mul_(10)
    return torch.autograd.grad(y, b)


@_unmodified("H01-before-and-between-saves")
def _(run: Run) -> object:
    w, x = leaf(64, 64), _plain()
    x.mul_(10)
    with run.around:
        first = w * x
        x.mul_(2)
        y = (w * 1).mul_(3).sin() * x
    y.sum().backward()
    return w.grad, first.detach()


@_unmodified("H01-after-backward", Flag.HELD)
def _(run: Run) -> object:
    w, x, gradients = leaf(64, 64), _plain(), []
    for _ in range(3):
        with run.around:
            y = w * x
        y.sum().backward()
        x.mul_(10)
        gradients.append(w.grad.clone())
    return gradients


@_unmodified("H01-activations-in-place")
def _(run: Run) -> object:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ELU(inplace=True))
    x = leaf(8, 64)
    with run.around:
        y = model(x).sum()
    y.backward()
    return x.grad, [parameter.grad for parameter in model.parameters()]


@_unmodified("H01-a-leaf-that-gets-other-data")
def _(run: Run) -> object:
    layer, x = nn.Linear(64, 64), leaf(64, 64)
    with run.around:
        y = layer(x * 2).tanh()
    layer.weight.data = layer.weight.data * 2
    y.sum().backward()
    return x.grad


@_unmodified("H13-a-change-between-two-saves-of-a-wrapper")
def _(run: Run) -> object:
    """The first save is never asked for; the second has the new values, and so has another wrapper of the same parts,
    which counts versions of its own."""
    gradients = []
    for kind, again in [*((kind, torch.clone) for kind in KINDS), (KINDS[0], Rewrapped.apply)]:
        x = wrapped(kind, 16, 16)
        with run.around:
            h = x * 2
            unused = h.square()
            other = (x * 5).tanh().exp()  # the copies of the first save have started by now
            h.mul_(3)
            y = again(h).square().sum() + other.sum() + h.square().sum()
        del h, unused, other
        y.backward()
        gradients.append(parts_of(x.grad))
    return gradients


# -- writes that no version counter sees ------------------------------------------------------------------------------


def everything_has_left(around: AbstractContextManager[Any]) -> None:
    """Returns when all that was saved so far has left, where there is an ``Offload``."""
    offload = getattr(around, "offload", around)
    if isinstance(offload, Offload):
        offload.stats(synchronize=True)


def _preserving(h: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(h), torch.no_grad():
        h.mul_(0.1)


#: Writes, and what is saved of the tensor again.
_UNSEEN: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], Tensor]]] = {
    "by-data": (lambda h: h.data.clamp_(-0.5, 0.5), lambda h: h),
    "by-numpy": (lambda h: h.detach().numpy().__imul__(0.1), lambda h: h),
    "of-no-version": (_preserving, lambda h: h),
    "before-a-transpose": (lambda h: h.data.mul_(0.1), lambda h: h.t()),
    "before-a-slice": (lambda h: h.data.mul_(0.1), lambda h: h[3:5]),
    "inside-of-a-wrapper": (lambda h: [part.data.mul_(0.1) for part in parts_of(h)], lambda h: h),
}


def _add_unseen(name: str, *flags: Flag) -> None:
    write, view = _UNSEEN[name]

    @program(f"H37-a-write-{name}", Flag.EAGER, Flag.SOURCES_CHANGE, *flags, moved=0.7)
    def _(run: Run) -> object:
        x, w = leaf(64, 64), leaf(64, 64, seed=2)
        if "wrapper" in name:
            x, w = wrapped_pair(64, 64), wrapped_pair(64, 64, seed=5)
        with run.around:
            h = x * 2
            unused = h * h  # saves it, and is never asked for
            other = (x @ x).tanh().sum()
            everything_has_left(run.around)
            write(h)
            y = (view(h) * view(w)).sum() + other
        del h
        everything_has_left(run.around)
        gradients = [parts_of(one) for one in torch.autograd.grad(y, [w, x])]
        return gradients, parts_of(unused)


for _name in _UNSEEN:
    _add_unseen(_name, *([Flag.HOST] if "numpy" in _name else []))


# -- changes that torch allows ----------------------------------------------------------------------------------------


@program("H46-what-is-changed-where-torch-allows-it-is-cloned-before", Flag.EAGER, Flag.SOURCES_CHANGE, moved=0.5)
def _(run: Run) -> object:
    """Saves tensors of all kinds, and changes some of them once or twice."""
    x, w, row = leaf(32, 32), leaf(32, 32, seed=2, grad=False), leaf(32, seed=3)
    pair, weight = wrapped_pair(16, 16), nn.Parameter(w[:16, :16] * 1)
    with allow_mutation_on_saved_tensors() as context:
        with run.around:
            b = x.clone()
            result = (b**2).sum() + (b.sin() * w).sum() + (row * 2).exp().sum() + (x[:16, :16] @ weight).sum()
            result = result + (x * 3).tanh().square().sum()
            everything_has_left(run.around)
            b.sin_()
            w.mul_(2)
            torch.no_grad()(weight.mul_)(2)
            result = result + (b * w).exp().sum() + b.t().cos().sum()
            b.add_(1)
            result = result + (b.square() * row).sum()
            inside = pair * 2
            changed = inside.sin()
            inside.mul_(3)
            changed = (changed * inside).sum()
            del b, w, inside
        result.backward(retain_graph=True)
        (result * 2).backward()
        changed.backward()
        del result, changed
        assert not context.original, "a handle that went is forgotten"
    return x.grad, row.grad, weight.grad, parts_of(pair.grad)
