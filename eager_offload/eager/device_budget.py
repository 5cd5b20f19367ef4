"""A budget of a device: as many of the newest saved bytes stay as it has room for, and no more.

[Note: a budget that is kept]
What stays of the newest bytes raises the device's peak by at most as much. So the first forward keeps what it would
keep anyway, and each one after it is given most of what the last one has left of the budget. What moves then is the
least that fits, and it is the oldest, which has the longest time to travel. What has come to be used since a forward
began, such as the state that an optimizer makes in its first step, is taken off before.

Where a peak is above the budget, less stays from the next forward on: peaks differ from step to step, by what is on its
way. It is not tried again before many forwards have kept to the budget, and each time after twice as many. Small
changes are not made, since what a step does would have to be learnt anew.

    a peak       what the device remembers, if that has grown since the forward began; else the most that was seen
    is seen      at each save and unpack of the first forwards, at one in eight of the later ones, when the context is
                 left, and at the end of a backward that follows a plan. What is used between steps, by an optimizer or
                 an evaluation, is not seen: whatever of the saved tensors had stayed would not change it
"""

from __future__ import annotations

from dataclasses import dataclass

from eager_offload.config import size_literal, size_text
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.errors import ConfigError
from eager_offload.runtime.base import DeviceMemory

__all__ = ["Allowance", "DeviceBudget"]

#: Of what is free when it is first used, the part that ``"auto"`` takes: allocators round and fragment.
_AUTO_PART = 0.9
#: A change of less than this part of the budget is not made, and so much of it is left.
_SMALL_PART = 50
#: The part of what is left that a forward is given.
_NEXT_PART = 0.9
#: After so many forwards within the budget more than what was too much is tried again; at most after so many.
_PATIENCE, _MOST_PATIENCE = 16, 1 << 12
#: In how many forwards every save and unpack is seen, and of the later ones one in so many.
_FIRST, _NOW_AND_THEN = 8, 8


class Allowance:
    """How many of the newest saved bytes may stay; numbers only, like ``schedule.py``.

    Args:
        budget: bytes of the device.
        keep: bytes that stay in the first forward.
    """

    def __init__(self, budget: int, keep: int) -> None:
        self.budget = budget
        self.keep = keep
        #: The most that may stay, since more was too much; how many forwards have kept to the budget since.
        self._most: int | None = None
        self._within = 0
        self._patience = _PATIENCE

    def adapt(self, peak: int, growth: int, *, moved: bool, lasts: bool) -> None:
        """A forward is over that kept ``keep`` bytes.

        Args:
            peak: of the device, in it.
            growth: how many bytes more are used now than when it began.
            moved: whether anything has left in it.
            lasts: whether that is all its own, and not what another thread has going.
        """
        small = self.budget // _SMALL_PART
        if peak > self.budget:
            self.keep = self._most = max(self.keep - (peak - self.budget) - small, 0)
            self._patience, self._within = min(2 * self._patience, _MOST_PATIENCE), 0
            return
        self._within += 1
        if self._within >= self._patience:
            self._most = None
        left = self.budget - small - peak - max(growth, 0)
        if left < 0 and lasts:
            self.keep = max(self.keep + left, 0)
        elif moved:
            keep = self.keep + int(left * _NEXT_PART)
            keep = keep if self._most is None else min(keep, self._most)
            if keep - self.keep >= small:
                self.keep = keep


@dataclass(slots=True)
class _Window:
    """One forward, and what comes until the next one begins; bytes."""

    began: DeviceMemory
    saved: int
    offloaded: int
    peak: int = 0


class DeviceBudget:
    """The budget of one device. Callers hold the offloader's lock.

    Args:
        budget: bytes, or ``"auto"``.
        keep: bytes that stay in the first forward.

    Raises:
        ConfigError: the device does not tell how much of its memory is used.
    """

    def __init__(self, offloader: DeviceOffloader, budget: int | str, keep: int) -> None:
        self._offloader = offloader
        memory = offloader.runtime.memory(offloader.device)
        if memory is None:
            raise ConfigError(
                f"device_budget={budget!r} is not accepted for {offloader.device}, which does not tell how much of its "
                "memory is used: leave it out, and bound what is on the device with keep_last_bytes, "
                "max_inflight_bytes and prefetch_bytes"
            )
        free = 0 if isinstance(budget, int) else offloader.runtime.free_memory(offloader.device)
        nbytes = budget if isinstance(budget, int) else memory.used + int(free * _AUTO_PART)
        self._allowance = Allowance(nbytes, keep)
        self._forwards = self._calls = 0
        self._has_told = False
        self._window = self._new_window(memory)

    @property
    def keep(self) -> int:
        """Bytes of the newest saved tensors that stay."""
        return self._allowance.keep

    def note_call(self) -> None:
        """Something is saved or unpacked."""
        self._calls += 1
        if self._forwards <= _FIRST or self._calls % _NOW_AND_THEN == 0:
            self.look()

    def look(self) -> None:
        """Sees how much is used now, and was since the forward began."""
        window, memory = self._window, self._offloader.runtime.memory(self._offloader.device)
        assert memory is not None
        seen = memory.used
        if memory.peak is not None and memory.peak > (window.began.peak or 0):
            seen = memory.peak
        if seen > window.peak:
            window.peak = seen
            counters = self._offloader.accounts.counters
            counters.device_memory_peak = max(counters.device_memory_peak, seen)

    def begin(self) -> bool:
        """A forward begins; whether other bytes stay from here on than in the last one."""
        now = self._offloader.runtime.memory(self._offloader.device)
        assert now is not None
        last, before, counters = self._window, self.keep, self._offloader.accounts.counters
        if last.peak and counters.saved_bytes != last.saved:
            moved = counters.offloaded_bytes != last.offloaded
            if last.peak > self._allowance.budget:
                counters.demote("over_budget")
                if before == 0 and not self._has_told:
                    self._tell(last.peak, moved=moved)
            growth = now.used - last.began.used
            self._allowance.adapt(last.peak, growth, moved=moved, lasts=self._forwards <= _FIRST)
        self._window = self._new_window(now)
        return self.keep != before

    def _new_window(self, now: DeviceMemory) -> _Window:
        counters = self._offloader.accounts.counters
        self._forwards += 1
        counters.device_budget, counters.keep_last_bytes = self._allowance.budget, self.keep
        return _Window(now, counters.saved_bytes, counters.offloaded_bytes)

    def _tell(self, peak: int, *, moved: bool) -> None:
        self._has_told = True
        smaller = "max_inflight_bytes, prefetch_bytes, " if moved else ""
        self._offloader.warn(
            f"device_budget={size_literal(self._allowance.budget)} is not kept: the peak on {self._offloader.device} "
            f"was {size_text(peak)}, with nothing kept that may leave. The rest is the model's own, smaller than "
            f"min_bytes, or on its way. To need less, take a smaller {smaller}min_bytes or batch, or checkpointing; "
            "else raise device_budget"
        )
