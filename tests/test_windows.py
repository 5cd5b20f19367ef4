"""Automatic windows: of the last step's bytes, in force where a step begins, and said in the stats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import eager_offload as eo
from eager_offload.compile import choose, insert_asynchronous, insert_synchronous, ops
from eager_offload.schedule import ResidentQueue, Windows, auto_window, first_window, largest_of
from tests.compile.compiled import deep, fresh_compiler
from tests.compile.split import config_of, split
from tests.hazards.backends import assert_settled
from tests.hazards.programs import Around, assert_identical
from tests.simulation.simulated import SimulatedRuntime

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = st.integers(0, 1 << 45)
FIRST = 64 * MIB
WITHOUT = nullcontext()


# -- how large --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("movable", "largest", "device_bytes", "window"),
    [
        (96 * MIB, 4 * MIB, None, 16 * MIB),  # four tensors
        (GIB, MIB, None, 128 * MIB),  # an eighth
        (8 * GIB, 4 * MIB, 80 * GIB, 256 * MIB),
        (8 * GIB, 100 * MIB, 80 * GIB, 400 * MIB),  # four tensors
        (64 * GIB, 4 * MIB, 80 * GIB, GIB),  # a 64th
        (48 * GIB, 512 * MIB, 16 * GIB, GIB),  # a 16th of the device
        (12 * MIB, 4 * MIB, None, 3 * MIB),  # a quarter, which no tensor fits into: they travel alone
        (0, 0, None, 1),
    ],
)
def test_a_window_is_a_part_of_what_a_step_could_move_and_some_of_its_tensors(
    movable: int, largest: int, device_bytes: int | None, window: int
) -> None:
    assert auto_window(movable, largest, device_bytes) == window


@given(movable=SIZES, largest=SIZES, more=SIZES, device_bytes=st.none() | SIZES)
def test_a_window_grows_with_a_step_and_keeps_to_its_bounds(
    movable: int, largest: int, more: int, device_bytes: int | None
) -> None:
    window = auto_window(movable, largest, device_bytes)
    most = movable // 4 if device_bytes is None else min(movable // 4, device_bytes // 16)
    assert 1 <= window <= max(most, 1)
    assert window == max(most, 1) or window >= max(4 * largest, movable // 64, min(movable // 8, 256 * MIB))
    assert window <= auto_window(movable + more, largest, device_bytes)
    assert window <= auto_window(movable, largest + more, device_bytes)
    assert window <= auto_window(movable, largest)


@given(sizes=st.lists(SIZES))
def test_four_tensors_make_a_size_the_largest_and_fewer_do_not(sizes: list[int]) -> None:
    queue, size = ResidentQueue(0), largest_of(sizes)
    for one in sizes:
        queue.count(one)
    assert (queue.movable, queue.largest) == (sum(sizes), size)
    assert sum(one > size for one in sizes) < 4
    assert size == 0 or sum(one >= size for one in sizes) >= 4


@given(steps=st.lists(st.tuples(SIZES, SIZES)), device_bytes=st.none() | SIZES)
def test_windows_are_of_the_last_step_that_could_move_anything(
    steps: Sequence[tuple[int, int]], device_bytes: int | None
) -> None:
    windows, expected = Windows(None, 5, device_bytes), first_window(0, device_bytes)
    for movable, largest in steps:
        before = expected
        expected = auto_window(movable, largest, device_bytes) if movable else expected
        assert windows.begin(movable, largest) == (expected != before)
        assert (windows.inflight, windows.prefetch) == (expected, 5)


# -- over steps -------------------------------------------------------------------------------------------------------


def chain(saves: int, nbytes: int, around: Around = WITHOUT) -> object:
    """A step that saves so many storages of so many bytes."""
    x = torch.linspace(-1, 1, nbytes // 4).requires_grad_()
    with around:
        y = x * 1
        for _ in range(saves):
            y = y.sigmoid() * 2
        loss = y.sum()
    loss.backward()
    return loss.detach(), x.grad


def windows_of(offload: eo.Offload) -> tuple[int, int]:
    stats = offload.stats()
    return stats.max_inflight_bytes, stats.prefetch_bytes


@pytest.fixture
def offloads() -> Iterator[Any]:
    """Makes an ``Offload`` of small tensors that rest on a disk; all are settled and closed at the end."""
    made: list[eo.Offload] = []

    def make(**fields: Any) -> eo.Offload:
        made.append(eo.Offload(**{"tier": "disk", "min_bytes": 0, **fields}))
        return made[-1]

    yield make
    for offload in made:
        assert_settled(offload)
        offload.close()


@pytest.mark.parametrize("step_plans", [False, True, "auto"])
def test_each_step_has_the_windows_that_the_one_before_it_asks_for(offloads: Any, step_plans: bool | str) -> None:
    """Also where a forward follows a plan, which says itself what it saves."""
    offload = offloads(step_plans=step_plans)
    steps = [(12, 64 * KIB)] * 5 + [(40, 4 * KIB), (12, 64 * KIB), (40, 4 * KIB), (6, 256 * KIB), (12, 64 * KIB)]
    expected = FIRST
    for saves, nbytes in steps:
        wanted = chain(saves, nbytes)
        assert_identical(wanted, chain(saves, nbytes, offload))
        assert windows_of(offload) == (expected, expected)
        expected = auto_window(saves * nbytes, nbytes)
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    assert bool(stats.followed_forwards) is bool(step_plans)


def test_a_first_step_grows_with_the_largest_size_that_four_of_its_tensors_have(offloads: Any) -> None:
    offload, seen = offloads(keep_last_bytes=0), []
    y = torch.ones(8 * MIB // 4, requires_grad=True)
    with offload:
        for times in (1, 3, 1, 1, 1):  # of 8 MiB, then of 24
            y = y.repeat(times).sigmoid()
            seen.append(windows_of(offload))
    y.sum().backward()
    assert seen == [(FIRST, FIRST)] * 4 + [(96 * MIB, 96 * MIB)]
    assert offload.stats(synchronize=True).bytes_out >= 32 * MIB


def test_what_backward_begins_with_makes_no_window_large(offloads: Any) -> None:
    """Logits, say, and what a loss makes of them in another dtype."""
    offload = offloads(keep_last_bytes=0)
    for _ in range(3):
        x = torch.ones(16 * KIB, requires_grad=True)
        with offload:
            y = x * 1
            for _ in range(12):
                y = y.sigmoid() * 2
            logits = y.repeat(16).sigmoid().sigmoid()
        logits.sum().backward()
        del logits, y
    assert windows_of(offload)[0] == auto_window((12 + 2 * 16) * 64 * KIB, 64 * KIB)
    assert windows_of(offload)[0] < 4 * MIB


def test_steps_inside_of_one_context_are_steps(offloads: Any) -> None:
    offload = offloads()
    with offload:
        for saves in (12, 24, 12):
            chain(saves, 64 * KIB)
    assert windows_of(offload)[0] == auto_window(24 * 64 * KIB, 64 * KIB)


def test_a_plan_of_a_first_step_does_not_keep_what_later_windows_have_no_room_for(offloads: Any) -> None:
    offload = offloads(step_plans=True)
    for _ in range(4):
        chain(12, 64 * KIB, offload)
    offload.reset_stats()
    chain(12, 64 * KIB, offload)
    stats = offload.stats(synchronize=True)
    assert stats.followed_forwards == 1
    assert stats.kept_bytes.get("newest", 0) <= stats.prefetch_bytes
    assert stats.bytes_out >= 8 * 64 * KIB


def test_what_a_user_gives_stays_in_force(offloads: Any) -> None:
    offload = offloads(max_inflight_bytes="1MiB", prefetch_bytes="auto")
    for window in (FIRST, auto_window(12 * 64 * KIB, 64 * KIB)):
        chain(12, 64 * KIB, offload)
        assert windows_of(offload) == (MIB, window)
    offload.reset_stats()
    assert windows_of(offload) == (MIB, window)
    offload = offloads(max_inflight_bytes="3MiB", prefetch_bytes=0)
    for _ in range(2):
        chain(12, 64 * KIB, offload)
        assert windows_of(offload) == (3 * MIB, 0)


def test_the_stats_say_the_windows_in_force(offloads: Any) -> None:
    offload = offloads()
    assert "windows" not in str(offload.stats())
    chain(12, 64 * KIB, offload)
    chain(12, 64 * KIB, offload)
    assert "\nwindows    192.0 KiB on the way out, 192.0 KiB brought back early\n" in str(offload.stats())


def test_no_more_is_on_its_way_than_the_windows_hold() -> None:
    runtime = SimulatedRuntime(out_bandwidth=1e6, in_bandwidth=1e6)
    with runtime.checked() as checker:
        offload = eo.Offload(runtime=runtime, tier="host", min_bytes=0, step_plans=False)
        chain(12, 64 * KIB, offload)
        for _ in range(3):
            offload.reset_stats()
            chain(12, 64 * KIB, offload)
            stats = offload.stats(synchronize=True)
            assert 0 < stats.inflight_bytes_peak <= 192 * KIB
            assert stats.resident_bytes_peak <= 3 * 192 * KIB, "what is newest, on its way out and brought back early"
        assert_settled(offload)
        offload.close()
    checker.assert_clean()


# -- compiled code and plans ------------------------------------------------------------------------------------------


def nodes_of(graph: torch.fx.Graph, operation: Any) -> list[torch.fx.Node]:
    return list(graph.find_nodes(op="call_function", target=operation))


@pytest.mark.parametrize("fields", [{}, {"max_inflight_bytes": 5}, {"prefetch_bytes": 0}], ids=str)
def test_a_graph_has_windows_of_its_own_bytes(fields: dict[str, int]) -> None:
    config = config_of(**fields)
    x, weight = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    halves, _ = split(deep, x, weight)
    choice = choose(halves.forward.graph, halves.backward.graph, halves.num_outputs, config)
    sizes = [group.nbytes for group in choice.groups]
    window = auto_window(sum(sizes), largest_of(sizes))
    expected = fields.get("max_inflight_bytes", window), fields.get("prefetch_bytes", window)
    assert (choice.windows.inflight, choice.windows.prefetch) == expected
    pair = insert_synchronous(halves.forward.graph, halves.backward.graph, halves.num_outputs, choice, config)
    forward, backward = map(insert_asynchronous, pair)
    assert {node.kwargs["window"] for node in nodes_of(forward, ops.offload)} == {expected[0]}
    assert {node.kwargs["window"] for node in nodes_of(backward, ops.reload)} == {expected[1]}


def test_compiled_code_says_its_windows() -> None:
    x, weight = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    with fresh_compiler():
        offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)
        run = torch.compile(deep, backend="aot_eager")
        with offload:
            loss = run(x, weight).sum()
        loss.backward()
        stats = offload.stats(synchronize=True)
        offload.close()
    assert stats.compiled_regions == 1
    window = auto_window(stats.bytes_out, 64 * 64 * 4)
    assert (stats.max_inflight_bytes, stats.prefetch_bytes) == (window, window)
    assert "windows" in str(stats)


def test_a_plan_has_the_windows_of_its_step_and_its_follower_has_them_at_once() -> None:
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(256, 64)
    plan = eo.plan(model, x, loss=lambda y: y.square().mean(), config={"min_bytes": 0, "tier": "disk"}, policy="max")
    window = auto_window(plan.movable_bytes, 256 * 64 * 4)
    assert (plan.config.max_inflight_bytes, plan.config.prefetch_bytes) == (window, window)
    offload = eo.Offload({"max_inflight_bytes": "auto"}, plan=plan)
    with offload:
        loss = model(x).square().mean()
    loss.backward()
    assert windows_of(offload) == (window, window)
    assert offload.stats(synchronize=True).followed_forwards == 1
    with pytest.raises(eo.ConfigError, match="max_inflight_bytes='7MiB' does not go with plan"):
        eo.Offload(plan=plan, max_inflight_bytes="7MiB")
    offload.close()
