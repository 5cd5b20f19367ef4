"""Measures the memory and time of steps on one device, and sets its windows and limits from them.

By default the windows limit the bytes that are kept and that are in flight. With a device budget, or if only hidden
copies are allowed, a controller chooses the fraction of a step's bytes that moves. Callers hold the lock of the
transfers: see ``DeviceOffloader.locked``.

[Note: the peak of a step]
    an accelerator   has a peak counter, which the user may reset. If the counter has grown in a step, it is the step's
                     peak; otherwise it is an upper bound. The memory in use is also read when backward ends, which
                     takes up to a millisecond. If the bound is too high to show whether the budget was kept, this
                     memory is read a second time, at an earlier unpack: one unpack later in each step
    a CPU            has no peak counter. Its memory in use is read at each save and unpack of the first steps, at some
                     of the later ones, when the context exits, and when backward ends
Memory that is used between steps (e.g. by an optimizer) is not read: keeping fewer saved tensors would not change it.

[Note: exposed time]
A transfer is exposed while compute waits for it. Each wait is timed on the compute stream: on an accelerator by events
before and after it, because the host runs ahead; on a CPU by the host's clock. The rest of a step is the estimate of
its time without offload. It still contains the time of the library's calls, and the time that compute loses because
transfers take memory bandwidth.

[Note: the outcome of a plan]
The stats show the allocator's peak counter, if it has grown in the step (a CPU has none), and the time from the
beginning of forward to the last unpack: a plan does not cover the time between steps.
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

#: A peak counter that did not grow in a step and is above this fraction of the budget does not show whether the step
#: kept the budget.
_HIDING_PART = 0.96
#: A CPU's memory is read at every save and unpack of the first 8 steps, and later at every 7th: an odd number, so that
#: the reads move through the step.
_FIRST, _NOW_AND_THEN = 8, 7
#: The extra read of an accelerator moves through the first 64 unpacks.
_ROUND = 64
#: The stats show the median time of up to this many steps.
_TOLD = 15


@dataclass(slots=True)
class Reading:
    """The readings of one step: from the beginning of a thread's forward to the beginning of its next one."""

    #: The thread's queue; ``others`` counts the forwards that other threads have begun since.
    thread: weakref.ref[ResidentQueue]
    #: The device's memory and the moment at the beginning.
    memory: DeviceMemory | None
    began: Moment
    #: Reads the log of waits from the beginning on.
    waits: Reader
    others: dict[int, int] = field(default_factory=dict)
    #: The log of the first step in this reading; ``None`` if no saved tensor could move.
    log: StepLog | None = None
    #: The most bytes that any read so far found in use; after the end, the step's peak, or 0 if it is unknown.
    peak: int = 0
    is_exact: bool = True
    #: The number of saves that may be unpacked, and of unpacks; ``is_over``: whether the last one was unpacked.
    saves: int = 0
    unpacks: int = 0
    is_over: bool = False
    #: Whether the step's outcome has been written into the stats, beside the plan.
    is_told: bool = False
    #: After the end: the growth of the bytes in use, the moment of the end, and its position in the log.
    growth: int = 0
    stopped: Moment = None
    end: int = 0
    #: Whether saves and first unpacks are timed; by number of the save, the moment of each and its position in the log.
    is_timed: bool = False
    saves_at: dict[int, tuple[Moment, int]] = field(default_factory=dict)
    unpacked_at: dict[int, tuple[Moment, int]] = field(default_factory=dict)
    #: After the end: the same moments in seconds of compute, without waits.
    saved: dict[int, float] = field(default_factory=dict)
    unpacked: dict[int, float] = field(default_factory=dict)
    #: Each wait of compute, as its position in the log and its seconds; their sum, divided by the number of threads
    #: that ran forwards; and the seconds of the step.
    waits_at: list[tuple[int, float]] = field(default_factory=list)
    exposed: float = 0.0
    seconds: float = 0.0


