"""Planning changes nothing of the program's: what closures, caches, hooks and the loss reach is as it was."""

from __future__ import annotations

import functools
import gc
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from eager_offload._torch import is_fake
from tests.hazards.programs import assert_identical
from tests.planning.programs import CONFIG

pytestmark = pytest.mark.usefixtures("one_thread", "fast_link")


def planned(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], *, steps: int = 0) -> eo.Plan:
    device = "here" if steps else "h200"
    return eo.plan(model, x, loss=loss, device=device, device_budget="1GiB", policy="max", config=CONFIG, steps=steps)


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def batch() -> Tensor:
    return torch.randn(256, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def none_is_fake() -> Iterator[None]:
    """After each test no more tensors without bytes are anywhere in the process than before."""
    before = fakes()
    yield
    gc.collect()
    assert fakes() <= before


def fakes() -> set[int]:
    return {id(one) for one in gc.get_objects() if is_fake(type(one))}


# -- tensors ----------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """Statistics, parameters, dropout, and a number in Python that steers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out, self.calls = nn.BatchNorm1d(64), nn.Linear(64, 8), 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.out(self.norm(hidden)).logsumexp(-1).mean() / self.calls


def trained(how: str, directory: Path) -> tuple[list[Tensor], int]:
    """Parameters and statistics after a few steps whose loss has a head of its own and the model's own parameters, and
    the bytes that moved."""
    torch.manual_seed(0)
    model, head, x, mean = body(), Head(), batch(), torch.zeros(64)
    head.out.weight.grad = torch.full_like(head.out.weight, 3.0)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1, momentum=0.9)

    def loss(hidden: Tensor) -> Tensor:
        penalty = torch.stack([one.square().sum() for one in model.parameters()])
        mean.mul_(0.9).add_(hidden.detach().mean(0))
        return head(hidden + mean) + 1e-3 * penalty.sum()

    kept = [one.grad for one in (*model.parameters(), *head.parameters())]
    plan = None if how == "no plan" else planned(model, x, loss, steps=2 if how == "steps" else 0)
    now = [one.grad for one in (*model.parameters(), *head.parameters())]
    assert all(one is other for one, other in zip(now, kept, strict=True))
    given: dict[str, Any] = {"config": CONFIG} if plan is None else {"plan": plan}
    offload = eo.Offload(**given, tier="disk", disk_path=directory)
    for _ in range(3):
        with offload:
            total = loss(model(x))
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = offload.stats(synchronize=True)
    offload.close()
    return [mean, *model.state_dict().values(), *head.state_dict().values()], stats.bytes_out


@pytest.mark.parametrize("how", ["traced", "steps"])
def test_h63_training_after_a_plan_is_training_without_it(how: str, tmp_path: Path) -> None:
    expected, _ = trained("no plan", tmp_path)
    found, moved = trained(how, tmp_path)
    assert_identical(expected, found)
    assert moved > 0


class Scale(torch.autograd.Function):
    """Is given what no function of torch's was given before."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: Tensor) -> Tensor:
        return hidden * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0] * 2, gradients[0].sum(0)


def test_h63_a_gradient_that_no_stand_in_can_take_is_an_error() -> None:
    scale = nn.Parameter(torch.ones(64))
    with pytest.raises(eo.PlanError, match=r"the model itself takes a tensor of the shape \(64,\) from outside"):
        planned(body(), batch(), lambda hidden: Scale.apply(hidden, scale).square().mean())
    assert scale.grad is None
    assert planned(body(), batch(), lambda hidden: Scale.apply(hidden, scale).mean(), steps=1).fits
    assert scale.grad is None


def test_h63_constants_from_outside_may_steer() -> None:
    weights = torch.tensor([1.0, 2.0])
    plan = planned(body(), batch(), lambda hidden: hidden.square().mean() * sum(weights.tolist()) * weights[0].item())
    assert plan.moved_bytes > 0


# -- what holds tensors -----------------------------------------------------------------------------------------------


@functools.lru_cache
def table(length: int) -> Tensor:
    return torch.arange(length).div(100).cos()[:, None]


@functools.cache
def other_table(length: int) -> tuple[Tensor, ...]:
    return (torch.full((length, 1), 0.5).sqrt(),)


KNOWN: dict[int, Tensor] = {}
LAST: Tensor | None = None


class Holder:
    """Has a table that is made once, and what it saw last."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    @functools.cached_property
    def made(self) -> Tensor:
        return torch.linspace(0, 1, 64).exp()


