"""A KeyboardInterrupt while the link is measured: the copies go on, and their memory has to be there."""

from __future__ import annotations

import weakref

import pytest

from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.runtime.base import Direction, Event
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
        runtime.tidy()
        ((event, held),) = runtime._left_behind
        assert not runtime.query(event), "it stands for the copy"
        alive = weakref.ref(held.target), weakref.ref(held.source)  # type: ignore[attr-defined]
        del event, held
        double.run_all()
        assert all(ref() is not None for ref in alive)
        runtime.tidy()
        assert all(ref() is None for ref in alive)
