"""What an ``Offload`` has done so far: counters while it runs, and the frozen snapshot that users read."""

from __future__ import annotations

import textwrap
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from eager_offload.config import OffloadConfig
from eager_offload.observe.advice import advise, terabytes_a_day
from eager_offload.tiers.forking import tell_after_fork

if TYPE_CHECKING:
    from eager_offload.observe.seam import Recorder

__all__ = ["Accounts", "KeepReason", "OffloadStats", "Tally"]


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


@dataclass(frozen=True)
class OffloadStats:
    """A snapshot of an :class:`~eager_offload.Offload`'s counters; ``print`` shows it as a short report.

    Bytes are of tensors as saved, counted once per pack. ``saved_bytes == offloaded_bytes + shared_bytes +
    sum(kept_bytes.values())`` always holds, and once all graphs are gone ``offloaded_bytes == reloaded_bytes +
    forwarded_bytes + released_bytes``.
    """

    saved_tensors: int = 0
    """How many tensors autograd saved; a wrapper (a ``DTensor``) counts as the plain tensors inside it."""
    saved_bytes: int = 0
    """Their bytes."""
    offloaded_tensors: int = 0
    """How many of them took a storage away."""
    offloaded_bytes: int = 0
    """Bytes of those."""
    shared_bytes: int = 0
    """Bytes of saves whose storage was taken already by an earlier one."""
    kept_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that stay on the device, by reason."""
    reloaded_bytes: int = 0
    """Offloaded bytes that were brought back."""
    forwarded_bytes: int = 0
    """Offloaded bytes that were asked for while they were still resident."""
    released_bytes: int = 0
    """Offloaded bytes that were never asked for."""
    bytes_out: int = 0
    """Bytes that left the device, in reality: a storage once, whatever its views."""
    bytes_in: int = 0
    """Bytes that came back, in reality."""
    stall_seconds: float = 0.0
    """Time that the host has waited for transfers; on a CPU device that is all that compute has waited."""
    window_stall_seconds: float = 0.0
    """The part of it that was for room in the in-flight window."""
    out_seconds: float = 0.0
    """For how long bytes travelled out, where that is known: on a CPU device, and to a disk."""
    in_seconds: float = 0.0
    """For how long bytes travelled back, where that is known."""
    inflight_bytes_peak: int = 0
    """Most bytes that were on their way out at one time."""
    resident_bytes_peak: int = 0
    """Most bytes that the library held on the device at one time: newest, on their way out, brought back early."""
    host_bytes_peak: int = 0
    """Most bytes held in host memory at one time, rounding and idle room included. All ``Offload`` objects of a process
    share that memory: what others held while this one used it counts too."""
    disk_bytes_peak: int = 0
    """Most bytes held on disk at one time."""
    disk_bytes_written: int = 0
    """Bytes that were written to disks, rounding included."""
    demotions: dict[str, int] = field(default_factory=dict)
    """What could not be done as planned, and how often: ``host_to_disk``, ``budget``, ``write_failed``."""
    foreign_hooks: int = 0
    """Other saved-tensor hooks that were entered inside this context and hide what is saved there."""
    compiled_regions: int = 0
    """Forward graphs of compiled code that were run and moved something."""
    empty_forwards: int = 0
    """Contexts in which autograd recorded operators but not one saved tensor could be seen."""
    seconds: float = field(default=0.0, compare=False)
    """Since the first ``with`` that is counted."""
    _config: ClassVar[OffloadConfig] = OffloadConfig()
    """What it ran with; no field, and not compared."""

    @property
    def advice(self) -> tuple[str, ...]:
        """What limited the run and which knob to turn, a sentence or two each; or that all is well."""
        return advise(self, self._config)

    def __str__(self) -> str:
        kept = sum(self.kept_bytes.values())
        lines = [
            f"saved      {self.saved_tensors:>8,} tensors {_size(self.saved_bytes)}",
            f"offloaded  {self.offloaded_tensors:>8,} tensors {_size(self.offloaded_bytes)}"
            f"  (+ {_size(self.shared_bytes).strip()} shared with them)",
            f"kept                        {_size(kept)}  {_breakdown(self.kept_bytes)}".rstrip(),
            f"back       {_size(self.reloaded_bytes).strip()} reloaded, {_size(self.forwarded_bytes).strip()} still"
            f" resident, {_size(self.released_bytes).strip()} never asked for",
            f"moved      {_size(self.bytes_out).strip()} out, {_size(self.bytes_in).strip()} in,"
            f" compute stalled {self.stall_seconds:.3f} s" + (f" of {self.seconds:,.1f} s" if self.seconds else ""),
            f"peaks      {_size(self.inflight_bytes_peak).strip()} in flight, {_size(self.resident_bytes_peak).strip()}"
            f" resident, {_size(self.host_bytes_peak).strip()} host, {_size(self.disk_bytes_peak).strip()} disk",
        ]
        if self.demotions:
            lines.append(
                "demotions  " + ", ".join(f"{name} {count:,}" for name, count in sorted(self.demotions.items()))
            )
        if self.disk_bytes_written:
            daily = terabytes_a_day(self)
            pace = f", {daily:,.1f} TB a day if it goes on" if daily >= 0.1 else ""
            lines.append(f"written    {_size(self.disk_bytes_written).strip()} to disk{pace}")
        if self.compiled_regions:
            lines.append(f"compiled   {self.compiled_regions:,} forward graphs that moved something")
        for sentence in self.advice:
            lines += textwrap.wrap(sentence, 100, initial_indent="advice     ", subsequent_indent=" " * 11)
        return "\n".join(lines)


class Tally:
    """The counters behind :class:`OffloadStats`. Plain attributes; whoever writes them holds the accounts' lock."""

    def __init__(self) -> None:
        self.saved_tensors = 0
        self.saved_bytes = 0
        self.offloaded_tensors = 0
        self.offloaded_bytes = 0
        self.shared_bytes = 0
        self.kept_bytes = dict.fromkeys(KeepReason, 0)
        self.reloaded_bytes = 0
        self.forwarded_bytes = 0
        self.released_bytes = 0
        self.bytes_out = 0
        self.bytes_in = 0
        self.stall_seconds = 0.0
        self.window_stall_seconds = 0.0
        self.out_seconds = 0.0
        self.in_seconds = 0.0
        self.inflight_bytes_peak = 0
        self.resident_bytes_peak = 0
        self.host_bytes_peak = 0
        self.disk_bytes_peak = 0
        self.disk_bytes_written = 0
        self.demotions: dict[str, int] = {}
        self.foreign_hooks = 0
        self.compiled_regions = 0
        self.empty_forwards = 0
        #: When the first `with` that is counted was entered.
        self.began: float | None = None

    def begin(self) -> None:
        """A `with` is entered."""
        if self.began is None:
            self.began = time.perf_counter()

    def kept(self, reason: KeepReason, nbytes: int) -> None:
        """A save that stays."""
        self.saved_tensors += 1
        self.saved_bytes += nbytes
        self.kept_bytes[reason] += nbytes

    def shared(self, nbytes: int) -> None:
        """A save whose storage is taken already."""
        self.saved_tensors += 1
        self.saved_bytes += nbytes
        self.shared_bytes += nbytes

    def reclassify(
        self, nbytes: int, before: KeepReason | None, after: KeepReason | None, *, shared_bytes: int = 0
    ) -> None:
        """Moves a save's bytes between reasons; ``None`` stands for offloaded.

        Args:
            shared_bytes: of saves that share it, and stay with it; only where it stays.
        """
        if before is None:
            self.offloaded_bytes -= nbytes
            self.offloaded_tensors -= 1
        else:
            self.kept_bytes[before] -= nbytes
        if after is None:
            self.offloaded_bytes += nbytes
            self.offloaded_tensors += 1
        else:
            self.kept_bytes[after] += nbytes + shared_bytes
            self.shared_bytes -= shared_bytes

    def demote(self, kind: str) -> bool:
        """Counts a demotion; true the first time, when the user is to be told."""
        self.demotions[kind] = self.demotions.get(kind, 0) + 1
        return self.demotions[kind] == 1

    def snapshot(self, config: OffloadConfig | None = None) -> OffloadStats:
        """What is counted so far, with what the run was configured with, for the advice."""
        values = dict(vars(self))
        began = values.pop("began")
        values["seconds"] = 0.0 if began is None else time.perf_counter() - began
        values["kept_bytes"] = {r.value: n for r, n in self.kept_bytes.items() if n}
        values["demotions"] = dict(self.demotions)
        stats = OffloadStats(**values)
        if config is not None:
            object.__setattr__(stats, "_config", config)  # the one way to give something to a frozen dataclass
        return stats


class Accounts:
    """What all devices of one ``Offload`` share: its lock, and the tally that is counted on now.

    A saved storage settles on the tally that it was taken under, so resetting in mid-step leaves no debts behind.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.tally = Tally()
        #: Who writes down what happens, while a trace runs.
        self.recorder: Recorder | None = None
        tell_after_fork(self)

    def after_fork(self) -> None:
        # A lock that another thread of the parent held would never be released in the child.
        self.lock = threading.RLock()


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:>9.1f} {unit}" if unit != "B" else f"{nbytes:>9,} B"


def _breakdown(parts: dict[str, int]) -> str:
    shown = sorted(parts.items(), key=lambda item: -item[1])
    return "(" + ", ".join(f"{name} {_size(nbytes).strip()}" for name, nbytes in shown) + ")" if shown else ""
