"""Writes down what one ``Offload`` does while a trace runs, and makes a ``Trace`` of it.

pack, unpack      in place of the hooks' own: who saves, who asks, where backward is  -> ledger.py, backwards.py
copies, waits     told by those who move bytes, see seam.py                           -> moments.py
forwards          by global module hooks                                              -> modules.py
"""

from __future__ import annotations

import dataclasses
import platform
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eager_offload._torch import node_sequence, tree_iter
from eager_offload.config import OffloadConfig
from eager_offload.eager.ground import Ground
from eager_offload.eager.hooks import logical_bytes
from eager_offload.eager.lanes import Lanes
from eager_offload.observe.advice import advise
from eager_offload.observe.backwards import Backwards
from eager_offload.observe.ledger import MOST, Handle, Ledger, ParcelRecord, RecordedHandle, Save
from eager_offload.observe.modules import ModuleCall, Modules
from eager_offload.observe.moments import Clock, Clocks, Mark, Moments
from eager_offload.observe.trace import Kind, MemorySample, Trace
from eager_offload.parcels import Parcel
from eager_offload.runtime.base import Event, Stream
from eager_offload.stats import Accounts, KeepReason, OffloadStats, Tally
from eager_offload.tiers.base import Slot

__all__ = ["Recorder"]

#: Autograd nodes that are asked for their names when an outermost forward ends.
_MOST_NODES = 1 << 14


class _Wait:
    """A wait that has begun."""

    __slots__ = ("_began", "_clock", "_module", "_moments", "_operation", "_stream")

    def __init__(self, moments: Moments, clock: Clock, stream: Stream | None, module: str, operation: str) -> None:
        self._moments, self._clock, self._stream = moments, clock, stream
        self._module, self._operation = module, operation
        self._began = self._now()

    def over(self, what: str) -> None:
        self._moments.add_work(
            *(Kind.STALL, what, self._began, self._now()),
            track="stall" if self._stream is not None or self._clock.computes_on_host else "stall host",
            lane=threading.get_ident(),
            module=self._module,
            operation=self._operation,
        )

    def _now(self) -> Mark:
        return self._clock.now() if self._stream is None else self._clock.at(self._stream)


class _Thread(threading.local):
    def __init__(self) -> None:
        #: Saves of which the operation is not known.
        self.nameless: list[Save] = []
        #: What is being unpacked.
        self.asked: Save | None = None


