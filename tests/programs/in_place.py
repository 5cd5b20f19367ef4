"""Changes in place: where autograd raises so do we, and nowhere else; and writes that no version counter sees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.testing._internal.two_tensor import TwoTensor

from eager_offload import Offload, SavedTensorModifiedError
from tests.programs import Flag, Run, leaf, program, raises, step
from tests.programs.parts.functions import custom, watching
from tests.programs.parts.wrappers import KINDS, Renewed, parts_of, wrapped, wrapped_pair

_Body = Callable[[Run], object]


def _raises(name: str, body: _Body, *flags: Flag, moved: float = 0.9) -> None:
    """Adds a program that raises, and behind which training goes on."""

    @program(name, Flag.EAGER, Flag.SOURCES_CHANGE, Flag.HELD, *flags, moved=moved)
    def _(run: Run) -> object:
        kind, said = None, ""
        try:
            body(run)
        except RuntimeError as error:
            kind, said = type(error), str(error)
        assert kind is (RuntimeError if isinstance(run.around, nullcontext) else SavedTensorModifiedError)
        assert "modified by an inplace operation" in said
        w = leaf(64, 64)
        with run.around:
            y = (w * 2).sin().cos()
        y.sum().backward()
        return w.grad, said.partition("is at version")[2].partition("instead")[0]


def _stays(name: str, body: _Body, *flags: Flag, moved: float = 0.9) -> None:
    """Adds a program that raises nowhere."""
    program(name, Flag.EAGER, Flag.SOURCES_CHANGE, Flag.NOTHING_BACK, *flags, moved=moved)(body)


def _plain() -> Tensor:
    return leaf(64, 64, seed=2, grad=False)


def _after(
    save: Callable[[Tensor, Tensor], Tensor],
    change: Callable[[Tensor, Tensor], object] = lambda x, y: None,
    when: str = "behind",
    *,
    w: tuple[int, ...] = (64, 64),
    x: Callable[[], Tensor] = _plain,
) -> _Body:
    """Saves, changes, and returns the gradient of ``w``.

    Args:
        save: makes an output of a leaf and of what ``x`` makes.
        change: is given the latter and the output.
        when: inside of the context, behind it, or between two backwards.
    """

    def body(run: Run) -> object:
        weight, other = leaf(*w), x()
        with run.around:
            y = save(weight, other)
            if when == "inside":
                change(other, y)
        loss = y.sum()
        if when == "between":
            loss.backward(retain_graph=True)
        if when != "inside":
            change(other, y)
        del y
        loss.backward()
        return weight.grad

    return body


def _product(w: Tensor, x: Tensor) -> Tensor:
    return w * x


def _in_every_layer(w: Tensor, mask: Tensor) -> Tensor:
    for layer in range(16):
        w = (w * mask).sin()
        if layer == 7:
            mask.mul_(2.0)
    return w


def _takes_a_step(parameter: Tensor, y: Tensor) -> None:
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()


def _changing(ctx: Any, gradient: Tensor) -> Tensor:
    (saved,) = ctx.saved_tensors
    result = gradient * saved
    saved.mul_(2)
    return result


def _parameter() -> Tensor:
    return leaf(64, 64, seed=2)


def _computed() -> Tensor:
    return leaf(64, 64, seed=2) * 2


for _name, _body in {
    "an-input": _after(_product, lambda x, y: x.mul_(10), "inside"),
    "an-input-after-the-context": _after(_product, lambda x, y: x.mul_(10)),
    "an-output": _after(lambda w, x: w.exp(), lambda x, y: y.add_(1), "inside"),
    "an-output-after-the-context": _after(lambda w, x: (w * 2).exp(), lambda x, y: y.add_(1)),
    "changed-and-changed-back": _after(_product, lambda x, y: x.mul_(2).div_(2)),
    "an-added-zero": _after(_product, lambda x, y: x.add_(0)),
    "a-base-through-a-view": _after(_product, lambda x, y: x[0].zero_()),
    "a-small-view-through-its-base": _after(lambda w, x: w * x[3], lambda x, y: x[0].zero_(), w=(64,)),
    "a-transpose-through-its-base": _after(lambda w, x: w * x.t(), lambda x, y: x.zero_()),
    "a-detached-alias": _after(_product, lambda x, y: x.detach().add_(1), x=_computed),
    "an-out-argument": _after(_product, lambda x, y: torch.add(x, 1, out=x)),
    "an-assignment-by-index": _after(_product, lambda x, y: x.__setitem__(x > 0, 0)),
    "in-inference-mode": _after(_product, lambda x, y: torch.inference_mode()(x.mul_)(10)),
    "only-its-shape": _after(lambda w, x: w * x[:32], lambda x, y: x.t_(), w=(32, 64)),
    "an-index": _after(lambda w, x: F.embedding(x, w), lambda x, y: x.fill_(0), x=lambda: torch.arange(64)),
    "a-leaf-that-requires-grad": _after(_product, lambda x, y: torch.no_grad()(x.mul_)(2), x=_parameter),
    "a-parameter-by-its-optimizer": _after(lambda w, x: ((w * 2) @ x).tanh(), _takes_a_step, x=_parameter),
    "an-intermediate-with-a-history": _after(lambda w, x: (x @ w) + x.relu_(), x=_computed),
    "the-earlier-of-two-saves": _after(lambda w, x: (w * x) + (w * x.mul_(2))),
    "what-every-layer-saves": _after(_in_every_layer),
    "between-two-backwards": _after(_product, lambda x, y: x.mul_(2), "between"),
    "H34-by-its-own-backward": _after(lambda w, x: custom(w, _changing, x + 1), when="between"),
    "H34-by-its-own-backward-while-it-is-kept": _after(lambda w, x: custom(w, _changing, x), when="between"),
}.items():
    _raises(f"H01-{_name}", _body)
_sparse = _after(lambda w, x: torch.sparse.mm(x, w.exp()), lambda x, y: x.mul_(2), x=lambda: torch.eye(64).to_sparse())
_raises("H01-a-sparse-tensor", _sparse, Flag.HOST)
for _kind in KINDS:
    _wrapper = _after(lambda w, h: h.exp() * h, lambda h, y: h.mul_(10), x=lambda kind=_kind: wrapped(kind, 16, 16) * 2)
    _raises(f"H13-{_kind.name.replace(' ', '-')}", _wrapper, moved=0.0)
_renewed = _after(
    lambda w, x: watching((w * 2).tanh(), lambda tensor: None, x).exp(),
    lambda x, y: x.mul_(2),
    x=lambda: Renewed(_plain(), torch.ones(1), "").mul_(2),
)
_raises("H13-versions-are-autograds-own-whatever-detach-does", _renewed, moved=0.0)

_stays("H01-a-clone-of-what-is-saved", _after(_product, lambda x, y: x.clone().mul_(10), "inside"))
_stays(
    "H01-an-optimizer-whose-parameter-is-not-read", _after(lambda w, x: (w * 2).sin() + x, _takes_a_step, x=_parameter)
)
_other_data = _after(lambda w, x: (w * 2) @ x, lambda x, y: setattr(x, "data", x.data * 2), x=_parameter)
_stays("H01-a-leaf-that-gets-other-data", _other_data)


@step("H01-activations-in-place")
def _() -> tuple[Callable[..., Tensor], list[Any]]:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ELU(inplace=True))
    return lambda model, x: model(x), [model, leaf(8, 64)]


def _branches(run: Run) -> object:
    """Of one no gradient is asked for, another one is never visited, and one is changed before it is saved."""
    a, b, x = leaf(64, 64), leaf(64, 64, seed=2), _plain()
    with run.around:
        u = a * 2
        unused = x * b
        x.mul_(2)
        y = u.square().sum() + (b * x).square().sum()
    u.detach().mul_(10)
    return torch.autograd.grad(y, b), unused.detach()


def _several_steps(run: Run) -> object:
    w, x, gradients = leaf(64, 64), _plain(), []
    for _ in range(3):
        with run.around:
            y = w * x
        y.sum().backward()
        x.mul_(10)
        gradients.append(w.grad.clone())
    return gradients


def _wrappers_between_saves(run: Run) -> object:
    """The first save is never asked for; the second has the new values, and so has another wrapper of the same parts,
    which counts versions of its own."""
    gradients = []
    for kind, again in [*((kind, torch.clone) for kind in KINDS), (KINDS[0], lambda h: TwoTensor(h.a, h.b))]:
        x = wrapped(kind, 16, 16)
        with run.around:
            h = x * 2
            unused = h.square()
            other = (x * 5).tanh().exp()  # the copies of the first save have started by now
            h.mul_(3)
            again = custom(h, lambda ctx, gradient: gradient, forward=again)
            y = again.square().sum() + other.sum() + h.square().sum()
        del h, unused, other, again
        y.backward()
        gradients.append(parts_of(x.grad))
    return gradients


_stays("H01-what-no-gradient-needs-and-what-comes-before-a-save", _branches)
_stays("H01-after-backward", _several_steps, Flag.HELD)
_stays("H13-a-change-between-two-saves-of-a-wrapper", _wrappers_between_saves)


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


@program("H01-a-change-between-two-saves", Flag.EAGER, Flag.SOURCES_CHANGE)
def _(run: Run) -> object:
    """What has left serves no save of a later version; the first save is never asked for."""
    x, w = leaf(64, 64), leaf(64, 64, seed=2)
    with run.around:
        y = x + 1.0
        first = (y * w).sigmoid()
        everything_has_left(run.around)
        y.mul_(2.0)
        second = (y * w).sum()
        del y
    everything_has_left(run.around)
    return torch.autograd.grad(second, w), first.detach()


@program("H01-a-backward-that-raises-once-and-again", Flag.EAGER, Flag.SOURCES_CHANGE, moved=0.5)
def _(run: Run) -> object:
    """What is whole of the same forward still comes back."""
    w, v, x, seen = leaf(32, 32), leaf(32, 32, seed=2), leaf(32, 32, seed=3, grad=False), list[Tensor]()
    with run.around:
        changed = (w * x).sum()
        whole = watching(v, lambda saved: seen.append(saved.detach().clone()), (v * 3).detach()).sum()
    x.add_(1)
    for _ in range(2):
        with raises("at version 1; expected version 0"):
            changed.backward(retain_graph=True)
    whole.backward()
    return w.grad, seen
