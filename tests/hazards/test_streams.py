"""H14, H15: copies are ordered against the streams, or threads, that compute really runs on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.runtime.base import Direction
from tests.hazards.backends import Backend, SimulatedBackend, assert_settled
from tests.hazards.blocks import Step
from tests.hazards.functions import custom
from tests.hazards.programs import REGIMES, Around, Regime, Settled, assert_moved, exact, leaf
from tests.simulation.log import Operation, Recorded, Waited, WrittenLog
from tests.simulation.simulated import SimulatedRuntime, SimulatedStream
from tests.threads import collect


class Streams:
    """Two streams of the simulated device; on a CPU two threads, which is what takes their place there."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.are_threads = not isinstance(backend, SimulatedBackend)
        self._side = None if self.are_threads else SimulatedStream("side")

    def run(self, work: Callable[[], object], *, aside: bool) -> None:
        """Runs ``work`` on the first or on the second stream, in order with everything before and after it."""
        if aside and self.are_threads:
            self._backend.in_thread(work)
        else:
            with self.aside() if aside else nullcontext():
                work()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The second stream is current."""
        self.meet()
        with self._backend.simulated.stream(self._side):
            yield
        self.meet()

    def meet(self) -> None:
        """What a program does that changes streams: each waits for the other."""
        if not self.are_threads:
            simulated, second = self._backend.simulated, self._side
            first = simulated.default_stream
            done = simulated.record(first), simulated.record(second)
            simulated.wait(first, done[1])
            simulated.wait(second, done[0])


def reading_on(x: Tensor, h: Tensor, streams: Streams, places: tuple[bool, ...]) -> Tensor:
    """Reads what it saved once for each entry of ``places``, on the stream or thread that stands there."""

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        read: list[Tensor] = []
        for aside in places:
            streams.run(lambda: read.append(gradient * ctx.saved_tensors[0]), aside=aside)
        for other in read[1:]:
            assert torch.equal(read[0], other)
        result = read[0].clone()
        streams.meet()
        return result

    return custom(x, backward, h, forward=lambda x: x * h)


PLACES = {
    "all aside": (True, True),
    "forward aside": (True, False),
    "backward aside": (False, True),
    "all on the first": (False, False),
}


@pytest.mark.parametrize("regime", REGIMES, ids=str)
@pytest.mark.parametrize("places", PLACES)
def test_h14_ordering_follows_the_stream_of_each_pack_and_unpack(places: str, regime: Regime, backend: Backend) -> None:
    forward_aside, backward_aside = PLACES[places]

    def program(offload: Around) -> object:
        streams, results = Streams(backend), []
        for seed in range(3):
            step = Step(seed)
            streams.run(lambda step=step: step.forward(offload), aside=forward_aside)
            # On a device autograd runs a node on the stream of its forward, wherever backward was called.
            streams.run(step.backward, aside=backward_aside if streams.are_threads else forward_aside)
            results.append(step.result)
            streams.meet()
        return results

    stats = exact(program, regime.around(backend.offload(**regime.fields)))
    assert_moved(stats)
    assert stats.bytes_in > 0 or not regime.settled


@pytest.mark.parametrize("regime", REGIMES, ids=str)
@pytest.mark.parametrize("places", [(True,), (False, True), (True, False), (True, True, False, True)], ids=str)
def test_h14_a_saved_tensor_is_read_on_other_streams(
    places: tuple[bool, ...], regime: Regime, backend: Backend
) -> None:
    def program(offload: Around) -> object:
        streams, x = Streams(backend), leaf(32, 32)
        with offload:
            y = (x * 2).tanh()
            for seed in range(4):
                step = 8 if seed % 2 else 1  # what has holes is packed
                h = (leaf(32, 32 * step, seed=seed, grad=False) * 1)[:, ::step]
                y = reading_on(y, h, streams, places).sin()
                del h
        y.sum().backward()
        streams.meet()
        return x.grad

    stats = exact(program, regime.around(backend.offload(**regime.fields)))
    assert_moved(stats)
    assert stats.bytes_in > 0 or not regime.settled


def test_h14_what_is_packed_meanwhile_is_read_on_another_stream() -> None:
    """A later forward pushes out what an earlier one has saved, and only the library orders that pack."""
    weight = leaf(32, 32, seed=2)
    exact = leaf(32, 32).sin().detach()
    with SimulatedBackend() as backend:
        offload = backend.offload(codec="bf16", keep_last_bytes=exact.nbytes, step_plans=False)
        streams, found = Streams(backend), []

        def forward() -> Tensor:
            with offload:
                return (leaf(32, 32).sin() * weight).sum()

        for step in range(3):
            first = forward()
            with streams.aside() if step else nullcontext():
                second = forward()
                found += torch.autograd.grad(first, weight)
                del first, second
                offload.stats(synchronize=True)
            collect()
        backend.assert_nothing_is_held()
    assert [torch.equal(one, exact.bfloat16().float()) for one in found] == [True] * 3


def test_h14_a_batch_of_another_stream_stays_until_it_is_packed() -> None:
    """Its memory goes back to the stream that loaded it, which knows nothing of the pack."""
    weight = leaf(32, 32)
    with SimulatedBackend() as backend:
        offload, streams = backend.offload(), Streams(backend)
        with streams.aside():
            batch = leaf(32, 256, grad=False) * 1
        with Settled(offload):
            loss = (batch[:, ::8] * weight).sum()
            del batch
        (found,) = torch.autograd.grad(loss, weight)
        del loss
        backend.assert_nothing_is_held()
        assert offload.stats().bytes_in == weight.nbytes
    assert torch.equal(found, leaf(32, 256)[:, ::8].detach())


def test_h14_a_step_that_is_followed_is_read_on_another_stream(backend: Backend) -> None:
    """What a plan brings back is ordered for the stream of its forward: any other one makes the step unknown."""
    places = [(False,), (False,), (False,), (True,), (False,), (False, True), (False,)]

    def program(offload: Around) -> object:
        results = []
        for number, where in enumerate(places):
            streams, x = Streams(backend), leaf(32, 32, seed=number)
            with offload:
                y = reading_on((x * 2).tanh(), leaf(32, 32, seed=1, grad=False) * 1, streams, where).sin()
            y.sum().backward()
            del y
            streams.meet()
            results.append(x.grad)
        return results

    stats = exact(program, Settled(backend.offload(step_plans=True)))
    assert stats.followed_forwards >= 3
    if not Streams(backend).are_threads:  # on a CPU there is one stream
        assert stats.plan_misses["stream"] > 0
    assert_moved(stats)


def test_h15_the_stream_is_noted_before_any_other_is_entered(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that asks for the current stream while a transfer stream is current is told the wrong one."""
    runtime, entered, asked = backend.runtime, threading.local(), []
    enter, current = runtime.enter, runtime.current_stream
    transfers = {runtime.transfer_stream(leaf(1).device, direction) for direction in Direction}

    @contextmanager
    def watched_enter(stream: Any) -> Iterator[None]:
        outer, entered.last = getattr(entered, "last", None), stream
        try:
            with enter(stream):
                yield
        finally:
            entered.last = outer

    def watched_current(device: torch.device) -> Any:
        asked.append(getattr(entered, "last", None))
        return current(device)

    monkeypatch.setattr(runtime, "enter", watched_enter)
    monkeypatch.setattr(runtime, "current_stream", watched_current)
    offload = backend.offload()
    for seed in range(3):
        Step(seed).forward(Settled(offload)).backward()
        gathered = leaf(64, 64, seed=seed, grad=False)[:, 3]
        with offload:
            y = (leaf(64) * gathered).sum()
        y.backward()
        del y, gathered
    assert len(asked) > 5, "where compute has one stream, a step that follows a plan asks once"
    assert transfers.isdisjoint(asked)
    assert_moved(assert_settled(offload))


def test_h15_every_copy_out_waits_for_an_event_of_the_stream_that_packed() -> None:
    simulated, recording = SimulatedRuntime(), WrittenLog()
    with simulated.checked(recording) as checker:
        side = SimulatedStream("side")
        offload = Offload(runtime=simulated, tier="host", min_bytes=0, keep_last_bytes=0)
        with simulated.stream(side):
            for seed in range(6):  # the pool is used again from the second step on, which is when it showed
                Step(seed).forward(Settled(offload) if seed % 2 else offload).backward()
        assert_moved(assert_settled(offload))
        offload.close()
    checker.assert_clean()
    out = simulated.transfer_stream(torch.device("cpu"), Direction.OUT)
    home: dict[Any, Any] = {}
    waited: set[Any] = set()
    copies = 0
    for entry in recording.entries:
        if isinstance(entry, Recorded):
            home[entry.event] = entry.stream
        elif isinstance(entry, Waited) and entry.stream is out:
            waited.add(home[entry.event])
        elif isinstance(entry, Operation) and entry.stream is out:
            assert side in waited, f"{entry} waits for {waited} only"
            waited.clear()
            copies += 1
    assert copies > 10
