"""What is computed again in backward is compared with what forward saved: wrong gradients are an error before."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.hazards.programs import assert_identical
from tests.planning.programs import Linears, Net, batch, gradients, plan_of_blocks, train

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.fixture(scope="module")
def plan() -> eo.Plan:
    return plan_of_blocks()


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
    (name,) = (name for name in plan.again if f"module {name!r} differs when recomputed" in text)
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


# -- when, and what is told -------------------------------------------------------------------------------------------


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


class Warm(Linears):
    """Has another factor each time, once it ``changes``."""

    count, changes = 0, False

    def between(self, h: Tensor) -> Tensor:
        self.count += self.changes
        return h * (1 + self.count)


@pytest.mark.parametrize(("twice", "again"), [(False, False), (True, False), (False, True)])
def test_a_second_step_is_checked_however_often_the_first_was_compared(twice: bool, again: bool, plan: eo.Plan) -> None:
    model = Net(Warm)
    with plan.apply(model) as checks:
        loss = model(batch()) + (model(batch() * 2) if twice else 0)
        loss.backward(retain_graph=again)
        if again:
            loss.backward()
        assert checks.calls == (4 if twice or again else 2)
        model.blocks[1].changes = True
        with pytest.raises(eo.OffloadError, match=r"blocks\.1"):
            model(batch()).backward()


def test_forwards_without_a_backward_leave_later_steps_checked(plan: eo.Plan) -> None:
    model = Net(partial(Stateful, add))
    with plan.apply(model):
        for _ in range(70):
            model(batch()[:2])
        with pytest.raises(eo.OffloadError, match=r"blocks\.1"):
            model(batch()[:2]).backward()


def test_last_bits_that_differ_are_counted_and_told_once_and_an_error_where_all_is_checked(plan: eo.Plan) -> None:
    model = Net(partial(Late, 1, 1e-7))
    with pytest.warns(RuntimeWarning, match="other bits and nearly the same sums") as told:
        train(model, plan.apply(model))
    assert len(told) == 1
    with plan.apply(model), pytest.raises(eo.OffloadError, match="other bits"), plan.apply(model, True):
        gradients(model, lambda: model(batch()))


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
