"""H41, H47: while one thread waits for a transfer, the others go on: no lock is held by a thread that waits; where no
thread can be started, the one that asks for a copy carries it out.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload import Offload
from eager_offload.compile import ops
from tests.hazards.backends import Backend, SimulatedBackend, assert_settled, offloader_of, transfer_threads
from tests.hazards.probes import meanwhile
from tests.hazards.programs import REGIMES, Around, Regime, assert_identical, assert_moved
from tests.programs import leaf
from tests.threads import refuse_threads

NBYTES = 64 * 64 * 4
#: Of a tensor that is large enough for its pieces to be shared among threads, or for a slab of its own.
SIDE = 1024
LARGE = 4 * SIDE * SIDE


def others_go_on(backend: Backend, offload: Offload, *, moves: bool = False) -> None:
    """Steps in another thread whose saves stay as small ones and by a mark, and leave if ``moves``."""

    def steps() -> None:
        with offload:
            small, kept = leaf(8, 8, seed=2).exp(), eo.keep(leaf(64, 64, seed=3).mul(2))
            losses = [small.sin().sum(), kept.sin().sum()]
            losses += [leaf(64, 64, seed=4).sin().cos().sum()] if moves else []
        for loss in losses:
            loss.backward()
        assert offload.stats().kept_bytes["small"] >= 8 * 8 * 4
        assert offload.stats().kept_bytes["marked"] == NBYTES

    # Fails where it waits for what this thread holds.
    ThreadPoolExecutor(1).submit(backend.in_thread, steps).result(60)


@pytest.mark.filterwarnings("ignore:eager_offload. nothing ran inside:RuntimeWarning")
@pytest.mark.parametrize("what", ["a full window", "the end of a with", "stats", "close", "a trace"])
def test_h41_other_threads_go_on_while_one_waits(what: str, tmp_path: Path, disk: Backend) -> None:
    fills_the_window = what in ("a full window", "the end of a with")
    offload = disk.offload(min_bytes=NBYTES, max_inflight_bytes=NBYTES if fills_the_window else 1 << 20)

    def others() -> None:
        others_go_on(disk, offload)
        gate.open()

    with disk.gate() as gate, meanwhile(others) as done:
        with offload:
            if what == "the end of a with":  # the second save may be filled until then, and finds the window full
                loss = (leaf(64, 64).mul(2).sin() * torch.rand(64, 64)).sum()
            else:
                loss = leaf(64, 64).sin().cos().tanh().sum()
        if what == "stats":
            offload.stats(synchronize=True)
        elif what == "close":
            offload.close()
        elif what == "a trace":
            with offload.trace(tmp_path / "trace.json"):
                pass
    assert done == ["waits"]
    loss.backward()
    del loss
    stats = assert_settled(offload)
    assert stats.bytes_out > 0
    assert stats.window_stall_seconds > 0 or not fills_the_window


@pytest.mark.parametrize("what", ["a save", "the end of a with"])
def test_h41_other_threads_go_on_while_the_system_gives_one_memory(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedBackend() as simulated:
        give, given, went_on = simulated.runtime.host_buffer, list[int](), list[str]()

        def giving(nbytes: int) -> Tensor:
            given.append(nbytes)
            if nbytes >= LARGE and not went_on:
                others_go_on(simulated, offload, moves=True)
                went_on.append("others")
                assert given[-1] == nbytes, "the other has room in a slab that there is"
            return give(nbytes)

        monkeypatch.setattr(simulated.runtime, "host_buffer", giving)
        offload = simulated.offload(step_tables=False, min_bytes=NBYTES, max_inflight_bytes=64 << 20)
        with offload:
            losses = [leaf(64, 64).sin().cos().tanh().sum() for _ in range(4)]
        offload.stats(synchronize=True)
        del losses[1:]  # from here on there is a slab with room for as much
        with offload:
            large = leaf(SIDE, SIDE)
            loss = large.sin().cos().sum() if what == "a save" else (large * torch.ones(SIDE, SIDE)).sum()
        assert went_on
        loss.backward()
        del loss, losses
        stats = assert_settled(offload)
        assert stats.bytes_out >= 3 * NBYTES + LARGE, "both have offloaded"
        assert not stats.fallbacks


def test_h10_nothing_leaves_after_a_crash_while_the_system_gives_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedBackend() as simulated:
        give, crashed = simulated.runtime.host_buffer, list[int]()

        def crashing(nbytes: int) -> Tensor:
            if nbytes >= LARGE:
                crashed.append(nbytes)
                offloader_of(offload).crash()
            return give(nbytes)

        monkeypatch.setattr(simulated.runtime, "host_buffer", crashing)
        offload, large = simulated.offload(max_inflight_bytes=64 << 20), leaf(SIDE, SIDE)
        with offload:
            first = leaf(64, 64).sin().cos().sum()
        before = offload.stats(synchronize=True).bytes_out
        with offload:
            second = large.sin().cos().sum()
        assert crashed
        assert offload.stats().bytes_out == before > 0
        (first + second).backward()
        assert torch.equal(large.grad, torch.autograd.grad(large.sin().cos().sum(), large)[0])
        del first, second


# -- the system has no thread left for transfers ----------------------------------------------------------------------


def layers(x: Tensor, around: Around) -> Tensor:
    with around:
        return x.sin().sin().sin().sin().sum()


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_h47_without_threads_compute_carries_the_copies_out(
    regime: Regime, disk: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, x = disk.offload(**regime.fields), leaf(SIDE, SIDE)
    (expected,) = torch.autograd.grad(layers(x, nullcontext()), x)
    refuse_threads(monkeypatch)
    with warnings.catch_warnings(record=True, action="always") as warned:
        for _ in range(3):
            assert_identical(expected, torch.autograd.grad(layers(x, regime.around(offload)), x)[0])
    assert ["no transfer thread could be started" in str(one.message) for one in warned] == [True]
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.bytes_in > 0
    assert stats.fallbacks == {"no_thread": (stats.bytes_out + stats.bytes_in) // LARGE}
    assert transfer_threads() == []


def test_h47_a_graph_moves_its_tensors_without_threads(disk: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    offload, x = disk.offload(), leaf(SIDE, SIDE, grad=False)
    config, sources = offload.config_key, [x * n for n in range(1, 4)]
    with offload:
        with pytest.warns(RuntimeWarning, match="no transfer thread could be started"):
            hosts = [ops.offload(source, config=config, wait=False) for source in sources]
        for host, source in zip(hosts, sources, strict=True):
            ops.wait_tensor(host, source)
            assert torch.equal(ops.reload(host, torch.device("cpu"), config=config, wait=True), source)
        del host, hosts
        stats = offload.stats(synchronize=True)
    assert stats.bytes_out == stats.bytes_in == 3 * LARGE
    assert stats.fallbacks == {"no_thread": 6}
