"""What an ``Offload`` has done so far: counters while it runs, and the frozen snapshot that users read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol, cast

from eager_offload.config import OffloadConfig, size_text
from eager_offload.live_bytes import LiveBytes
from eager_offload.tiers.forking import ForkSafeLock


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
    """Its copy failed, or there was no memory on its device to gather its elements in before they leave."""


#: So many steps are written down, and then one in so many.
_WRITTEN, _WRITTEN_AGAIN = 3, 16


class SavedRow(NamedTuple):
    """One save of a step, as far as it takes memory of the device."""

    nbytes: int
    """Bytes that it is the first of its step to hold; 0 for a further save of a storage."""
    size: int
    """Bytes of the tensor, which ``min_bytes`` is compared with; of several that hold the same bytes, the most."""
    reason: KeepReason | None
    """Why it stays; ``None`` for what may move."""
    operator: int
    """Equal for what one operator saves."""


@dataclass(frozen=True)
class PlanOutcome:
    """What a plan has predicted, and what was measured; sizes in bytes, times in seconds."""

    predicted_peak_bytes: int
    """That a step takes of the device at most."""
    predicted_step_seconds: float
    """Of forward and backward."""
    peak_bytes: int | None = None
    """The most that the device's allocator had handed out in a step; ``None`` on a CPU, and where it had handed out
    more before."""
    step_seconds: float | None = None
    """The median of the last steps: from where the ``with`` was entered until the last tensor was asked for, by the
    clock of the device. ``None`` before the first one is over, and where a device does not tell the time."""
    without_offload_seconds: float | None = None
    """Of forward and backward without offload, measured before training: ``None`` unless the plan was made of real
    steps, by ``steps=`` of :func:`eager_offload.plan`."""

    def __str__(self) -> str:
        peak = "" if self.peak_bytes is None else f", measured {size_text(self.peak_bytes)}"
        seconds = "" if self.step_seconds is None else f", measured {self.step_seconds:,.4g} s"
        return (
            f"a peak of {size_text(self.predicted_peak_bytes)}{peak}; a step of {self.predicted_step_seconds:,.4g} s"
            f"{seconds}"
        )


class Relief(NamedTuple):
    """A larger budget, and what comes of it as a planner predicts it."""

    device_budget: int
    """Bytes."""
    waits: float
    """The share of the step that compute waits for transfers."""


class Planned(Protocol):
    """The plan that was given."""

    policy: str
    """``"least"``, ``"free"`` or ``"max"``."""

    @property
    def peak_bytes(self) -> int:
        """That the step takes of the device at most."""
        ...

    @property
    def step_seconds(self) -> float:
        """Of forward and backward."""
        ...

    @property
    def without_offload_seconds(self) -> float | None:
        """Of forward and backward without offload, where that was measured."""
        ...

    @property
    def relief(self) -> Relief | None:
        """The least larger budget with which compute waits little; ``None`` where there is none. May take seconds."""
        ...


#: Of the stats, what does not add up from step to step.
_NO_AMOUNTS = ("device_budget", "keep_last_bytes", "max_inflight_bytes", "plan", "prefetch_bytes", "slowdown")


@dataclass(frozen=True)
class OffloadStats:
    """A snapshot of an :class:`~eager_offload.Offload`'s counters; ``print`` shows it as a short report.

    Bytes are of tensors as saved, counted once per pack. ``saved_bytes == offloaded_bytes + shared_bytes +
    sum(kept_bytes.values())`` always holds, and once all graphs are gone ``offloaded_bytes == reloaded_bytes +
    forwarded_bytes + released_bytes``.
    """

    steps: int = 0
    """How many steps saved something. The outermost ``with`` around a forward counts as one, and so does each forward
    inside of a ``with`` that surrounds several steps, and each run of a compiled graph outside of every ``with``."""
    saved_tensors: int = 0
    """How many tensors autograd saved; a wrapper (a ``DTensor``) counts as the plain tensors inside it."""
    saved_bytes: int = 0
    """Their bytes."""
    offloaded_tensors: int = 0
    """How many of them had a storage offloaded."""
    offloaded_bytes: int = 0
    """Bytes of those."""
    shared_bytes: int = 0
    """Bytes of saves whose storage an earlier one has offloaded already."""
    kept_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that stay on the device, by reason."""
    coded_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that a codec packed before they left, as they were on the device; by codec."""
    packed_bytes: dict[str, int] = field(default_factory=dict)
    """Those bytes as they travelled."""
    refused: dict[str, int] = field(default_factory=dict)
    """How many storages had values that their codec cannot hold: they travel as they are, or on an accelerator stay."""
    reloaded_bytes: int = 0
    """Offloaded bytes that were brought back."""
    forwarded_bytes: int = 0
    """Offloaded bytes that were asked for while they were still resident."""
    released_bytes: int = 0
    """Offloaded bytes that were never asked for."""
    failed_bytes: int = 0
    """Offloaded bytes of forwards that an exception has ended, so that no backward came for them."""
    bytes_out: int = 0
    """Bytes that left the device, in reality: a storage once, whatever its views."""
    bytes_in: int = 0
    """Bytes that came back, in reality."""
    stall_seconds: float = 0.0
    """Time that compute has waited for transfers, and for the system to give memory to a tier. On an accelerator it is
    told by events of the stream that computes, for waits that the device has passed: ``stats(synchronize=True)`` counts
    all. What a graph waits that was captured is not in it; it is 0 where a device's events do not tell the time."""
    window_stall_seconds: float = 0.0
    """The part of it that was for room in the in-flight window."""
    host_wait_seconds: float = 0.0
    """Time that the host has waited for the same. On a CPU, which computes itself, that is ``stall_seconds``. On an
    accelerator it costs nothing as long as compute, which the host runs ahead of, has work."""
    processor_seconds: float = 0.0
    """Time of one processor core that copies took, of those that are over. On a CPU device these are cores that compute
    may have lacked, which is in no stall: a step may take longer though it hardly waits. 0 where a device copies."""
    out_seconds: float = 0.0
    """For how long bytes travelled out. On an accelerator some copies are timed, and the others counted at their rate;
    0 where a device does not tell the time."""
    in_seconds: float = 0.0
    """For how long bytes travelled back, likewise."""
    inflight_bytes_peak: int = 0
    """Most bytes that were on their way out at one time."""
    resident_bytes_peak: int = 0
    """Most bytes that the library held on the device at one time: newest, on their way out, brought back early."""
    device_bytes_peak: int = 0
    """Most bytes of saved tensors that were on the device at one time: those that stay, and ``resident_bytes_peak``'s.
    Parameters, which are there anyway, and tensors below ``min_bytes`` take no part."""
    without_offload_bytes_peak: int = 0
    """Most bytes of saved tensors that would have been there at one time if nothing had moved."""
    host_bytes_peak: int = 0
    """Most bytes of this ``Offload`` that were in host memory at one time."""
    disk_bytes_peak: int = 0
    """Most bytes of it that were on disk at one time."""
    disk_bytes_written: int = 0
    """Bytes that were written to disks, rounding included."""
    demotions: dict[str, int] = field(default_factory=dict)
    """What could not be done as planned, and how often: ``host_to_disk``, ``budget``, ``write_failed``, ``no_thread``,
    ``device_full`` (no memory to gather the elements of a small view in before they leave: they stay), ``over_budget``
    (forwards whose peak was above ``device_budget``, or that of a plan), ``uncompiled_codec`` (sizes of tensors for
    which a codec could not be compiled: torch's own operators round them) and others."""
    foreign_hooks: int = 0
    """Other saved-tensor hooks that were entered inside this context and hide from it what is saved there. Not counted:
    hooks that call those of the context for what they are given, and those inside of a checkpoint."""
    followed_forwards: int = 0
    """How many forwards were looked up in a step table: one was in force at their first save."""
    plan_misses: dict[str, int] = field(default_factory=dict)
    """How often one of them went on as an unknown one, by what differed from all tables: ``size``, ``share``,
    ``requires_grad``, ``codec``, ``more`` or ``fewer`` saves, or the ``order`` of backward."""
    plan: PlanOutcome | None = None
    """What the plan of :func:`eager_offload.plan` that was given has predicted, beside what was measured."""
    device_budget: int = 0
    """Bytes of the device that training may take, as ``device_budget`` came to; 0 where nothing bounds it. This and
    ``keep_last_bytes`` are of the device that was used last."""
    device_memory_peak: int = 0
    """Most bytes of the device that were seen to be used, by whatever, where there is such a budget."""
    max_inflight_bytes: int = 0
    """The window in force, the field of that name or what ``"auto"`` came to; 0 where nothing was saved yet. This and
    ``prefetch_bytes`` are of the device, or the compiled graph, that was used last."""
    prefetch_bytes: int = 0
    """The window of what comes back, likewise."""
    keep_last_bytes: int = 0
    """How many of the newest saved bytes it leaves room for, or ``policy="free"`` or ``max_slowdown`` lets stay."""
    slowdown: float = 0.0
    """For which share of a step without offload compute waited for transfers in the steps that such a setting was
    adapted to last, by the device's own clock."""
    compiled_regions: int = 0
    """How often forward graphs of compiled code were run that move something."""
    compiled_graphs: int = 0
    """How many graphs those were."""
    keeps_freed_memory: bool = False
    """Whether CPU tensors moved in a process whose C library keeps freed memory; see ``release_freed_memory``."""
    copies_within_host: bool = False
    """Whether CPU tensors went to a tier in host memory, which is the device itself: that frees nothing."""
    failed_forwards: int = 0
    """Outermost contexts that were left by an error."""
    empty_forwards: int = 0
    """Contexts in which autograd recorded operators but not one saved tensor could be seen."""
    is_approximate: bool = False
    """Whether an interrupt came in the midst of the library, so that what was counted around it may be missing."""
    seconds: float = field(default=0.0, compare=False)
    """Since the first ``with`` that is counted."""
    _config: ClassVar[OffloadConfig] = OffloadConfig()
    """What it ran with; no field, and not compared."""
    _planned: ClassVar[Planned | None] = None
    """The plan that was given, likewise."""
    _rows: ClassVar[tuple[SavedRow, ...]] = ()
    """What a step has saved, of the largest that was written down, likewise; empty where none was."""
    _advise: ClassVar[Callable[[OffloadStats, OffloadConfig], tuple[str, ...]]]
    """The rules of ``observe/advice.py``. ``Offload`` puts them here: nothing below imports what observes."""
    _describe: ClassVar[Callable[[OffloadStats, OffloadConfig], str]]
    """The report of ``observe/summary.py``, likewise."""

    def __post_init__(self) -> None:
        if isinstance(plan := cast(object, self.plan), dict):  # as ``to_dict`` has it
            object.__setattr__(self, "plan", PlanOutcome(**plan))

    def to_dict(self) -> dict[str, Any]:
        """The fields, as JSON can hold them; ``OffloadStats(**stats.to_dict())`` is equal to ``stats``."""
        return dataclasses.asdict(self)

    def since(self, before: OffloadStats) -> OffloadStats:
        """Returns what was counted since ``before``, of the same run; what is no amount is what it is now."""
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
        stats._know(self._config, self._planned, self._rows)
        return stats

    def _know(self, config: OffloadConfig, planned: Planned | None, rows: tuple[SavedRow, ...]) -> None:
        # __setattr__: the one way to give something to a frozen dataclass
        for name, value in (("_config", config), ("_planned", planned), ("_rows", rows)):
            object.__setattr__(self, name, value)

    @property
    def advice(self) -> tuple[str, ...]:
        """What limited the run and which knob to turn, a sentence or two each; or that all is well."""
        return type(self)._advise(self, self._config)

    @property
    def terabytes_a_day(self) -> float:
        """What would be written to disks if it went on like this all day; 1e12 bytes."""
        return self.disk_bytes_written / self.seconds * 86_400 / 1e12 if self.seconds else 0.0

    def __str__(self) -> str:
        return type(self)._describe(self, self._config)


