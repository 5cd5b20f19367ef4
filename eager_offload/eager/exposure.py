"""As many of the saved bytes stay as it takes for a step to wait for no more than a share of its time.

[Note: exposed time]
A transfer is exposed for as long as compute waits for it. Each wait is timed on the stream that computes, by a moment
before and one after it: on an accelerator by events of that stream, so that the host's clock, which runs ahead, has no
part in it; on a CPU by the host's, where compute is the host. Waits of the host for room in the in-flight window are
timed in the same way: what lies between the timestamps is the time in which the stream had nothing to do.

    a step            from where a thread begins a forward to where it begins the next one
    without offload   what of that was not exposed: an estimate. What the calls of the library take, and what transfers
                      take from compute besides, such as memory bandwidth, is in it. It is not measured: that would
                      take a step that has no room
    slowdown          exposed seconds by those; 0 where the link hides all

The more stays, the less is exposed. ``LeastKept`` looks for the least that stays with which the slowdown is within its
limit. A step is judged together with those beside it, so that forwards of several kinds that take turns are judged as
one, and the first ones after a change are not: nothing has taught what stays of them, and copies of the step before are
under way.

What stays is not only the newest: a link that is slower than forward makes bytes would have a full window half-way, and
idle times later. So of what stays beyond the newest bytes each stretch of forward keeps its part; see
``step_table.py``.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from eager_offload.engine.transfer_log import Reader, Waited
from eager_offload.engine.transfers import Transfers
from eager_offload.errors import ConfigError
from eager_offload.runtime.base import Moment
from eager_offload.schedule import ResidentQueue

#: Of a step, what counts as nothing exposed: clocks and machines are not more exact than that.
_HIDDEN = 0.005
#: How many steps are judged together, and how many after a change are not judged.
_STEPS, _SKIPPED = 4, 2
#: A step that is longer than so many of the median, such as one with an evaluation in it, counts as one of these.
_LONG = 2
#: The parts of what may stay that are told apart.
_PARTS = 32
#: What was found stays until a slowdown is so many limits, twice in a row.
_SLACK = 1.2
#: So many steps after it was found less is tried, if nothing is exposed; each time after twice as many.
_FIRST_PAUSE = 32
#: Where what may stay differs by more than this part from what it was, all is learnt anew.
_OTHER = 4


class LeastKept:
    """How few saved bytes may stay; numbers only, like ``schedule.py``.

    It tries more, in strides that double or as far as the last two tries lead, until a slowdown is within the limit; or
    less, in strides that double, until it is not; then halves what lies between. What it has found it leaves when that
    does not hold any more, and to see whether less will do, ever more rarely. So where a device stays as it is, it
    comes to rest, and the tries in ``n`` steps are of the order of ``log n``.

    Args:
        limit: the slowdown that is accepted, a share of a step without offload.
        keep: bytes that may stay in the first forward.
    """

    def __init__(self, limit: float, keep: int) -> None:
        self.limit = max(limit, _HIDDEN)
        self.keep = keep
        #: Of the steps that were judged last, or once it is found of those that it was found by.
        self.slowdown = 0.0
        self._most = 0
        self._pause = _FIRST_PAUSE
        #: The most bytes that were too few, and the least that were enough; ``None`` where none was tried.
        self._too_few: int | None = None
        self._enough: int | None = None
        #: The slowdown with ``_enough``.
        self._hidden = 0.0
        self._stride = 0
        #: What was too few before, and the slowdown.
        self._last: tuple[int, float] | None = None
        self._found = False
        #: Once it is found: how often in a row it was too few, and for how many steps it was enough.
        self._exceeded = self._rested = 0
        self._skipped = 0
        #: Exposed and other seconds of the steps that are judged next.
        self._steps: list[tuple[float, float]] = []

    def adapt(self, keep: int, exposed: float, seconds: float, most: int) -> None:
        """A step is over.

        Args:
            keep: with which it was begun.
            exposed: seconds for which compute waited in it.
            seconds: that it took.
            most: bytes that could stay in it.
        """
        if abs(most - self._most) * _OTHER > self._most:
            self._most, self._pause = most, _FIRST_PAUSE
            self._search()
        if self.keep > self._most:
            self.keep = self._most
            self._begin_round()
        if keep != self.keep:
            return  # enqueued before the last change
        if self._skipped < _SKIPPED:
            self._skipped += 1
            return
        self._steps.append((exposed, max(seconds - exposed, 0.0)))
        if len(self._steps) == _STEPS:
            self._judge()

    def _judge(self) -> None:
        usual = median(without for _, without in self._steps)
        without = sum(min(without, _LONG * usual) for _, without in self._steps)
        exposed = sum(exposed for exposed, _ in self._steps)
        self.slowdown = exposed / max(without, sys.float_info.epsilon)
        self._steps = []
        if not self._found:
            if self.slowdown <= self.limit:
                self._enough, self._hidden = self.keep, self.slowdown
            else:
                self._too_few = self.keep
            self._next()
        elif self.slowdown > self.limit * _SLACK:
            self._exceeded, self._rested = self._exceeded + 1, 0
            if self._exceeded == 2 and self.keep < self._most:
                self._search()
                self._too_few = self.keep
                self._next()
        else:
            self._exceeded, self._rested = 0, self._rested + _STEPS
            if self._rested >= self._pause and self.keep:
                self._pause *= 2
                self._search()
                self._enough, self._hidden = self.keep, self.slowdown
                self._next()

    def _search(self) -> None:
        """Begins to look for it, from where it is."""
        self._too_few = self._enough = None
        self._last = None
        self._stride, self._found, self._exceeded, self._rested = 0, False, 0, 0
        self._begin_round()

    def _begin_round(self) -> None:
        self._skipped, self._steps = 0, []

    def _next(self) -> None:
        """Something was tried: what is next."""
        part, few, enough, before = max(self._most // _PARTS, 1), self._too_few, self._enough, self.keep
        if enough is None:
            assert few is not None
            self.keep = self._more(few, part)
            self._found = few >= self._most
        elif few is None:
            self._stride = max(2 * self._stride, part)
            self.keep = max(enough - self._stride, 0)
            self._found = enough == 0
        elif enough - few <= part:
            self.keep, self.slowdown, self._found = enough, self._hidden, True
        else:
            self.keep = (few + enough) // 2
        if self.keep != before:
            self._begin_round()

    def _more(self, few: int, part: int) -> int:
        """What is tried next where ``few`` bytes were too few, and nothing is enough: more must not stay in vain.

        The more stays the less each byte is worth, as a rule, so the line through the last two leads to less than what
        is enough.
        """
        last, self._last = self._last, (few, self.slowdown)
        self._stride = max(2 * self._stride, part)
        if last is not None and last[1] > self.slowdown:
            needed = (self.slowdown - self.limit) * (few - last[0]) / (last[1] - self.slowdown)
            self._stride = max(min(self._stride, int(needed)), part)
        more = few + self._stride
        return self._most if more + part > self._most else more


@dataclass(slots=True)
class _Step:
    """From the beginning of a thread's forward to that of its next one."""

    #: The thread, by its queue, and the others that have begun a forward since, with how many.
    thread: weakref.ref[ResidentQueue]
    began: Moment
    keep: int
    #: Of the waits from its beginning on.
    waits: Reader
    others: dict[int, int] = field(default_factory=dict)
    #: How many forwards have saved something that may leave.
    forwards: int = 0
    #: Seconds for which compute waited in it, as far as the waits were read.
    exposed: float = 0.0
    #: Where it ended, and where in the log.
    stopped: Moment = None
    end: int = 0


