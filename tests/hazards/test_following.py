"""H54: a forward follows what a like one did; where it differs it goes on as an unknown one, and no bit is another."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import eager_offload as eo
from eager_offload import Offload, OffloadStats
from eager_offload.step_plan import Ask, Fate, Save, StepPlan
from tests.hazards.backends import Backend, assert_settled, offloader_of, saves_of
from tests.hazards.programs import REGIMES, Around, Regime, Settled, assert_identical, assert_moved, leaf, one_step
from tests.sampling import search
from tests.threads import collect

SIDE = 16
#: What a layer does with what the one before it returns.
LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda y: (y * 0.1).exp(),
    "product": lambda y: y * y.sin(),
    "matrix": lambda y: (y @ y.t()).tanh(),
    "mask": lambda y: y * torch.ones(SIDE, SIDE),
    "halves": lambda y: torch.cat([half.sigmoid() for half in y.chunk(2)]),
    "small": lambda y: y + y[:1].square().sum(),
    "twice": lambda y: torch.cat([y.sigmoid(), y.cos()]).view(2, SIDE, SIDE).sum(0),
}
FIRST = ["exp", "product", "matrix", "mask", "exp", "halves", "twice", "exp"]


def step(around: Around, layers: Sequence[str], seed: int, order: bool = True) -> list[Tensor]:
    """The loss and the gradients of one step; ``order``: which of its two branches backward comes to first."""
    x, w = leaf(SIDE, SIDE, seed=seed), leaf(SIDE, SIDE, seed=seed + 1)
    with around:
        y, z = x * 2, w * 3
        for name in layers:
            y, z = LAYERS[name](y), z.cos()
        losses = [y.sum(), z.sum()]
    del y, z
    for loss in losses if order else losses[::-1]:
        loss.backward()
    return [*(loss.detach() for loss in losses), x.grad, w.grad]


def first(around: Around, seed: int) -> list[Tensor]:
    return step(around, FIRST, seed)


def chain(x: Tensor, around: Around, layers: Sequence[str] = FIRST) -> Tensor:
    with around:
        y = x * 2
        for name in layers:
            y = LAYERS[name](y)
        return y.sum()


def deep(x: Tensor, around: Around, count: int = 8) -> Tensor:
    with around:
        y = x
        for _ in range(count):
            y = (y * 0.5).exp()
        return y.sum()


def assert_as_without(x: Tensor, forward: Callable[[Tensor, Around], Tensor]) -> None:
    """Asserts that the gradient of ``x`` is the one that ``forward`` gives without offload."""
    plain = x.detach().clone().requires_grad_()
    forward(plain, nullcontext()).backward()
    assert_identical(plain.grad, x.grad)


def follows(
    backend: Backend,
    step: Callable[[Around, Any], object],
    cases: Iterable[Any],
    forwards: int,
    misses: dict[str, int],
    least: float = 0.9,
    regime: Regime = REGIMES[0],
    **fields: Any,
) -> OffloadStats:
    """Takes a step of each of ``cases``, as without offload; so many forwards follow a plan, with these ``misses``.

    Args:
        step: of what stands around its forward, and of the case.
        least: the part of the bytes that has to move.
        fields: of the config.
    """
    offload = backend.offload(**{"step_plans": True, **regime.fields, **fields})
    for case in cases:
        assert_identical(step(nullcontext(), case), step(regime.around(offload), case))
    stats = assert_settled(offload)
    assert (stats.followed_forwards, stats.plan_misses) == (forwards, misses)
    assert_moved(stats, least)
    return stats


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_h54_steps_that_are_alike_are_followed(regime: Regime, backend: Backend) -> None:
    follows(backend, first, range(6), 5, {}, regime=regime)
    (offload,) = backend.offloads
    plan = offload.step_plan()
    assert plan == offload.step_plan(offloader_of(offload).device)
    assert offload.step_plan("meta") is None
    assert plan.totals.offloaded > 0
    assert {save.fate for save in plan.saves} >= {Fate.OFFLOAD, Fate.SHARE}


@pytest.mark.parametrize(("policy", "followed"), [("auto", 3), (True, 5), (False, 0)])
def test_h54_how_soon_a_step_is_followed(policy: bool | str, followed: int, backend: Backend) -> None:
    follows(backend, first, range(6), followed, {}, step_plans=policy)
    (offload,) = backend.offloads
    assert (offload.step_plan() is not None) == (followed > 0)


def test_h54_a_step_that_differs_anywhere_is_exact(backend: Backend) -> None:
    """At a random save, by another operator or by none, or at a random unpack; then as before."""

    def check(layers: list[str], changes: list[tuple[int, str, bool]], regime: Regime) -> None:
        offload = backend.offload(step_plans=True, **regime.fields)
        for seed in range(2):
            assert_identical(step(nullcontext(), layers, seed), step(regime.around(offload), layers, seed))
        for where, name, order in changes:
            changed = [*layers[:where], *([name] if name else []), *layers[where + 1 :]]
            expected = step(nullcontext(), changed, 7, order)
            assert_identical(expected, step(regime.around(offload), changed, 7, order))
            assert_identical(step(nullcontext(), layers, 8), step(regime.around(offload), layers, 8))
        stats = assert_settled(offload)
        offload.close()
        # Where parts of storages leave by themselves, too little is left for a plan.
        assert stats.followed_forwards > 0 or {"halves", "small"} & {*layers}
        assert stats.bytes_out > 0

    layer, change = st.sampled_from(sorted(LAYERS)), st.sampled_from(["", *LAYERS])
    changes = st.lists(st.tuples(st.integers(0, 4), change, st.booleans()), min_size=1, max_size=4)
    search(check, st.lists(layer, min_size=1, max_size=5), changes, st.sampled_from(REGIMES), fixed=12)


def test_h54_two_plans_in_turn(backend: Backend) -> None:
    """As a generator and a discriminator have them."""
    offload, others = backend.offload(step_plans=True), ["matrix", "exp", "mask"]
    for seed in range(8):
        with Settled(offload):
            first = LAYERS["matrix"](leaf(SIDE, SIDE, seed=seed) * 2)
        step(Settled(offload), others, seed)
        first.sum().backward()
        assert_identical(step(nullcontext(), FIRST, seed), step(Settled(offload), FIRST, seed))
        if seed == 3:
            before = assert_settled(offload)
    stats = assert_settled(offload)
    assert stats.followed_forwards - before.followed_forwards == 3 * 4, "each kind is known, and what comes after it"
    assert stats.plan_misses == before.plan_misses
    assert_moved(stats)


@pytest.mark.filterwarnings("ignore:eager_offload. no room")
def test_h54_a_forward_without_room_for_its_slots_follows_nothing_and_is_counted(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = backend.offload(step_plans=True)
    step(Settled(offload), FIRST, 0)
    with monkeypatch.context() as full:
        full.setattr(offloader_of(offload), "room", lambda nbytes, **_: None)
        assert_identical(step(nullcontext(), FIRST, 1), step(Settled(offload), FIRST, 1))
    assert offload.step_plan() is None, "none was followed"
    step(Settled(offload), FIRST, 2)
    assert offload.step_plan() is not None
    stats = assert_settled(offload)
    assert (stats.followed_forwards, stats.plan_misses) == (1, {"room": 1})
    assert stats.bytes_out > 0


def test_h54_steps_of_which_too_much_is_decided_anew_say_so_once(backend: Backend) -> None:
    follows(backend, lambda around, seed: step(around, ["exp", "small"] * 2, seed), range(8), 0, {"decided": 1})


@pytest.mark.parametrize(
    ("what", "layers"),
    [("size", [FIRST[0], "halves", *FIRST[2:]]), ("more", [*FIRST, "exp"]), ("fewer", FIRST[:-1]), ("order", FIRST)],
)
def test_h54_what_differs_is_counted(what: str, layers: list[str], backend: Backend) -> None:
    def taken(around: Around, layers: list[str]) -> list[Tensor]:
        return step(around, layers, 5, order=layers is not last or what != "order")

    last = [*layers]
    follows(backend, taken, [FIRST, FIRST, last], 2, {what: 1})


def test_h54_a_tensor_that_needs_no_gradient_is_not_taken_for_one_that_does(backend: Backend) -> None:
    @one_step
    def step(grad: bool) -> tuple[Tensor, ...]:
        x, w = leaf(SIDE, SIDE, grad=grad), leaf(SIDE, SIDE, seed=2)
        return ((x * 2) * (w * 3)).exp(), w

    follows(backend, step, [True, True, False], 2, {"requires_grad": 1})


@one_step
def shared(same: bool) -> tuple[Tensor, ...]:
    """Two operators that save one tensor, or two of one size."""
    x = leaf(SIDE, SIDE)
    y = x * 2
    other = y if same else x * 3
    return y.sin() + other.cos(), x


@pytest.mark.parametrize("first", [True, False])
def test_h54_a_storage_that_is_another_one_is_not_shared(first: bool, backend: Backend) -> None:
    follows(backend, shared, [first, first, not first], 2, {"share": 1} if first else {})


@pytest.mark.parametrize("how", ["keep", "prefer", "no_offload"])
def test_h54_marks_and_regions_come_before_a_plan(how: str, backend: Backend) -> None:
    @one_step
    def marked(how: str) -> tuple[Tensor, ...]:
        x = leaf(SIDE, SIDE)
        y = x * 2
        if how in ("keep", "prefer"):
            (eo.keep if how == "keep" else eo.prefer_offload)(y)
        with eo.no_offload() if how == "no_offload" else nullcontext():
            z = y.sin()
        return z.cos(), x

    misses = {} if how == "prefer" else {"marks": 1}  # what is to leave does so by the plan too
    stats = follows(backend, marked, ["", "", how], 2, misses, 0.6)
    kept = {"keep": "marked", "no_offload": "region"}.get(how)
    assert (kept is None) or stats.kept_bytes[kept] == SIDE * SIDE * 4


def knowing(backend: Backend, step: Callable[[Around], object], **fields: Any) -> Offload:
    """An ``Offload`` that has taken two steps, of which the second has followed the first one's plan."""
    offload = backend.offload(step_plans=True, **fields)
    for _ in range(2):
        step(Settled(offload))
    return offload


