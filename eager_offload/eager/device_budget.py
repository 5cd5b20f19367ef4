"""A budget of a device: as many of the newest saved bytes stay as it has room for, and no more.

[Note: a budget that is kept]
What stays of the newest bytes raises the device's peak by at most as much. So what else a peak is made of, the *rest*,
is measured in each forward, and the next one keeps what the budget has left beside the highest rest of the last ones:
peaks differ from step to step, by what is on its way and by what is trained. What moves then is the least that fits,
and it is the oldest, which has the longest time to travel. What has come to be used since a forward began, such as the
state that an optimizer makes in its first step, is taken off before. Small changes are not made, since what a step does
would have to be learnt anew.

    a peak       what the device remembers, if that has grown since the forward began; else the most that was seen
    is seen      at each save and unpack of the first forwards and at some of the later ones, when the context is left,
                 and where a backward that follows a plan begins and ends. What is used between steps, by an optimizer
                 or an evaluation, is not seen: whatever of the saved tensors had stayed would not change it
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from eager_offload.config import size_literal, size_text
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.errors import ConfigError
from eager_offload.runtime.base import DeviceMemory

#: Of what is free when it is first used, the part that ``"auto"`` takes: allocators round and fragment.
_AUTO_PART = 0.9
#: In the first forward so much of what is left of the budget stays: what else it will take is not known yet.
_FIRST_PART = 0.25
#: The part of what is left that a forward is given.
_NEXT_PART = 0.9
#: A change of less than this part of the budget is not made, and so much of it is left.
_SMALL_PART = 50
#: Of how many forwards the highest rest counts.
_REMEMBERED = 64
#: In how many forwards every save and unpack is seen, and of the later ones one in so many. That is odd, so that it is
#: not always the same ones.
_FIRST, _NOW_AND_THEN = 8, 7


class Allowance:
    """How many of the newest saved bytes may stay; numbers only, like ``schedule.py``.

    Args:
        budget: bytes of the device.
        keep: bytes that may stay in the first forward.
    """

    def __init__(self, budget: int, keep: int) -> None:
        self.budget = budget
        self.keep = keep
        self._rests: deque[int] = deque(maxlen=_REMEMBERED)

    def adapt(self, peak: int, kept: int, growth: int = 0, *, moved: bool) -> None:
        """A forward is over.

        Args:
            peak: of the device, in it.
            kept: the newest bytes that really stayed in it; at most ``keep`` of them count.
            growth: how many bytes more are used from now on than when it began.
            moved: whether anything has left in it.
        """
        small, kept = self.budget // _SMALL_PART, min(kept, self.keep)
        self._rests.append(max(peak - kept, 0))
        most = max(self.budget - small - max(self._rests) - max(growth, 0), 0)
        if most + small < self.keep:
            self.keep = most
        elif moved and most - self.keep >= small:
            self.keep += int((most - self.keep) * _NEXT_PART)


@dataclass(slots=True)
class _Window:
    """One forward, and what comes until the next one begins; bytes."""

    began: DeviceMemory
    #: How many calls there were before, and how many bytes had left.
    calls: int
    departed: int
    #: The most that was used in it, and that stayed; ``None`` where that was not seen.
    peak: int = 0
    kept: int | None = None


class DeviceBudget:
    """The budget of one device. Callers hold the offloader's lock.

    Args:
        budget: bytes, or ``"auto"``.
        keep: the most that may stay in the first forward, bytes.

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
        self._allowance = Allowance(nbytes, min(keep, int(max(nbytes - memory.used, 0) * _FIRST_PART)))
        #: How many forwards were learnt from, and how many saves and unpacks there were.
        self._forwards = self._calls = 0
        #: The warning that it is not kept, until it is given; ``None`` once it was.
        self._unkept: str | None = ""
        self._window = self._new_window(memory)

    @property
    def keep(self) -> int:
        """Bytes of the newest saved tensors that may stay."""
        return self._allowance.keep

    def note_call(self) -> bool:
        """Something is saved or unpacked; whether to ``look``."""
        self._calls += 1
        return self._forwards < _FIRST or self._calls % _NOW_AND_THEN == 0

    def look(self, kept: int | None = None) -> None:
        """Sees how much is used now, and was since the forward began.

        Args:
            kept: bytes of the newest that stay, at a moment when nothing else waits to leave.
        """
        window, memory = self._window, self._offloader.runtime.memory(self._offloader.device)
        assert memory is not None
        seen = memory.used
        if memory.peak is not None and memory.peak > (window.began.peak or 0):
            seen = memory.peak
        window.peak = max(window.peak, seen)
        if kept is not None:
            window.kept = max(window.kept or 0, kept)
        self._tell_counters(seen)

    def begin(self) -> None:
        """A forward begins."""
        now = self._offloader.runtime.memory(self._offloader.device)
        assert now is not None
        last, before = self._window, self.keep
        if last.peak and self._calls > last.calls:
            # Later it may be what another thread has going.
            growth = now.used - last.began.used if self._forwards < _FIRST else 0
            moved = self._departed != last.departed
            kept = before if last.kept is None else min(last.kept, before)
            self._forwards += 1
            if last.peak > self._allowance.budget:
                self._offloader.accounts.counters.demote("over_budget")
                if kept == 0 and self._unkept == "":
                    self._unkept = self._why(last.peak, moved=moved)
            self._allowance.adapt(last.peak, kept, growth, moved=moved)
        self._window = self._new_window(now)

    def warning(self) -> str:
        """What the user is to be told, once; empty where there is nothing."""
        if not self._unkept:
            return ""
        warning, self._unkept = self._unkept, None
        return warning

    @property
    def _departed(self) -> int:
        """The bytes that have left so far, or are about to."""
        return self._offloader.out_rate.nbytes + self._offloader.inflight_bytes

    def _new_window(self, now: DeviceMemory) -> _Window:
        self._tell_counters(0)
        return _Window(now, self._calls, self._departed)

    def _tell_counters(self, seen: int) -> None:
        counters = self._offloader.accounts.counters
        counters.device_budget = self._allowance.budget
        counters.device_memory_peak = max(counters.device_memory_peak, seen)

    def _why(self, peak: int, *, moved: bool) -> str:
        device = self._offloader.device
        smaller = "max_inflight_bytes, prefetch_bytes, " if moved else ""
        freed = ", or freed memory that stays with the process (see eo.release_freed_memory)"
        return (
            f"device_budget={size_literal(self._allowance.budget)} is not kept: the peak on {device} was "
            f"{size_text(peak)}, with nothing kept that may leave. The rest is the model's own, smaller than "
            f"min_bytes, on its way{freed if device.type == 'cpu' else ''}. To need less, take a smaller {smaller}"
            "min_bytes or batch, or checkpointing; else raise device_budget"
        )
