"""Writes down what one ``Offload`` does while a trace runs, and makes a ``Trace`` of it.

pack, unpack      in place of the hooks' own: what saves, what asks
copies, waits     the engine reports them, see ``stats.Observer``       -> timestamps.py
compute           by global module hooks, and by what backward asks for -> compute.py

[Note: handles that report]
While a trace runs, autograd is given a ``RecordedHandle`` around each handle. It learns the operation when backward
comes to it. After the trace it only hands on.
"""

from __future__ import annotations

import dataclasses
import platform
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eager_offload._torch import without_torch_function
from eager_offload.config import OffloadConfig
from eager_offload.eager.handles import KeptTensor, SavedView
from eager_offload.eager.hooks import Packed
from eager_offload.engine.offloaders import Offloaders
from eager_offload.engine.transfer import CountedBytes, State
from eager_offload.observe.advice import advise
from eager_offload.observe.compute import Backwards, Forwards
from eager_offload.observe.timestamps import Bounded, Clock, Clocks, Copy, Saver, TimeLog, Work
from eager_offload.runtime.base import Event, Stream
from eager_offload.runtime.host import HostRuntime
from eager_offload.selection import logical_bytes
from eager_offload.stats import Accounts, Counters, GraphBytes, KeepReason, OffloadStats, OnDevice, kept_by_graph
from eager_offload.tiers.base import Slot
from eager_offload.trace_file import HOST_STALLS, MemorySample, SavedGroup, SliceKind, Trace
from eager_offload.version import VERSION

#: Of the stats, what does not add up from step to step.
_NO_AMOUNTS = ("device_budget", "keep_last_bytes", "max_inflight_bytes", "plan", "prefetch_bytes", "slowdown")
_BY_GRAPHS = "compiled graph"


class _Outcome(NamedTuple):
    """What became of a saved tensor, or of a plain one inside it."""

    outcome: str
    reason: str
    nbytes: int


def _kept(reason: KeepReason, nbytes: int) -> _Outcome:
    return _Outcome("kept", reason.value, nbytes)


def _outcome_of(record: CountedBytes, shares: bool, nbytes: int) -> _Outcome:
    """The record knows the state of a storage whether or not that is still alive."""
    if record.state is State.KEPT or (record.state is State.WAITING and not shares):
        return _kept(record.kept, nbytes)
    return _Outcome("shared" if shares else "offloaded", "", nbytes)


@dataclass(eq=False, slots=True)
class _Save:
    """A saved tensor, or what a graph saved at once."""

    module: str
    device: torch.device
    operation: str = ""
    #: By which it is known what became of it.
    outcomes: list[Callable[[], _Outcome]] = field(default_factory=list)


@dataclass(eq=False, slots=True, weakref_slot=True)
class RecordedHandle:
    """What autograd holds while a trace runs, and for as long as it holds it; see the note."""

    inner: Packed
    save: _Save
    recorder: weakref.ref[TraceRecorder]

    def unpack(self) -> Tensor:
        recorder = self.recorder()
        return self.inner.unpack() if recorder is None or recorder.is_over else recorder.unpack(self)


class _Wait(NamedTuple):
    """A wait that has begun: of a stream, or of the host."""

    time_log: TimeLog
    clock: Clock
    stream: Stream | None
    began: object
    where: Saver

    def over(self, what: str) -> None:
        is_compute = self.stream is not None or isinstance(self.clock.runtime, HostRuntime)
        track = SliceKind.STALL.value if is_compute else HOST_STALLS
        moments = self.clock, self.began, self.clock.at(self.stream)
        self.time_log.add(Work(SliceKind.STALL, what, *moments, track, *self.where, threading.get_ident()))


