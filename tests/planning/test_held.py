"""Planning changes nothing of the program's, and what holds a tensor of a trace afterwards is named."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from eager_offload.torch_private.memory import is_fake
from tests.hazards.programs import assert_identical
from tests.planning.programs import CONFIG

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], **fields: Any) -> eo.Plan:
    fields = {"device": "h200", "device_budget": "1GiB", "policy": "max", "config": CONFIG, **fields}
    return eo.plan(model, x, loss=loss, **fields)


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
    gc.unfreeze()
    return {id(one) for one in gc.get_objects() if is_fake(type(one))}


# -- tensors ----------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """Statistics and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(64), nn.Linear(64, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(self.norm(hidden)).logsumexp(-1).mean()


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
    plan = None if how == "no plan" else planned(model, x, loss)
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


def test_h63_training_after_a_plan_is_training_without_it(tmp_path: Path) -> None:
    expected, _ = trained("no plan", tmp_path)
    found, moved = trained("traced", tmp_path)
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


def test_h63_constants_from_outside_may_steer() -> None:
    weights = torch.tensor([1.0, 2.0])
    plan = planned(body(), batch(), lambda hidden: hidden.square().mean() * sum(weights.tolist()) * weights[0].item())
    assert plan.moved_bytes > 0


# -- what holds tensors -----------------------------------------------------------------------------------------------


@functools.lru_cache
def table(length: int) -> Tensor:
    return torch.rand(length, 1)


@functools.cache
def other_table(length: int) -> tuple[Tensor, ...]:
    return (torch.full((length, 1), 0.5).sqrt(),)


class Caching(nn.Linear):
    """Asks caches of its module and of its class."""

    @functools.lru_cache(maxsize=8)  # noqa: B019  # which holds the module too
    def width(self) -> Tensor:
        return torch.tensor(float(self.out_features))

    @staticmethod
    @functools.lru_cache
    def ones(length: int) -> Tensor:
        return torch.ones(length, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.width() * table(len(x)) * other_table(len(x))[0] * self.ones(len(x))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("was_used", [False, True])
def test_h63_caches_are_neither_filled_nor_emptied(fails: bool, was_used: bool) -> None:
    model, caches = nn.Sequential(Caching(64, 64)), (table, other_table, Caching.width, Caching.ones)

    def loss(hidden: Tensor) -> Tensor:
        if fails:
            raise KeyError("its own")
        return hidden.square().mean()

    for one in caches:
        one.cache_clear()
    if was_used:
        model(batch())
    counts = [one.cache_info() for one in caches]
    with pytest.raises(KeyError) if fails else nullcontext():
        assert planned(model, batch(), loss).moved_bytes > 0
    assert (table, other_table, Caching.width, Caching.ones) == caches
    assert [one.cache_info() for one in caches] == counts
    assert [one.cache_info().currsize for one in caches] == [int(was_used)] * 4


def test_h63_another_thread_has_its_cache_meanwhile() -> None:
    table.cache_clear()
    with ThreadPoolExecutor(1) as other:
        kept = other.submit(table, 256).result()

        def loss(hidden: Tensor) -> Tensor:
            assert other.submit(table, 256).result() is kept
            assert table(256) is table(256) is not kept
            return (hidden * table(256)).square().mean()

        assert planned(body(), batch(), loss).moved_bytes > 0
    assert table(256) is kept


def test_h63_a_step_inside_of_autocast_leaves_nothing_in_its_cache() -> None:
    model = body()
    with torch.autocast("cpu", torch.bfloat16):
        model(batch())
        assert planned(model, batch(), lambda hidden: hidden.float().square().mean()).moved_bytes > 0
        assert torch.is_autocast_cache_enabled()
        assert model(batch()).dtype is torch.bfloat16


FOUND: list[Tensor] = []
KNOWN: dict[str, tuple[Tensor, ...]] = {}
LAST: Tensor | None = None
CONTEXT: ContextVar[Tensor | None] = ContextVar("CONTEXT", default=None)


class Holder:
    last: Tensor | None = None


class Slotted:
    """Has no dictionary."""

    __slots__ = ("last",)


class Strange(Tensor):
    """Lets nobody ask it anything."""

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        raise RuntimeError("its own code has run")


HOLDER, SLOTTED, WEAK = Holder(), Slotted(), WeakKeyDictionary[object, Tensor]()


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (lambda made: globals().update(LAST=made), "'LAST' of module .*test_held"),
        (lambda made: globals()["FO" + "UND"].append(made), "'FOUND' of module .*test_held"),
        (lambda made: KNOWN.update(here=(made,)), "('here' of )?'KNOWN' of module .*test_held"),
        (lambda made: setattr(Holder, "last", made), "'last' of type Holder"),
        (lambda made: vars(HOLDER).update(last=made), "('last' of )?a Holder"),
        (lambda made: setattr(SLOTTED, "last", made), "a Slotted"),
        (lambda made: WEAK.update({HOLDER: made}), "a value of (a dict|'data' of .*)"),
        (CONTEXT.set, ""),
    ],
)
def test_h63_what_holds_a_tensor_is_named_and_left_as_it_is(put: Callable[[Any], object], said: str) -> None:
    strange, before = torch.ones(3).as_subclass(Strange), fakes()
    expected = f"held by ({said}), .*python -m eager_offload plan"
    with pytest.raises(eo.PlanError, match=expected) if said else nullcontext():
        planned(body(), batch(), lambda made: [made.mean(), put(made.detach())][0])
    assert type(strange) is Strange
    assert bool(fakes() - before) is bool(said)
    put(None)
    FOUND.clear()


@pytest.mark.parametrize("fails", [False, True])
def test_h63_a_tensor_is_seen_behind_a_frozen_heap_and_beside_an_error(fails: bool) -> None:
    def loss(made: Tensor) -> Tensor:
        FOUND.append(made.detach())
        return made.square().mean() if not fails else fails["its own"]  # type: ignore[index]

    gc.freeze()
    with pytest.raises(TypeError if fails else eo.PlanError) as caught:
        planned(body(), batch(), loss)
    assert gc.get_freeze_count() > 0
    assert "is held by 'FOUND' of module" in str([caught.value, *getattr(caught.value, "__notes__", ())])
    FOUND.clear()


class Weighted:
    """A loss that is no module, and has a tensor."""

    def __init__(self) -> None:
        self.weight = torch.full((64,), 0.5)

    def loss(self, hidden: Tensor) -> Tensor:
        return (hidden * self.weight).square().mean()


@pytest.mark.parametrize("how", ["method", "partial"])
def test_h63_a_loss_that_is_no_module_may_have_tensors(how: str) -> None:
    weighted = Weighted()
    loss = weighted.loss if how == "method" else functools.partial(Weighted.loss, weighted)
    assert planned(body(), batch(), loss).moved_bytes > 0


def test_h76_what_holds_a_tensor_of_the_trace_is_named_by_its_variable() -> None:
    model, noted = nn.Linear(64, 256), dict[str, Tensor]()

    class Notes:
        def __call__(self, module: nn.Module, given: Any, made: Tensor) -> None:
            noted["a"] = made

    model.register_forward_hook(Notes())
    with pytest.raises(eo.PlanError, match=r"held by 'a' of 'noted' of function .*__call__"):
        planned(model, torch.randn(64, 64), loss=lambda made: made.mean())
