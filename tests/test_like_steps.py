"""What a step costs once like steps were before it, who waits in it, what it counts, and how its table prints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadStats
from tests.hazards.backends import assert_settled
from tests.hazards.programs import assert_identical
from tests.simulation.simulated import SimulatedRuntime
from tests.simulation.timeline import Timeline

N = 64
NBYTES = N * N * 4
DEPTH = 8
SECOND = 1 << 20  # bytes of a transfer that takes one

pytestmark = pytest.mark.filterwarnings("ignore:eager_offload. tier", "ignore:eager_offload. nothing moved")

# -- what it costs, on the simulated device ---------------------------------------------------------------------------


class Step(NamedTuple):
    """What one step did, and how long compute, and the host, waited for transfers in it."""

    stats: OffloadStats
    exposed: float
    waited: float

    @property
    def wasted(self) -> int:
        """Bytes that left and were asked for while they were still there, or came back unasked."""
        return self.stats.forwarded_bytes + max(self.stats.bytes_in - self.stats.reloaded_bytes, 0)


class Graphs(NamedTuple):
    """What a forward leaves: losses in the order in which backward takes them, and what the program holds on to."""

    losses: list[Tensor]
    held: list[Tensor]


def tower(x: Tensor, held: list[Tensor]) -> Tensor:
    for _ in range(DEPTH):
        x = x.exp()  # which saves its result
        held.append(x)
        x = x.neg()
    return x.sum()


def towers_in_the_order_of_forward(x: Tensor) -> Graphs:
    return Graphs([tower(x * scale, []) for scale in (0.1, 0.2, 0.3)], [])


def one_tower(x: Tensor) -> Graphs:
    return Graphs([tower(x * 0.1, [])], [])


def one_tower_whose_results_are_held(x: Tensor) -> Graphs:
    held: list[Tensor] = []
    return Graphs([tower(x * 0.1, held)], held)


def leaf() -> Tensor:
    return torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()


def steps(
    program: Callable[[Tensor], Graphs],
    runtime: SimulatedRuntime,
    count: int = 3,
    *,
    synchronize: bool = False,
    one_context: bool = False,
    **fields: Any,
) -> list[Step]:
    """Trains on a device with virtual streams, for so many steps; every one must be exact and in order.

    Args:
        synchronize: whether the host waits for all transfers between forward and backward.
        one_context: whether all steps are inside of one context.
    """
    found, expected = [], leaf()
    for loss in program(expected).losses:
        loss.backward()
    with runtime.checked() as checker:
        offload = Offload(runtime=runtime, tier="host", min_bytes=0, **{"step_tables": True, **fields})
        with offload if one_context else nullcontext():
            for _ in range(count):
                x = leaf()
                runtime.timeline = Timeline()
                offload.reset_stats()
                with nullcontext() if one_context else offload:
                    graphs = program(x)
                if synchronize:
                    offload.stats(synchronize=True)
                while graphs.losses:
                    graphs.losses.pop(0).backward()
                del graphs
                assert_identical(expected.grad, x.grad)
                timeline = runtime.timeline
                waits = timeline.stall_seconds, timeline.host_wait_seconds
                found.append(Step(offload.stats(synchronize=True), *waits))
        assert_settled(offload)
        offload.close()
    checker.assert_clean()
    return found


def test_the_true_order_of_need_is_learnt_so_that_less_is_waited_for() -> None:
    device = SimulatedRuntime(in_bandwidth=1e9)
    fields = {"keep_last_bytes": 0, "prefetch_bytes": 4 * NBYTES}
    first, _, third = steps(towers_in_the_order_of_forward, device, synchronize=True, **fields)
    assert first.stats.reloaded_bytes == third.stats.reloaded_bytes == 3 * DEPTH * NBYTES
    assert third.exposed < first.exposed
    assert third.stats.bytes_in == first.stats.bytes_in == 3 * DEPTH * NBYTES


@pytest.mark.parametrize("one_context", [False, True])
def test_what_is_asked_for_too_soon_stays_and_the_rest_leaves_at_once(one_context: bool) -> None:
    first, *later = steps(one_tower, SimulatedRuntime(), one_context=one_context, prefetch_bytes=6 * NBYTES)
    assert first.stats.kept_bytes["newest"] == 6 * NBYTES
    for step in later:
        assert 0 < step.stats.kept_bytes["newest"] <= 3 * NBYTES
        assert step.exposed <= first.exposed
        assert step.stats.resident_bytes_peak <= first.stats.resident_bytes_peak


def test_what_someone_else_keeps_alive_is_served_without_a_reload_and_not_taken_again() -> None:
    program = one_tower_whose_results_are_held
    first, *later = steps(program, SimulatedRuntime(), synchronize=True, keep_last_bytes=0)
    assert first.stats.forwarded_bytes == DEPTH * NBYTES
    assert first.stats.bytes_in == 0, "what lives needs no reload"
    for step in later:
        assert step.stats.bytes_out == step.stats.offloaded_bytes == 0
        assert step.stats.kept_bytes == {"alive": DEPTH * NBYTES}


@pytest.mark.parametrize("program", [towers_in_the_order_of_forward, one_tower, one_tower_whose_results_are_held])
def test_what_is_known_of_a_step_makes_it_no_worse(program: Callable[[Tensor], Graphs]) -> None:
    device = SimulatedRuntime(compute_rate=1e9, out_bandwidth=6e8, in_bandwidth=6e8)
    sizes = {"max_inflight_bytes": 4 * NBYTES, "prefetch_bytes": 4 * NBYTES}
    first, _, third, *_, last = steps(program, device, 6, synchronize=True, **sizes)
    for earlier, later in ((first, third), (third, last)):
        assert later.exposed <= earlier.exposed + 1e-9
        assert later.wasted <= earlier.wasted
    assert last.stats.resident_bytes_peak <= third.stats.resident_bytes_peak
    assert not last.stats.table_misses


@pytest.mark.parametrize("stays", [False, True])
def test_a_shared_storage_moves_if_it_can_be_back_when_it_is_asked_for_the_first_time(stays: bool) -> None:
    """Its second save is asked for first. Either that ask or the one for its first save comes a second later, when it
    could have been away and back."""
    runtime = SimulatedRuntime(launch_seconds=0.0, host_waits=True, out_bandwidth=SECOND, in_bandwidth=SECOND)

    def a_second_later(gradient: Tensor) -> None:
        runtime.advance(runtime.default_stream, 1.0)

    def program(x: Tensor) -> Graphs:
        for _ in range(DEPTH):
            x = x.exp().neg()
        shared = x.exp()
        result = shared.sin()
        (shared if stays else result).register_hook(a_second_later)
        return Graphs([result.sum()], [])

    *_, last = steps(program, runtime, 4, prefetch_bytes=4 * NBYTES)
    assert last.stats.table_forwards == 1
    assert last.stats.kept_bytes.get("newest", 0) == (2 * NBYTES if stays else 0)
    assert last.stats.bytes_out == (DEPTH if stays else DEPTH + 1) * NBYTES


# -- who waits --------------------------------------------------------------------------------------------------------


def stalled(runtime: SimulatedRuntime, seconds: float = 0.0, **fields: Any) -> Step:
    """A step that is not known, whose compute is given work of so many seconds after each save."""

    def program(x: Tensor) -> Graphs:
        for _ in range(6):
            x = x.sin()
            runtime.advance(runtime.default_stream, seconds)
        return Graphs([x.sum()], [])

    (step,) = steps(program, runtime, 1, keep_last_bytes=0, **fields)
    assert step.stats.bytes_out >= 5 * NBYTES
    return step


def test_the_host_waits_for_room_while_compute_has_work() -> None:
    runtime = SimulatedRuntime(launch_seconds=0.0, out_bandwidth=SECOND, in_bandwidth=1e12)
    stats, _, waited = stalled(runtime, seconds=1.0, max_inflight_bytes=NBYTES)
    assert 0 < stats.host_wait_seconds == pytest.approx(waited)
    assert stats.stall_seconds == stats.window_stall_seconds == 0.0
    assert "stalled 0.0 %" in str(stats)
    assert not any("waited" in sentence and "raise" in sentence for sentence in stats.advice), stats.advice


def test_compute_waits_for_what_is_not_back_while_the_host_goes_on() -> None:
    runtime = SimulatedRuntime(launch_seconds=0.0, out_bandwidth=1e12, in_bandwidth=SECOND)
    stats, exposed, _ = stalled(runtime, synchronize=True, max_inflight_bytes=1 << 30, prefetch_bytes=NBYTES)
    assert 0 < stats.stall_seconds == pytest.approx(exposed)
    assert stats.window_stall_seconds == stats.host_wait_seconds == 0.0
    assert any("waited" in sentence for sentence in stats.advice), stats.advice


def test_compute_has_nothing_to_do_while_the_host_waits_for_room() -> None:
    """Then both wait: what the stream has missed is a stall, and the host's wait is longer."""
    runtime = SimulatedRuntime(launch_seconds=0.0, out_bandwidth=SECOND, in_bandwidth=1e12)
    stats, _, _ = stalled(runtime, seconds=NBYTES / SECOND / 4, max_inflight_bytes=NBYTES)
    assert stats.host_wait_seconds > stats.stall_seconds == stats.window_stall_seconds > 0


