"""What is computed again in backward is compared with what forward saved: wrong gradients are an error before."""

from __future__ import annotations

import gc
import itertools
import random
import warnings
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import eager_offload as eo
from tests.hazards.programs import assert_identical
from tests.planning.programs import CONFIG, gradients, slow

pytestmark = pytest.mark.usefixtures("one_thread")


class Linears(nn.Module):
    """Two linear layers, and in between what a subclass does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x).sin().exp()).sin())

    def between(self, h: Tensor) -> Tensor:
        return h.cos()


class Stateful(Linears):
    """Computes with a number that ``change`` makes of its own state, or of one that it is given."""

    def __init__(self, change: Callable[[Any], float], own: Any = None) -> None:
        super().__init__()
        self.change, self.own, self.number = change, own, 0.0
        self.register_buffer("buffer", torch.zeros(1))

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        state = self.own if given is None else given
        self.number = 1 + self.change(self if state is None else state) / 8
        return super().forward(x)

    def between(self, h: Tensor) -> Tensor:
        return h * self.number


class Net(nn.Module):
    """``make`` makes its blocks; ``given``, what each of them is given in a forward."""

    def __init__(self, make: Callable[[], nn.Module], given: Callable[[], Any] | None = None, count: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.given = nn.Linear(32, 32), nn.Linear(32, 32), given
        self.blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        given = {} if self.given is None else {"given": self.given()}
        x = self.first(x)
        for block in self.blocks:
            x = block(x, **given)
        return self.last(x).square().sum()


@pytest.fixture(scope="module")
def plan() -> eo.Plan:
    """One in which both blocks of a ``Net`` are computed again."""
    far, x = slow(out=1e6, back=1e6), torch.empty(64, 32)
    fields: dict[str, Any] = {"device": far, "config": CONFIG, "optimizer": None}
    least = eo.plan(Net(Linears), x, **fields).least_budget
    plan = eo.plan(Net(Linears), x, device_budget=least - 1, recompute=True, **fields)
    assert plan.again == ("blocks.0", "blocks.1")
    return plan


def batch() -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, around: AbstractContextManager[Any], x: Tensor | None = None) -> list[Tensor]:
    """Returns the losses and the gradients of two steps."""
    found = list[Tensor]()
    with around:
        for _ in range(2):
            torch.manual_seed(2)
            found += [one.clone() for one in gradients(model, lambda: model(batch() if x is None else x.sin()))]
    return found


# -- what changes -----------------------------------------------------------------------------------------------------


class Count:
    def __init__(self, inside: Any = None) -> None:
        self.count, self.inside = 0, inside


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def add(one: Any) -> float:
    one.count = getattr(one, "count", 0) + 1
    return float(one.count)


def grow(one: Any) -> float:
    one["n"] = one.get("n", 0) + 1
    return float(one["n"])


def append(one: Any) -> float:
    one.append(1)
    return float(len(one))


def insert(one: set[int]) -> float:
    one.add(len(one))
    return float(len(one))


def write(one: Any) -> float:
    one += 1
    return float(one[0])


def write_first(one: Any) -> float:
    one[0] += 1
    return float(one[0])


def write_data(block: Any) -> float:
    block.buffer.data.add_(1)
    return float(block.buffer)


EVERYWHERE = Count()
#: What makes a state, and what a forward does to it.
STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "object": (Count, add),
    "object inside": (lambda: Count(Count()), lambda one: add(one.inside)),
    "slots": (Slots, add),
    "class": (lambda: type("Own", (), {}), add),
    "function": (lambda: partial(add), add),
    "numpy array": (lambda: np.zeros(1), write),
    "numpy generator": (lambda: np.random.default_rng(1), lambda one: float(one.random())),
    "numpy state": (lambda: np.random.RandomState(1), lambda one: float(one.rand())),
    "random": (lambda: random.Random(1), lambda one: one.random()),
    "iterator": (itertools.count, next),
    "iterator that ends": (lambda: iter(range(2)), next),
    "generator": (lambda: (one for one in range(100)), next),
    "generators in a list": (lambda: [random.Random(1)], lambda one: one[0].random()),
    "torch generator": (torch.Generator, lambda one: float(torch.rand(1, generator=one))),
    "array": (lambda: array("d", [0]), write_first),
    "tensor in a list": (lambda: [torch.zeros(1)], lambda one: write(one[0])),
    "global": (Count, lambda _: add(EVERYWHERE)),
}
#: Those of which a module may be given a copy.
CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "list": (list, append),
    "list that runs out": (lambda: [5.0, 1.0, 3.0, 2.0], lambda one: float(one.pop())),
    "dict": (dict, grow),
    "set": (set, insert),
    "deque": (partial(deque, maxlen=9), append),
    "ordered": (OrderedDict, grow),
    "bytes": (bytearray, append),
    "three deep": (lambda: {"a": [{"b": [0]}]}, lambda one: append(one["a"][0]["b"])),
    "in a tuple": (lambda: (1, [0]), lambda one: append(one[1])),
}
#: Of the module itself.
OWN: dict[str, Callable[[Any], float]] = {
    "attribute": add,
    "attribute of a child": lambda block: add(block.up),
    "another buffer": lambda block: float(block.__setattr__("buffer", block.buffer + 1) or block.buffer),
    "the data of a buffer": write_data,
}


def trains_or_is_refused(plan: eo.Plan, made: Callable[[], nn.Module]) -> bool:
    """Returns whether gradients are those without the plan; else they are not there, and would have been wrong."""
    plain, model, found = train(made(), nullcontext()), made(), list[Tensor]()
    try:
        found = train(model, plan.apply(model))
    except eo.OffloadError as error:
        text = str(error)
    if found:
        assert_identical(found, plain)
        return True
    (name,) = (name for name in plan.again if f"module {name!r} does another thing" in text)
    assert "zero_grad" in text
    assert all(one.grad is None for one in model.get_submodule(name).parameters())
    assert model.last.weight.grad is not None, "of a later module"
    try:
        unchecked = train(model := made(), plan.apply(model, verify=False))
    except (StopIteration, IndexError, RuntimeError):  # torch makes the last one of the first
        return False
    assert not all(map(torch.equal, unchecked, plain))
    return False


@pytest.mark.parametrize("name", [*STATES, *CONTAINERS])
def test_h75_a_module_that_changes_what_it_has_is_refused(name: str, plan: eo.Plan) -> None:
    make, change = {**STATES, **CONTAINERS}[name]
    assert not trains_or_is_refused(plan, lambda: Net(lambda: Stateful(change, make())))


@pytest.mark.parametrize("name", OWN)
def test_h75_a_module_that_changes_itself_is_refused(name: str, plan: eo.Plan) -> None:
    assert not trains_or_is_refused(plan, lambda: Net(lambda: Stateful(OWN[name])))


@pytest.mark.parametrize("name", [*STATES, *CONTAINERS])
def test_h75_a_module_that_changes_what_it_is_given_is_refused_or_given_a_copy(name: str, plan: eo.Plan) -> None:
    make, change = {**STATES, **CONTAINERS}[name]
    assert trains_or_is_refused(plan, lambda: Net(lambda: Stateful(change), make)) == (name in CONTAINERS)


# -- what stays as it is ----------------------------------------------------------------------------------------------


class Dropped(Linears):
    def between(self, h: Tensor) -> Tensor:
        return nn.functional.dropout(h, 0.3) * nn.functional.rrelu(h, training=True)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        found: Tensor = self.attention(h, h, h, need_weights=False)[0]
        return x + found


class Normalized(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(128)

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.norm(h).relu()
        return out


class Nested(Linears):
    def between(self, h: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda h: h.sin().exp().cos(), h, use_reentrant=False)
        return out * out.detach().tanh()


def keeps(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.sum.default, torch.ops.aten.mul.Tensor)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


POLICY = partial(create_selective_checkpoint_contexts, keeps)


class Selective(Linears):
    def between(self, h: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda h: h.sin() * h.exp(), h, use_reentrant=False, context_fn=POLICY)
        return out.cos()


class InSelective(Net):
    """All of it is under a policy."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False, context_fn=POLICY)
        return out