class Counters:
    """The counters behind :class:`OffloadStats`. Plain attributes; callers that write them hold the accounts' lock."""

    def __init__(
        self,
        live: LiveBytes | None = None,
        plan: PlanOutcome | None = None,
        planned: Planned | None = None,
        rows: tuple[SavedRow, ...] = (),
    ) -> None:
        self.live = LiveBytes() if live is None else live
        self.live.poll()
        # Those of a snapshot, by its names; what is not here is at its default there.
        self.steps = self.saved_tensors = self.offloaded_tensors = self.foreign_hooks = 0
        self.followed_forwards = self.compiled_regions = self.empty_forwards = 0
        self.failed_forwards = 0
        self.saved_bytes = self.offloaded_bytes = self.shared_bytes = 0
        self.reloaded_bytes = self.forwarded_bytes = self.released_bytes = self.failed_bytes = 0
        self.bytes_out = self.bytes_in = self.disk_bytes_written = 0
        self.inflight_bytes_peak = self.resident_bytes_peak = self.device_bytes_peak = 0
        self.host_bytes_peak = self.disk_bytes_peak = self.device_memory_peak = 0
        self.without_offload_bytes_peak = self.live.without_offload
        self.device_budget = self.keep_last_bytes = self.max_inflight_bytes = self.prefetch_bytes = 0
        self.stall_seconds = self.window_stall_seconds = self.host_wait_seconds = 0.0
        self.out_seconds = self.in_seconds = self.processor_seconds = self.slowdown = 0.0
        self.keeps_freed_memory = self.copies_within_host = self.is_approximate = False
        self.kept_bytes = dict.fromkeys(KeepReason, 0)
        self.coded_bytes: dict[str, int] = {}
        self.packed_bytes: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.demotions: dict[str, int] = {}
        self.plan_misses: dict[str, int] = {}
        self.plan = plan
        self.planned = planned
        #: Of the largest step that was written down; and whether one was since counting began.
        self.rows, self.has_own_rows = rows, False
        #: When the first `with` that is counted was entered.
        self.began: float | None = None
        #: Whether what is saved next is the first of a step.
        self.step_begins = False
        #: The compiled graphs that have moved something.
        self.graphs: set[str] = set()

    def begin(self, *, step: bool = True) -> None:
        """A `with` is entered; ``step``: what is saved in it is a step's."""
        if self.began is None:
            self.began = time.perf_counter()
        self.step_begins |= step

    def _begin_step(self) -> None:
        self.step_begins = False
        self.steps += 1

    def kept(self, reason: KeepReason, nbytes: int) -> None:
        """A save that stays."""
        if self.step_begins:
            self._begin_step()
        self.saved_tensors += 1
        self.saved_bytes += nbytes
        self.kept_bytes[reason] += nbytes

    def expect(self, planned: Planned) -> None:
        """Takes in what ``planned`` has predicted of steps."""
        without = planned.without_offload_seconds
        self.plan = PlanOutcome(planned.peak_bytes, planned.step_seconds, without_offload_seconds=without)
        self.planned = planned

    def kept_by_graph(self, region: str) -> int:
        """What a compiled graph keeps each time it runs; bytes, parameters left out."""
        kept = kept_by_graph(region)
        for reason, nbytes in kept.items():
            self.kept(reason, nbytes)
        return sum(nbytes for reason, nbytes in kept.items() if reason is not KeepReason.PARAMETER)

    def shared(self, nbytes: int) -> None:
        """A save whose storage is offloaded already."""
        if self.step_begins:
            self._begin_step()
        self.saved_tensors += 1
        self.saved_bytes += nbytes
        self.shared_bytes += nbytes

    def note_live(self) -> None:
        """More saved tensors are alive."""
        if self.live.without_offload > self.without_offload_bytes_peak:
            self.without_offload_bytes_peak = self.live.without_offload

    def note_resident(self, resident_bytes: int) -> None:
        """The library holds ``resident_bytes`` bytes on the device, which are more than before."""
        self.live.poll()
        self.resident_bytes_peak = max(self.resident_bytes_peak, resident_bytes)
        self.device_bytes_peak = max(self.device_bytes_peak, resident_bytes + self.live.kept)

    @property
    def writes_rows(self) -> bool:
        """Whether the next step is to be written down: until one was whole, the first ones, and some after them."""
        return not self.rows or self.steps < _WRITTEN or self.steps % _WRITTEN_AGAIN == 0

    def step_of(self, rows: list[SavedRow]) -> None:
        """A step has saved ``rows``. The largest step is the one that the peaks are of."""
        nbytes = sum([row.nbytes for row in rows])
        if rows and (not self.has_own_rows or nbytes >= sum([row.nbytes for row in self.rows])):
            self.rows, self.has_own_rows = tuple(rows), True

    def demote(self, kind: str) -> bool:
        """Counts a demotion; true the first time, when the user is to be warned."""
        self.demotions[kind] = self.demotions.get(kind, 0) + 1
        return self.demotions[kind] == 1

    def stall(self, seconds: float, *, fills_window: bool) -> None:
        """Compute has waited."""
        self.stall_seconds += seconds
        self.window_stall_seconds += seconds if fills_window else 0.0

    def packed(self, codec: str, nbytes: int, packed_nbytes: int) -> None:
        """What ``codec`` packed has left."""
        self.coded_bytes[codec] = self.coded_bytes.get(codec, 0) + nbytes
        self.packed_bytes[codec] = self.packed_bytes.get(codec, 0) + packed_nbytes

    def refuse(self, codec: str) -> None:
        """A storage has values that ``codec`` cannot hold."""
        self.refused[codec] = self.refused.get(codec, 0) + 1

    def snapshot(self, config: OffloadConfig | None = None) -> OffloadStats:
        """What is counted so far, with what the run was configured with, for the advice."""
        values: dict[str, Any] = {
            name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()
        }
        for name in ("live", "planned", "rows", "has_own_rows", "began", "step_begins", "graphs"):
            del values[name]
        values["kept_bytes"] = {reason.value: nbytes for reason, nbytes in self.kept_bytes.items() if nbytes}
        values["compiled_graphs"] = len(self.graphs)
        values["seconds"] = 0.0 if self.began is None else time.perf_counter() - self.began
        stats = OffloadStats(**values)
        if config is not None:
            stats._know(config, self.planned, self.rows)
        return stats


class Accounts(ForkSafeLock):
    """What all devices of one ``Offload`` share: its lock, and the counters that are in use.

    A saved storage is counted to its end on the counters of the time at which it was offloaded, so that a reset within
    a step leaves no difference behind.
    """

    def __init__(self) -> None:
        super().__init__(shared=False)
        self.counters = Counters()
        #: How many steps are prepared for a capture now; see the note in engine/transfers.py.
        self.preparing = 0

    def demoted(self, kind: str, reasons: Iterable[str]) -> list[str]:
        """Counts a demotion of ``kind`` for each of ``reasons``. Returns those that the user is to be told of.

        Takes the lock.
        """
        with self.lock:
            return [reason for reason in reasons if self.counters.demote(kind)]


def kept_by_graph(region: str) -> dict[KeepReason, int]:
    """What a compiled graph keeps, of what its first offload is given: the graph's name, and ``reason=bytes,...``."""
    items = (item.partition("=") for item in region.split(",")[1:])
    return {KeepReason(reason): int(nbytes) for reason, _, nbytes in items}
