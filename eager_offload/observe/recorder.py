"""Writes down what one ``Offload`` does while a trace runs, and makes a ``Trace`` of it.

pack, unpack      in place of the hooks' own: what saves, what asks     -> saves.py
copies, waits     the engine reports them, see ``stats.Observer``       -> timestamps.py
compute           by global module hooks, and by what backward asks for -> compute.py
"""

from __future__ import annotations

import dataclasses
import platform
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eager_offload._torch import without_torch_function
from eager_offload.config import OffloadConfig
from eager_offload.eager.hooks import Packed
from eager_offload.engine.offloaders import Offloaders
from eager_offload.observe.advice import advise
from eager_offload.observe.compute import Backwards, Forwards
from eager_offload.observe.saves import GraphSave, RecordedHandle, SaveEntries, SaveEntry, groups_of
from eager_offload.observe.timestamps import Bounded, Clock, Clocks, Copy, TimeLog, Timestamp, Work
from eager_offload.runtime.base import Event, Stream
from eager_offload.runtime.host import HostRuntime
from eager_offload.selection import logical_bytes
from eager_offload.stats import Accounts, Counters, GraphBytes, KeepReason, OffloadStats, OnDevice, kept_by_graph
from eager_offload.tiers.base import Slot
from eager_offload.trace_file import HOST_STALLS, MemorySample, SliceKind, Trace
from eager_offload.version import VERSION

#: Of the stats, what does not add up from step to step.
_NO_AMOUNTS = ("device_budget", "keep_last_bytes", "max_inflight_bytes", "plan", "prefetch_bytes", "slowdown")


class _Wait(NamedTuple):
    """A wait that has begun: of a stream, or of the host."""

    time_log: TimeLog
    clock: Clock
    stream: Stream | None
    began: Timestamp
    where: tuple[str, str]

    def over(self, what: str) -> None:
        is_compute = self.stream is not None or isinstance(self.clock.runtime, HostRuntime)
        track = SliceKind.STALL.value if is_compute else HOST_STALLS
        now, thread = self.clock.at(self.stream), threading.get_ident()
        self.time_log.add(Work(SliceKind.STALL, what, self.began, now, track, thread, *self.where))


class _Thread(threading.local):
    #: What is being unpacked.
    asked: SaveEntry | None = None


