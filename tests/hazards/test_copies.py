"""H14 to H18: what a copy reads, how it is ordered against the streams that compute runs on, what is asked for while it
runs, and who may write to its slot afterwards; see also ``tests/programs/streams.py``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.runtime.base import Direction
from eager_offload.tiers.base import ByteRegion
from eager_offload.tiers.disk import DiskSlot
from tests.hazards.backends import Backend, SimulatedBackend, assert_settled, gate_before
from tests.hazards.probes import meanwhile
from tests.hazards.programs import Around, Settled, assert_identical, assert_moved, leaf
from tests.programs.parts.blocks import Step
from tests.programs.streams import Streams
from tests.simulation.log import Operation, Recorded, Waited, WrittenLog
from tests.simulation.simulated import SimulatedRuntime, SimulatedStream
from tests.threads import collect

CPU = torch.device("cpu")


def result(around: Around, seed: int = 1, meanwhile: Callable[[], object] = lambda: None) -> object:
    step = Step(seed).forward(around)
    meanwhile()
    return step.backward().result


def test_h16_the_copy_reads_the_old_bytes_when_the_block_gets_a_new_owner(backend: Backend) -> None:
    """Everything of the forward is dropped while its copies wait, and compute takes whatever memory is free."""

    def paint(leave: Callable[[], object]) -> None:
        noise = [torch.full((32, 32), float("nan")) for _ in range(50)]
        for tensor in noise:
            tensor.mul_(2).sin_()
        leave()
        del noise
        _ = [torch.full((32, 32), float("inf")) for _ in range(50)]

    def leave() -> None:
        gate.open()
        offload.stats(synchronize=True)

    expected, offload = result(nullcontext()), backend.offload()
    with backend.gate() as gate:
        assert_identical(expected, result(offload, meanwhile=lambda: paint(leave)))
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.bytes_in > 0


def test_h16_a_source_lives_exactly_until_its_copy_is_over(backend: Backend) -> None:
    offload, x = backend.offload(), leaf(32, 32)
    with backend.gate() as gate:
        with offload:
            h = (x * 2).tanh()
            y = h.exp().sum()
        source = weakref.ref(h.untyped_storage())
        del h
        offload.stats()
        assert source() is not None, "the source went before its copy was over"
        gate.open()
        offload.stats(synchronize=True)
    assert source() is None, "the source stayed after its copy was over"
    y.backward()
    del y
    assert_moved(assert_settled(offload))


def test_h17_an_unpack_during_its_own_copy_out_is_served_from_the_source(backend: Backend) -> None:
    expected, offload = result(nullcontext()), backend.offload()
    with backend.gate() as gate:
        assert_identical(expected, result(offload))  # nothing can arrive: an unpack that waited would wait for ever
        stats = offload.stats()
        assert stats.forwarded_bytes == stats.offloaded_bytes > 0
        assert stats.bytes_in == 0
        gate.open()
    assert_moved(assert_settled(offload))


@contextmanager
def logged(**rates: float) -> Iterator[tuple[SimulatedRuntime, Offload, list[Any], Any, Any]]:
    """A simulated device with an ``Offload``, its log, and the streams out and back; in the end all is in order."""
    simulated, log = SimulatedRuntime(**rates), WrittenLog()
    out, back = (simulated.transfer_stream(CPU, direction) for direction in (Direction.OUT, Direction.IN))
    with simulated.checked(log) as checker:
        offload = Offload(runtime=simulated, tier="host", min_bytes=0, keep_last_bytes=0)
        yield simulated, offload, log.entries, out, back
        assert_moved(assert_settled(offload))
        offload.close()
    checker.assert_clean()


def test_h18_an_offload_waits_for_the_last_read_of_its_slot() -> None:
    """Reading is so slow here that the next forward comes to the slots while they are still being read."""
    with logged(in_bandwidth=1e4) as (_, offload, entries, out, back):
        for seed in range(4):
            assert_identical(result(nullcontext(), seed), result(Settled(offload), seed))
    reads = {entry.event for entry in entries if isinstance(entry, Recorded) and entry.stream is back}
    waits = [entry for entry in entries if isinstance(entry, Waited) and entry.stream is out]
    assert any(entry.event in reads for entry in waits), "no slot was used again while it was being read"


def test_h18_on_disk_a_write_behind_a_read_that_is_held_back_waits_for_it(
    disk: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, waiting, log = disk.offload(prefetch_bytes=1 << 20), threading.Event(), list[tuple[str, ByteRegion]]()

    def note(name: str) -> None:
        call = getattr(DiskSlot, name)

        def noting(slot: DiskSlot, tensor: Tensor) -> None:
            call(slot, tensor)
            log.append((name, slot.region))

        monkeypatch.setattr(DiskSlot, name, noting)

    note("read")
    note("write")
    x = leaf(32, 32)
    with Settled(offload):
        losses = [(x * n).exp().sum() for n in range(1, 5)]
    log.clear()
    backward = threading.Thread(target=losses.pop().backward)
    with gate_before(DiskSlot, "read") as gate, meanwhile(waiting.set, backward):
        backward.start()
        assert waiting.wait(60)  # the first of four reads stands before the gate, the others behind it
        losses.clear()
        with offload:
            losses = [(x * n).exp().sum() for n in range(5, 12)]
        gate.open()
        backward.join()
        offload.stats(synchronize=True)
    kinds = [what for what, _ in log]
    assert (kinds.count("read") >= 4, kinds.count("write")) == (True, 7)
    for index, (what, region) in enumerate(log):
        assert what == "read" or ("read", region) not in log[index:], f"written before its last read: {log}"
    while losses:
        losses.pop().backward()
    assert_moved(assert_settled(offload))


# -- streams ----------------------------------------------------------------------------------------------------------


def test_h14_what_is_packed_meanwhile_is_read_on_another_stream() -> None:
    """A later forward pushes out what an earlier one has saved, and only the library orders that pack."""
    weight, exact = leaf(32, 32, seed=2), leaf(32, 32).sin().detach()
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
        offload = backend.offload()
        with Streams().aside():
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
        with enter(stream):
            yield
        entered.last = outer

    def watched_current(device: torch.device) -> Any:
        asked.append(getattr(entered, "last", None))
        return current(device)

    monkeypatch.setattr(runtime, "enter", watched_enter)
    monkeypatch.setattr(runtime, "current_stream", watched_current)
    offload = backend.offload()
    for seed in range(3):
        result(Settled(offload), seed)
        with offload:
            y = (leaf(64) * leaf(64, 64, seed=seed, grad=False)[:, 3]).sum()  # gathered before it leaves
        y.backward()
        del y
    assert len(asked) > 5
    assert transfers.isdisjoint(asked)
    assert_moved(assert_settled(offload))


def test_h15_every_copy_out_waits_for_an_event_of_the_stream_that_packed() -> None:
    with logged() as (simulated, offload, entries, out, _):
        side = SimulatedStream("side")
        with simulated.stream(side):
            for seed in range(6):  # the pool is used again from the second step on, which is when it showed
                result(Settled(offload) if seed % 2 else offload, seed)
    home, waited, copies = dict[Any, Any](), set[Any](), 0
    for entry in entries:
        if isinstance(entry, Recorded):
            home[entry.event] = entry.stream
        elif isinstance(entry, Waited) and entry.stream is out:
            waited.add(home[entry.event])
        elif isinstance(entry, Operation) and entry.stream is out:
            assert side in waited, f"{entry} waits for {waited} only"
            waited.clear()
            copies += 1
    assert copies > 10
