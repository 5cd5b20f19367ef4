"""H14 to H18: what a copy reads, how it is ordered against the streams that compute runs on, what is asked for while it
runs, and who may write to its slot afterwards; see also ``tests/programs/streams.py``.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import torch

from eager_offload import Offload
from eager_offload.runtime.base import Direction
from tests.hazards.backends import Backend, SimulatedBackend, assert_settled
from tests.hazards.programs import Around, Settled, assert_identical, assert_moved
from tests.programs import leaf
from tests.programs.parts.blocks import Step
from tests.programs.streams import Streams
from tests.simulation.log import Recorded, Waited, WrittenLog
from tests.simulation.simulated import SimulatedRuntime


def result(around: Around, seed: int = 1) -> object:
    return Step(seed).forward(around).backward().result


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


def test_h18_an_offload_waits_for_the_last_read_of_its_slot() -> None:
    """Reading is so slow here that the next forward comes to the slots while they are still being read."""
    simulated, log = SimulatedRuntime(in_bandwidth=1e4), WrittenLog()
    out, back = (simulated.transfer_stream(torch.device("cpu"), direction) for direction in Direction)
    with simulated.checked(log) as checker:
        offload = Offload(runtime=simulated, tier="host", min_bytes=0, keep_last_bytes=0)
        for seed in range(4):
            assert_identical(result(nullcontext(), seed), result(Settled(offload), seed))
        assert_moved(assert_settled(offload))
        offload.close()
    checker.assert_clean()
    reads = {entry.event for entry in log.entries if isinstance(entry, Recorded) and entry.stream is back}
    waits = [entry for entry in log.entries if isinstance(entry, Waited) and entry.stream is out]
    assert any(entry.event in reads for entry in waits), "no slot was used again while it was being read"


# -- streams ----------------------------------------------------------------------------------------------------------


def test_h14_a_batch_of_another_stream_stays_until_it_is_gathered() -> None:
    """Its memory goes back to the stream that loaded it, which does not know that another one gathers."""
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
