"""What is counted in real steps, to the byte, and the bounds that the counters show to be kept."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from tests.hazards.backends import DiskBackend, assert_balanced, assert_settled, offloader_of, open_when_the_host_waits
from tests.programs import leaf
from tests.test_contract import NBYTES, N, chain, exact_backward, gradient

DEPTH = 10
ALL = DEPTH * NBYTES


def test_a_step_is_counted_to_the_byte(disk: DiskBackend) -> None:
    offload, x = disk.offload(), leaf(N)
    with offload:
        loss = chain(x, DEPTH)
    forward = offload.stats(synchronize=True)
    assert (forward.saved_tensors, forward.saved_bytes) == (DEPTH, ALL)
    assert (forward.offloaded_tensors, forward.offloaded_bytes) == (DEPTH, ALL)
    assert (forward.bytes_out, forward.bytes_in) == (ALL, 0)
    assert forward.kept_bytes == forward.fallbacks == {}
    assert forward.shared_bytes == forward.reloaded_bytes == forward.forwarded_bytes == forward.released_bytes == 0
    assert 0 < forward.inflight_bytes_peak <= ALL
    assert forward.disk_bytes_peak >= ALL
    assert forward.host_bytes_peak == 0
    assert forward.disk_bytes_written >= ALL
    assert forward.out_seconds > 0 == forward.in_seconds
    exact_backward(loss, x, DEPTH)
    stats = offload.stats(synchronize=True)
    assert (stats.out_seconds, stats.disk_bytes_written) == (forward.out_seconds, forward.disk_bytes_written)
    assert stats.in_seconds > 0
    assert (stats.reloaded_bytes, stats.forwarded_bytes, stats.released_bytes) == (ALL, 0, 0)
    assert (stats.bytes_out, stats.bytes_in) == (ALL, ALL)
    assert stats.stall_seconds >= 0
    assert (stats.foreign_hooks, stats.empty_forwards) == (0, 0)
    assert_balanced(stats)
    offload.close()
    assert offload.stats().disk_bytes_written == forward.disk_bytes_written, "of tiers that are closed, too"


def test_the_peak_on_the_device_is_of_what_is_alive_at_one_time(disk: DiskBackend) -> None:
    bounds = {"max_inflight_bytes": NBYTES, "prefetch_bytes": NBYTES}
    offload, x = disk.offload(**bounds), leaf(N)
    for _ in range(3):
        with offload:
            loss = chain(x, DEPTH)
        loss.backward()
        del loss
    stats = offload.stats(synchronize=True)
    assert stats.steps == 3
    assert stats.without_offload_bytes_peak == ALL
    assert stats.resident_bytes_peak <= stats.device_bytes_peak < ALL
    offload.reset_stats()
    with offload:
        with eo.no_offload():
            kept = x.sigmoid().exp()  # saves two tensors, and the last one twice
            kept = kept * kept
        loss = chain(kept, DEPTH)
    # In the midst of a step. A disk's thread lets go of a tensor before the library notices: both have by then.
    offload.stats(synchronize=True)
    offload.reset_stats()
    loss.backward()
    del loss, kept
    stats = offload.stats(synchronize=True)
    assert stats.without_offload_bytes_peak == ALL + 2 * NBYTES
    assert 2 * NBYTES < stats.resident_bytes_peak + 2 * NBYTES <= stats.device_bytes_peak < ALL + 2 * NBYTES
    offload.reset_stats()
    stats = offload.stats()
    assert stats.without_offload_bytes_peak == stats.device_bytes_peak == 0


def test_counting_anew_in_mid_step_leaves_no_debts(disk: DiskBackend) -> None:
    offload, x = disk.offload(keep_last_bytes=2 * NBYTES), leaf(N)
    with disk.gate() as gate:
        with offload:
            loss = chain(x, DEPTH)
        offload.reset_stats()
        stats = offload.stats()
        held = (stats.inflight_bytes_peak, stats.resident_bytes_peak, stats.without_offload_bytes_peak)
        assert held == (ALL - 2 * NBYTES, ALL, ALL), "the peaks start at what is held now"
        assert stats.disk_bytes_peak > stats.bytes_out == stats.saved_bytes == 0
        gate.open()
    offload.stats(synchronize=True)
    offload.reset_stats()
    with offload:
        again = chain(x, DEPTH)
    (loss + again).backward()
    del loss, again
    stats = offload.stats(synchronize=True)
    assert torch.equal(x.grad, 2 * gradient(x, DEPTH))
    assert stats.saved_bytes == ALL
    assert stats.kept_bytes == {"newest": 2 * NBYTES}
    assert stats.bytes_out == ALL, "the newest of the first forward had to make way for the second's"
    assert_settled(offload)


# -- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, NBYTES, 3 * NBYTES, 3 * NBYTES + 1])
def test_what_is_on_its_way_stays_within_the_window_and_a_full_one_stalls(window: int, disk: DiskBackend) -> None:
    offload, x = disk.offload(max_inflight_bytes=window), leaf(N)
    allowed = max(window // NBYTES, 1) * NBYTES
    with disk.gate() as gate:
        gate_keeper = threading.Thread(target=open_when_the_host_waits, args=(gate, offload))
        gate_keeper.start()
        with offload:
            loss = chain(x, DEPTH)
        gate_keeper.join()
    stats = offload.stats(synchronize=True)
    assert stats.inflight_bytes_peak == allowed
    assert stats.resident_bytes_peak == allowed + 2 * NBYTES, "and the one that waits to leave, and the newest"
    assert 0 < stats.window_stall_seconds <= stats.stall_seconds, "the file's growth is no part of the window's"
    assert stats.host_wait_seconds == stats.stall_seconds, "a CPU device computes on the host"
    exact_backward(loss, x, DEPTH)
    assert stats.offloaded_bytes == ALL


@pytest.mark.parametrize("prefetch", [0, NBYTES - 1, NBYTES, 3 * NBYTES])
def test_what_comes_back_early_stays_within_its_bound(prefetch: int, disk: DiskBackend) -> None:
    offload, x = disk.offload(prefetch_bytes=prefetch), leaf(N)
    with offload:
        loss = chain(x, DEPTH)
    offload.stats(synchronize=True)
    offload.reset_stats()
    loss.backward()
    stats = offload.stats(synchronize=True)
    assert torch.equal(x.grad, gradient(x, DEPTH))
    early = max(prefetch // NBYTES, 1 if prefetch else 0)  # one that is larger comes alone
    assert stats.resident_bytes_peak == (early + 1) * NBYTES, "and the one that is asked for"
    assert stats.bytes_in == ALL


def test_what_is_expected_when_its_copy_arrives_stays_as_if_it_had_come_back(disk: DiskBackend) -> None:
    offload, x = disk.offload(prefetch_bytes=3 * NBYTES, max_inflight_bytes=2 * ALL), leaf(N)
    with disk.gate() as gate:
        with offload:
            y = chain(x, DEPTH - 1)  # a sum, of which the rest of the graph is made
            loss = (y * x).sigmoid().sum()

        def all_arrive(_: Tensor) -> None:
            gate.open()
            offload.stats(synchronize=True)

        y.register_hook(all_arrive)  # when the first of the saves has been asked for, and the next three are expected
        loss.backward()
    stats = offload.stats(synchronize=True)
    expected = leaf(N)
    (chain(expected, DEPTH - 1) * expected).sigmoid().sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert stats.bytes_out >= (DEPTH - 1) * NBYTES
    assert 0 < stats.bytes_in <= stats.bytes_out - 4 * NBYTES, "those that were expected did not come back: they stayed"
    assert stats.resident_bytes_peak <= stats.bytes_out


@pytest.mark.filterwarnings("ignore:eager_offload. nothing moved:RuntimeWarning")
@pytest.mark.parametrize("newest", [0, NBYTES - 1, NBYTES, 4 * NBYTES, ALL, 2 * ALL])
def test_the_newest_bytes_stay_within_theirs(newest: int, disk: DiskBackend) -> None:
    offload, x = disk.offload(keep_last_bytes=newest, max_inflight_bytes=NBYTES), leaf(N)
    with offload:
        loss = chain(x, DEPTH)
    stats = offload.stats(synchronize=True)
    staying = min(newest // NBYTES * NBYTES, ALL)
    assert stats.kept_bytes.get("newest", 0) == staying
    assert stats.offloaded_bytes == stats.bytes_out == ALL - staying
    assert stats.resident_bytes_peak <= staying + NBYTES + 2 * NBYTES
    assert offloader_of(offload).resident_bytes == staying
    exact_backward(loss, x, DEPTH)
    del loss
    stats = offload.stats(synchronize=True)
    assert_settled(offload)
    assert stats.bytes_in == stats.offloaded_bytes


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("room", [1, NBYTES - 1, NBYTES, 4 * NBYTES, 5 * NBYTES - 1])
def test_a_budget_in_bytes_is_kept_and_the_rest_stays(tier: str, room: int, disk: DiskBackend) -> None:
    offload, x = disk.offload(**{"tier": tier, f"{tier}_budget": room}), leaf(N)
    fits = room // NBYTES

    def step() -> eo.OffloadStats:
        x.grad = None
        with offload:
            loss = chain(x, DEPTH)
        stats = offload.stats(synchronize=True)
        (held,) = (one.held_bytes for one in offloader_of(offload).tiers)
        assert held <= room
        exact_backward(loss, x, DEPTH)
        return stats

    with pytest.warns(RuntimeWarning, match=f"no room for {NBYTES} bytes in the {tier} tier: they stay on cpu"):
        stats = step()
    assert stats.offloaded_bytes == stats.bytes_out == fits * NBYTES
    assert stats.kept_bytes == {"budget": ALL - fits * NBYTES}
    assert stats.fallbacks == {"budget": DEPTH - fits}
    with warnings.catch_warnings(action="error"):  # told once
        for _ in range(3):
            step()
    stats = offload.stats(synchronize=True)
    assert stats.offloaded_bytes == 4 * fits * NBYTES, "the room is used again"
    assert stats.without_offload_bytes_peak == ALL
    assert fits or stats.device_bytes_peak == ALL, "what finds no room counts on the device"
    peaks = (stats.host_bytes_peak, stats.disk_bytes_peak)
    assert max(peaks) <= room
    assert peaks[tier == "host"] == 0
    assert_settled(offload)