def plan_of(backend: Backend, step: Callable[[Around], object], **fields: Any) -> StepPlan:
    return knowing(backend, step, **fields).step_plan()


def begun_at_once(plan: StepPlan) -> StepPlan:
    """The same plan with each copy as early as numbers permit: at the save itself."""
    saves = (
        dataclasses.replace(save, start=number) if save.fate is Fate.OFFLOAD else save
        for number, save in enumerate(plan.saves)
    )
    return StepPlan(tuple(saves), plan.asks, (), plan.slots)


@pytest.mark.parametrize("is_saved_before", [False, True])
def test_h54_what_is_not_final_yet_does_not_leave_although_its_plan_says_so(
    is_saved_before: bool, backend: Backend
) -> None:
    """The sequence number is asked at each start, whatever was written down."""

    @one_step
    def noisy() -> tuple[Tensor, ...]:
        x = leaf(1024, 1024)
        torch.manual_seed(0)
        y = x * 2
        if is_saved_before:
            noise = torch.ones(1024, 1024)
            y = torch._C._nn.rrelu_with_noise(y * noise, noise, training=True)
            del noise
        for _ in range(3):
            y = torch.rrelu(y, training=True)
        return y.sin(), x

    plan = begun_at_once(plan_of(backend, noisy))
    follows(backend, lambda around, _: noisy(around), [None], 1, {}, plan=plan)