class Odd(Linears):
    """Saves views, masks, indices, complex numbers, halves, infinities and nothing."""

    def between(self, h: Tensor) -> Tensor:
        mask = torch.where(h > 2, -torch.inf, 0.0)
        top = h.topk(3, 1).values.sum(1, keepdim=True)
        wave = torch.fft.rfft(h).abs()[:, :1].expand(-1, 128)
        with torch.no_grad():
            fixed = h.half().float()
        return (h + mask).softmax(1) * top + wave * fixed + h[:, :0].exp().sum() + h.t()[::2].exp().sum()


class Forces(Linears):
    """Has a gradient in forward, with a graph of its own."""

    def between(self, h: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(h.sin().square().sum(), h, create_graph=True)
        return h + force


ORDINARY = [Linears, Dropped, Attending, Normalized, Nested, Selective, Odd, Forces]


@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("kind", ORDINARY)
def test_modules_that_do_the_same_once_more_train_exactly_and_are_checked(
    kind: type[nn.Module], cast: bool, plan: eo.Plan
) -> None:
    nets = [(Net if kind is not Selective else InSelective)(kind) for _ in range(2)]
    offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)

    def step(model: nn.Module, around: Any) -> list[Tensor]:
        torch.manual_seed(2)

        def loss() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                found: Tensor = model(batch()).float()
            return found

        return gradients(model, loss, around)

    with warnings.catch_warnings(), plan.apply(nets[1], verify=True) as checks:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*copies within host memory")
        for _ in range(3):
            assert_identical(step(nets[0], None), step(nets[1], offload))
    assert checks.calls >= 6, "each block in each step"
    assert checks.inexact == 0
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()


