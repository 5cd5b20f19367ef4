"""A computed plan that is followed: what its steps take, beside its budget and what it has predicted.

[Note: adapting]
What a planner could not know (an optimizer's states, memory that kernels take for themselves, how fast kernels are)
shows in the peak of the device and in how long its operators take: see ``measuring.py``. After every 16th forward that
has followed the plan to its end, both are looked at:

    above the budget       counted as ``over_budget``; the plan is made anew for a device on which as much more is in
                           use as the peak was above the predicted one, so that less stays
    5 % below prediction   made anew with as much less in use
    times 5 % off          made anew with those that were measured, of operators and of the link

What moves changes only where the peak has to be lower, or where the step gets 2 % shorter.

To make it takes up to seconds. So that is done where a thread enters its outermost ``with``, which no lock is held for
and no operator waits in; the forward that begins there is the first one to follow it. What is made in vain is made
ever more rarely. Where the device tells neither peak nor time, nothing changes.

On a CPU the peak is the predicted one and what the process has grown by beyond what was predicted. It says only that
more is in use, since a C library may keep what is freed, and what a process takes for itself is no part of a plan: so
less than 5 % of the peak and 64 MiB are no difference.
"""

from __future__ import annotations

from typing import NamedTuple

from eager_offload.computed_plan import Adapted, ComputedPlan, Timing
from eager_offload.config import MIB
from eager_offload.eager.measuring import StepMeasurement

#: After so many forwards it is looked at.
_EVERY = 16
#: A peak that is lower than predicted by less than one part in so many changes nothing.
_LOWER = 20
#: Bytes that a process may take for itself in a step: of threads, of code that is loaded, and what lies idle in the
#: pool that serves reloads on a CPU.
_OF_A_PROCESS = 64 * MIB
#: The forwards before it that are measured closely.
_CLOSELY = 3


class Request(NamedTuple):
    """What is to be made anew."""

    plan: ComputedPlan
    surplus: int
    """Bytes by which the peak was above the predicted one."""
    timing: Timing | None
    """What was measured, where it is off."""


class Adapting:
    """Says when a plan is to be made anew; numbers only, like ``schedule.py``. Callers hold the offloader's lock."""

    def __init__(self, plan: ComputedPlan) -> None:
        self._plan = plan
        self._forwards = 0
        self._peak: int | None = None
        self._request: Request | None = None
        #: Of the last steps that were looked at, where the device is a CPU.
        self.process_peak: int | None = None
        #: Of how many looks nothing comes after one that was in vain, and by now.
        self._next_pause = 1
        self._pause = 0

    @property
    def is_due(self) -> bool:
        """Whether there is a request. No lock is needed to ask."""
        return self._request is not None

    @property
    def looks_closely(self) -> bool:
        """Whether a forward that begins now is to be measured closely."""
        return self._forwards % _EVERY >= _EVERY - _CLOSELY

    @property
    def is_last(self) -> bool:
        """Whether what was measured is asked for at the next ``note``."""
        return (self._forwards + 1) % _EVERY == 0

    def note(self, peak: int | None, measured: StepMeasurement | None = None) -> bool:
        """A forward has followed the plan to its end; whether its budget was exceeded, as far as this is looked at.

        Args:
            peak: of the device in it; ``None`` where that is not known.
            measured: what was found in those that were measured closely, where ``is_last``.
        """
        if peak is not None:
            self._peak = max(peak, self._peak or 0)
        self._forwards += 1
        if self._forwards % _EVERY:
            return False
        plan, measured = self._plan, measured or StepMeasurement()
        peak, self._peak = self._peak, None
        if peak is None and measured.seen_bytes is not None and plan.seen_bytes is not None:
            peak = plan.peak_bytes + measured.seen_bytes - plan.seen_bytes
        if measured.grown_bytes is not None and plan.grown_bytes is not None:
            more = measured.grown_bytes - plan.grown_bytes
            self.process_peak = plan.peak_bytes + more
            peak = self.process_peak if more > plan.peak_bytes // _LOWER + _OF_A_PROCESS else None
        surplus, is_over = 0 if peak is None else peak - plan.peak_bytes, peak is not None and peak > plan.device_budget
        if surplus < 0 and -surplus * _LOWER <= plan.peak_bytes:
            surplus = 0  # less than that is no difference
        timing = measured.timing if measured.timing is not None and plan.is_off(measured.timing) else None
        if surplus < 0 or timing is not None or (is_over and surplus > 0):
            if self._pause:
                self._pause -= 1
            else:
                self._request = Request(plan, surplus, timing)
        return is_over

    def take(self) -> Request | None:
        """The request, which is the caller's from here on."""
        request, self._request = self._request, None
        return request

    def made(self, found: Adapted | None) -> None:
        """What came of a request; ``None``: nothing that is better."""
        if found is not None:
            self._plan, self._forwards, self._peak, self.process_peak = found.plan, 0, None, None
        if found is not None and found.is_other:
            self._pause, self._next_pause = 0, 1
        else:
            self._pause, self._next_pause = self._next_pause, 2 * self._next_pause
