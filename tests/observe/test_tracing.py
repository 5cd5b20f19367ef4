"""A trace of real steps: what is in it, that its numbers are those of the stats, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import eager_offload as eo
from eager_offload.observe.timeline import SliceKind
from eager_offload.observe.trace import read_trace
from tests.hazards.backends import Backend, DiskBackend, SimulatedBackend
from tests.observe.steps import DEPTH, FIELDS, NBYTES, SAVED, Net, assert_sound, of, step, traced, traced_step
from tests.threads import collect

pytestmark = pytest.mark.filterwarnings("ignore:eager_offload. nothing of this Offload:RuntimeWarning")

_TRANSFERS = (SliceKind.OFFLOAD, SliceKind.RELOAD, SliceKind.PREFETCH)


@pytest.mark.parametrize("kind", [DiskBackend, SimulatedBackend])
def test_a_step_is_shown_whole_and_is_the_same_step(kind: type[Backend], path: Path, net: Net) -> None:
    with kind() as backend:
        trace = traced_step(backend.offload(**FIELDS), path, net)
        assert_sound(trace)
        assert trace.stats["bytes_out"] == trace.stats["offloaded_bytes"] == SAVED
        assert trace.stats["bytes_in"] > 0
        assert of(trace, SliceKind.PREFETCH), "the next ones came early"
        assert max(one.without_offload for one in trace.memory) == SAVED, "without parameters"
        assert max(one.device for one in trace.memory) <= trace.stats["resident_bytes_peak"] + NBYTES
        if kind is DiskBackend:
            assert max(one.disk for one in trace.memory) >= 2 * DEPTH * NBYTES
        assert {one.device for one in trace.slices} == {"cpu"}
        assert trace.versions["torch"] == torch.__version__
        backend.assert_nothing_is_held()


def test_forward_and_backward_are_named_by_module_and_operation(path: Path, net: Net, offload: eo.Offload) -> None:
    trace = traced_step(offload, path, net)
    forward = [one.name for one in trace.slices if one.track == "compute forward"]
    assert forward == ["Net", *(name for n in range(DEPTH) for name in (f"Net.layers.{n}", f"Net.layers.{n}.inner"))]
    backward = [one for one in trace.slices if one.track == "compute backward"]
    assert backward[0].name == "backward"
    assert [(one.module, one.operation) for one in backward[1:4]] == [
        ("Net", "PowBackward0"),
        ("Net.layers.3", "ExpBackward0"),
        ("Net.layers.3", "TanhBackward0"),
    ]
    groups = {(group.module, group.operation): group for group in trace.saved if group.outcome == "offloaded"}
    assert groups["Net.layers.2", "TanhBackward0"].nbytes == NBYTES
    assert {one.module for one in of(trace, SliceKind.OFFLOAD)} >= {"Net.layers.0", "Net.layers.3"}


def test_times_and_stalls_are_those_of_the_simulated_device(path: Path, net: Net) -> None:
    with SimulatedBackend() as simulated:
        offload = simulated.offload(**FIELDS | {"prefetch_bytes": 0})
        step(net, offload)
        first, base = len(simulated.runtime.timeline.spans), simulated.runtime.now
        trace = traced_step(offload, path, net)
        spans = simulated.runtime.timeline.spans[first:]
    expected = sorted((span.start - base, span.seconds) for span in spans if span.is_transfer)
    found = sorted((one.start, one.seconds) for one in of(trace, *_TRANSFERS))
    assert len(found) == len(expected) > 0
    # The trace begins a few calls of the runtime after `base`, each of which takes a microsecond of its clock.
    assert all(abs(a[0] - b[0]) < 1e-4 and abs(a[1] - b[1]) < 1e-8 for a, b in zip(found, expected, strict=True))
    stalls = of(trace, SliceKind.STALL)
    assert sum(one.seconds for one in stalls) == pytest.approx(trace.stats["stall_seconds"], rel=0.02, abs=1e-9)
    assert ("reload", "Net.layers.2", "ExpBackward0") in {(one.name, one.module, one.operation) for one in stalls}


@pytest.mark.parametrize(
    ("reason", "fields"),
    [("region", {}), ("newest", {"keep_last_bytes": 1 << 30}), ("budget", {"disk_budget": 1}), ("failed", {})],
)
@pytest.mark.filterwarnings(
    "ignore:.*(no room for|offloading failed)", "ignore:eager_offload. nothing moved:RuntimeWarning"
)
def test_what_stays_is_counted_on_the_device(
    reason: str, fields: dict[str, Any], path: Path, net: Net, disk: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise eo.TransferError("the disk is broken", errno=5, tier="disk", nbytes=1)

    offload = disk.offload(**{"min_bytes": NBYTES, **fields})
    if reason == "failed":
        monkeypatch.setattr("eager_offload.tiers.disk.DiskSlot.write", fail)
    with eo.no_offload() if reason == "region" else nullcontext():
        trace = traced_step(offload, path, net)
    monkeypatch.undo()
    assert trace.stats["bytes_out"] == len(of(trace, SliceKind.OFFLOAD)) == 0
    assert max(one.without_offload for one in trace.memory) == SAVED
    assert set(trace.stats["fallbacks"]) == {"budget": {"budget"}, "failed": {"write_failed"}}.get(reason, set())
    if reason != "failed":
        assert_sound(trace)
        assert trace.stats["kept_bytes"][reason] > 0
        assert max(one.device for one in trace.memory) == SAVED


def test_handles_outlive_a_trace_and_hold_no_offload(path: Path, net: Net) -> None:
    eo.Offload(tier="disk", **FIELDS)  # the first of a configuration makes the pair of hooks
    collect()
    gc.disable()
    try:
        offload = eo.Offload(tier="disk", **FIELDS)
        with offload.trace(path), offload:
            loss = net(torch.ones(64, 64))
        offload.close()
        alive = weakref.ref(offload)
        del offload
        assert alive() is None
        loss.backward()
    finally:
        gc.enable()
    trace = read_trace(path)
    assert trace.stats["bytes_out"] > 0
    assert {group.operation for group in trace.saved} == {""}, "backward never came to them"
    assert {group.module for group in trace.saved} >= {"Net", "Net.layers.3", "Net.layers.3.inner"}


def test_what_is_too_much_is_counted_and_the_last_sample_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch, net: Net, offload: eo.Offload
) -> None:
    monkeypatch.setattr("eager_offload.observe.timeline.MOST", 5)
    trace = traced_step(offload, path, net)
    assert trace.stats["bytes_out"] > 0
    assert sum(group.count for group in trace.saved) == len(trace.memory) == 5
    assert trace.memory[-1][1:] == (0, 0, 0, 0)
    assert trace.dropped > trace.stats["saved_tensors"] - 5 > 0


def test_a_second_trace_begins_anew(path: Path, net: Net, offload: eo.Offload) -> None:
    first = traced_step(offload, path, net)
    second = traced(offload, path, lambda: (step(net, offload), offload.close(), step(net, offload)))
    assert_sound(second)
    assert second.stats["saved_bytes"] == 2 * first.stats["saved_bytes"]
    assert second.stats["max_inflight_bytes"] == offload.stats().max_inflight_bytes > 0, "a window is no amount"
    assert second.advice[0].startswith("Memory ")
    third = traced(offload, path, lambda: (offload.reset_stats(), step(net, offload)))
    assert third.stats["saved_bytes"] == offload.stats().saved_bytes, "counting anew inside is shown as it is"
