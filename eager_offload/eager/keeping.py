"""How many of the newest saved bytes of one device stay, and how many may be on their way.

The windows say both, unless a budget of the device or a limit of the slowdown does. What is here needs the lock of the
transfers, see ``DeviceOffloader.locked``.
"""

from __future__ import annotations

from eager_offload.config import OffloadConfig
from eager_offload.eager.device_budget import DeviceBudget
from eager_offload.eager.exposure import Exposure
from eager_offload.engine.transfers import Transfers
from eager_offload.schedule import PrefetchOrder, ResidentQueue
from eager_offload.step_table import StepTables
from eager_offload.tiers.finalizers import Living


class Keeping:
    """Sets the limits of the threads' queues, of the look-ahead and of the step tables, at the begin of each forward.

    Raises:
        ConfigError: the device cannot tell how much of it is used, or the time, where the config needs that.
    """

    def __init__(self, transfers: Transfers, config: OffloadConfig, tables: StepTables, order: PrefetchOrder) -> None:
        self._transfers, self._config, self._tables, self._order = transfers, config, tables, order
        self._windows = transfers.windows
        #: The most of the newest bytes that stay where neither a budget nor a limit of the slowdown says it.
        self._queue_bytes = keep = config.newest_bytes(self._windows.prefetch)
        budget, limit = config.device_budget, config.slowdown
        #: Bounds the device; ``None`` where nothing does.
        self.budget = None if budget is None else DeviceBudget(transfers, budget, keep, config.written("device_budget"))
        #: Keeps as much as it takes for steps to wait no longer than a limit; ``None`` where there is no limit.
        self.exposure = None if limit is None else Exposure(transfers, limit, keep, config.says_slowdown)
        self._queues: Living[ResidentQueue] = Living()
        # Not by the time that steps took, where a graph is captured of one.
        self._learns_what_stays = config.learns_what_stays and not transfers.is_captured
        #: Whether storages that a step table has leave do so as soon as they are final.
        self.leaves_early = self.exposure is not None or self._learns_what_stays
        self._use_windows()

    @property
    def adapts(self) -> bool:
        """Whether anything may change when a forward begins."""
        return self.budget is not None or self.exposure is not None or self._windows.is_auto

    @property
    def keep(self) -> int:
        """The most bytes of the newest that stay, for each thread."""
        kept = [one.keep for one in (self.budget, self.exposure) if one is not None]
        return min(kept, default=self._queue_bytes)

    @property
    def kept_newest(self) -> int:
        """Bytes of the newest that stay now, of all threads."""
        return sum(queue.nbytes for queue in self._queues)

    def new_queue(self) -> ResidentQueue:
        """Returns a queue of the newest bytes, for one thread."""
        queue = ResidentQueue(self.keep)
        self._queues.add(queue)
        return queue

    def begin(self, queue: ResidentQueue) -> str:
        """Begins a forward on the thread of ``queue``; returns a warning to the user, empty where there is none."""
        counters, budget, exposure, message = self._transfers.accounts.counters, self.budget, self.exposure, ""
        if self._windows.begin(queue.movable, queue.largest):
            self._use_windows()
        queue.begin_step()
        self._tell_windows()
        if budget is None and exposure is None:
            return message
        self._transfers.poll()
        if budget is not None:
            budget.begin()
            message = budget.warning()
        if exposure is not None:
            most = self._tables.most_bytes
            exposure.begin(queue, most if budget is None else min(most, budget.keep))
        keep = queue.limit = counters.keep_last_bytes = self.keep
        if exposure is not None:
            self._tables.keep(keep, self._queue_bytes)
        return message

    def grow(self, queue: ResidentQueue) -> None:
        """Has the windows follow what ``queue`` has taken in, in a first step, which nothing is known before."""
        if not self._windows.is_known and self._windows.grow(queue.largest):
            self._use_windows()

    def expect(self, movable: int, largest: int) -> None:
        """Sets the windows for steps like one with these numbers; see ``Windows.begin``."""
        if self._windows.begin(movable, largest):
            self._use_windows()

    def _use_windows(self) -> None:
        prefetch = self._order.limit = self._windows.prefetch
        self._queue_bytes = self._config.newest_bytes(prefetch)
        self._tables.room = self._config.small_step_bytes(prefetch) if self._learns_what_stays else 0
        for queue in self._queues:
            queue.limit = self.keep
        self._tell_windows()

    def _tell_windows(self) -> None:
        counters, windows = self._transfers.accounts.counters, self._windows
        counters.max_inflight_bytes, counters.prefetch_bytes = windows.inflight, windows.prefetch