class Readings:
    """Reads the steps of one device.

    Args:
        is_timed: whether to time steps.

    Raises:
        ConfigError: the config has a budget, and the device does not report its memory in use.
    """

    def __init__(self, transfers: Transfers, config: OffloadConfig, *, is_timed: bool) -> None:
        self._transfers, self._runtime, self._device = transfers, transfers.runtime, transfers.device
        #: Whether there is a plan, whose outcome the stats show.
        self._is_planned = transfers.accounts.counters.plan is not None
        #: Beginning and end of steps that the device has not finished, and the seconds of the last finished ones.
        self._told: deque[tuple[Moment, Moment]] = deque(maxlen=_TOLD)
        self._seconds: deque[float] = deque(maxlen=_TOLD)
        self._is_free = config.is_free
        self._is_timed = is_timed
        self._given = config.written("device_budget")
        #: Bytes; ``None`` if memory is not read.
        self.budget = None if config.device_budget is None else self._budget_of(config.device_budget)
        #: Whether the device has a peak counter.
        self._remembers = False if (memory := self._memory()) is None else memory.peak is not None
        #: The number of saves and unpacks so far, and of steps that were read.
        self._calls = self._steps = 0
        #: The number of unpacks of the last step, at most ``_ROUND``.
        self._unpacks = 1
        #: Whether the current step needs a read before its end.
        self._watches = False
        self._open: Reading | None = None
        #: Readings that have ended for the host, and perhaps not for the device.
        self._over: deque[Reading] = deque()

    @cached_property
    def tells_time(self) -> bool:
        return self._runtime.tells_time(self._device)

    def note_step(self, log: StepLog, queue: ResidentQueue) -> None:
        """Notes that a step of ``queue``'s thread begins, at its first save that may move."""
        if (one := self._open) is not None and one.log is None and one.thread() is queue:
            one.log = log

    def note_save(self, log: StepLog, number: int) -> None:
        """Notes a save that may be unpacked."""
        if (one := self._open) is not None:
            if self._is_timed and one.log is log:
                if not one.saves:
                    one.is_timed = not self._is_free or log.known is None or not log.known.is_timed
                if one.is_timed:
                    one.saves_at[number] = self._moment(), self._transfers.transfer_log.end
            one.saves += 1
            if self._is_sampled():
                self._look(one)

    def note_unpack(self, log: StepLog, number: int) -> None:
        """Notes the unpack of save ``number`` of the step of ``log``."""
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
        """Whether the outcome of the current step is wanted, and not known yet."""
        return self._is_planned and self._open is not None and not self._open.is_told

    def note_end(self) -> None:
        """Notes the last unpack, and writes the outcome into the stats: see [Note: the outcome of a plan]."""
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
            if seconds:  # 0 from a device without timing
                self._seconds.append(seconds)
        if self._seconds:
            outcome = replace(outcome, step_seconds=median(self._seconds))
        counters.plan = outcome

    def note_exit(self) -> None:
        if self._open is not None and self.budget is not None and not self._remembers:
            self._look(self._open)

    def begin(self, queue: ResidentQueue) -> Reading | None:
        """Begins a reading, for a forward on the thread of ``queue``.

        Returns:
            The reading that this call ends, if any, with its memory; ``timed`` yields it later, with its times.

        Raises:
            ConfigError: ``policy="free"`` on a device whose events do not tell the time.
        """
        if self._is_free and not self.tells_time:
            raise ConfigError(
                f'policy="free" is not accepted for {self._device}: its events do not tell the time, so waits for '
                "transfers cannot be measured. Leave policy out, and set keep_last_bytes or device_budget instead"
            )
        one, closed = self._open, None
        memory = self._runtime.memory(self._device) if self._is_planned else self._memory()
        now = self._moment() if self._is_planned or self._is_timed else None
        if one is not None:
            thread = one.thread()
            if thread is not None and thread is not queue:
                one.others[id(queue)] = begun = one.others.get(id(queue), 0) + 1
                if begun == 1:
                    return None  # at this thread's second forward, the reading's thread is assumed to have ended
            elif one.log is not None:
                closed = one
                self._close(one, memory, now)
        if self._remembers and memory is not None:
            # Also if the last unpack of the step before never came, so that its end was not read: the user may have
            # reset the counter.
            self._watches = self._hides(memory) or not (closed is None or closed.is_over)
        self._open = Reading(weakref.ref(queue), memory, now, self._transfers.transfer_log.reader())
        return closed

    def timed(self) -> Iterator[Reading]:
        """Yields the readings whose end the device has reached, in order."""
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
            one.unpacked = self._without_waits(one, one.unpacked_at)
            yield self._over.popleft()

    def _without_waits(self, one: Reading, moments: dict[int, tuple[Moment, int]]) -> dict[int, float]:
        """Returns the seconds of compute from the beginning of ``one`` to each moment, without waits."""
        found, waited, at = {}, 0.0, 0
        for number, (moment, position) in moments.items():
            while at < len(one.waits_at) and one.waits_at[at][0] < position:
                waited += one.waits_at[at][1]
                at += 1
            found[number] = (self._runtime.seconds_between(one.began, moment) or 0.0) - waited
        return found

    def _close(self, one: Reading, memory: DeviceMemory | None, now: Moment) -> None:
        self._unpacks = min(max(one.unpacks, 1), _ROUND)
        if memory is not None and one.memory is not None:
            # In later steps, growth may belong to another thread.
            one.growth = memory.used - one.memory.used if self._steps < _FIRST else 0
            remembered, grown = one.memory.peak, memory.peak
            if remembered is not None and grown is not None and grown > remembered and not one.is_over:
                # The peak may have been reached after backward; then fewer bytes are kept than would fit.
                one.peak = max(grown, one.peak)
            if remembered is not None and one.peak <= remembered and one.is_over and not self._hides(one.memory):
                one.peak, one.is_exact = remembered, False
        self._steps += 1
        if self._is_timed:
            one.stopped, one.end = now, self._transfers.transfer_log.end
            self._over.append(one)

    def stop(self) -> None:
        """Drops all readings."""
        self._open = None
        self._over.clear()

    def _is_sampled(self) -> bool:
        """Counts a call, and returns whether to read a CPU's memory at it."""
        self._calls += 1
        if self.budget is None or self._remembers:
            return False
        return self._steps < _FIRST or self._calls % _NOW_AND_THEN == 0

    def _hides(self, memory: DeviceMemory) -> bool:
        """Returns whether the peak counter is too high to tell whether a step kept the budget."""
        return self.budget is not None and (memory.peak or 0) > self.budget * _HIDING_PART

    def _look(self, one: Reading) -> None:
        """Reads the memory in use, and the peak counter if it has grown in the step."""
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
        """Returns the budget in bytes; for ``"auto"``, the memory in use and most of the free memory."""
        memory = self._runtime.memory(self._device)
        if memory is None:
            raise ConfigError(
                f"device_budget={self._given or repr(given)} is not accepted for {self._device}, which does not report "
                "how much of its memory is used: leave it out, and bound the bytes on the device with keep_last_bytes, "
                "max_inflight_bytes and prefetch_bytes"
            )
        if isinstance(given, int):
            return given
        return self._runtime.available_memory(self._device, memory.used)


