"""How long the last steps of a device took, and what they took of its memory, beside what a plan has predicted.

a peak    what the device's allocator remembers, where that has grown in the step. It is the user's, who may have
          used more before, or has it start anew. A CPU has none
a time    from a moment where the step began to one where it was over to the host, read when the device has come to both
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from eager_offload.engine.transfers import Transfers
from eager_offload.runtime.base import Moment
from eager_offload.stats import Counters

#: Of so many steps the median time is told.
_MEASURED = 15


class StepMeasures:
    """Numbers; waits for nothing."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers, self._runtime, self._device = transfers, transfers.runtime, transfers.device
        #: Whether a step that is to be measured is not over.
        self.is_in_step = False
        self._began: Moment | None = None
        self._peak: int | None = None
        #: From when to when steps lasted that are over to the host; a device may be in the midst of them.
        self._steps: deque[tuple[Moment, Moment]] = deque(maxlen=_MEASURED)
        self._seconds: deque[float] = deque(maxlen=_MEASURED)

    def begin(self) -> None:
        """A step begins."""
        memory = self._runtime.memory(self._device)
        self._peak = None if memory is None else memory.peak
        self._began, self.is_in_step = None if self._transfers.is_capturing() else self._moment(), True

    def end(self, counters: Counters) -> None:
        """Its backward has asked for all that it needs, which says what has come of the plan of ``counters``."""
        memory, outcome, self.is_in_step = self._runtime.memory(self._device), counters.plan, False
        if outcome is None:
            return
        if memory is not None and memory.peak is not None and self._peak is not None and memory.peak > self._peak:
            outcome = replace(outcome, peak_bytes=max(memory.peak, outcome.peak_bytes or 0))
        if self._began is not None:
            self._steps.append((self._began, self._moment()))
        self._read_steps()
        if self._seconds:
            outcome = replace(outcome, step_seconds=median(self._seconds))
        counters.plan = outcome

    def _read_steps(self) -> None:
        """Takes up how long the steps lasted that the device has come to the end of."""
        while self._steps and (seconds := self._runtime.seconds_between(*self._steps[0])) is not None:
            self._steps.popleft()
            if seconds:  # a device that does not tell the time says 0
                self._seconds.append(seconds)

    def _moment(self) -> Moment:
        return self._runtime.moment(self._runtime.current_stream(self._device))
