"""H41: while one thread waits for a transfer, the others go on: no lock is held by a thread that waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload import Offload
from eager_offload.compile import ops
from eager_offload.runtime.host import host_runtime
from tests.hazards.backends import Backend, SimulatedBackend, assert_settled, offloader_of, transfer_threads
from tests.hazards.probes import meanwhile
from tests.hazards.programs import REGIMES, Around, Regime, assert_identical, assert_moved, leaf
from tests.threads import refuse_threads

NBYTES = 64 * 64 * 4
#: Of a tensor that is large enough for its pieces to be shared among threads, or for a slab of its own.
SIDE = 1024


def in_another_thread(backend: Backend, work: Callable[[], object]) -> None:
    """Returns when ``work`` is done; fails where it waits for what this thread holds."""
    ThreadPoolExecutor(1).submit(backend.in_thread, work).result(60)


def others_go_on(offload: Offload, *, moves: bool = False) -> list[Tensor]:
    """Steps whose saves stay as small ones and by a mark, and leave if ``moves``; returns their losses."""
    with offload:
        small, kept = leaf(8, 8, seed=2).exp(), eo.keep(leaf(64, 64, seed=3).mul(2))
        losses = [small.sin().sum(), kept.sin().sum()]
        if moves:
            losses.append(leaf(64, 64, seed=4).sin().cos().sum())
    for loss in losses:
        loss.backward()
    return losses


@pytest.mark.parametrize("what", ["a full window", "the end of a with", "stats", "close", "a trace"])
def test_h41_other_threads_go_on_while_one_waits(what: str, tmp_path: Path, disk: Backend) -> None:
    fills_the_window = what in ("a full window", "the end of a with")
    offload = disk.offload(min_bytes=NBYTES, max_inflight_bytes=NBYTES if fills_the_window else 1 << 20)
    other: list[Tensor] = []

    def others() -> None:
        other.extend(others_go_on(offload))
        assert offload.stats().kept_bytes["small"] >= 8 * 8 * 4
        assert offload.stats().kept_bytes["marked"] == NBYTES
        gate.open()

    with disk.gate() as gate, meanwhile(lambda: in_another_thread(disk, others)) as done:
        with offload:
            if what == "the end of a with":  # the second save may be filled until then, and finds the window full
                loss = (leaf(64, 64, seed=0).mul(2).sin() * torch.rand(64, 64)).sum()
            else:
                loss = leaf(64, 64, seed=0).sin().cos().tanh().sum()
        if what == "stats":
            offload.stats(synchronize=True)
        elif what == "close":
            offload.close()
        elif what == "a trace":
            with offload.trace(tmp_path / "trace.json"):
                pass
    assert done == ["waits"]
    assert other
    loss.backward()
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    assert stats.window_stall_seconds > 0 or not fills_the_window
    del loss
    other.clear()
    assert_settled(offload)


@pytest.mark.parametrize("what", ["a save", "the end of a with", "what a codec refuses"])
def test_h41_other_threads_go_on_while_the_system_gives_one_memory(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedBackend() as simulated:
        give, other, given = simulated.runtime.host_buffer, list[Tensor](), list[int]()

        def giving(nbytes: int) -> Tensor:
            given.append(nbytes)
            if nbytes >= 4 * SIDE * SIDE and not other:
                in_another_thread(simulated, lambda: other.extend(others_go_on(offload, moves=True)))
                assert given[-1] == nbytes, "the other has room in a slab that there is"
            return give(nbytes)

        monkeypatch.setattr(simulated.runtime, "host_buffer", giving)
        codec = "lossless" if what == "what a codec refuses" else "identity"
        fields = {"min_bytes": NBYTES, "max_inflight_bytes": 64 << 20}
        offload = simulated.offload(step_plans=False, codec=codec, **fields)
        with offload:
            losses = [leaf(64, 64, seed=1).sin().cos().tanh().sum() for _ in range(4)]
        offload.stats(synchronize=True)
        del losses[1:]  # from here on there is a slab with room for as much
        with offload:
            large = leaf(SIDE, SIDE, seed=0)
            if what == "a save":
                loss = large.sin().cos().sum()
            else:
                mask = torch.ones(SIDE, SIDE)
                mask[0, 0], mask[-1, -1] = 0.0, 0.5 if codec == "lossless" else 0.0
                loss = (large * mask).sum()
                del mask
        assert len(other) == 3
        loss.backward()
        stats = offload.stats(synchronize=True)
        assert stats.kept_bytes["marked"] == NBYTES
        assert stats.bytes_out >= 3 * NBYTES + (4 << 20), "both have offloaded"
        assert stats.refused == ({"bitmask": 1} if codec == "lossless" else {})
        assert not stats.demotions
        del loss, losses
        other.clear()
        assert_settled(offload)


def test_h10_nothing_leaves_after_a_crash_while_the_system_gives_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedBackend() as simulated:
        give, crashed = simulated.runtime.host_buffer, list[int]()

        def crashing(nbytes: int) -> Tensor:
            if nbytes >= 4 * SIDE * SIDE:
                crashed.append(nbytes)
                offloader_of(offload).crash()
            return give(nbytes)

        monkeypatch.setattr(simulated.runtime, "host_buffer", crashing)
        offload, large = simulated.offload(max_inflight_bytes=64 << 20), leaf(SIDE, SIDE, seed=0)
        with offload:
            first = leaf(64, 64, seed=1).sin().cos().sum()
        before = offload.stats(synchronize=True).bytes_out
        with offload:
            second = large.sin().cos().sum()
        assert crashed
        assert offload.stats().bytes_out == before > 0
        (first + second).backward()
        assert torch.equal(large.grad, torch.autograd.grad(large.sin().cos().sum(), large)[0])
        del first, second


# -- the system has no thread left for transfers ----------------------------------------------------------------------


def program(around: Around) -> object:
    x = leaf(SIDE, SIDE)
    layers(x, around).backward()
    return x.grad


def layers(x: Tensor, around: Around) -> Tensor:
    with around:
        for _ in range(4):
            x = x.sin()
        return x.sum()


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_h47_without_threads_compute_carries_the_copies_out(
    regime: Regime, disk: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, offload = program(nullcontext()), disk.offload(**regime.fields)
    refuse_threads(monkeypatch)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_identical(expected, program(regime.around(offload)))
    (warning,) = warned
    assert "starts no thread for transfers" in str(warning.message)
    stats = assert_settled(offload)
    assert_moved(stats)
    assert stats.bytes_in > 0
    assert stats.demotions == {"no_thread": (stats.bytes_out + stats.bytes_in) // (SIDE * SIDE * 4)}
    assert transfer_threads() == []


def test_h47_what_left_by_a_thread_comes_back_without_one(disk: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, offload, x = program(nullcontext()), disk.offload(), leaf(SIDE, SIDE)
    loss = layers(x, offload)
    offload.stats(synchronize=True)
    host_runtime().close()
    refuse_threads(monkeypatch)
    with pytest.warns(RuntimeWarning, match="starts no thread for transfers"):
        loss.backward()
    del loss
    stats = assert_settled(offload)
    assert_identical(expected, x.grad)
    assert_moved(stats)
    assert stats.demotions["no_thread"] == stats.bytes_in // (SIDE * SIDE * 4) > 0


def test_h47_a_graph_moves_its_tensors_without_threads(disk: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    offload, x = disk.offload(), leaf(SIDE, SIDE, grad=False)
    config, sources = offload.config_key, [x * n for n in range(1, 4)]
    with offload:
        with pytest.warns(RuntimeWarning, match="starts no thread for transfers"):
            hosts = [ops.offload(source, config=config, wait=False) for source in sources]
        for host, source in zip(hosts, sources, strict=True):
            ops.wait_tensor(host, source)
        for host, source in zip(hosts, sources, strict=True):
            assert torch.equal(ops.reload(host, torch.device("cpu"), config=config, wait=True), source)
        del host, hosts
        stats = offload.stats(synchronize=True)
    assert stats.bytes_out == stats.bytes_in == 3 * x.nbytes
    assert stats.demotions == {"no_thread": 6}