class Late(Linears):
    """Has another factor from the given step on."""

    def __init__(self, step: int, less: float = 1.0) -> None:
        super().__init__()
        self.calls, self.less, self.most = 0, less, 2 * step - 1

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * (1 if self.calls < self.most else 1 + self.less * self.calls)


def test_a_third_step_of_a_kind_is_checked_where_that_is_asked_for_alone(plan: eo.Plan) -> None:
    def run(verify: Any, shapes: list[int]) -> None:
        model = Net(partial(Late, 3))
        with plan.apply(model, verify):
            for rows in shapes:
                gradients(model, lambda rows=rows: model(batch()[:rows]))

    run("auto", [64, 64, 64, 64])
    run(False, [64, 32, 64])
    for verify, shapes in ((True, [64, 64, 64]), ("auto", [64, 64, 32])):
        with pytest.raises(eo.OffloadError, match=r"module 'blocks.1' .* value \d+ of \d+ .*float32 of shape"):
            run(verify, shapes)
    with pytest.raises(eo.ConfigError, match="verify='always' is not accepted"):
        run("always", [])


def test_last_bits_that_differ_are_counted_and_told_once_and_an_error_where_all_is_checked(plan: eo.Plan) -> None:
    model = Net(partial(Late, 1, 1e-7))
    with pytest.warns(RuntimeWarning, match="differ in their last bits") as told:
        train(model, plan.apply(model))
    assert len(told) == 1
    with plan.apply(model), pytest.raises(eo.OffloadError, match="other bits"), plan.apply(model, True):
        gradients(model, lambda: model(batch()))


def test_graphs_are_run_backward_in_any_order_and_more_than_once(plan: eo.Plan) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        losses = [model(batch()), model(batch() * 2), model(batch() * 3)]
        for loss in (losses[1], losses[0], losses[1], losses[2]):
            loss.backward(retain_graph=True)
        return [one.grad for one in model.parameters() if one.grad is not None]

    expected = run(Net(Dropped))
    with plan.apply(model := Net(Dropped), True) as checks:
        assert_identical(run(model), expected)
    assert checks.calls == 8


class Failing(Linears):
    """Raises ``error`` in a call to come."""

    left = 0
    error: type[Exception] = KeyError

    def between(self, h: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            raise self.error("so it is")
        return h.cos()


@pytest.mark.parametrize(
    ("call", "error", "raised"),
    [
        (1, KeyError, KeyError),
        (2, KeyError, eo.OffloadError),
        (2, torch.OutOfMemoryError, torch.OutOfMemoryError),
    ],
)
def test_errors_of_a_module_leave_nothing_behind(call: int, error: Any, raised: Any, plan: eo.Plan) -> None:
    expected, model = train(Net(Linears), nullcontext()), Net(Failing)
    model.blocks[1].left, model.blocks[1].error = call, error
    gc.collect()
    gc.disable()
    try:
        x = batch().requires_grad_()
        seen = weakref.ref(x)
        with pytest.raises(raised):
            train(model, plan.apply(model), x=x)
        assert_identical(train(model, plan.apply(model)), expected)
        del x
        assert seen() is None
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()