def with_a_late_share(plan: StepPlan, owner: int, number: int) -> StepPlan:
    """The same plan with each copy at its save, in which save ``number`` shares the storage of save ``owner``."""
    saves = list(begun_at_once(plan).saves)
    nbytes, requires_grad = saves[number].nbytes, saves[number].requires_grad
    saves[number] = Save(Fate.SHARE, nbytes=nbytes, requires_grad=requires_grad, owner=owner)
    slots: list[int] = []
    for place, save in enumerate(saves):
        if save.fate is Fate.OFFLOAD:
            saves[place] = dataclasses.replace(save, slot=len(slots))
            slots.append(save.slot_nbytes)
    return StepPlan(tuple(saves), tuple(Ask(ask.save) for ask in plan.asks), (), tuple(slots))


@pytest.mark.parametrize("is_written", [False, True])
def test_h54_a_storage_that_has_begun_to_leave_is_not_shared_any_more(is_written: bool, backend: Backend) -> None:
    """It may have been written since, in a way that no version counts: bytes of two moments, taken for the same."""

    @one_step
    def step(offload: Offload | None = None) -> tuple[Tensor, ...]:
        x, mask = leaf(SIDE, SIDE), torch.full((SIDE, SIDE), 2.0)
        y = ((x * 1.5).sin() * mask).exp().cos()
        if offload is not None:
            offload.stats(synchronize=True)
        if is_written:
            mask.data.mul_(3)
        return (y * mask).sin(), x

    backend.sources_change = True
    first = backend.offload(step_plans=True)
    for _ in range(3):
        step(Settled(first), first)
    plan = first.step_plan()
    assert [plan.saves[number].requires_grad for number in (1, 4)] == [False, False]  # the mask, both times
    alone, offload = backend.offload(step_plans=False), backend.offload(plan=with_a_late_share(plan, 1, 4))
    assert_identical(step(Settled(alone), alone), step(Settled(offload), offload))
    stats = assert_settled(offload)
    assert stats.plan_misses == {"share": 1}
    assert_moved(stats, 0.5)