class Exposure:
    """What of the transfers of one device is exposed.

    Args:
        limit: as for ``LeastKept``.
        keep: as for ``LeastKept``.
        setting: that asks for it, for an error.
    """

    def __init__(self, transfers: Transfers, limit: float, keep: int, setting: str) -> None:
        self._transfers, self._runtime = transfers, transfers.runtime
        self._rule = LeastKept(limit, keep)
        self._setting = setting
        self._tells_time: bool | None = None
        self._step: _Step | None = None
        #: Those that are over to the host; a device may be in the midst of them.
        self._over: deque[_Step] = deque()

    @property
    def keep(self) -> int:
        """Bytes of saved tensors that may stay."""
        return self._rule.keep

    def pause(self) -> None:
        """What runs until the next forward begins is no step that is measured."""
        self._step = None

    def note_forward(self) -> None:
        """A forward saves something that may leave."""
        if self._step is not None:
            self._step.forwards += 1

    def begin(self, queue: ResidentQueue, most: int) -> None:
        """A forward begins on the thread of ``queue``.

        Args:
            most: bytes that could stay in one; 0 where that is not known.

        Raises:
            ConfigError: the device's events do not tell the time.
        """
        runtime, device = self._runtime, self._transfers.device
        if self._tells_time is None:
            self._tells_time = runtime.tells_time(device)
        if not self._tells_time:
            raise ConfigError(
                f"{self._setting} is not accepted for {device}, whose events do not tell the time, so that how "
                "long it waits for transfers is not known: leave it out, and say with keep_last_bytes or device_budget "
                "what stays"
            )
        step, now = self._step, runtime.moment(runtime.current_stream(device))
        if step is not None:
            leader = step.thread()
            if leader is not None and leader is not queue:
                step.others[id(queue)] = begun = step.others.get(id(queue), 0) + 1
                if begun == 1:
                    return  # else the other thread has ended, or does something else
            elif leader is queue and step.forwards:
                step.stopped, step.end = now, self._transfers.transfer_log.end
                self._over.append(step)
        self._learn(most)
        self._step = _Step(weakref.ref(queue), now, self.keep, self._transfers.transfer_log.reader())

    def _learn(self, most: int) -> None:
        """Learns from the steps that are over."""
        device, log = self._transfers.device, self._transfers.transfer_log
        while self._over:
            step = self._over[0]
            for entry in log.read(step.waits, step.end):
                if isinstance(entry, Waited) and entry.what and entry.device == device:
                    if (waited := entry.seconds()) is None:
                        return
                    step.exposed += waited
            seconds = self._runtime.seconds_between(step.began, step.stopped)
            if seconds is None:
                return
            self._over.popleft()
            if most:
                self._rule.adapt(step.keep, step.exposed / (1 + len(step.others)), seconds, most)
                self._transfers.accounts.counters.slowdown = self._rule.slowdown