class TraceRecorder:
    """See the module; and ``stats.Observer``, which this is.

    Args:
        pack: what packs a tensor when no trace runs.
    """

    def __init__(
        self, accounts: Accounts, offloaders: Offloaders, config: OffloadConfig, pack: Callable[[Tensor], Packed]
    ) -> None:
        self._accounts = accounts
        self._offloaders = offloaders
        self._config = config
        self._pack = pack
        self._clocks = Clocks(offloaders.runtime_of)
        self._time_log = TimeLog()
        self._forwards = Forwards(self._clocks, self._time_log)
        self._backwards = Backwards(self._time_log)
        self._saves = Bounded[SaveEntry]()
        self._log = SaveEntries(self.unpack, self._saves.add)
        self._memory = Bounded[MemorySample]()
        self._thread = _Thread()
        self._counters = accounts.counters
        self._demotions = dict(accounts.counters.demotions)

    def start(self) -> None:
        for offloader in self._offloaders.all():
            self._clocks.of(offloader.device)
        self._forwards.start()
        self._sample()

    def stop(self) -> None:
        """Takes away what reports to this; may be called again."""
        self._forwards.stop()
        self._clocks.stop()
        self._log.close()

    def finish(self, before: OffloadStats, after: OffloadStats, counters: Counters) -> Trace:
        """Everything, once transfers are over.

        Args:
            before, after: the stats when the trace began and when it ended.
            counters: what was counted on when it began.
        """
        with self._accounts.lock:
            self._sample()
            seconds = self._clocks.host.now().seconds()
            self._forwards.break_off()
            self._backwards.close()
            saved = groups_of(self._saves.entries)
            counted = _between(before, after) if counters is self._accounts.counters else dataclasses.asdict(after)
        slices = self._time_log.slices(self._log.saved_by)
        return Trace(
            seconds=max([seconds, *(one.stop for one in slices)]),  # compute may go on when transfers are over
            config=dataclasses.asdict(self._config),
            stats=counted,
            advice=advise(after.with_counted(counted), self._config),
            saved=saved,
            slices=slices,
            memory=tuple(self._memory.entries),
            versions=_versions(),
            dropped=self._time_log.dropped + self._saves.dropped + self._memory.dropped,
        )

    # -- hooks ------------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Packed | RecordedHandle:
        """In place of the pack hook."""
        with without_torch_function():  # a subclass hears no more of it than without a trace
            return self._pack_and_record(tensor)

    def _pack_and_record(self, tensor: Tensor) -> Packed | RecordedHandle:
        began = self._clocks.host.now()
        self._clocks.of(tensor.device)
        save = SaveEntry(self._forwards.path, tensor.device)
        handle = self._pack(tensor)
        with self._accounts.lock:
            if self._log.unpack is None:
                return handle
            recorded = self._log.add(tensor, handle, logical_bytes(tensor), save)
            self._sample(began)
        return recorded

    def unpack(self, handle: RecordedHandle) -> Tensor:
        """In place of the unpack hook."""
        save = handle.save
        clock = self._clocks.of(save.device)
        with self._accounts.lock:
            save.operation = self._backwards.asked(clock, save.module) or save.operation
            self._thread.asked = save
        try:
            return handle.inner.unpack()
        finally:
            self._thread.asked = None
            with self._accounts.lock:
                self._sample()

    # -- what the engine reports --------------------------------------------------------------------------------------

    def copied(self, offloader: OnDevice, what: str, slot: Slot, event: Event, key: int | None) -> None:
        clock = self._clocks.of(offloader.device)
        self._time_log.add(Copy(SliceKind(what), clock, event, slot.nbytes, slot.tier, self._forwards.path, key))
        self._sample()

    def waits(self, offloader: OnDevice, stream: Stream | None) -> _Wait:
        save = self._thread.asked
        where = (self._forwards.path, "") if save is None else (save.module, save.operation)
        clock = self._clocks.of(offloader.device)
        return _Wait(self._time_log, clock, stream, clock.at(stream), where)

    def stays(self, key: int) -> None:
        self._log.stays(key)

    def graph_offloads(self, offloader: OnDevice, host: GraphBytes, region: str | None) -> None:
        save = partial(SaveEntry, self._forwards.path, offloader.device)
        reason = KeepReason.BUDGET.value if host.slot is None else ""
        host.observed = self._log.add_by_graph(host.record.logical_bytes, reason, save())
        for kept, nbytes in kept_by_graph(region or "").items():
            self._log.add_kept_by_graph(kept.value, nbytes, save())
        self._sample()

    def graph_keeps(self, host: GraphBytes) -> None:
        if isinstance(host.observed, GraphSave):
            host.observed.stays(KeepReason.FAILED.value)

    def graph_reloads(self, offloader: OnDevice) -> None:
        self._backwards.asked(self._clocks.of(offloader.device), "")
        self._sample()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _sample(self, began: Timestamp | None = None) -> None:
        """Looks at what is held, and at what could not be done as planned since ``began``. The lock is held."""
        log, memory, now = self._log, self._memory, self._clocks.host.now()
        log.poll()
        tiers = self._offloaders.tiers()
        sample = MemorySample(
            now.seconds(),
            device=log.kept_bytes + sum(one.resident_bytes for one in self._offloaders.all()),
            host=sum(tier.used_bytes for tier in tiers if tier.name != "disk"),
            disk=sum(tier.used_bytes for tier in tiers if tier.name == "disk"),
            without_offload=log.without_offload,
        )
        if (not memory.entries or memory.entries[-1][1:] != sample[1:]) and not memory.add(sample):
            memory.entries[-1] = sample  # the last one stays, which shows what the trace leaves behind
        counters = self._accounts.counters
        if counters is not self._counters:
            self._counters, self._demotions = counters, {}
        if counters.demotions != self._demotions:
            for kind, count in counters.demotions.items():
                if count > self._demotions.get(kind, 0):
                    where = (SliceKind.DEMOTION.value, threading.get_ident(), self._forwards.path)
                    self._time_log.add(Work(SliceKind.DEMOTION, kind, began or now, now, *where))
            self._demotions = dict(counters.demotions)


def _between(before: OffloadStats, after: OffloadStats) -> dict[str, Any]:
    """What was counted from ``before`` to ``after``; what is no amount is what it is."""
    first = dataclasses.asdict(before)
    found: dict[str, Any] = {}
    for name, last in dataclasses.asdict(after).items():
        if name in _NO_AMOUNTS or name.endswith(("_peak", "_largest")) or isinstance(last, bool):
            found[name] = last
        elif isinstance(last, dict):
            more = {what: value - first[name].get(what, 0) for what, value in last.items()}
            found[name] = {what: value for what, value in more.items() if value}
        else:
            found[name] = last - first[name]
    return found


def _versions() -> dict[str, str]:
    return {"eager_offload": VERSION, "torch": torch.__version__, "python": platform.python_version()}