def test_h54_several_forwards_before_a_backward_have_slots_of_their_own(backend: Backend) -> None:
    offload = backend.offload(step_plans=True)
    step(Settled(offload), FIRST, 0)
    leaves = [leaf(SIDE, SIDE, seed=seed) for seed in range(3)]
    losses = [chain(x, Settled(offload)) for x in leaves]
    for x in leaves:
        losses.pop(0).backward()
        assert_as_without(x, chain)
    assert_moved(assert_settled(offload))


def test_h54_the_newest_bytes_of_several_forwards_are_bounded_together(backend: Backend) -> None:
    size = SIDE * SIDE * 4
    offload = backend.offload(step_plans=True, keep_last_bytes=4 * size)

    def forward(seed: int) -> tuple[Tensor, Tensor]:
        x = leaf(SIDE, SIDE, seed=seed)
        return x, deep(x, Settled(offload), 6)

    for seed in range(2):
        forward(seed)[1].backward()
    assert offload.stats().followed_forwards == 1
    offload.reset_stats()
    found = [forward(seed) for seed in range(4)]
    assert offload.stats(synchronize=True).followed_forwards == 1, "the first, which leaves no room for a second one"
    assert offloader_of(offload).census().resident_bytes <= 4 * size + size
    for x, loss in found:
        loss.backward()
        assert_as_without(x, partial(deep, count=6))
    del found, x, loss
    assert offload.stats(synchronize=True).bytes_out > 0
    assert_settled(offload)


def test_h54_a_graph_that_is_dropped_or_kept_gives_back_what_it_held(backend: Backend) -> None:
    offload = backend.offload(step_plans=True)
    for seed in range(6):
        x = leaf(SIDE, SIDE, seed=seed)
        loss = chain(x, Settled(offload))
        if seed % 3 == 1:
            del loss
            assert offloader_of(offload).census().resident_bytes == 0
            continue
        loss.backward(retain_graph=seed % 3 == 2)
        if seed % 3 == 2:
            first = x.grad
            x.grad = None
            loss.backward()
            assert_identical(first, x.grad)
        del loss
    assert_moved(assert_settled(offload))


