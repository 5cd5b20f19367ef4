"""How long the last steps of a device took that followed a plan, and what they took of its memory.

[Note: a step that is looked at closely]
A few of the forwards between two looks at a plan are measured closely: at some of their saves and asks the moment of
the stream that computes is noted, and at all of them how much memory is in use. What compute has waited for between two
timestamps is taken off, so that the rest is what its operators took. Nothing waits for that: timestamps are read when
the device has come to them.

    a peak    what the device's allocator remembers, where that has grown in the step. It is the user's, who may have
              used more before, or has it start anew; where it has not grown, the most that was seen at a save or an ask
              is compared with what the plan has expected to be seen there. A CPU has none: there it is by how much
              the resident bytes of the process were more at a save or an ask than when the step began
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from eager_offload.computed_plan import Stretch, Timing
from eager_offload.engine.offloader import DeviceOffloader, Wait
from eager_offload.runtime.base import DeviceMemory, Moment
from eager_offload.stats import PlanOutcome

#: Of so many steps the median time is told.
_MEASURED = 15
#: In so many stretches of about as many saves, or asks, each half of a step is measured.
_STRETCHES = 16


class StepMeasurement(NamedTuple):
    """What was found in steps that were measured closely."""

    seen_bytes: int | None = None
    """The most that was in use at a save or an ask; ``None`` where the device does not tell."""
    grown_bytes: int | None = None
    """Of a process: by how much that was more than when the step began; the median of the steps."""
    timing: Timing | None = None


class _Mark(NamedTuple):
    """A moment of a step."""

    save: int
    """The save that it is at, or that is asked for; -1 where the forward begins."""
    is_ask: bool
    moment: Moment
    waits: int
    """How many waits there were until then."""


class _Close:
    """A step that is measured closely."""

    def __init__(self, moment: Moment, began_bytes: int) -> None:
        #: In use when it began.
        self.began_bytes = began_bytes
        self.marks = [_Mark(-1, False, moment, 0)]
        self.waits: list[Wait] = []
        #: The forward, once it has begun.
        self.run: object = None
        self.seen_bytes: int | None = None
        self.grown_bytes: int | None = None


class StepMeasures:
    """Numbers; waits for nothing. Callers hold the offloader's lock."""

    def __init__(self, offloader: DeviceOffloader) -> None:
        self._offloader, self._runtime, self._device = offloader, offloader.runtime, offloader.device
        self._began: Moment | None = None
        self._peak: int | None = None
        #: From when to when steps lasted that are over to the host; a device may be in the midst of them.
        self._steps: deque[tuple[Moment, Moment]] = deque(maxlen=_MEASURED)
        self._seconds: deque[float] = deque(maxlen=_MEASURED)
        #: In the last step that was measured, by what the device remembers; ``None`` where that is not known.
        self.peak: int | None = None
        self._close: _Close | None = None
        #: Whether saves and asks are to be noted; an attribute, since each of them asks.
        self.is_close = False
        self._over: list[_Close] = []

    def begin(self, *, closely: bool) -> None:
        """A forward begins."""
        memory = self._runtime.memory(self._device)
        self._peak = None if memory is None else memory.peak
        self.drop()
        self._began = None if self._offloader.is_capturing() else self._moment()
        if closely and self._began is not None and self._offloader.waits is None:
            self._close, self.is_close = _Close(self._began, self._used_besides(memory)), True
            self._offloader.waits = self._close.waits

    def drop(self) -> None:
        """What goes on is not measured closely any more."""
        if self._close is not None:
            self._close, self.is_close, self._offloader.waits = None, False, None

    def saw(self, run: object, number: int, place: int, count: int, *, is_ask: bool) -> None:
        """A forward that follows a plan has saved something, or its backward has asked for it.

        Args:
            number: of the save.
            place: of the save among the saves, or of the ask among the asks.
            count: how many of them there are.
        """
        close = self._close
        if close is None:
            return
        if close.run is None:
            close.run = run
        elif close.run is not run:
            self.drop()  # of a forward that another has come between
            return
        every = max(count // _STRETCHES, 1)
        if (place + 1) % every == 0 or place in (0, count - 1):
            close.marks.append(_Mark(number, is_ask, self._moment(), len(close.waits)))
        memory = self._runtime.memory(self._device)
        if memory is not None and memory.peak is not None:
            close.seen_bytes = max(memory.used, close.seen_bytes or 0)
        elif memory is not None:  # of a process, in which much besides is in use
            close.grown_bytes = max(self._used_besides(memory) - close.began_bytes, close.grown_bytes or 0)

    def end(self, outcome: PlanOutcome) -> PlanOutcome:
        """Its backward has asked for all that it needs; ``outcome`` with what that says."""
        memory, self.peak = self._runtime.memory(self._device), None
        if memory is not None and memory.peak is not None and self._peak is not None and memory.peak > self._peak:
            self.peak = memory.peak
            outcome = replace(outcome, peak_bytes=max(memory.peak, outcome.peak_bytes or 0))
        if self._began is not None:
            self._steps.append((self._began, self._moment()))
            self._began = None
        self._read_steps()
        if self._seconds:
            outcome = replace(outcome, step_seconds=median(self._seconds))
        if self._close is not None:
            self._over.append(self._close)
            self.drop()
        return outcome

    def take(self) -> StepMeasurement:
        """What was found since the last time."""
        over, self._over = self._over, []
        seen = [one.seen_bytes for one in over if one.seen_bytes is not None]
        steps = [step for one in over if (step := self._stretches(one)) is not None]
        alike = [step for step in steps if [one[:2] for one in step[0]] == [one[:2] for one in steps[-1][0]]]
        timing = None
        if alike:
            stretches = (
                Stretch(every[0].save, every[0].is_ask, median(one.seconds for one in every))
                for every in zip(*(step[0] for step in alike), strict=True)
            )
            rates = self._offloader.out_rate.value, self._offloader.in_rate.value
            timing = Timing(tuple(stretches), median(waits for _, waits in alike), *rates)
        grown = [one.grown_bytes for one in over if one.grown_bytes is not None]
        return StepMeasurement(max(seen, default=None), int(median(grown)) if grown else None, timing)

    def restart(self) -> None:
        """Another plan is followed from here on."""
        self._steps.clear()
        self._seconds.clear()
        self._over.clear()
        self.drop()

    def _stretches(self, close: _Close) -> tuple[Sequence[Stretch], float] | None:
        """What compute took until each moment, and what it has waited in all; ``None`` where that is not known."""
        between = self._runtime.seconds_between
        waits = [between(*wait) for wait in close.waits]
        found, waited = list[Stretch](), 0.0
        for before, after in zip(close.marks, close.marks[1:], strict=False):
            seconds, own = between(before.moment, after.moment), waits[before.waits : after.waits]
            if seconds is None or None in own:
                return None
            exposed = sum(one for one in own if one is not None)
            waited += exposed
            found.append(Stretch(after.save, after.is_ask, max(seconds - exposed, 0.0)))
        tells_time = any(one.seconds for one in found)
        return (found, waited) if tells_time else None

    def _used_besides(self, memory: DeviceMemory | None) -> int:
        """Bytes that are in use besides what has moved to memory of the host, which on a CPU is the same."""
        moved = sum(tier.used_bytes for tier in self._offloader.tiers if tier.name == "host")
        return 0 if memory is None else memory.used - moved

    def _read_steps(self) -> None:
        """Takes up how long the steps lasted that the device has come to the end of."""
        while self._steps and (seconds := self._runtime.seconds_between(*self._steps[0])) is not None:
            self._steps.popleft()
            if seconds:  # a device that does not tell the time says 0
                self._seconds.append(seconds)

    def _moment(self) -> Moment:
        return self._runtime.moment(self._runtime.current_stream(self._device))