class Keeping:
    """Sets the limits of the threads' queues, of the prefetch order and of the step tables when a forward begins.

    Raises:
        ConfigError: the config has a budget, and the device does not report its memory in use.
    """

    def __init__(self, transfers: Transfers, config: OffloadConfig, tables: StepTables, order: PrefetchOrder) -> None:
        self._transfers, self._config, self._tables, self._order = transfers, config, tables, order
        self._windows = transfers.windows
        #: Reads memory and time of steps; ``None`` if no setting and no outcome of a plan depends on them now.
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
        #: Times steps to size the windows; ``None`` if no window is automatic, in a capture, or if ``readings`` has
        #: another purpose. Not on a CPU: a disk's first writes only reach a cache, and look faster than later ones.
        self._timing: Readings | None = None
        is_sized = self._windows.is_auto and self.readings is None and not transfers.is_captured
        if is_sized and not transfers.runtime.has_one_stream:
            self._timing = Readings(transfers, config, is_timed=True)
        #: The log of the last step of each thread, by its queue; and the table whose windows are in force.
        self._logs: weakref.WeakKeyDictionary[ResidentQueue, StepLog] = weakref.WeakKeyDictionary()
        self.known: KnownTable | None = None
        # A captured step repeats as it was captured.
        self._learns_what_stays = config.learns_what_stays and not transfers.is_captured
        #: Whether copies of storages with fate MOVE start as soon as the bytes are final.
        self.leaves_early = tables.controller is not None or self._learns_what_stays
        #: In an unknown step, the newest bytes that each thread keeps.
        self.keep = 0
        self._use_windows()

    def move(self, fraction: float) -> None:
        """Makes each step that has a table move this fraction of its movable bytes."""
        self._tables.control(Controller(None, fraction))
        self.leaves_early = True

    @property
    def adapts(self) -> bool:
        """Whether a limit may change when a forward begins."""
        return self.readings is not None or self._windows.is_auto

    def new_queue(self) -> ResidentQueue:
        """Returns the queue of a thread's saved storages."""
        queue = ResidentQueue(self.keep)
        self._queues.add(queue)
        return queue

    def begin(self, queue: ResidentQueue) -> None:
        """Updates windows, limits and readings for a forward on the thread of ``queue``."""
        movable = queue.movable
        if self._windows.begin(movable, queue.largest):
            self._use_windows()
        queue.begin_step()
        self._tell_windows()
        if self._timing is not None:
            self._time(queue)
        if self.readings is None:
            return
        self._transfers.poll()  # derives the tables of finished steps
        if (over := self.readings.begin(queue)) is not None:
            self._observe_memory(over)
        for one in self.readings.timed():
            self._observe_waits(one)
        controller = self._tables.controller
        if controller is not None and controller.is_free and self._budget is None:
            queue.limit = max(self.keep, int((1 - controller.fraction(controller.unknown)) * movable))

    def note_step(self, log: StepLog, queue: ResidentQueue) -> None:
        """Notes that a step of ``queue``'s thread begins, at its first save that may move."""
        if self._timing is not None:
            self._logs[queue] = log
        if self.readings is not None:
            self.readings.note_step(log, queue)

    def use(self, known: KnownTable | None) -> None:
        """Puts the windows of ``known`` in force."""
        self.known = known
        least = None if known is None else known.least
        if (self._windows.are_least or least is not None) and self._windows.use(least):
            self._use_windows()

    def _time(self, queue: ResidentQueue) -> None:
        """Times the step that begins, if the table of the thread's last step is due to be timed."""
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
        """Grows the windows during a first step, to fit the saves of ``queue`` so far."""
        if self._windows.grow(queue.largest):
            self._use_windows()

    def _observe_memory(self, one: Reading) -> None:
        """Gives the controller the memory of a finished step."""
        controller, budget = self._tables.controller, self._budget
        if budget is None or one.log is None or not one.peak:
            return
        assert controller is not None
        kept = one.log.kept
        if one.peak > budget:
            for queue in self._queues:  # offload kept storages, unless backward comes first
                queue.requeue_exempt()
            why = partial(self._why, one.peak, budget) if kept == 0 else None
            self._transfers.accounts.fall_back("over_budget", why)
        if (known := one.log.kind) is not None:
            movable = known.table.movable_bytes
            controller.observe_memory(known.kind, one.peak, kept, movable, one.growth, is_exact=one.is_exact)

    def _observe_waits(self, one: Reading) -> None:
        """Uses the times of a finished step: to update or decide the controller's fraction for its class, or to size
        the windows of its table."""
        controller, log, link = self._tables.controller, one.log, self.link
        if log is None or (known := log.kind) is None:
            return
        kind = known.kind
        if kind.free is not None:
            assert controller is not None
            if log.fraction is not None:
                controller.observe_waits(kind, log.fraction, one.exposed / max(one.seconds - one.exposed, 1e-12))
                self._transfers.accounts.counters.slowdown = controller.slowdown
        elif one.saved and one.unpacked and link is not None and (controller is None or not known.is_timed):
            if not known.time(log.times(one.saved, one.unpacked, link, self._windows)):
                return
            if controller is None:
                known.size(self._windows)
                self.known = None  # so that the next matching step puts the new windows in force
            else:
                controller.decide(kind, known.hidden_part())

    @property
    def link(self) -> Link | None:
        """The measured speed of the link; ``None`` before the first timed copy."""
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
            f"device_budget={given} is not kept: the peak on {device} was {size_text(peak)}, although every "
            "saved tensor that may be offloaded was. What remains is the model's own memory, saved tensors below "
            f"min_bytes, copies in flight{freed if device.type == 'cpu' else ''}. To need less, take a smaller "
            f"{smaller}min_bytes or batch, or use checkpointing; otherwise raise device_budget"
        )
