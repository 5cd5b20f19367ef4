"""H44: tensors without bytes of their own, tracers, and modes of the caller that see every operator."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.hazards.backends import Backend, assert_settled
from tests.hazards.functions import custom
from tests.hazards.programs import Around, Program, Settled, assert_identical, assert_moved, exact, leaf


def layers(**where: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, **where), nn.LayerNorm(8, **where), nn.GELU(), nn.Linear(8, 8, **where))


def gradients(model: nn.Module) -> list[tuple[object, ...]]:
    """What can be said of gradients that have no values."""
    return [(type(p.grad), p.grad.size(), p.grad.stride(), str(p.grad.device)) for p in model.parameters()]


# -- what has no bytes ------------------------------------------------------------------------------------------------


def on_meta(around: Around) -> object:
    model = layers(device="meta")
    with around:
        loss = model(torch.ones(4, 8, device="meta")).sum()
    loss.backward()
    return gradients(model)


def on_meta_inside(around: Around) -> object:
    with around, torch.device("meta"):
        model = layers()
        model(torch.ones(4, 8)).sum().backward()
    return gradients(model)


def fake(around: Around, *, backward_inside: bool = True) -> object:
    mode = FakeTensorMode()
    with mode:
        model = layers()
        with around:
            loss = model(torch.ones(4, 8)).sum()
    with mode if backward_inside else nullcontext():
        loss.backward()
    return gradients(model)


@pytest.mark.parametrize("program", [on_meta, on_meta_inside, fake, partial(fake, backward_inside=False)])
def test_h44_what_has_no_bytes_stays(program: Program, backend: Backend) -> None:
    stats = exact(program, backend.offload())
    assert stats.bytes_out == 0
    assert set(stats.kept_bytes) <= {"layout", "parameter"}
    assert stats.kept_bytes["layout"] > 0
    assert all(type(nbytes) is int for nbytes in stats.kept_bytes.values())


def test_h44_real_tensors_move_after_fake_ones(backend: Backend) -> None:
    offload = backend.offload()  # for each type of element something is made once, here in the mode

    def program(around: Around) -> object:
        x = leaf(8, 8, dtype=torch.float64)
        with around:
            loss = (x.exp() * x).sum()
        loss.backward()
        return x.grad

    with FakeTensorMode(), offload:
        y = torch.ones(8, 8, dtype=torch.float64, requires_grad=True)
        (y.exp() * y).sum().backward()
    assert_moved(exact(program, Settled(offload)))


# -- tracers ----------------------------------------------------------------------------------------------------------


def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    loss = (((x @ w).exp() * x).relu() + w.sigmoid()).square().sum()
    return torch.autograd.grad(loss, (x, w))


@pytest.mark.sampled(5, quick=True)
@pytest.mark.parametrize("inside", [False, True], ids=["around the trace", "in what is traced"])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_h44_make_fx_traces_forward_and_backward(mode: str, inside: bool, backend: Backend) -> None:
    def traced(around: Around) -> object:
        def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            with around if inside else nullcontext():
                return step(x, w)

        with nullcontext() if inside else around:
            graph = make_fx(function, tracing_mode=mode)(leaf(4, 4), leaf(4, 4, seed=2))
        calls = [str(node.target) for node in graph.graph.nodes if node.op != "output"]
        # With any hooks torch itself makes an alias of what is unpacked, which tracers of torch 2.15 call so.
        return [call for call in calls if "detach" not in call and "alias" not in call], graph(
            leaf(4, 4, seed=3), leaf(4, 4, seed=4)
        )

    stats = exact(traced, backend.offload())
    assert stats.kept_bytes["layout"] > 0
    assert all(type(nbytes) is int for nbytes in stats.kept_bytes.values())


# -- modes that see every operator ------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Writes down what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def square(x: Tensor) -> Tensor:
    """A function mode sees what runs inside of it, and so would see what packs and unpacks."""
    return custom(x, lambda ctx, gradient: 2 * ctx.saved_tensors[0] * gradient, x, forward=lambda x: x * x)


def squares(around: Around, mode: Operators | Functions, outside: bool) -> object:
    x, w = leaf(16, 16), leaf(16, 16, seed=2)
    with mode if outside else nullcontext():
        with around, nullcontext() if outside else mode:
            h = square((x @ w).exp().relu())
            h = nn.functional.layer_norm(h, (16,)).t()[::2]
            part = (h * 2)[:, ::4].square()
            loss = square(part).sum() + h.sigmoid().mean()
            del h, part
            if not outside:
                torch.autograd.backward(loss)  # a function mode does not see this one, and stays on
        if outside:
            torch.autograd.backward(loss)
    return x.grad, w.grad, mode.seen


@pytest.mark.parametrize("kind", [Operators, Functions])
@pytest.mark.parametrize("outside", [False, True], ids=["mode inside", "mode outside"])
def test_h44_modes_of_the_caller_see_nothing_of_it(
    outside: bool, kind: type[Operators] | type[Functions], backend: Backend
) -> None:
    offload, plain = backend.offload(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    expected = squares(plain, kind(), outside)
    assert_identical(expected, squares(offload, kind(), outside))
    assert_identical(expected, squares(Settled(offload), kind(), outside))
    assert_moved(assert_settled(offload), 0.5)  # what is saved last before a backward in the context stays


def test_h44_the_mode_is_on_again_after_an_error(backend: Backend) -> None:
    backend.sources_change = True
    offload, x = backend.offload(), leaf(16, 16)
    with Operators() as mode:
        with offload:
            h = (x * 2).exp()
            loss = h.square().sum()
        h.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del h, loss
        before = len(mode.seen)
        x.detach().cos()
        assert "aten.cos.default" in mode.seen[before:]
    assert_moved(assert_settled(offload))
