"""A trace of real steps: what is in it, that its numbers are those of the stats, and that it leaves nothing behind."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload.observe import timeline
from eager_offload.tiers.disk import DiskSlot
from eager_offload.trace_file import SliceKind
from tests.hazards.backends import Backend, DiskBackend, SimulatedBackend
from tests.hazards.wrappers import two
from tests.observe.steps import DEPTH, FIELDS, NBYTES, WINDOW, Net, assert_sound, of, saved, step, traced, traced_step


@pytest.mark.parametrize("kind", [DiskBackend, SimulatedBackend])
def test_a_step_is_shown_whole_and_is_the_same_step(kind: type[Backend], path: Path, net: Net) -> None:
    with kind() as backend:
        trace = traced_step(backend.offload(**FIELDS), path, net)
        assert_sound(trace)
        assert trace.stats["bytes_out"] == trace.stats["offloaded_bytes"] == (1 + 2 * DEPTH) * NBYTES
        assert trace.stats["bytes_in"] > 0
        assert of(trace, SliceKind.PREFETCH), "the next ones came early"
        assert of(trace, SliceKind.STALL) or kind is DiskBackend
        assert trace.devices == ("cpu",)
        assert trace.config["max_inflight_bytes"] == WINDOW
        assert trace.versions["torch"] == torch.__version__
        backend.assert_nothing_is_held()


def test_what_is_too_much_is_counted_and_the_last_sample_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch, net: Net, offload: eo.Offload
) -> None:
    most = 5
    monkeypatch.setattr(timeline, "MOST", most)
    trace = traced_step(offload, path, net)
    assert trace.stats["bytes_out"] > 0
    assert sum(group.count for group in trace.saved) == most
    assert len(trace.memory) == most
    assert trace.memory[-1][1:] == (0, 0, 0, 0)
    assert trace.dropped > trace.stats["saved_tensors"] - most > 0


def test_forward_and_backward_are_named_by_module_and_operation(path: Path, net: Net, offload: eo.Offload) -> None:
    trace = traced_step(offload, path, net)
    forward = [one.name for one in trace.slices if one.track == "compute forward"]
    inner = [name for n in range(DEPTH) for name in (f"Net.layers.{n}", f"Net.layers.{n}.inner")]
    assert forward == ["Net", *inner]
    backward = [one for one in trace.slices if one.track == "compute backward"]
    assert backward[0].name == "backward"
    assert [(one.module, one.operation) for one in backward[1:4]] == [
        ("Net", "PowBackward0"),
        ("Net.layers.3", "ExpBackward0"),
        ("Net.layers.3", "TanhBackward0"),
    ]
    assert all(one.stop <= backward[0].stop + 1e-9 for one in backward)
    groups = {(group.module, group.operation): group for group in trace.saved if group.outcome == "offloaded"}
    assert groups["Net.layers.2", "TanhBackward0"].nbytes == NBYTES
    assert {one.module for one in trace.slices if one.kind is SliceKind.OFFLOAD} >= {"Net.layers.0", "Net.layers.3"}


def test_handles_outlive_a_trace(path: Path, net: Net, offload: eo.Offload, disk: DiskBackend) -> None:
    graphs: list[Tensor] = []

    def forward() -> None:
        with offload:
            graphs.append(net(torch.ones(64, 64)))

    trace = traced(offload, path, forward)
    assert {group.operation for group in trace.saved} == {""}, "backward never came to them"
    assert {group.module for group in trace.saved} >= {"Net", "Net.layers.3", "Net.layers.3.inner"}
    graphs[0].backward()
    assert offload.stats().reloaded_bytes > 0
    graphs.clear()
    disk.assert_nothing_is_held()


def test_without_offload_autograd_would_hold_what_the_counter_says(
    path: Path, net: Net, offload: eo.Offload, disk: DiskBackend
) -> None:
    trace = traced_step(offload, path, net)
    # The input, and two results in each layer, of which one is the next layer's input; no parameters.
    assert max(one.without_offload for one in trace.memory) == (1 + 2 * DEPTH) * NBYTES
    assert max(one.device for one in trace.memory) <= trace.stats["resident_bytes_peak"] + NBYTES
    assert max(one.disk for one in trace.memory) >= 2 * DEPTH * NBYTES
    assert [one.seconds for one in trace.memory] == sorted(one.seconds for one in trace.memory)


@pytest.mark.parametrize(("reason", "fields"), [("region", {}), ("newest", {"keep_last_bytes": 1 << 30})])
def test_what_stays_is_counted_on_the_device(
    reason: str, fields: dict[str, int], path: Path, net: Net, disk: DiskBackend
) -> None:
    offload = disk.offload(**{"min_bytes": NBYTES, **fields})

    def work() -> None:
        with eo.no_offload() if reason == "region" else nullcontext():
            step(net, offload)

    trace = traced(offload, path, work)
    assert_sound(trace)
    assert trace.stats["kept_bytes"][reason] > 0
    assert max(one.device for one in trace.memory) == (1 + 2 * DEPTH) * NBYTES
    assert all(one.device == one.without_offload for one in trace.memory)


def test_a_full_tier_is_a_fallback(path: Path, net: Net, disk: DiskBackend) -> None:
    offload = disk.offload(disk_budget=1, min_bytes=NBYTES)
    with pytest.warns(RuntimeWarning, match="no room"):
        trace = traced_step(offload, path, net)
    assert_sound(trace)
    assert set(trace.stats["demotions"]) == {"budget"}
    assert trace.stats["kept_bytes"]["budget"] > 0


def test_a_write_that_failed_is_counted_and_shows_no_bytes_that_left(
    path: Path, monkeypatch: pytest.MonkeyPatch, net: Net, offload: eo.Offload, disk: DiskBackend
) -> None:
    def fail(slot: DiskSlot, source: Tensor) -> None:
        raise eo.TransferError("the disk is broken", errno=5, tier="disk", nbytes=slot.nbytes)

    monkeypatch.setattr(DiskSlot, "write", fail)
    with pytest.warns(RuntimeWarning, match="offloading failed"):
        trace = traced_step(offload, path, net)
    monkeypatch.undo()
    assert trace.stats["demotions"]["write_failed"] > 0
    assert trace.stats["bytes_out"] == len(of(trace, SliceKind.OFFLOAD)) == 0


def test_a_wait_is_shown_with_who_waited(
    path: Path, monkeypatch: pytest.MonkeyPatch, net: Net, disk: DiskBackend
) -> None:
    """Backward waits for a read that ends when the main thread is seen to wait."""
    from eager_offload.runtime.host import HostEvent

    waits, wait, read = threading.Event(), HostEvent.wait, DiskSlot.read

    def seen(event: HostEvent) -> None:
        if threading.current_thread() is threading.main_thread() and not event.done:
            waits.set()
        wait(event)

    def late(slot: DiskSlot, target: Tensor) -> None:
        assert waits.wait(60), "no thread waited for the read"
        read(slot, target)

    offload = disk.offload(min_bytes=NBYTES, prefetch_bytes=0)

    def work() -> None:
        with offload:
            loss = net(torch.ones(64, 64))
        offload.stats(synchronize=True)
        monkeypatch.setattr(HostEvent, "wait", seen)
        monkeypatch.setattr(DiskSlot, "read", late)
        loss.backward()
        monkeypatch.undo()

    trace = traced(offload, path, work)
    assert_sound(trace)
    (first, *_) = [one for one in trace.slices if one.kind is SliceKind.STALL]
    assert (first.name, first.module, first.operation) == ("reload", "Net", "PowBackward0")
    assert sum(one.seconds for one in trace.slices if one.kind is SliceKind.STALL) <= trace.stats["stall_seconds"] + 0.1


def test_virtual_times_are_those_of_the_simulated_device(path: Path, net: Net) -> None:
    with SimulatedBackend() as simulated:
        offload = simulated.offload(**FIELDS)
        first = len(simulated.runtime.timeline.spans)
        base = simulated.runtime.now
        trace = traced_step(offload, path, net)
        spans = simulated.runtime.timeline.spans[first:]
    expected = sorted((span.start - base, span.seconds) for span in spans if span.is_transfer)
    found = sorted(
        (one.start, one.seconds)
        for one in trace.slices
        if one.kind in (SliceKind.OFFLOAD, SliceKind.RELOAD, SliceKind.PREFETCH)
    )
    assert len(found) == len(expected) > 0
    # The trace begins a few calls of the runtime after `base`, each of which takes a microsecond of its clock.
    assert all(abs(a[0] - b[0]) < 1e-4 and abs(a[1] - b[1]) < 1e-8 for a, b in zip(found, expected, strict=True))
    stalls = sum(one.seconds for one in trace.slices if one.track == "stall")
    assert stalls == pytest.approx(trace.stats["stall_seconds"], rel=0.02, abs=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_lies_inside_the_backward_that_asks_for_it(
    path: Path, reentrant: bool, net: Net, offload: eo.Offload
) -> None:
    def work() -> None:
        x = torch.ones(64, 64, requires_grad=True)
        with offload:
            for layer in net.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
        x.sum().backward()

    trace = traced(offload, path, work)
    assert_sound(trace)
    assert len([one for one in trace.slices if one.name == "Layer"]) == 2, "forward, and again in backward"


def test_several_threads_have_tracks_of_their_own(path: Path, offload: eo.Offload) -> None:
    nets = [Net(), Net()]
    together = threading.Barrier(2)

    def train(net: Net) -> None:
        together.wait(60)
        step(net, offload)

    def work() -> None:
        threads = [threading.Thread(target=train, args=(net,)) for net in nets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    trace = traced(offload, path, work)
    assert_sound(trace)
    tracks = {one.track for one in trace.slices if one.kind is SliceKind.COMPUTE}
    assert tracks == {"compute forward", "compute forward 2", "compute backward", "compute backward 2"}
    assert {one.module.partition(".")[0] for one in trace.slices} >= {"Net", "Net 2"}


def test_wrappers_are_counted_by_what_is_inside(path: Path, disk: DiskBackend) -> None:
    offload = disk.offload(min_bytes=0)

    def leaf_of(seed: int) -> Tensor:
        return torch.full((64, 64), float(seed))

    def work() -> None:
        x = two(leaf_of).requires_grad_()
        with offload:
            loss = (x.sin() * x.cos()).exp().sum()
        loss.backward()

    trace = traced(offload, path, work)
    assert saved(trace, "offloaded") == trace.stats["offloaded_bytes"] > 0
    assert saved(trace, "shared") == trace.stats["shared_bytes"]


def test_a_second_trace_begins_anew(path: Path, net: Net, offload: eo.Offload) -> None:
    first = traced_step(offload, path, net)
    second = traced(offload, path, lambda: (step(net, offload), offload.close(), step(net, offload)))
    assert_sound(second)
    assert second.stats["saved_bytes"] == 2 * first.stats["saved_bytes"]
    assert second.stats["max_inflight_bytes"] == offload.stats().max_inflight_bytes > 0, "a window is no amount"
    assert second.advice[0].startswith("Memory ")
    trace = traced(offload, path, lambda: (offload.reset_stats(), step(net, offload)))
    assert trace.stats["saved_bytes"] == offload.stats().saved_bytes, "counting anew inside is shown as it is"


def test_a_codec_for_each_module_is_written_as_the_config_has_it(path: Path, net: Net, disk: DiskBackend) -> None:
    offload = disk.offload(codec={"*": "lossless", "layers.0": "bf16"}, min_bytes=NBYTES)
    offload.skip_in(net)
    trace = traced(offload, path, lambda: step(net, offload))
    assert trace.config == offload.config.to_dict()
    assert trace.config["codec"] == {"*": "lossless", "layers.0": "bf16"}