# -- what it counts ---------------------------------------------------------------------------------------------------

WEIGHTS, LOOKS = 4, 12


def make(step_tables: bool) -> Offload:
    return Offload(tier="host", min_bytes="4KiB", keep_last_bytes=0, step_tables=step_tables)


def train(offload: Offload, count: int, look: Callable[[int], object] = lambda number: None) -> None:
    """Saves of each weight and each product, and of small numbers; ``look`` is called in the last forward."""
    weights = [torch.nn.Parameter(torch.full((64, 64), 0.01 * number)) for number in range(WEIGHTS)]
    for step in range(count):
        numbers = iter(range(LOOKS) if step == count - 1 else ())
        with offload:
            h, total = torch.ones(64, 64) * weights[0].detach(), torch.zeros(())
            for number, weight in enumerate(weights):
                h = (h * weight).exp()
                for saved in (h, h[0, : (4, 16, 8)[number % 3]].clone(), weight):
                    total = total + saved.exp().sum()
                    _ = [look(at) for at in itertools.islice(numbers, 1)]
            loss = total + h.sum()
        del h
        offload.stats(synchronize=True)  # what leaves has left, however slow the machine is
        loss.backward()


def counted(offload: Offload) -> tuple[Any, ...]:
    stats = offload.stats()
    kept = tuple(stats.kept_bytes.get(name, 0) for name in ("parameter", "small", "region"))
    return stats.steps, stats.saved_tensors, stats.saved_bytes, kept


@pytest.mark.parametrize("when", range(0, LOOKS, 4))
@pytest.mark.parametrize("act", [Offload.stats, Offload.reset_stats, Offload.close])
def test_stats_in_a_forward_have_all_that_was_saved_whether_its_step_is_known_or_not(
    act: Callable[[Offload], object], when: int
) -> None:
    def run(offload: Offload) -> list[Any]:
        seen: list[Any] = []
        train(offload, 4, lambda at: (act(offload) if at == when else None, seen.append(counted(offload))))
        return [*seen, counted(offload)]

    with closing(make(False)) as unknown, closing(make(True)) as known:
        assert run(known) == run(unknown)


# -- how a table prints ------------------------------------------------------------------------------------------------


def test_a_table_prints_a_line_for_each_save_and_one_for_those_alike() -> None:
    with closing(make(True)) as offload:
        train(offload, 3)
        table = offload.step_table()
    assert table is not None
    head, columns, *rows = str(table).splitlines()
    assert head.startswith(f"{len(table.rows)} saves: ")
    assert columns.split() == ["saves", "what", "each", "last", "save"]
    assert "move" in {row.split()[1] for row in rows}