class _Thread(threading.local):
    #: What is being unpacked.
    asked: _Save | None = None


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
        self._saves = Bounded[_Save]()
        #: What saved a storage first, by its key.
        self._savers: dict[int, _Save] = {}
        self._memory = Bounded[MemorySample]()
        self._thread = _Thread()
        self._counters, self._demotions = accounts.counters, dict(accounts.counters.demotions)
        #: Whether nothing is written down any more.
        self.is_over = False

    def start(self) -> None:
        for offloader in self._offloaders.all():
            self._clocks.of(offloader.device)
        self._forwards.start()
        self._sample()

    def stop(self) -> None:
        """Takes away what reports to this; may be called again."""
        self.is_over = True
        self._forwards.stop()
        self._clocks.stop()

    def finish(self, before: OffloadStats, after: OffloadStats, counters: Counters) -> Trace:
        """Everything, once transfers are over.

        Args:
            before, after: the stats when the trace began and when it ended.
            counters: what was counted on when it began.
        """
        with self._accounts.lock:
            self._sample()
            seconds = self._clocks.host.seconds(self._clocks.host.at(None))
            self._forwards.break_off()
            self._backwards.close()
            saved = _groups_of(self._saves.entries)
            counted = _between(before, after) if counters is self._accounts.counters else after.to_dict()
        slices = self._time_log.slices(self._saver)
        return Trace(
            seconds=max([seconds, *(one.stop for one in slices)]),  # compute may go on when transfers are over
            config=self._config.to_dict(),
            stats=counted,
            advice=advise(after.with_counted(counted), self._config),
            saved=saved,
            slices=slices,
            memory=tuple(self._memory.entries),
            versions={"eager_offload": VERSION, "torch": torch.__version__, "python": platform.python_version()},
            dropped=self._time_log.dropped + self._saves.dropped + self._memory.dropped,
        )

    def _saver(self, key: int | None) -> Saver | None:
        save = None if key is None else self._savers.get(key)
        return None if save is None else Saver(save.module, save.operation)

    # -- hooks ------------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Packed | RecordedHandle:
        """In place of the pack hook."""
        with without_torch_function():  # a subclass hears no more of it than without a trace
            began = self._clocks.host.at(None)
            self._clocks.of(tensor.device)
            handle = self._pack(tensor)
            with self._accounts.lock:
                if self.is_over:
                    return handle
                save = _Save(self._forwards.path, tensor.device)
                self._add(tensor, handle, save)
                self._sample(began)
            return RecordedHandle(handle, save, weakref.ref(self))

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
        clock, kind = self._clocks.of(offloader.device), SliceKind(what)
        self._time_log.add(Copy(kind, clock, event, slot.nbytes, slot.tier, key, self._forwards.path))
        if kind is not SliceKind.OFFLOAD:
            self._backwards.asked(clock, "")  # a graph asks, whose saves have no handle here
        self._sample()

    def waits(self, offloader: OnDevice, stream: Stream | None) -> _Wait:
        save, clock = self._thread.asked, self._clocks.of(offloader.device)
        where = Saver(self._forwards.path) if save is None else Saver(save.module, save.operation)
        return _Wait(self._time_log, clock, stream, clock.at(stream), where)

    def graph_offloads(self, offloader: OnDevice, host: GraphBytes, region: str | None) -> None:
        record = host.record
        outcomes = [partial(_outcome_of, record, False, record.logical_bytes)]
        outcomes += (partial(_kept, reason, nbytes) for reason, nbytes in kept_by_graph(region or "").items())
        for outcome in outcomes:
            self._saves.add(_Save(self._forwards.path, offloader.device, _BY_GRAPHS, [outcome]))
        self._sample()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _add(self, tensor: Tensor, handle: Packed, save: _Save) -> None:
        """Takes note of a saved tensor."""
        if isinstance(handle, KeptTensor):
            save.outcomes = [partial(_kept, handle.reason, logical_bytes(tensor))]
        else:
            views = [handle] if isinstance(handle, SavedView) else handle.views()
            save.outcomes = [
                partial(_outcome_of, one.storage.record, one.shares, one.size.numel() * one.dtype.itemsize)
                for one in views
            ]
        if self._saves.add(save) and isinstance(handle, SavedView):
            self._savers.setdefault(handle.storage.record.key, save)

    def _sample(self, began: object = None) -> None:
        """Looks at what is held, and at what could not be done as planned since ``began``. The lock is held."""
        clock, counters, memory = self._clocks.host, self._accounts.counters, self._memory
        now, tiers = clock.at(None), self._offloaders.tiers()
        counters.live.poll()
        sample = MemorySample(
            clock.seconds(now),
            device=counters.live.kept + sum(one.resident_bytes for one in self._offloaders.all()),
            host=sum(tier.used_bytes for tier in tiers if tier.name != "disk"),
            disk=sum(tier.used_bytes for tier in tiers if tier.name == "disk"),
            without_offload=counters.live.without_offload,
        )
        if (not memory.entries or memory.entries[-1][1:] != sample[1:]) and not memory.add(sample):
            memory.entries[-1] = sample  # the last one stays, which shows what the trace leaves behind
        if counters is not self._counters:
            self._counters, self._demotions = counters, {}
        if counters.demotions != self._demotions:
            for kind, count in counters.demotions.items():
                if count > self._demotions.get(kind, 0):
                    where = (SliceKind.DEMOTION.value, self._forwards.path, "", threading.get_ident())
                    self._time_log.add(Work(SliceKind.DEMOTION, kind, clock, began or now, now, *where))
            self._demotions = dict(counters.demotions)


def _groups_of(saves: Iterable[_Save]) -> tuple[SavedGroup, ...]:
    """Which operation of which module saved what, most bytes first."""
    groups: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for save in saves:
        for outcome, reason, nbytes in (one() for one in save.outcomes):
            key = save.operation, save.module, outcome, reason
            count, total = groups.get(key, (0, 0))
            groups[key] = count + 1, total + nbytes
    found = (SavedGroup(*key, count=count, nbytes=total) for key, (count, total) in groups.items())
    return tuple(sorted(found, key=lambda group: -group.nbytes))


def _between(before: OffloadStats, after: OffloadStats) -> dict[str, Any]:
    """What was counted from ``before`` to ``after``; what is no amount is what it is."""
    first, found = dataclasses.asdict(before), dict[str, Any]()
    for name, last in dataclasses.asdict(after).items():
        if name in _NO_AMOUNTS or name.endswith(("_peak", "_largest")) or isinstance(last, bool):
            found[name] = last
        elif isinstance(last, dict):
            more = {what: value - first[name].get(what, 0) for what, value in last.items()}
            found[name] = {what: value for what, value in more.items() if value}
        else:
            found[name] = last - first[name]
    return found
