"""H44: tensors without bytes of their own, tracers, and modes of the caller that see every operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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
from tests.hazards.programs import Around, Settled, assert_identical, assert_moved, exact
from tests.programs import leaf
from tests.programs.parts.functions import custom

pytestmark = pytest.mark.filterwarnings(
    "ignore:eager_offload. nothing moved:RuntimeWarning", "ignore:Accessing the data pointer of FakeTensor:UserWarning"
)


def stays_as_layout(program: Callable[[Around], object], backend: Backend) -> None:
    stats = exact(program, backend.offload())
    assert stats.kept_bytes["layout"] > 0
    assert all(type(nbytes) is int for nbytes in stats.kept_bytes.values())


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), FakeTensorMode], ids=["meta", "fake"])
@pytest.mark.parametrize("inside", ["nothing", "forward", "forward and backward"])
def test_h44_what_has_no_bytes_stays(inside: str, mode: Callable[[], Any], backend: Backend) -> None:
    def program(around: Around) -> object:
        no_bytes = mode()
        with no_bytes:
            model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)), torch.ones(4, 8)
        with around, nullcontext() if inside == "nothing" else no_bytes:
            loss = model(x).sum()
        with no_bytes if "backward" in inside else nullcontext():
            loss.backward()
        # What can be said of gradients that have no values.
        return [(type(p.grad), p.grad.size(), p.grad.stride(), str(p.grad.device)) for p in model.parameters()]

    stays_as_layout(program, backend)
    assert {*assert_settled(backend.offloads[0]).kept_bytes} <= {"layout", "parameter"}
    assert backend.offloads[0].stats().bytes_out == 0


def test_h44_real_tensors_move_after_fake_ones(backend: Backend) -> None:
    offload = backend.offload()  # for each type of element something is made once, here in the mode

    def program(around: Around, dtype: torch.dtype = torch.float64) -> object:
        x = torch.ones(8, 8, dtype=dtype, requires_grad=True)
        with around:
            loss = (x.exp() * x).sum()
        loss.backward()
        return x.grad

    with FakeTensorMode():
        program(offload)
    assert_moved(exact(program, Settled(offload)))


@pytest.mark.sampled(5, quick=True)
@pytest.mark.parametrize("inside", [False, True], ids=["around the trace", "in what is traced"])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_h44_make_fx_traces_forward_and_backward(mode: str, inside: bool, backend: Backend) -> None:
    def traced(around: Around) -> object:
        def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            with around if inside else nullcontext():
                loss = (((x @ w).exp() * x).relu() + w.sigmoid()).square().sum()
                return torch.autograd.grad(loss, (x, w))

        with nullcontext() if inside else around:
            graph = make_fx(function, tracing_mode=mode)(leaf(4, 4), leaf(4, 4, seed=2))
        calls = [str(node.target) for node in graph.graph.nodes if node.op != "output"]
        # With any hooks torch itself makes an alias of what is unpacked, which tracers of torch 2.15 call so.
        own = [call for call in calls if "detach" not in call and "alias" not in call]
        return own, graph(leaf(4, 4, seed=3), leaf(4, 4, seed=4))

    stays_as_layout(traced, backend)


# -- modes that see every operator ------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Writes down what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    __torch_function__ = Operators.__torch_dispatch__


def square(x: Tensor) -> Tensor:
    """A function mode sees what runs inside of it, and so would see what packs and unpacks."""
    return custom(x, lambda ctx, gradient: 2 * ctx.saved_tensors[0] * gradient, x, forward=lambda x: x * x)


def squares(around: Around, mode: Any, outside: bool) -> object:
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
def test_h44_modes_of_the_caller_see_nothing_of_it(outside: bool, kind: Callable[[], Any], backend: Backend) -> None:
    offload, plain = backend.offload(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    expected = squares(plain, kind(), outside)
    for around in (offload, Settled(offload)):
        assert_identical(expected, squares(around, kind(), outside))
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
        mode.seen.clear()
        x.detach().cos()
        assert "cos.default" in mode.seen
    assert_moved(assert_settled(offload))
