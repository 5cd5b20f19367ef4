"""A budget of a device: as many of the newest saved bytes stay as it has room for, and no more.

[Note: a budget that is kept]
What stays of the newest bytes raises the device's peak by at most as much. So what else a peak is made of, the *rest*,
is measured in each forward, and the next one keeps what the budget has left beside the highest rest of the last ones:
peaks differ from step to step, by what is on its way and by what is trained. What moves then is the least that fits,
and it is the oldest, which has the longest time to travel. What has come to be used since a forward began, such as the
state that an optimizer makes in its first step, is taken off before. Small changes are not made, since what a step does
would have to be learnt anew.

    a peak       what the device remembers, if that has grown since the forward began. If it has not, the peak was at
                 most what is remembered. Where that leaves no room to tell more, since about as much as the budget was
                 used before, or more, the most that was seen counts
    is seen      on an accelerator, of which a reading takes up to a millisecond: where a forward begins, and where its
                 backward ends. Where what it remembers is too high, once in between as well, in each forward one ask
                 later than in the one before. On a CPU at each save and unpack of the first forwards and at some of the
                 later ones, when the context is left, and where backward ends. What is used between steps, by an
                 optimizer or an evaluation, is not seen: whatever of the saved tensors had stayed would not change it
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from eager_offload.config import size_literal, size_text
from eager_offload.engine.transfers import Transfers
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

    def adapt(self, peak: int, kept: int, growth: int = 0, *, moved: bool, exact: bool = True) -> None:
        """A forward is over.

        Args:
            peak: of the device, in it.
            kept: the newest bytes that really stayed in it; at most ``keep`` of them count.
            growth: how many bytes more are used from now on than when it began.
            moved: whether anything has left in it.
            exact: ``False``: the peak was at most that, so that more may stay, and less has to for ``growth`` alone.
        """
        small, kept, growth = self.budget // _SMALL_PART, min(kept, self.keep), max(growth, 0)
        rest = max(peak - kept, 0)
        if exact:
            self._rests.append(rest)
        most = max(self.budget - small - max(rest, *self._rests, 0) - growth, 0)
        if not exact:
            most = max(most, self.keep - growth)
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
    #: The most that was seen to be used in it, and to stay; 0 and ``None`` where that was not seen.
    peak: int = 0
    kept: int | None = None
    #: What was saved in it that may be asked for, and what was asked for.
    saves: int = 0
    asks: int = 0
    #: Whether the end of its backward was seen.
    is_over: bool = False


class _Peak(NamedTuple):
    """Bytes of the device."""

    nbytes: int
    #: ``False``: it was at most that.
    is_exact: bool


class DeviceBudget:
    """The budget of one device.

    Args:
        budget: bytes, or ``"auto"``.
        keep: the most that may stay in the first forward, bytes.
        given: ``budget`` as the user has written it, if that was a text: the warning repeats it.

    Raises:
        ConfigError: the device does not tell how much of its memory is used.
    """

    def __init__(self, transfers: Transfers, budget: int | str, keep: int, given: str | None) -> None:
        self._transfers, self._given = transfers, given
        memory = transfers.runtime.memory(transfers.device)
        if memory is None:
            raise ConfigError(
                f"device_budget={given or budget!r} is not accepted for {transfers.device}, which does not tell how "
                "much of its memory is used: leave it out, and bound what is on the device with keep_last_bytes, "
                "max_inflight_bytes and prefetch_bytes"
            )
        #: Whether the device remembers its peak, so that it need not be watched.
        self._remembers = memory.peak is not None
        free = 0 if isinstance(budget, int) else transfers.runtime.free_memory(transfers.device)
        nbytes = budget if isinstance(budget, int) else memory.used + int(free * _AUTO_PART)
        self._allowance = Allowance(nbytes, min(keep, int(max(nbytes - memory.used, 0) * _FIRST_PART)))
        #: How many forwards were learnt from, and how many saves and unpacks there were.
        self._forwards = self._calls = 0
        #: How many forwards there were, and how many asks the last had; at most as many as peaks are remembered.
        self._windows, self._asks = 0, 1
        #: Whether the one that goes on is looked at once before it ends.
        self._watches = False
        #: The warning that it is not kept, until it is given; ``None`` once it was.
        self._unkept: str | None = ""
        self._window = self._new_window(memory)

    @property
    def keep(self) -> int:
        """Bytes of the newest saved tensors that may stay."""
        return self._allowance.keep

    def note_save(self) -> None:
        """Something is saved that may be asked for."""
        self._window.saves += 1
        if self._is_sampled():
            self._look()

    def note_ask(self, *, is_last: bool | None = None) -> None:
        """Something is asked for; ``is_last``: whether backward asks for nothing else, if that is known."""
        window = self._window
        is_last = window.asks + 1 == window.saves if is_last is None else is_last
        is_due = is_last or (self._watches and window.asks == self._windows % self._asks)
        window.asks += 1
        if self._is_sampled() or is_due:
            self._look()
        window.is_over |= is_last

    def note_kept(self, kept: int) -> None:
        """Nothing waits to leave but the newest, of which ``kept`` bytes stay."""
        self._window.kept = max(self._window.kept or 0, kept)
        if not self._remembers:
            self._look()

    def begin(self) -> None:
        """A forward begins."""
        now = self._transfers.runtime.memory(self._transfers.device)
        assert now is not None
        last, before = self._window, self.keep
        if self._calls > last.calls and (peak := self._peak_of(last, now)) is not None:
            # Later it may be what another thread has going.
            growth = now.used - last.began.used if self._forwards < _FIRST else 0
            moved = self._departed != last.departed
            kept = before if last.kept is None else min(last.kept, before)
            self._forwards += 1
            if peak.nbytes > self._allowance.budget:
                self._transfers.accounts.counters.demote("over_budget")
                if kept == 0 and self._unkept == "":
                    self._unkept = self._why(peak.nbytes, moved=moved)
            self._allowance.adapt(peak.nbytes, kept, growth, moved=moved, exact=peak.is_exact)
        if self._calls > last.calls:
            self._windows += 1
            self._asks = min(max(last.asks, 1), _REMEMBERED)
        # What is remembered may begin anew before the next forward; without a look at the end that would be missed.
        self._watches = self._remembers and (self._is_hidden(now) or not (last.is_over or self._calls == last.calls))
        self._window = self._new_window(now)

    def warning(self) -> str:
        """What the user is to be told, once; empty where there is nothing."""
        if not self._unkept:
            return ""
        warning, self._unkept = self._unkept, None
        return warning

    def _is_sampled(self) -> bool:
        """Counts a call; whether it is one at which a CPU is looked at."""
        self._calls += 1
        return not self._remembers and (self._forwards < _FIRST or self._calls % _NOW_AND_THEN == 0)

    def _is_hidden(self, began: DeviceMemory) -> bool:
        """Whether the device remembers so much that a peak which does not grow says nothing."""
        budget = self._allowance.budget
        return (began.peak or 0) > budget - 2 * (budget // _SMALL_PART)

    def _look(self) -> None:
        """Sees how much is used now, and was since the forward began."""
        window, memory = self._window, self._transfers.runtime.memory(self._transfers.device)
        assert memory is not None
        seen = memory.used
        if memory.peak is not None and memory.peak > (window.began.peak or 0):
            seen = memory.peak
        window.peak = max(window.peak, seen)
        self._tell_counters(seen)

    def _peak_of(self, window: _Window, now: DeviceMemory) -> _Peak | None:
        """The peak of a forward that is over; ``None`` where nothing of it was seen."""
        remembered, seen = window.began.peak, window.peak
        if remembered is not None and now.peak is not None and now.peak > remembered and not window.is_over:
            seen = max(now.peak, seen)  # it may be of what came after, and then less stays than could
        if remembered is not None and seen <= remembered and window.is_over and not self._is_hidden(window.began):
            return _Peak(remembered, is_exact=False)
        return _Peak(seen, is_exact=True) if seen else None

    @property
    def _departed(self) -> int:
        """The bytes that have left so far, or are about to."""
        return self._transfers.out_rate.nbytes + self._transfers.inflight_bytes

    def _new_window(self, now: DeviceMemory) -> _Window:
        self._tell_counters(0)
        return _Window(now, self._calls, self._departed)

    def _tell_counters(self, seen: int) -> None:
        counters = self._transfers.accounts.counters
        counters.device_budget = self._allowance.budget
        counters.device_memory_peak = max(counters.device_memory_peak, seen)

    def _why(self, peak: int, *, moved: bool) -> str:
        device = self._transfers.device
        smaller = "max_inflight_bytes, prefetch_bytes, " if moved else ""
        freed = ", or freed memory that stays with the process (see eo.release_freed_memory)"
        given = self._given or size_literal(self._allowance.budget)
        return (
            f"device_budget={given} is not kept: the peak on {device} was {size_text(peak)}, with nothing kept that "
            "may leave. The rest is the model's own, smaller than "
            f"min_bytes, on its way{freed if device.type == 'cpu' else ''}. To need less, take a smaller {smaller}"
            "min_bytes or batch, or checkpointing; else raise device_budget"
        )