class Hiding(nn.Linear):
    """Puts what it makes wherever it can."""

    seen: list[Tensor] = []  # noqa: RUF012  # of the class
    last: Tensor | None = None
    calls = 0

    @functools.lru_cache(maxsize=8)  # noqa: B019  # which holds the module too
    def width(self) -> Tensor:
        return torch.tensor(float(self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        global LAST
        self.calls += 1
        if len(x) not in KNOWN:
            KNOWN[len(x)] = torch.arange(len(x)).float().cos()[:, None]
        y = super().forward(x) / self.width() * table(len(x)) * other_table(len(x))[0] * KNOWN[len(x)]
        Hiding.seen.append(y.detach())
        type(self).last = LAST = y.detach()
        return y


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("was_used", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_h63_whatever_holds_a_tensor_has_what_it_had(fails: bool, was_used: bool, steps: int) -> None:
    features: dict[str, Tensor] = {}
    holder, count = Holder(), 0
    model = nn.Sequential(Hiding(64, 64), nn.GELU(), Hiding(64, 64))

    def note(module: nn.Module, given: object, made: Tensor) -> None:
        nonlocal count
        count += 1
        features["out"] = holder.last = made.detach()
        model.last = made.detach()  # type: ignore[assignment]  # of the model itself, and not of its copy

    model[1].register_forward_hook(note)

    def loss(hidden: Tensor) -> Tensor:
        total = (hidden * holder.made).square().mean()
        if fails:
            raise KeyError("its own")
        return total

    def state() -> tuple[Any, ...]:
        objects = dict(KNOWN), list(Hiding.seen), vars(Hiding).get("last"), LAST, dict(features), dict(vars(holder))
        return *objects, count, vars(model).get("last"), model[0].calls

    for one in (KNOWN, Hiding.seen):
        one.clear()
    table.cache_clear()
    other_table.cache_clear()
    if was_used:
        model(batch())
        assert len(features) == len(KNOWN) == 1
    before = state()
    with pytest.raises(KeyError) if fails else nullcontext():
        assert planned(model, batch(), loss, steps=steps).moved_bytes > 0
    after = state()
    assert str(before) == str(after)
    assert all(one is other for one, other in zip(tensors(before), tensors(after), strict=True))
    for one in (table(256), *other_table(256)):
        assert type(one) is Tensor


def tensors(state: object) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_iter(state) if isinstance(one, Tensor)]


class Slotted:
    """Has no dictionary, a slot whose name Python mangles, and lets nobody write."""

    __slots__ = ("__first", "last")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def put(self, made: Tensor) -> None:
        for name in SLOTS:
            object.__setattr__(self, name, made)


SLOTS = ("_Slotted__first", "last")


CONTEXT: ContextVar[Tensor | None] = ContextVar("CONTEXT", default=None)


@pytest.mark.parametrize("steps", [0, 1])
def test_h63_so_has_what_is_no_container(steps: int) -> None:
    """Slots, a context variable, an attribute of a tensor, an array, generators of numbers, hooks of a parameter and of
    all modules, and one tensor that two names have in turn."""
    slotted, weak, plain, array = Slotted(), WeakKeyDictionary[object, Tensor](), torch.ones(64), numpy.empty(1, object)
    drawn, drawn_by_python, seen = torch.Generator().manual_seed(3), random.Random(3), list[object]()
    model, pair = body(), {"first": torch.zeros(1), "second": torch.ones(1)}
    model[0].weight.register_hook(lambda gradient: seen.append(gradient) or gradient)

    def loss(hidden: Tensor) -> Tensor:
        array[0] = plain.last = weak[model] = made = hidden.detach()
        slotted.put(made)
        CONTEXT.set(made)
        pair["first"], pair["second"] = pair["second"], pair["first"]
        return (hidden * torch.rand(64, generator=drawn)).square().mean() * drawn_by_python.random()

    def state() -> tuple[object, ...]:
        slots = [hasattr(slotted, name) for name in SLOTS]
        objects = slots, list(weak), vars(plain), array.tolist(), seen, CONTEXT.get(), *pair.values()
        return *objects, drawn.get_state(), drawn_by_python.getstate()

    before = str(state())
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, given, made: seen.append(made))
    try:
        assert planned(model, batch(), loss, steps=steps).moved_bytes > 0
    finally:
        everywhere.remove()
    assert str(state()) == before


class Weighted:
    """A loss that is no module, and has a tensor and a number."""

    def __init__(self) -> None:
        self.weight, self.calls = torch.full((64,), 0.5), 0

    def loss(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return (hidden * self.weight).square().mean()


@pytest.mark.parametrize("how", ["method", "partial"])
def test_h63_a_loss_that_is_no_module_may_have_tensors(how: str) -> None:
    weighted = Weighted()
    loss = weighted.loss if how == "method" else functools.partial(Weighted.loss, weighted)
    assert planned(body(), batch(), loss).moved_bytes > 0
    assert weighted.calls == 0


class Making(OrderedDict[str, Any]):
    """Makes anew what it is asked for, as a table of activations does."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


ACTIVATIONS = Making(gelu=nn.GELU)


def test_h63_a_table_that_makes_what_it_is_asked_for_is_left_alone() -> None:
    assert planned(body(), batch(), lambda hidden: ACTIVATIONS["gelu"](hidden).square().mean()).moved_bytes > 0
    assert OrderedDict.__getitem__(ACTIVATIONS, "gelu") is nn.GELU


FOUND: list[Tensor] = []


class Strange(Tensor):
    """Lets nobody ask it anything."""

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        raise RuntimeError("its own code has run")


def test_h63_a_holder_that_no_function_names_is_found_and_named() -> None:
    hidden, strange = FOUND, torch.ones(3).as_subclass(Strange)

    def loss(made: Tensor) -> Tensor:
        vars(sys.modules[__name__])["FO" + "UND"].append(made.detach())
        return made.square().mean()

    with pytest.raises(eo.PlanError, match="was put into a list, outside of the model"):
        planned(body(), batch(), loss)
    assert hidden == []
    assert type(strange) is Strange


# -- what depends on the device ---------------------------------------------------------------------------------------


class Device(nn.Module):
    """Functions that save other tensors on an accelerator, and the same ones where they save nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.lstm = nn.MultiheadAttention(64, 4, dropout=0.1), nn.LSTM(64, 64)
        self.dropout, self.norm = nn.Dropout(0.1), nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm(x)
        attended = self.attention(x, x, x, need_weights=False)[0]
        return self.lstm(self.dropout(attended))[0].square().mean()


def test_h70_a_plan_names_the_functions_whose_saves_it_guessed(tmp_path: Path) -> None:
    plan = eo.plan(Device(), batch(), device="h200", config=CONFIG)
    assert [one.partition(" ")[0] for one in plan.guessed] == ["attention", "dropout", "recurrent"]
    assert ["of CUDA" in one or "CUDA's" in one for one in plan.guessed] == [True, True, False], "written down as those"
    assert "guessed, since the device is not here" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert eo.Plan.load(tmp_path / "plan.json").guessed == plan.guessed
    assert not eo.plan(
        Device(), batch(), device="here", device_budget="1GiB", config={**CONFIG, "tier": "host"}
    ).guessed
    assert not eo.plan(body(), batch(), loss=lambda made: made.mean(), device="h200", config=CONFIG).guessed


class Flexible(nn.Linear):
    """Calls what torch differentiates on accelerators alone."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        y = super().forward(x).view(1, 4, -1, 16)
        return flex_attention(y, y, y, score_mod=lambda score, b, h, q, k: score + q - k).square().mean()


def test_a_model_with_flex_attention_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(eo.PlanError, match=r"module '0' calls what .*scaled_dot_product_attention.* Offload\("):
        eo.plan(nn.Sequential(Flexible(64, 64)), batch(), device="h200")
