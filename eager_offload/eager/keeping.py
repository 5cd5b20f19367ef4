"""How many saved bytes of one device stay, and how many may be on their way.

The windows say both, unless there is a budget of the device or only what the link hides moves: then a controller says
which part of a known step's bytes moves. What is here needs the lock of the transfers, see ``DeviceOffloader.locked``.

[Note: the peak of a step]
    an accelerator   remembers its highest peak, which is the user's to start anew. Where that has grown in a step, it
                     is the step's peak; else the step's peak was at most that. Where it is so high that this leaves
                     open whether the budget holds, the device is read as well, which takes up to a millisecond: where
                     backward ends, and once in between, in each step one ask later than in the one before
    a CPU            is read at each save and ask of the first steps, at some of the later ones, when the context is
                     left, and where backward ends
What is used between steps, by an optimizer or an evaluation, is not seen: whatever of the saved tensors had stayed
would not change it.

[Note: exposed time]
A transfer is exposed for as long as compute waits for it. Each wait is timed on the stream that computes, by a moment
before and one after it: on an accelerator by events of that stream, so that the host's clock, which runs ahead, has no
part in it; on a CPU by the host's, where compute is the host. The rest of a step is its time without offload: an
estimate, since it has in it what the library's calls take, and what transfers take of compute's memory bandwidth.

[Note: what came of a plan]
The peak is the one that the allocator remembers, where that has grown in the step; a CPU has none. The time is that
from the beginning of the forward until backward has asked for all: what comes between steps is no part of a plan.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median

from eager_offload.config import OffloadConfig, size_literal, size_text
from eager_offload.core.budget import Controller
from eager_offload.core.schedule import PrefetchOrder, ResidentQueue
from eager_offload.core.step_table import KnownTable, Link, StepLog, StepTables
from eager_offload.engine.transfer_log import Reader, Waited
from eager_offload.engine.transfers import Transfers
from eager_offload.errors import ConfigError
from eager_offload.runtime.base import DeviceMemory, Moment
from eager_offload.tiers.forking import Living

#: A peak that is remembered hides those of steps from so much of the budget on.
_HIDING_PART = 0.96
#: In how many steps every save and ask is read, and of the later ones one in so many. That is odd, so that it is not
#: always the same ones.
_FIRST, _NOW_AND_THEN = 8, 7
#: In so many steps the ask that is read in between moves on.
_ROUND = 64
#: Of so many steps the stats have the median time.
_TOLD = 15


@dataclass(slots=True)
class Reading:
    """From where a thread begins a forward to where it begins its next one."""

    #: The thread, by its queue, and the others that have begun a forward since, with how many.
    thread: weakref.ref[ResidentQueue]
    #: As it began: the device's memory, and the moment.
    memory: DeviceMemory | None
    began: Moment
    #: Of the waits from there on.
    waits: Reader
    others: dict[int, int] = field(default_factory=dict)
    #: The first step that was begun in it; ``None`` where nothing was saved that may leave.
    log: StepLog | None = None
    #: The most bytes that were seen to be used; once it is over, the peak, which is 0 where nothing was seen.
    peak: int = 0
    is_exact: bool = True
    #: Saves in it that may be asked for, and asks; whether the end of its backward was seen.
    saves: int = 0
    unpacks: int = 0
    is_over: bool = False
    #: Whether the stats have been told of it, beside a plan.
    is_told: bool = False
    #: Once it is over: bytes that are used beyond those at its beginning, where it ended, and where in the log.
    growth: int = 0
    stopped: Moment = None
    end: int = 0
    #: Whether each of its saves and first asks is timed: by their numbers, when it was, and where in the log. Once it
    #: is over, the seconds until then for which compute did not wait.
    is_timed: bool = False
    saves_at: dict[int, tuple[Moment, int]] = field(default_factory=dict)
    unpacked_at: dict[int, tuple[Moment, int]] = field(default_factory=dict)
    saved: dict[int, float] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)
    #: Seconds for which compute has waited, as far as the waits were read, and where in the log; and all seconds.
    waits_at: list[tuple[int, float]] = field(default_factory=list)
    exposed: float = 0.0
    seconds: float = 0.0


class Readings:
    """Reads the steps of one device.

    Args:
        is_timed: whether the device is asked for the times of steps.

    Raises:
        ConfigError: the config has a budget, and the device does not tell how much of its memory is used.
    """

    def __init__(self, transfers: Transfers, config: OffloadConfig, *, is_timed: bool) -> None:
        self._transfers, self._runtime, self._device = transfers, transfers.runtime, transfers.device
        #: Whether the stats have what a plan has predicted, and are told what comes of it.
        self._is_planned = transfers.accounts.counters.plan is not None
        #: From when to when the steps lasted of which the stats are to be told; and the seconds of the last ones.
        self._told: deque[tuple[Moment, Moment]] = deque(maxlen=_TOLD)
        self._seconds: deque[float] = deque(maxlen=_TOLD)
        self._is_free = config.is_free
        #: Whether steps are timed, and their saves until two of a kind are.
        self._is_timed = is_timed
        self._given = config.written("device_budget")
        #: Bytes; ``None`` where memory is not read.
        self.budget = None if config.device_budget is None else self._budget_of(config.device_budget)
        #: Whether the device remembers its peak, so that it need not be watched.
        self._remembers = False if (memory := self._memory()) is None else memory.peak is not None
        #: How many saves and asks there were, and how many steps were read.
        self._calls = self._steps = 0
        #: How many asks the last step had.
        self._unpacks = 1
        #: Whether the step that goes on is looked at once before it ends.
        self._watches = False
        self._open: Reading | None = None
        #: Those that are over to the host; a device may be in the midst of them.
        self._over: deque[Reading] = deque()

    @cached_property
    def tells_time(self) -> bool:
        """Whether the device does."""
        return self._runtime.tells_time(self._device)

    def note_step(self, log: StepLog, queue: ResidentQueue) -> None:
        """A step of the thread of ``queue`` begins, in which something is saved that may leave."""
        if (one := self._open) is not None and one.log is None and one.thread() is queue:
            one.log = log

    def note_save(self, log: StepLog, number: int) -> None:
        """Something is saved that may be asked for, as that save of the step of ``log``."""
        if (one := self._open) is not None:
            if self._is_timed and one.log is log:
                if not one.saves:
                    one.is_timed = not self._is_free or log.known is None or not log.known.is_timed
                if one.is_timed:
                    one.saves_at[number] = self._moment(), self._transfers.transfer_log.end
            one.saves += 1
            if self._is_sampled():
                self._look(one)

    def note_ask(self, log: StepLog, number: int) -> None:
        """That save of the step of ``log`` is asked for."""
        if (one := self._open) is not None:
            if one.is_timed and one.log is log and number not in one.unpacked_at:
                one.unpacked_at[number] = self._moment(), self._transfers.transfer_log.end
            is_last = one.unpacks + 1 == one.saves
            is_due = is_last or (self._watches and one.unpacks == self._steps % self._unpacks)
            one.unpacks += 1
            if self._is_sampled() or is_due:
                self._look(one)
            one.is_over |= is_last

    @property
    def awaits_end(self) -> bool:
        """Whether the stats are to be told of the step that goes on."""
        return self._is_planned and self._open is not None and not self._open.is_told

    def note_end(self) -> None:
        """Backward has been given all that it asks for: tells the stats, see [Note: what came of a plan]."""
        one, counters = self._open, self._transfers.accounts.counters
        assert one is not None
        one.is_told, memory, outcome = True, self._runtime.memory(self._device), counters.plan
        assert outcome is not None
        before = None if one.memory is None else one.memory.peak
        if memory is not None and memory.peak is not None and before is not None and memory.peak > before:
            outcome = replace(outcome, peak_bytes=max(memory.peak, outcome.peak_bytes or 0))
        self._told.append((one.began, self._moment()))
        while self._told and (seconds := self._runtime.seconds_between(*self._told[0])) is not None:
            self._told.popleft()
            if seconds:  # a device that does not tell the time says 0
                self._seconds.append(seconds)
        if self._seconds:
            outcome = replace(outcome, step_seconds=median(self._seconds))
        counters.plan = outcome

    def note_exit(self) -> None:
        """The context is left."""
        if self._open is not None and self.budget is not None and not self._remembers:
            self._look(self._open)

    def begin(self, queue: ResidentQueue) -> Reading | None:
        """Begins to read a forward on the thread of ``queue``.

        Returns:
            The reading that ends with it, of which the memory is known; see ``timed`` for the time.

        Raises:
            ConfigError: only what the link hides moves, and the device's events do not tell the time.
        """
        if self._is_free and not self.tells_time:
            raise ConfigError(
                f'policy="free" is not accepted for {self._device}, whose events do not tell the time, so that how '
                "long it waits for transfers is not known: leave it out, and say with keep_last_bytes or "
                "device_budget what stays"
            )
        one, closed = self._open, None
        memory = self._runtime.memory(self._device) if self._is_planned else self._memory()
        now = self._moment() if self._is_planned or self._is_timed else None
        if one is not None:
            thread = one.thread()
            if thread is not None and thread is not queue:
                one.others[id(queue)] = begun = one.others.get(id(queue), 0) + 1
                if begun == 1:
                    return None  # else the other thread has ended, or does something else
            elif one.log is not None:
                closed = one
                self._close(one, memory, now)
        if self._remembers and memory is not None:
            # The peak may start anew before the next forward: without a look at the end that would be missed.
            self._watches = self._hides(memory) or not (closed is None or closed.is_over)
        self._open = Reading(weakref.ref(queue), memory, now, self._transfers.transfer_log.reader())
        return closed

    def timed(self) -> Iterator[Reading]:
        """Yields the readings that are over and whose end the device has come to, in order."""
        log = self._transfers.transfer_log
        while self._over:
            one = self._over[0]
            for entry in log.read(one.waits, one.end):
                if isinstance(entry, Waited) and entry.what and entry.device == self._device:
                    if (waited := entry.seconds()) is None:
                        return
                    one.waits_at.append((one.waits.position, waited))
            if (seconds := self._runtime.seconds_between(one.began, one.stopped)) is None:
                return
            one.exposed = sum(waited for _, waited in one.waits_at) / (1 + len(one.others))
            one.seconds = seconds
            one.saved = self._without_waits(one, one.saves_at)
            one.asked = self._without_waits(one, one.unpacked_at)
            yield self._over.popleft()

    def _without_waits(self, one: Reading, moments: dict[int, tuple[Moment, int]]) -> dict[int, float]:
        """Returns the seconds from the beginning of ``one`` to those moments, less what compute has waited before."""
        found, waited, at = {}, 0.0, 0
        for number, (moment, position) in moments.items():
            while at < len(one.waits_at) and one.waits_at[at][0] < position:
                waited += one.waits_at[at][1]
                at += 1
            found[number] = (self._runtime.seconds_between(one.began, moment) or 0.0) - waited
        return found

    def _close(self, one: Reading, memory: DeviceMemory | None, now: Moment) -> None:
        """``one`` is over."""
        self._unpacks = min(max(one.unpacks, 1), _ROUND)
        if memory is not None and one.memory is not None:
            # Later it may be what another thread has going.
            one.growth = memory.used - one.memory.used if self._steps < _FIRST else 0
            remembered, grown = one.memory.peak, memory.peak
            if remembered is not None and grown is not None and grown > remembered and not one.is_over:
                one.peak = max(grown, one.peak)  # of what came after, it may be: then less stays than could
            if remembered is not None and one.peak <= remembered and one.is_over and not self._hides(one.memory):
                one.peak, one.is_exact = remembered, False
        self._steps += 1
        if self._is_timed:
            one.stopped, one.end = now, self._transfers.transfer_log.end
            self._over.append(one)

    def stop(self) -> None:
        """Reads no more of what goes on, nor of what is over."""
        self._open = None
        self._over.clear()

    def _is_sampled(self) -> bool:
        """Counts a call; whether it is one at which a CPU is read."""
        self._calls += 1
        if self.budget is None or self._remembers:
            return False
        return self._steps < _FIRST or self._calls % _NOW_AND_THEN == 0

    def _hides(self, memory: DeviceMemory) -> bool:
        """Whether so high a peak is remembered that one that does not grow says nothing."""
        return self.budget is not None and (memory.peak or 0) > self.budget * _HIDING_PART

    def _look(self, one: Reading) -> None:
        """Reads how much is used now, and was since the step began."""
        if (memory := self._memory()) is None:
            return
        assert one.memory is not None
        grown = memory.peak if memory.peak is not None and memory.peak > (one.memory.peak or 0) else 0
        one.peak = max(one.peak, memory.used, grown)
        counters = self._transfers.accounts.counters
        counters.device_memory_peak = max(counters.device_memory_peak, memory.used, grown)

    def _moment(self) -> Moment:
        return self._runtime.moment(self._runtime.current_stream(self._device))

    def _memory(self) -> DeviceMemory | None:
        return None if self.budget is None else self._runtime.memory(self._device)

    def _budget_of(self, given: int | str) -> int:
        """Returns the budget in bytes; of ``"auto"``, most of what is free."""
        memory = self._runtime.memory(self._device)
        if memory is None:
            raise ConfigError(
                f"device_budget={self._given or repr(given)} is not accepted for {self._device}, which does not tell "
                "how much of its memory is used: leave it out, and bound what is on the device with keep_last_bytes, "
                "max_inflight_bytes and prefetch_bytes"
            )
        if isinstance(given, int):
            return given
        return self._runtime.available_memory(self._device, memory.used)


class Keeping:
    """Sets the limits of the threads' queues, of the look-ahead and of the step tables, where each forward begins.

    Raises:
        ConfigError: the config has a budget, and the device does not tell how much of its memory is used.
    """

    def __init__(self, transfers: Transfers, config: OffloadConfig, tables: StepTables, order: PrefetchOrder) -> None:
        self._transfers, self._config, self._tables, self._order = transfers, config, tables, order
        self._windows = transfers.windows
        #: Reads what steps take; ``None`` where nothing depends on that.
        self.readings: Readings | None = None
        is_controlled = config.device_budget is not None or config.is_free
        if is_controlled or transfers.accounts.counters.plan is not None:
            self.readings = Readings(transfers, config, is_timed=config.is_free)
        self._budget = None if self.readings is None else self.readings.budget
        if is_controlled:
            if tables.controller is None:
                tables.control(Controller(self._budget, float(config.is_free), is_free=config.is_free))
            else:
                tables.controller.budget = self._budget
        self._queues: Living[ResidentQueue] = Living()
        #: Times steps, by which windows are sized: ``None`` where none is automatic, or something else says what stays.
        #: A host's clock would not do, which runs ahead of a device; nor would a disk's pace, which is a cache's first.
        self._timing: Readings | None = None
        is_sized = self._windows.is_auto and self.readings is None and not transfers.is_captured
        if is_sized and not transfers.runtime.has_one_stream:
            self._timing = Readings(transfers, config, is_timed=True)
        #: What the last step of each thread left behind, by its queue; and the kind whose windows are in force.
        self._logs: weakref.WeakKeyDictionary[ResidentQueue, StepLog] = weakref.WeakKeyDictionary()
        self.known: KnownTable | None = None
        # Not by the time that steps took, where a graph is captured of one.
        self._learns_what_stays = config.learns_what_stays and not transfers.is_captured
        #: Whether storages that a step table has leave do so as soon as they are final.
        self.leaves_early = tables.controller is not None or self._learns_what_stays
        #: The most bytes of the newest that stay, for each thread, in a step that is not known.
        self.keep = 0
        self._use_windows()

    def move(self, fraction: float) -> None:
        """Has that part of the movable bytes of each known step move."""
        self._tables.control(Controller(None, fraction))
        self.leaves_early = True

    @property
    def adapts(self) -> bool:
        """Whether anything may change when a forward begins."""
        return self.readings is not None or self._windows.is_auto

    def new_queue(self) -> ResidentQueue:
        """Returns a queue of the newest bytes, for one thread."""
        queue = ResidentQueue(self.keep)
        self._queues.add(queue)
        return queue

    def begin(self, queue: ResidentQueue) -> None:
        """Begins a forward on the thread of ``queue``."""
        movable = queue.movable
        if self._windows.begin(movable, queue.largest):
            self._use_windows()
        queue.begin_step()
        self._tell_windows()
        if self._timing is not None:
            self._time(queue)
        if self.readings is None:
            return
        self._transfers.poll()  # which learns the tables of steps that are over
        if (over := self.readings.begin(queue)) is not None:
            self._observe_memory(over)
        for one in self.readings.timed():
            self._observe_waits(one)
        controller = self._tables.controller
        if controller is not None and controller.is_free and self._budget is None:
            queue.limit = max(self.keep, int((1 - controller.fraction(controller.unknown)) * movable))

    def note_step(self, log: StepLog, queue: ResidentQueue) -> None:
        """A step of the thread of ``queue`` begins, in which something is saved that may leave."""
        if self._timing is not None:
            self._logs[queue] = log
        if self.readings is not None:
            self.readings.note_step(log, queue)

    def use(self, known: KnownTable | None) -> None:
        """Has the windows of steps like ``known`` in force."""
        self.known = known
        least = None if known is None else known.least
        if (self._windows.are_least or least is not None) and self._windows.use(least):
            self._use_windows()

    def _time(self, queue: ResidentQueue) -> None:
        """Times the step that begins if the last one was looked up in a table of which two are not timed yet."""
        log, timing = self._logs.get(queue), self._timing
        assert timing is not None
        if log is not None and log.known is not None and log.known.is_due:
            if not timing.tells_time:
                self._timing = None
            self.readings = self._timing
        elif self.readings is not None:
            timing.stop()
            self.readings = None

    def grow(self, queue: ResidentQueue) -> None:
        """Has the windows follow what ``queue`` has taken in, in a first step, before which nothing is known."""
        if self._windows.grow(queue.largest):
            self._use_windows()

    def _observe_memory(self, one: Reading) -> None:
        """Has the controller learn from the memory of a step that is over."""
        controller, budget = self._tables.controller, self._budget
        if budget is None or one.log is None or not one.peak:
            return
        assert controller is not None
        kept = one.log.kept
        if one.peak > budget:
            for queue in self._queues:  # what was to stay leaves, unless backward comes first
                queue.requeue_exempt()
            why = partial(self._why, one.peak, budget) if kept == 0 else None
            self._transfers.accounts.fall_back("over_budget", why)
        if (known := one.log.kind) is not None:
            movable = known.table.movable_bytes
            controller.observe_memory(known.kind, one.peak, kept, movable, one.growth, is_exact=one.is_exact)

    def _observe_waits(self, one: Reading) -> None:
        """Has the controller learn from the waits of a step that is over, or decides what the link hides of its kind,
        or which windows that needs."""
        controller, log, link = self._tables.controller, one.log, self.link
        if log is None or (known := log.kind) is None:
            return
        kind = known.kind
        if kind.free is not None:
            assert controller is not None
            if log.fraction is not None:
                controller.observe_waits(kind, log.fraction, one.exposed / max(one.seconds - one.exposed, 1e-12))
                self._transfers.accounts.counters.slowdown = controller.slowdown
        elif one.saved and one.asked and link is not None and (controller is None or not known.is_timed):
            if not known.time(log.times(one.saved, one.asked, link, self._windows)):
                return
            if controller is None:
                known.size(self._windows)
                self.known = None  # so that a step like it uses them
            else:
                controller.decide(kind, known.hidden_part())

    @property
    def link(self) -> Link | None:
        """How fast bytes travel; ``None`` where nothing was moved that could tell."""
        out = self._transfers.out_rate.value
        return None if out is None else Link(out, self._transfers.in_rate.value or out)

    def _use_windows(self) -> None:
        prefetch = self._order.limit = self._windows.prefetch
        self.keep = 0 if self._budget is not None else self._config.newest_bytes(prefetch)
        room = self._config.small_step_bytes(self._windows.most_prefetch)
        self._tables.room = room if self._learns_what_stays else 0
        for queue in self._queues:
            queue.limit = self.keep
        self._tell_windows()

    def _tell_windows(self) -> None:
        counters, windows = self._transfers.accounts.counters, self._windows
        counters.max_inflight_bytes, counters.prefetch_bytes = windows.inflight, windows.prefetch
        if self._budget is not None:
            counters.device_budget = self._budget

    def _why(self, peak: int, budget: int) -> str:
        device, moved = self._transfers.device, self._transfers.out_rate.nbytes > 0
        smaller = "max_inflight_bytes, prefetch_bytes, " if moved else ""
        freed = ", or freed memory that stays with the process (see eo.release_freed_memory)"
        given = self._config.written("device_budget") or size_literal(budget)
        return (
            f"device_budget={given} is not kept: the peak on {device} was {size_text(peak)}, with nothing kept that "
            "may leave. The rest is the model's own, smaller than "
            f"min_bytes, on its way{freed if device.type == 'cpu' else ''}. To need less, take a smaller {smaller}"
            "min_bytes or batch, or checkpointing; else raise device_budget"
        )
