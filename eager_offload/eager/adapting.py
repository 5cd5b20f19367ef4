"""A computed plan that is followed: what its steps take, beside its budget and what it has predicted.

[Note: adapting]
What a planner could not know (an optimizer's states, memory that kernels take for themselves) shows in the peak of the
device. After every 16th forward that has followed the plan to its end, the highest peak of these is looked at:

    above the budget       counted as ``over_budget``; the plan is made anew for a device on which as much more is in
                           use as the peak was above the predicted one, so that less stays
    5 % below prediction   made anew with as much less in use, and followed if its step is 2 % shorter

To make it takes up to seconds. So that is done where a thread enters its outermost ``with``, which no lock is held for
and no operator waits in; the forward that begins there is the first one to follow it. What is made in vain is made
ever more rarely. Where the device does not remember a peak, or had more in use before, nothing is known and nothing
changes.
"""

from __future__ import annotations

from typing import NamedTuple

from eager_offload.step_plan import ComputedPlan

__all__ = ["Adapting", "Request"]

#: After so many forwards it is looked at.
_EVERY = 16
#: A peak that is lower than predicted by less than one part in so many changes nothing.
_LOWER = 20


class Request(NamedTuple):
    """What is to be made anew."""

    plan: ComputedPlan
    surplus: int
    """Bytes by which the peak was above the predicted one."""


class Adapting:
    """Says when a plan is to be made anew; numbers only, like ``schedule.py``. Callers hold the offloader's lock."""

    def __init__(self, plan: ComputedPlan) -> None:
        self._plan = plan
        self._forwards = 0
        self._peak: int | None = None
        self._request: Request | None = None
        #: Of how many looks nothing comes after one that was in vain, and by now.
        self._next_pause = 1
        self._pause = 0

    @property
    def is_due(self) -> bool:
        """Whether there is a request. No lock is needed to ask."""
        return self._request is not None

    def note(self, peak: int | None) -> bool:
        """A forward has followed the plan to its end; whether its budget was exceeded, as far as this is looked at.

        Args:
            peak: of the device in it; ``None`` where that is not known.
        """
        if peak is not None:
            self._peak = max(peak, self._peak or 0)
        self._forwards += 1
        if self._forwards % _EVERY or self._peak is None:
            return False
        peak, self._peak = self._peak, None
        surplus, is_over = peak - self._plan.peak_bytes, peak > self._plan.device_budget
        if (is_over and surplus > 0) or -surplus * _LOWER > self._plan.peak_bytes:
            if self._pause:
                self._pause -= 1
            else:
                self._request = Request(self._plan, surplus)
        return is_over

    def take(self) -> Request | None:
        """The request, which is the caller's from here on."""
        request, self._request = self._request, None
        return request

    def made(self, plan: ComputedPlan | None) -> None:
        """What came of a request; ``None``: nothing that is better."""
        if plan is None:
            self._pause, self._next_pause = self._next_pause, 2 * self._next_pause
        else:
            self._plan, self._pause, self._next_pause, self._forwards, self._peak = plan, 0, 1, 0, None
