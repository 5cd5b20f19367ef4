"""The counters of an ``Offload``, and the frozen snapshot of them that users read."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from eager_offload.config import OffloadConfig, size_text
from eager_offload.errors import warn_once
from eager_offload.tiers.forking import FinalizerRecord, ForkSafeLock
from eager_offload.torch_private.memory import storage_key, storage_of


class KeepReason(StrEnum):
    """Why a saved tensor stays on its device."""

    SMALL = "small"
    PARAMETER = "parameter"
    DEVICE = "device"
    LAYOUT = "layout"
    MARKED = "marked"
    REGION = "region"
    NEWEST = "newest"
    ALIVE = "alive"
    BUDGET = "budget"
    FAILED = "failed"
    """Its copy failed, or the device had no memory to gather its elements before the copy."""


@dataclass(frozen=True)
class PlanOutcome:
    """The predictions of a plan, and the measurements; sizes in bytes, times in seconds."""

    predicted_peak_bytes: int
    """The peak memory of a step on the device."""
    predicted_step_seconds: float
    """The time of forward and backward."""
    peak_bytes: int | None = None
    """The highest peak of the device's allocator in a step; ``None`` on a CPU, and if an earlier peak was higher."""
    step_seconds: float | None = None
    """The median of the last steps, by the clock of the device: from the entry of the ``with`` until backward unpacks
    the last tensor. ``None`` before the first step is over, and on a device without timing events."""

    def __str__(self) -> str:
        peak = "" if self.peak_bytes is None else f", measured {size_text(self.peak_bytes)}"
        seconds = "" if self.step_seconds is None else f", measured {self.step_seconds:,.4g} s"
        return (
            f"a peak of {size_text(self.predicted_peak_bytes)}{peak}; a step of {self.predicted_step_seconds:,.4g} s"
            f"{seconds}"
        )


class Relief(NamedTuple):
    """A larger budget, and the wait that the planner predicts for it."""

    device_budget: int
    """Bytes."""
    waits: float
    """The share of the step in which compute waits for transfers."""


class PlanPredictions(Protocol):
    """The predictions of the user's plan."""

    policy: str
    """``"least"``, ``"free"`` or ``"max"``."""

    @property
    def peak_bytes(self) -> int:
        """The peak memory of a step on the device."""

    @property
    def step_seconds(self) -> float:
        """The time of forward and backward."""

    @property
    def relief(self) -> Relief | None:
        """The smallest larger budget with which compute hardly waits, or ``None``. May take seconds."""


#: Fields of the stats that do not add up from step to step.
_NO_AMOUNTS = ("device_budget", "keep_last_bytes", "max_inflight_bytes", "plan", "prefetch_bytes", "slowdown")


