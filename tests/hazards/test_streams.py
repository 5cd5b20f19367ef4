"""H14, H15: copies are ordered against the streams that compute runs on; see also ``tests/programs/streams.py``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.runtime.base import Direction
from tests.hazards.backends import Backend, SimulatedBackend, assert_settled
from tests.hazards.programs import Settled, assert_moved, leaf
from tests.programs.streams import Streams
from tests.simulation.log import Operation, Recorded, Waited, WrittenLog
from tests.simulation.simulated import SimulatedRuntime, SimulatedStream
from tests.threads import collect


def train(offload: Any, seed: int) -> None:
    x, w = leaf(32, 32, seed=seed), leaf(32, 32, seed=seed + 100)
    with offload:
        h = (x * 2).tanh()
        loss = ((h @ w).exp() * h).sin().sum()
    del h
    loss.backward()


def test_h14_what_is_packed_meanwhile_is_read_on_another_stream() -> None:
    """A later forward pushes out what an earlier one has saved, and only the library orders that pack."""
    weight = leaf(32, 32, seed=2)
    exact = leaf(32, 32).sin().detach()
    with SimulatedBackend() as backend:
        offload = backend.offload(codec="bf16", keep_last_bytes=exact.nbytes, step_plans=False)
        streams, found = Streams(), []

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
        offload, streams = backend.offload(), Streams()
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
        train(Settled(offload), seed)
        gathered = leaf(64, 64, seed=seed, grad=False)[:, 3]
        with offload:
            y = (leaf(64) * gathered).sum()
        y.backward()
        del y, gathered
    assert len(asked) > 5
    assert transfers.isdisjoint(asked)
    assert_moved(assert_settled(offload))


def test_h15_every_copy_out_waits_for_an_event_of_the_stream_that_packed() -> None:
    simulated, recording = SimulatedRuntime(), WrittenLog()
    with simulated.checked(recording) as checker:
        side = SimulatedStream("side")
        offload = Offload(runtime=simulated, tier="host", min_bytes=0, keep_last_bytes=0)
        with simulated.stream(side):
            for seed in range(6):  # the pool is used again from the second step on, which is when it showed
                train(Settled(offload) if seed % 2 else offload, seed)
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
