"""What a step costs once the steps before it have taught something: on the simulated device, and exact all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadStats
from tests.hazards.backends import assert_settled, saves_of
from tests.simulation.simulated import SimulatedRuntime
from tests.simulation.timeline import Timeline

N = 64
NBYTES = N * N * 4
DEPTH = 8


class Step(NamedTuple):
    """What one step did, and how long compute waited for transfers in it."""

    stats: OffloadStats
    exposed: float

    @property
    def wasted(self) -> int:
        """Bytes that left and were asked for while they were still there, or came back unasked."""
        return self.stats.forwarded_bytes + max(self.stats.bytes_in - self.stats.reloaded_bytes, 0)


class Graphs(NamedTuple):
    """What a forward leaves: losses in the order in which backward takes them, and what the program holds on to."""

    losses: list[Tensor]
    held: list[Tensor]


def tower(x: Tensor, held: list[Tensor] | None = None) -> Tensor:
    for _ in range(DEPTH):
        x = x.exp()  # which saves its result
        if held is not None:
            held.append(x)
        x = x.neg()
    return x.sum()


def towers_in_the_order_of_forward(x: Tensor) -> Graphs:
    return Graphs([tower(x * scale) for scale in (0.1, 0.2, 0.3)], [])


def one_tower(x: Tensor) -> Graphs:
    return Graphs([tower(x * 0.1)], [])


def one_tower_whose_results_are_held(x: Tensor) -> Graphs:
    held: list[Tensor] = []
    return Graphs([tower(x * 0.1, held)], held)


def steps(
    program: Callable[[Tensor], Graphs],
    runtime: SimulatedRuntime,
    *,
    rows: Sequence[int] = (N, N, N),
    synchronize: bool = False,
    retain: bool = False,
    **fields: object,
) -> list[Step]:
    """Trains on a device with virtual streams, one step for each of ``rows``; every step must be exact and in order.

    Args:
        synchronize: whether the host waits for all transfers between forward and backward.
        retain: whether each loss goes backward twice.
    """
    found = []
    with runtime.checked() as checker:
        offload = Offload(runtime=runtime, tier="host", min_bytes=0, **fields)
        for height in rows:
            x, expected = (torch.linspace(-1, 1, height * N).view(height, N).requires_grad_() for _ in range(2))
            for loss in program(expected).losses:
                if retain:
                    loss.backward(retain_graph=True)
                loss.backward()
            runtime.timeline = Timeline()
            offload.reset_stats()
            with offload:
                graphs = program(x)
            if synchronize:
                offload.stats(synchronize=True)
            while graphs.losses:
                if retain:
                    graphs.losses[0].backward(retain_graph=True)
                graphs.losses.pop(0).backward()
            del graphs
            assert x.grad is not None
            assert expected.grad is not None
            assert torch.equal(x.grad, expected.grad)
            found.append(Step(offload.stats(synchronize=True), runtime.timeline.stall_seconds))
        assert_settled(offload)
        offload.close()
    checker.assert_clean()
    return found


def test_the_true_order_of_need_is_learnt_so_that_less_is_waited_for() -> None:
    first, _, third = steps(
        towers_in_the_order_of_forward,
        SimulatedRuntime(in_bandwidth=1e9),
        synchronize=True,
        keep_last_bytes=0,
        prefetch_bytes=4 * NBYTES,
    )
    assert first.stats.reloaded_bytes == third.stats.reloaded_bytes == 3 * DEPTH * NBYTES
    assert third.exposed < first.exposed
    assert third.stats.bytes_in == first.stats.bytes_in == 3 * DEPTH * NBYTES


def test_what_is_asked_for_too_soon_stays_and_the_rest_leaves_at_once() -> None:
    first, second, third = steps(one_tower, SimulatedRuntime(), prefetch_bytes=6 * NBYTES)
    assert first.stats.kept_bytes["newest"] == 6 * NBYTES
    for step in (second, third):
        assert 0 < step.stats.kept_bytes["newest"] <= 3 * NBYTES
        assert step.exposed <= first.exposed
        assert step.stats.resident_bytes_peak <= first.stats.resident_bytes_peak


def test_what_someone_else_keeps_alive_is_served_without_a_reload_and_not_taken_again() -> None:
    first, second, third = steps(
        one_tower_whose_results_are_held, SimulatedRuntime(), synchronize=True, keep_last_bytes=0
    )
    assert first.stats.forwarded_bytes == DEPTH * NBYTES
    assert first.stats.bytes_in == 0, "what lives needs no reload"
    for step in (second, third):
        assert step.stats.bytes_out == step.stats.offloaded_bytes == 0
        assert step.stats.kept_bytes == {"alive": DEPTH * NBYTES}


@pytest.mark.parametrize("program", [towers_in_the_order_of_forward, one_tower, one_tower_whose_results_are_held])
def test_what_is_known_of_a_step_makes_it_no_worse_and_neither_does_a_plan(program: Callable[[Tensor], Graphs]) -> None:
    """Of six steps the third knows those before it, and the last follows a step plan."""
    device = SimulatedRuntime(compute_rate=1e9, out_bandwidth=6e8, in_bandwidth=6e8)
    sizes = {"max_inflight_bytes": 4 * NBYTES, "prefetch_bytes": 4 * NBYTES}
    first, _, learnt, *_, followed = steps(program, device, rows=(N,) * 6, synchronize=True, **sizes)
    assert [step.stats.followed_forwards for step in (first, learnt, followed)] == [0, 0, 1]
    for earlier, later in ((first, learnt), (learnt, followed)):
        assert later.exposed <= earlier.exposed + 1e-9
        assert later.wasted <= earlier.wasted
    assert followed.stats.resident_bytes_peak <= learnt.stats.resident_bytes_peak
    assert not followed.stats.plan_misses


def test_h21_shapes_that_change_with_every_step_learn_nothing_wrong() -> None:
    known = steps(towers_in_the_order_of_forward, SimulatedRuntime(), rows=(N, N, N), keep_last_bytes=0)
    changing = steps(towers_in_the_order_of_forward, SimulatedRuntime(), rows=(N, N + 1, N - 1, N), keep_last_bytes=0)
    for step, height in zip(changing, (N, N + 1, N - 1, N), strict=True):
        assert step.stats.offloaded_bytes == 3 * DEPTH * height * N * 4
    # For how long the system gives memory, the host waits, which no virtual clock knows.
    first = [one[0]._replace(stats=replace(one[0].stats, stall_seconds=0.0)) for one in (changing, known)]
    assert first[0] == first[1]


def test_a_further_save_of_what_someone_else_keeps_alive_stays_with_it() -> None:
    def program(x: Tensor) -> Graphs:
        h = (x * 0.1).exp()  # saves its result,
        return Graphs([(h * h.t()).sum()], [h])  # and this saves it twice more

    first, *later = steps(program, SimulatedRuntime(), rows=(N,) * 4, synchronize=True, keep_last_bytes=0)
    assert first.stats.offloaded_bytes + first.stats.shared_bytes == first.stats.saved_bytes == 3 * NBYTES
    for step in later:
        assert step.stats.kept_bytes == {"alive": 3 * NBYTES}


def test_parts_of_one_storage_that_the_library_itself_holds_are_no_sign_that_someone_else_does() -> None:
    def program(x: Tensor) -> Graphs:
        parts = (x * 0.1).chunk(8)  # each below a quarter, so that it travels alone
        return Graphs([torch.stack([part.sin().sum() for part in parts]).sum()], [])

    found = steps(
        program, SimulatedRuntime(), rows=(N,) * 5, synchronize=True, retain=True, keep_last_bytes=2 * NBYTES // 8
    )
    for step in found:
        assert "alive" not in step.stats.kept_bytes
        assert step.stats.offloaded_bytes >= found[0].stats.offloaded_bytes > 0


def test_one_context_around_many_steps_is_learnt_from_step_by_step_and_its_notes_stay_small() -> None:
    runtime = SimulatedRuntime()
    with runtime.checked() as checker:
        offload = Offload(runtime=runtime, tier="host", min_bytes=0, prefetch_bytes=6 * NBYTES)
        newest = []
        with offload:
            for _ in range(6):
                offload.reset_stats()
                x = torch.linspace(-1, 1, N * N).view(N, N).requires_grad_()
                one_tower(x).losses[0].backward()
                newest.append(offload.stats(synchronize=True).kept_bytes["newest"])
                forward = offload._hooks.thread.forward(saves_of(offload))
                assert len(forward.positions) <= DEPTH
        assert newest[0] == 6 * NBYTES
        assert all(0 < nbytes <= 3 * NBYTES for nbytes in newest[1:])
        assert_settled(offload)
        offload.close()
    checker.assert_clean()
