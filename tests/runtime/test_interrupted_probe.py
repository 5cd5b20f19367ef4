"""Measuring a link: what is timed, and what an interrupt leaves behind, since the copies go on."""

from __future__ import annotations

import weakref

import pytest

from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.runtime.accelerator_events import EventPool
from eager_offload.runtime.base import Direction, Event
from eager_offload.runtime.link_probe import LinkProbe
from tests.doubles.recording_accelerator import RecordingAccelerator
from tests.runtime.accelerator_double import DEVICE


def test_h10_the_memory_of_an_interrupted_probe_outlives_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    double = RecordingAccelerator()
    runtime = AcceleratorRuntime(double)

    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "synchronize", interrupted)
    for _ in range(2):  # the second time an event of the first is over
        with pytest.raises(KeyboardInterrupt):
            runtime.bandwidth(DEVICE, Direction.OUT)
        runtime.poll()
        ((event, held),) = runtime._kept
        assert not runtime.query(event), "it stands for the copy"
        alive = weakref.ref(held.target), weakref.ref(held.source)  # type: ignore[attr-defined]
        del event, held
        double.run_all()
        assert all(ref() is not None for ref in alive)
        runtime.poll()
        assert all(ref() is None for ref in alive)


def test_the_first_copies_are_over_before_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    double, said = RecordingAccelerator(can_time=False), list[str]()
    runtime = AcceleratorRuntime(double)
    probe = LinkProbe(runtime, double, EventPool(double), DEVICE, 1 << 12)
    synchronize = runtime.synchronize

    def noted(event: Event) -> None:
        assert not runtime.query(event), "there is something to wait for"
        said.append("waited")
        synchronize(event)

    monkeypatch.setattr(runtime, "synchronize", noted)
    double.during_copy = lambda: said.append("copy")
    assert probe.alone(Direction.OUT) > 0
    assert said == ["copy", "waited", *["copy"] * 4]
    said.clear()
    assert probe.both_ways(Direction.OUT) > 0
    assert said == [*["copy"] * 2, *["waited"] * 2, *["copy"] * 8]