@pytest.mark.filterwarnings("ignore:eager_offload. tier=.host.")
@pytest.mark.parametrize("keep", [0, 1 << 20], ids=["away", "waiting"])
def test_h54_graphs_that_are_dropped_while_forward_goes_on_count_no_more(keep: int, disk: Backend) -> None:
    def step(offload: Offload, *, drops: bool) -> int:
        """Returns the bytes that the library holds on the device at the end of the forward."""
        x, losses = leaf(SIDE, SIDE), []
        with offload:
            losses += [deep(x, nullcontext(), 2)]
            for _ in range(5):
                losses += [deep(x, nullcontext(), 3)]
                offload.stats(synchronize=True)
                del losses[1 if drops else 6 :]
                offload.stats(synchronize=True)
            resident = offloader_of(offload).census().resident_bytes
        while losses:
            losses.pop().backward()
        return resident

    found = []
    for step_plans in (True, False):
        offload = disk.offload(tier="host", keep_last_bytes=keep, step_plans=step_plans)
        for _ in range(2):
            step(offload, drops=False)
        offload.reset_stats()
        resident = step(offload, drops=True)
        stats = offload.stats(synchronize=True)
        assert stats.followed_forwards == step_plans
        assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
        found.append((stats.without_offload_bytes_peak, stats.released_bytes, resident))
    assert found[0] == found[1]
    assert found[0][0] == 5 * SIDE * SIDE * 4


def test_h54_a_tensor_of_the_size_of_a_weight_is_not_taken_for_one(backend: Backend) -> None:
    """A layer that is frozen saves its weight; once it is trained, its input."""
    weight = torch.nn.Parameter(leaf(SIDE, SIDE, seed=3).detach())

    @one_step
    def train(frozen: bool) -> tuple[Tensor, ...]:
        first = leaf(SIDE, SIDE).requires_grad_(frozen)
        weight.requires_grad_(not frozen)
        weight.grad = None
        return ((first * 2) @ weight).sin().cos(), first if frozen else weight

    stats = follows(backend, train, [True] * 4 + [False] * 4, 5, {"size": 1})
    assert stats.kept_bytes["parameter"] == 4 * SIDE * SIDE * 4, "of the frozen steps"


def test_h54_steps_in_one_context_are_followed_one_by_one(backend: Backend) -> None:
    offload = backend.offload(step_plans=True)
    weight = torch.nn.Parameter(leaf(SIDE, SIDE, seed=3).detach())
    for seed in range(5):
        expected, found = [], []
        for grads, around in ((expected, nullcontext()), (found, offload)):
            with around:
                for part in range(3):
                    weight.grad = None
                    x = leaf(SIDE, SIDE, seed=9 * seed + part)
                    deep(weight * x, nullcontext()).backward()  # saves what stays first
                    grads += [x.grad, weight.grad]
        assert_identical(expected, found)
    stats = assert_settled(offload)
    assert (stats.steps, stats.followed_forwards, stats.plan_misses) == (15, 14, {})
    assert stats.bytes_out > 0


def test_h54_nothing_grows_with_the_steps_that_follow(backend: Backend) -> None:
    offload = backend.offload(step_plans=True)
    steps = 1_000 if backend.name == "disk" else 120  # the others write a log
    counts, used = [], []
    for seed in range(steps):
        step(Settled(offload), ["exp", "product"], seed)
        if seed in (60, steps - 1):
            offload.stats(synchronize=True)
            collect()
            counts.append(len(gc.get_objects()) if backend.name != "simulated" else 0)  # which writes a log
            used.append([tier.used_bytes for tier in offloader_of(offload).tiers])
    assert counts[1] <= counts[0] + 50
    assert used[0] == used[1]
    plan = offload.step_plan()
    assert sum(used[0]) == plan.totals.slots, "one set, for the next step"
    assert saves_of(offload).plans.idle_bytes == plan.totals.slots
    assert_moved(assert_settled(offload))


def test_h54_a_plan_serves_another_process_or_model(backend: Backend, tmp_path: Path) -> None:
    plan = plan_of(backend, lambda around: step(around, FIRST, 0))
    plan.save(tmp_path / "plan.json")

    follows(backend, first, [1], 1, {}, plan=StepPlan.load(tmp_path / "plan.json"))

    other = backend.offload(plan=plan)
    layers = ["halves", "matrix"]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for seed in range(3):
            assert_identical(step(nullcontext(), layers, seed), step(Settled(other), layers, seed))
    assert ["the step plan that was given does not fit this model" in str(one.message) for one in warned] == [True]
    assert_moved(assert_settled(other))
    with pytest.raises(eo.ConfigError, match="does not go with step_plans=False"):
        Offload(plan=plan, step_plans=False)
