"""How long the last steps of a device took, and what they took of its memory, beside what a plan has predicted.

a peak    what the device's allocator remembers, where that has grown in the step. It is the user's, who may have
          used more before, or has it start anew. A CPU has none
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.stats import Counters

#: Of so many steps the median time is told.
_MEASURED = 15


class StepMeasures:
    """Numbers; waits for nothing. Callers hold the offloader's lock."""

    def __init__(self, offloader: DeviceOffloader) -> None:
        self._runtime, self._device = offloader.runtime, offloader.device
        #: Whether a step that is to be measured is not over.
        self.is_in_step = False
        self._began: float | None = None
        self._peak: int | None = None
        self._seconds: deque[float] = deque(maxlen=_MEASURED)

    def begin(self) -> None:
        """A step begins."""
        memory = self._runtime.memory(self._device)
        self._peak = None if memory is None else memory.peak
        self._began, self.is_in_step = self._now(), True

    def end(self, counters: Counters) -> None:
        """Its backward has asked for all that it needs, which says what has come of the plan of ``counters``."""
        memory, now, outcome, self.is_in_step = self._runtime.memory(self._device), self._now(), counters.plan, False
        if outcome is None:
            return
        if memory is not None and memory.peak is not None and self._peak is not None and memory.peak > self._peak:
            outcome = replace(outcome, peak_bytes=max(memory.peak, outcome.peak_bytes or 0))
        if now is not None and self._began is not None:
            self._seconds.append(now - self._began)
            outcome = replace(outcome, step_seconds=median(self._seconds))
        counters.plan = outcome

    def _now(self) -> float | None:
        runtime = self._runtime
        return runtime.clock(runtime.current_stream(self._device)) if runtime.knows_time else None