class Recorder:
    """See the module; and ``observe.seam.Recorder``, which this is.

    Args:
        pack: what packs a tensor when no trace runs.
    """

    def __init__(
        self, accounts: Accounts, lanes: Lanes, config: OffloadConfig, pack: Callable[[Tensor], Handle]
    ) -> None:
        self._accounts = accounts
        self._lanes = lanes
        self._config = config
        self._pack = pack
        self._clocks = Clocks(lanes.runtime_of)
        self._moments = Moments()
        self._backwards = Backwards(self._moments)
        self._ledger = Ledger(self)
        self._modules = Modules(self)
        self._thread = _Thread()
        self._memory: list[MemorySample] = []
        self._dropped = 0
        self._tally = accounts.tally
        self._demotions = dict(accounts.tally.demotions)

    def start(self) -> None:
        for lane in self._lanes.all():
            self._clocks.of(lane.device)
        self._modules.start()
        self._sample()

    def stop(self) -> None:
        """Takes away what tells this; may be called again."""
        self._modules.stop()
        self._clocks.stop()
        self._ledger.listener = None

    def finish(self, before: OffloadStats, after: OffloadStats, tally: Tally) -> Trace:
        """Everything, once transfers are over.

        Args:
            before, after: the stats when the trace began and when it ended.
            tally: what was counted on when it began.
        """
        with self._accounts.lock:
            self._sample()
            seconds = self._clocks.host.now().seconds()
            self._modules.break_off()
            self._backwards.close()
            saved = self._ledger.close()
            counted = _between(before, after) if tally is self._accounts.tally else dataclasses.asdict(after)
        slices = self._moments.slices(self._ledger.of_key)
        return Trace(
            seconds=max([seconds, *(one.stop for one in slices)]),  # compute may go on when transfers are over
            config=dataclasses.asdict(self._config),
            stats=counted,
            advice=advise(OffloadStats(**counted), self._config),
            saved=tuple(saved),
            slices=slices,
            memory=tuple(self._memory),
            versions=_versions(),
            dropped=self._dropped + self._moments.dropped + self._ledger.dropped,
        )

    # -- hooks ------------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Handle | RecordedHandle:
        """In place of the pack hook."""
        began = self._clocks.host.now()
        self._clocks.of(tensor.device)
        save = Save(self._modules.path, tensor.device)
        handle = self._pack(tensor)
        with self._accounts.lock:
            if self._ledger.listener is None:
                return handle
            recorded = self._ledger.add(tensor, handle, logical_bytes(tensor), save)
            if len(self._thread.nameless) < MOST:
                self._thread.nameless.append(save)
            self._sample(began)
        return recorded

    def unpack(self, handle: RecordedHandle) -> Tensor:
        """In place of the unpack hook."""
        save = handle.save
        clock = self._clocks.of(save.device)
        with self._accounts.lock:
            name = self._backwards.asked(clock, save.module)
            save.operation = name or save.operation
            self._thread.asked = save
        try:
            return handle.inner.unpack()
        finally:
            self._thread.asked = None
            with self._accounts.lock:
                self._sample()

    def forward_begins(self, call: ModuleCall) -> None:
        if call.is_outermost:
            self._thread.nameless.clear()
        clock = self._clocks.of(call.device)
        call.began = clock.at(clock.current_stream)

    def forward_ends(self, call: ModuleCall, output: object) -> None:
        clock = self._clocks.of(call.device)
        assert isinstance(call.began, Mark)
        ended = clock.at(clock.current_stream)
        self._moments.add_work(
            *(Kind.COMPUTE, call.path, call.began, ended),
            track="compute forward",
            lane=threading.get_ident(),
            module=call.path,
        )
        if call.is_outermost:
            self._name_saves(call.first_node, output)

    def _name_saves(self, first: int, output: object) -> None:
        """Asks the graph behind ``output`` which operations made the saves of a forward: backward may never come."""
        nameless = {save.node: save for save in self._thread.nameless if not save.operation and save.node >= first}
        by_node: dict[int, list[Save]] = {}
        for save in self._thread.nameless:
            by_node.setdefault(save.node, []).append(save)
        self._thread.nameless.clear()
        if not nameless:
            return
        found: list[Any] = [one.grad_fn for one in tree_iter(output) if isinstance(one, Tensor)]
        seen: set[Any] = set()
        while found and len(seen) < _MOST_NODES:
            node = found.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            number = node_sequence(node)
            if number < first:
                continue
            for save in by_node.pop(number, ()):
                save.operation = save.operation or str(node.name())
            found.extend(following for following, _ in node.next_functions)

    # -- seam -------------------------------------------------------------------------------------------------------

    def copied(self, ground: Ground, what: str, slot: Slot, event: Event, key: int | None) -> None:
        self._moments.add_copy(
            *(Kind(what), self._clocks.of(ground.device), event),
            nbytes=slot.nbytes,
            tier=slot.tier,
            module=self._modules.path,
            key=key,
        )
        self._sample()

    def waits(self, ground: Ground, stream: Stream | None) -> _Wait:
        save = self._thread.asked
        module, operation = (self._modules.path, "") if save is None else (save.module, save.operation)
        return _Wait(self._moments, self._clocks.of(ground.device), stream, module, operation)

    def stays(self, key: int) -> None:
        self._ledger.stays(key)

    def parcel(self, ground: Ground, parcel: Parcel, region: str | None) -> None:
        module = self._modules.path
        reason = KeepReason.BUDGET.value if parcel.slot is None else ""
        parcel.recorded = self._ledger.add_parcel(parcel.logical_bytes, reason, Save(module, ground.device))
        for item in filter(None, (region or "").split(",")):
            kept, _, nbytes = item.partition("=")
            self._ledger.add_kept_by_graph(module, kept, int(nbytes))
        self._sample()

    def parcel_stays(self, parcel: Parcel) -> None:
        record = parcel.recorded
        if isinstance(record, ParcelRecord):
            record.reason = KeepReason.FAILED.value

    def graph_reloads(self, ground: Ground) -> None:
        self._backwards.asked(self._clocks.of(ground.device), "")
        self._sample()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _sample(self, began: Mark | None = None) -> None:
        """Looks at what is held, and at what could not be done as planned since ``began``. The lock is held."""
        ledger, now = self._ledger, self._clocks.host.now()
        ledger.drain()
        tiers = self._lanes.tiers()
        held = (
            ledger.kept_bytes + sum(lane.resident_bytes for lane in self._lanes.all()),
            sum(tier.used_bytes for tier in tiers if tier.name != "disk"),
            sum(tier.used_bytes for tier in tiers if tier.name == "disk"),
            ledger.without_offload,
        )
        if not self._memory or self._memory[-1][1:] != held:
            sample = MemorySample(now.seconds(), *held)
            if len(self._memory) < MOST:
                self._memory.append(sample)
            else:  # the last one stays, which shows what the trace leaves behind
                self._memory[-1] = sample
                self._dropped += 1
        tally = self._accounts.tally
        if tally is not self._tally:
            self._tally, self._demotions = tally, {}
        if tally.demotions != self._demotions:
            for kind, count in tally.demotions.items():
                if count > self._demotions.get(kind, 0):
                    self._moments.add_work(
                        *(Kind.DEMOTION, kind, began or now, now),
                        track=Kind.DEMOTION.value,
                        lane=threading.get_ident(),
                        module=self._modules.path,
                    )
            self._demotions = dict(tally.demotions)


def _between(before: OffloadStats, after: OffloadStats) -> dict[str, Any]:
    """What was counted from ``before`` to ``after``; a peak is what it is."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(OffloadStats):
        first, last = getattr(before, field.name), getattr(after, field.name)
        if isinstance(last, dict):
            more = {name: value - first.get(name, 0) for name, value in last.items()}
            found[field.name] = {name: value for name, value in more.items() if value}
        else:
            found[field.name] = last if field.name.endswith("_peak") else last - first
    return found


def _versions() -> dict[str, str]:
    import eager_offload

    return {"eager_offload": eager_offload.__version__, "torch": torch.__version__, "python": platform.python_version()}
