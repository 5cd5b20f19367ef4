"""How many saved bytes of one device stay, and how many may be on their way.

The windows say both, unless there is a budget of the device or only what the link hides moves: then a controller says
which part of a known step's bytes moves. What is here needs the lock of the transfers, see ``DeviceOffloader.locked``.
"""

from __future__ import annotations

from functools import partial

from eager_offload.config import OffloadConfig, size_literal, size_text
from eager_offload.core.budget import Controller
from eager_offload.core.schedule import PrefetchOrder, ResidentQueue
from eager_offload.core.step_table import Link, Step, StepTables
from eager_offload.eager.readings import Reading, Readings
from eager_offload.engine.transfers import Transfers
from eager_offload.errors import warn_once
from eager_offload.tiers.forking import Living


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
            self.readings = Readings(transfers, config)
        self._budget = None if self.readings is None else self.readings.budget
        if is_controlled:
            if tables.controller is None:
                tables.control(Controller(self._budget, float(config.is_free), is_free=config.is_free))
            else:
                tables.controller.budget = self._budget
        self._queues: Living[ResidentQueue] = Living()
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

    def begin_step(self, step: Step, queue: ResidentQueue) -> None:
        """Begins a step of the thread of ``queue``, in which something is saved that may leave."""
        if self.readings is not None:
            self.readings.note_step(step.log, queue)

    def grow(self, queue: ResidentQueue) -> None:
        """Has the windows follow what ``queue`` has taken in, in a first step, before which nothing is known."""
        if not self._windows.is_known and self._windows.grow(queue.largest):
            self._use_windows()

    def _observe_memory(self, one: Reading) -> None:
        """Has the controller learn from the memory of a step that is over."""
        controller, budget = self._tables.controller, self._budget
        if budget is None or one.log is None or not one.peak:
            return
        assert controller is not None
        kept = one.log.kept
        if one.peak > budget:
            accounts = self._transfers.accounts
            accounts.counters.fall_back("over_budget")
            for queue in self._queues:  # what was to stay leaves, unless backward comes first
                queue.stay_no_longer()
            if kept == 0:
                warn_once("over_budget", partial(self._why, one.peak, budget), accounts.said)
        if (known := one.log.kind) is not None:
            movable, kind = known.table.movable_bytes, self._tables.kind_of(known)
            controller.observe_memory(kind, one.peak, kept, movable, one.growth, is_exact=one.is_exact)

    def _observe_waits(self, one: Reading) -> None:
        """Has the controller learn from the waits of a step that is over, or decide what the link hides of its kind."""
        controller, log = self._tables.controller, one.log
        assert controller is not None
        if log is None or (known := log.kind) is None:
            return
        kind, link = self._tables.kind_of(known), self.link
        if kind.free is not None:
            if log.fraction is not None:
                controller.observe_waits(kind, log.fraction, one.exposed / max(one.seconds - one.exposed, 1e-12))
                self._transfers.accounts.counters.slowdown = controller.slowdown
        elif one.saved and one.asked and link is not None:
            self._tables.time(known, log.times(one.saved, one.asked, link, self._windows))

    @property
    def link(self) -> Link | None:
        """How fast bytes travel; ``None`` where nothing was moved that could tell."""
        out = self._transfers.out_rate.value
        return None if out is None else Link(out, self._transfers.in_rate.value or out)

    def _use_windows(self) -> None:
        prefetch = self._order.limit = self._windows.prefetch
        self.keep = 0 if self._budget is not None else self._config.newest_bytes(prefetch)
        self._tables.room = self._config.small_step_bytes(prefetch) if self._learns_what_stays else 0
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