@dataclass(frozen=True)
class OffloadStats:
    """A snapshot of an :class:`~eager_offload.Offload`'s counters; ``print`` shows it as a short report.

    Bytes are of tensors as saved, counted once per pack. ``saved_bytes == offloaded_bytes + shared_bytes +
    sum(kept_bytes.values())`` always holds, and once all graphs are gone ``offloaded_bytes == reloaded_bytes +
    forwarded_bytes + released_bytes``.
    """

    steps: int = 0
    """Steps that saved a tensor: each outermost ``with`` around a forward, each forward inside a ``with`` around
    several steps, and each run of a compiled graph outside every ``with``."""
    saved_tensors: int = 0
    """Tensors that autograd saved; a wrapper (a ``DTensor``) counts as the plain tensors inside it."""
    saved_bytes: int = 0
    """Bytes of the saved tensors."""
    offloaded_tensors: int = 0
    """Saved tensors whose storage was offloaded."""
    offloaded_bytes: int = 0
    """Bytes of the offloaded tensors."""
    shared_bytes: int = 0
    """Bytes of saves whose storage an earlier save has offloaded already."""
    kept_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that stay on the device, by reason."""
    reloaded_bytes: int = 0
    """Offloaded bytes that were brought back."""
    forwarded_bytes: int = 0
    """Offloaded bytes that backward unpacked while they were still resident."""
    released_bytes: int = 0
    """Offloaded bytes that no backward unpacked."""
    failed_bytes: int = 0
    """Offloaded bytes of forwards that an exception ended, so that no backward followed."""
    bytes_out: int = 0
    """Bytes that left the device; a storage counts once for all of its views."""
    bytes_in: int = 0
    """Bytes that came back."""
    stall_seconds: float = 0.0
    """Time that compute waited for transfers, and for the system to give memory to a tier. On an accelerator, events of
    the compute stream measure it, for waits that the device has passed; ``stats(synchronize=True)`` counts all waits.
    Waits of captured graphs are not counted; 0 on a device whose events do not tell the time."""
    window_stall_seconds: float = 0.0
    """The part of ``stall_seconds`` that was for room in the in-flight window."""
    host_wait_seconds: float = 0.0
    """Time that the host waited for the same. On a CPU the host computes, so it equals ``stall_seconds``. On an
    accelerator it costs nothing as long as compute has queued work."""
    processor_seconds: float = 0.0
    """Processor time of finished copies, in seconds of one core; 0 if the device copies. On a CPU device compute may
    have lacked these cores: a step may take longer although ``stall_seconds`` hardly grows."""
    out_seconds: float = 0.0
    """Time of copies out. On an accelerator only some copies are timed, and the rest is estimated from their rate; 0 on
    a device that does not tell the time."""
    in_seconds: float = 0.0
    """Time of copies back, measured in the same way."""
    inflight_bytes_peak: int = 0
    """Most bytes on their way out at one time."""
    resident_bytes_peak: int = 0
    """Most bytes that the library held on the device at one time: last saved, in flight, or prefetched."""
    device_bytes_peak: int = 0
    """Most bytes of saved tensors on the device at one time. Each storage counts whole and once until it is freed, even
    if the program holds it too; reloaded copies count as well. Parameters, which are there anyway, and storages below
    ``min_bytes`` are left out. This and ``without_offload_bytes_peak`` cover the steps from the first one that followed
    a step table; without such a step, all steps but the first, which has large windows."""
    without_offload_bytes_peak: int = 0
    """Most bytes that saved tensors would have taken on the device at one time without offload; each storage counts
    once."""
    host_bytes_peak: int = 0
    """Most bytes of this ``Offload`` in host memory at one time."""
    disk_bytes_peak: int = 0
    """Most bytes of this ``Offload`` on disk at one time."""
    disk_bytes_written: int = 0
    """Bytes written to disks, rounding included."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Fallbacks, and how often each was taken: ``host_to_disk``, ``budget``, ``write_failed``, ``no_thread``,
    ``pageable`` (host memory that could not be pinned, for this ``Offload`` or another one),
    ``device_full`` (no memory for the gathered elements of a small view: they stay), ``over_budget`` (forwards whose
    peak was above ``device_budget``, or that of a plan) and others."""
    foreign_hooks: int = 0
    """Other saved-tensor hooks that were entered inside this context and hide saves from it. Not counted: hooks that
    pass their tensors on to the context's hooks, and hooks of a checkpoint."""
    table_forwards: int = 0
    """Forwards that followed a step table from their first save on."""
    table_misses: dict[str, int] = field(default_factory=dict)
    """The number of these forwards that continued as unknown steps, by the difference from all tables: ``size``,
    ``share``, ``requires_grad``, ``more`` or ``fewer`` saves, or the ``order`` of backward."""
    plan: PlanOutcome | None = None
    """The predictions of the given plan (see :func:`eager_offload.plan`), and the measurements."""
    device_budget: int = 0
    """Bytes of the device that training may take, from the setting ``device_budget``; 0 without a bound. This and
    ``keep_last_bytes`` are of the device that was used last."""
    device_memory_peak: int = 0
    """Peak memory in use on the device, by any allocation, measured with a ``device_budget``."""
    max_inflight_bytes: int = 0
    """The in-flight window in force, given or ``"auto"``; 0 before the first save. This and ``prefetch_bytes`` are of
    the device, or the compiled graph, that was used last."""
    prefetch_bytes: int = 0
    """The prefetch window in force; 0 before the first save."""
    keep_last_bytes: int = 0
    """Bytes of the last known step that stayed because of ``device_budget`` or ``policy="free"``."""
    slowdown: float = 0.0
    """The time that compute waited for transfers in the last step that ``policy="free"`` decided, by the device's
    clock, divided by the time of the step without these waits."""
    compiled_regions: int = 0
    """Runs of forward graphs of compiled code that move something."""
    compiled_graphs: int = 0
    """The number of these graphs."""
    keeps_freed_memory: bool = False
    """Whether CPU tensors moved in a process whose C library keeps freed memory; see ``release_freed_memory``."""
    releases_freed_memory: bool = False
    """Whether CPU tensors moved in a process in which an ``Offload`` has freed memory go back to the system."""
    step_memory_peak: int | None = field(default=None, compare=False)
    """Peak memory in use in the last step, by any allocation, read when backward ended: on a CPU the resident memory of
    the process, read after each copy; on an accelerator the allocator's peak counter. ``None`` if nothing moved or the
    device does not report it."""
    copies_within_host: bool = False
    """Whether CPU tensors were copied to a tier in host memory, which frees nothing."""
    failed_forwards: int = 0
    """Outermost contexts that an error has ended."""
    empty_forwards: int = 0
    """Contexts in which autograd recorded operators but no saved tensor was seen."""
    is_approximate: bool = False
    """Whether an interrupt came inside the library, so that counts around it may be missing."""
    seconds: float = field(default=0.0, compare=False)
    """Time since the first ``with`` that is counted."""
    _config: ClassVar[OffloadConfig] = OffloadConfig()
    """The configuration of the run. It is not a field, and not compared."""
    _planned: ClassVar[PlanPredictions | None] = None
    """The plan that was given, likewise."""
    _advise: ClassVar[Callable[[OffloadStats, OffloadConfig], tuple[str, ...]]]
    """The rules of ``observe/advice.py``. ``Offload`` sets it, because this module may not import ``observe``."""
    _describe: ClassVar[Callable[[OffloadStats, OffloadConfig], str]]
    """The report of ``observe/report.py``, likewise."""

    def __post_init__(self) -> None:
        if isinstance(plan := cast(object, self.plan), dict):  # from ``to_dict``
            object.__setattr__(self, "plan", PlanOutcome(**plan))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields in the types of JSON; ``OffloadStats(**stats.to_dict())`` is equal to ``stats``."""
        return dataclasses.asdict(self)

    def since(self, before: OffloadStats) -> OffloadStats:
        """Returns the counts since ``before``, of the same run; fields that are not amounts keep their present
        value."""
        earlier, found = before.to_dict(), self.to_dict()
        for name, now in found.items():
            if name in _NO_AMOUNTS or name.endswith(("_peak", "_largest")) or isinstance(now, bool):
                continue
            if isinstance(now, dict):
                more = {what: value - earlier[name].get(what, 0) for what, value in now.items()}
                found[name] = {what: value for what, value in more.items() if value}
            else:
                found[name] = now - earlier[name]
        stats = OffloadStats(**found)
        stats._know(self._config, self._planned)
        return stats

    def _know(self, config: OffloadConfig, planned: PlanPredictions | None) -> None:
        # the one way to set an attribute of a frozen dataclass
        for name, value in (("_config", config), ("_planned", planned)):
            object.__setattr__(self, name, value)

    @property
    def advice(self) -> tuple[str, ...]:
        """Sentences on what limited the run and which setting to change."""
        return type(self)._advise(self, self._config)

    @property
    def terabytes_a_day(self) -> float:
        """The bytes that a whole day at this rate would write to disks, in units of 1e12 bytes."""
        return self.disk_bytes_written / self.seconds * 86_400 / 1e12 if self.seconds else 0.0

    def __str__(self) -> str:
        return type(self)._describe(self, self._config)


#: Most dead handles that are not yet taken out of the count.
_MOST_DROPPED = 256


class LiveStorage(FinalizerRecord[torch.UntypedStorage]):
    """A weak reference to a storage whose views handles hold, or held when they were made."""

    __slots__ = ("handles", "key", "nbytes")
    key: int
    nbytes: int
    #: The number of handles for tensors of the storage, moved or not.
    handles: int


class LiveBytes:
    """The bytes of saved tensors that are alive, for the peaks. Callers hold the accounts' lock.

    [Note: distinct storages]
    Autograd holds a whole storage as long as it holds a view of it, and a storage that the program also holds stays on
    the device, even if its saved tensors move. So each storage counts once, with all of its bytes: as bytes without
    offload, from its first handle to its last one; as bytes on the device, as long as it lives. A weak reference
    reports its death; the callback only appends to a deque, see [Note: finalizers] in ``tiers/forking.py``.

    This object outlives the counters, which ``reset_stats()`` replaces within a step.
    """

    def __init__(self) -> None:
        #: Bytes that autograd would hold on the device without offload; and bytes on the device, of these storages and
        #: of copies of their bytes that the library holds.
        self.without_offload = 0
        self.on_device = 0
        #: Storages that are alive, or whose death was not noticed yet.
        self._storages: dict[int, LiveStorage] = {}
        self._gone: deque[LiveStorage] = deque()
        #: The storages of dead handles, once for each handle.
        self.dropped: deque[LiveStorage] = deque()
        self._records: set[_KeptRecord] = set()
        self._finalized: deque[_KeptRecord] = deque()
        # Taken once, or each record would make another one.
        self._on_storage_death, self._on_death = self._gone.append, self._finalized.append

    def add(self, storage: torch.UntypedStorage) -> LiveStorage:
        """Counts ``storage`` for a new handle. Its reference is in ``dropped`` once that handle has died."""
        key = storage_key(storage)
        found = self._storages.get(key)
        # Poll: the key may belong to a dead storage, and the references to dead ones must not pile up.
        if (found is not None and self._gone) or len(self.dropped) > _MOST_DROPPED:
            self.poll()
            found = self._storages.get(key)
        if found is None:
            found = self._storages[key] = LiveStorage(storage, self._on_storage_death)
            found.key, found.nbytes, found.handles = key, storage.nbytes(), 1
            self.without_offload += found.nbytes
            self.on_device += found.nbytes
        else:
            found.handles += 1
        return found

    def keep(self, handle: object, tensor: Tensor, nbytes: int, reason: Any) -> None:
        """Counts ``tensor``, which ``handle`` holds on the device."""
        if self._finalized:
            self.poll()
        record = _KeptRecord(handle, self._on_death)
        record.reason = reason
        storage = storage_of(tensor)
        record.storage = None if storage is None else self.add(storage)
        record.nbytes = nbytes if record.storage is None or record.storage.handles == 1 else 0
        self._records.add(record)
        if record.storage is None:
            self.without_offload += nbytes
            self.on_device += nbytes

    def kept_by(self) -> Iterator[tuple[Any, int]]:
        """Yields the reason and the bytes of each saved tensor that stays."""
        self.poll()
        for record in self._records:
            yield record.reason, record.nbytes

    def poll(self) -> None:
        """Takes the bytes of handles and storages that have died out of the count."""
        gone = self._gone  # storages that have died, or whose last handle has
        while self._finalized:
            record = self._finalized.popleft()
            self._records.discard(record)
            if record.storage is not None:
                self.dropped.append(record.storage)
            else:
                self.without_offload -= record.nbytes
                self.on_device -= record.nbytes
        while self.dropped:
            storage = self.dropped.popleft()
            storage.handles -= 1
            if not storage.handles:
                self.without_offload -= storage.nbytes
                gone.append(storage)
        while gone:
            storage = gone.popleft()
            if self._storages.get(storage.key) is storage:  # else it has gone before, and another one may have its key
                del self._storages[storage.key]
                self.on_device -= storage.nbytes


class _KeptRecord(FinalizerRecord[object]):
    """A weak reference to the handle of a saved tensor that stays."""

    __slots__ = ("nbytes", "reason", "storage")
    storage: LiveStorage | None
    #: Bytes of the tensor, if no other handle held its storage before.
    nbytes: int
    #: The reason to stay.
    reason: Any


class Stage(IntEnum):
    """How much is known of a step as it begins."""

    NONE = 0
    FIRST = 1
    """Nothing: its windows are large."""
    SIZED = 2
    """The bytes saved by the step before it, which size the windows."""
    KNOWN = 3
    """Its table."""


class Counters:
    """The counters behind :class:`OffloadStats`: plain attributes, which callers write under the accounts' lock."""

    def __init__(
        self,
        live: LiveBytes | None = None,
        plan: PlanOutcome | None = None,
        planned: PlanPredictions | None = None,
        stage: Stage = Stage.NONE,
    ) -> None:
        self.live = LiveBytes() if live is None else live
        self.live.poll()
        # The fields of a snapshot, by name; a field that is not here keeps its default there.
        self.steps = self.saved_tensors = self.offloaded_tensors = self.foreign_hooks = 0
        self.table_forwards = self.compiled_regions = self.empty_forwards = 0
        self.failed_forwards = 0
        self.saved_bytes = self.offloaded_bytes = self.shared_bytes = 0
        self.reloaded_bytes = self.forwarded_bytes = self.released_bytes = self.failed_bytes = 0
        self.bytes_out = self.bytes_in = self.disk_bytes_written = 0
        self.inflight_bytes_peak = self.resident_bytes_peak = self.device_bytes_peak = 0
        self.host_bytes_peak = self.disk_bytes_peak = self.device_memory_peak = 0
        self.without_offload_bytes_peak = self.live.without_offload
        self.stage = stage
        self.device_budget = self.keep_last_bytes = self.max_inflight_bytes = self.prefetch_bytes = 0
        self.stall_seconds = self.window_stall_seconds = self.host_wait_seconds = 0.0
        self.out_seconds = self.in_seconds = self.processor_seconds = self.slowdown = 0.0
        self.step_memory_peak: int | None = None
        self.releases_freed_memory = self.keeps_freed_memory = self.copies_within_host = self.is_approximate = False
        self.kept_bytes = dict.fromkeys(KeepReason, 0)
        self.fallbacks: dict[str, int] = {}
        self.table_misses: dict[str, int] = {}
        self.plan = plan
        self.planned = planned
        #: When the first `with` that is counted was entered.
        self.began: float | None = None
        #: Whether the next save is the first of a step.
        self.step_begins = False
        #: The compiled graphs that have moved something.
        self.graphs: set[str] = set()

    def begin(self, *, step: bool = True) -> None:
        """Begins to count, as a `with` is entered. With ``step`` the next save begins a step."""
        if self.began is None:
            self.began = time.perf_counter()
        self.step_begins |= step

    def _begin_step(self) -> None:
        self.step_begins = False
        self.steps += 1
        if self.stage < Stage.SIZED:
            self.reach(Stage(self.stage + 1))

    def kept(self, reason: KeepReason, nbytes: int) -> None:
        if self.step_begins:
            self._begin_step()
        self.saved_tensors += 1
        self.saved_bytes += nbytes
        self.kept_bytes[reason] += nbytes

    def expect(self, planned: PlanPredictions) -> None:
        self.plan = PlanOutcome(planned.peak_bytes, planned.step_seconds)
        self.planned = planned

    def kept_by_graph(self, region: str) -> int:
        """Counts the saves that a run of a compiled graph keeps. Returns their bytes without those of parameters."""
        kept = kept_by_graph(region)
        for reason, nbytes in kept.items():
            self.kept(reason, nbytes)
        return sum(nbytes for reason, nbytes in kept.items() if reason is not KeepReason.PARAMETER)

    def shared(self, nbytes: int) -> None:
        if self.step_begins:
            self._begin_step()
        self.saved_tensors += 1
        self.saved_bytes += nbytes
        self.shared_bytes += nbytes

    def reach(self, stage: Stage) -> None:
        """Begins a step at ``stage``. If more is known of it than of earlier steps, the peaks start again."""
        if stage > self.stage:
            self.stage = stage
            self.live.poll()
            self.device_bytes_peak, self.without_offload_bytes_peak = self.live.on_device, self.live.without_offload

    def note_live(self) -> None:
        """Updates the peaks after more tensors were saved."""
        live = self.live
        if live.on_device > self.device_bytes_peak or live.without_offload > self.without_offload_bytes_peak:
            live.poll()
            self.device_bytes_peak = max(self.device_bytes_peak, live.on_device)
            self.without_offload_bytes_peak = max(self.without_offload_bytes_peak, live.without_offload)

    def note_resident(self, resident_bytes: int) -> None:
        """Updates the peaks; the library now holds ``resident_bytes`` bytes on the device, more than before.

        ``resident_bytes`` counts each view with the whole range that it spans; views of one storage overlap, so their
        sum may exceed the bytes that are there.
        """
        self.note_live()
        self.resident_bytes_peak = max(self.resident_bytes_peak, min(resident_bytes, self.live.on_device))

    def fall_back(self, kind: str) -> None:
        self.fallbacks[kind] = self.fallbacks.get(kind, 0) + 1

    def stall(self, seconds: float, *, fills_window: bool) -> None:
        self.stall_seconds += seconds
        self.window_stall_seconds += seconds if fills_window else 0.0

    def snapshot(self, config: OffloadConfig | None = None) -> OffloadStats:
        """Returns the counts so far, with the configuration of the run for the advice."""
        values: dict[str, Any] = {
            name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()
        }
        for name in ("live", "planned", "stage", "began", "step_begins", "graphs"):
            del values[name]
        values["kept_bytes"] = {reason.value: nbytes for reason, nbytes in self.kept_bytes.items() if nbytes}
        values["compiled_graphs"] = len(self.graphs)
        values["seconds"] = 0.0 if self.began is None else time.perf_counter() - self.began
        stats = OffloadStats(**values)
        if config is not None:
            stats._know(config, self.planned)
        return stats


class Accounts(ForkSafeLock):
    """The lock and the current counters, which all devices of one ``Offload`` share.

    A saved storage is counted to its end on the counters that were current when it was offloaded, so that a reset
    within a step leaves no difference behind.
    """

    def __init__(self) -> None:
        super().__init__(shared=False)
        self.counters = Counters()
        #: The keys of the warnings that were given, see ``warn_once``.
        self.said: set[str] = set()

    def fall_back(self, kind: str, message: str | Callable[[], str] | None) -> None:
        """Counts a fallback, and warns with ``message`` of the first of its kind; callers hold the lock."""
        self.counters.fall_back(kind)
        if message is not None:
            warn_once(kind, message, self.said)


def kept_by_graph(region: str) -> dict[KeepReason, int]:
    """Returns the bytes that a compiled graph keeps, by reason, from its region text: a name and
    ``reason=bytes,...``."""
    items = (item.partition("=") for item in region.split(",")[1:])
    return {KeepReason(reason): int(nbytes) for reason, _, nbytes in items}
