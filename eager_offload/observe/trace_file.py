"""A trace of compute, transfers, resident bytes and the operations that saved them; and the file of a trace.

The file is Chrome trace JSON, which https://ui.perfetto.dev opens, beside a profile of ``torch.profiler`` if there is
one::

    {"traceEvents": [...], "displayTimeUnit": "ms", "eager_offload": {...}}

**Times** are microseconds since the trace began. On an accelerator the times of slices are the device's own, by timing
events; on a CPU device they are the host's.

**traceEvents** holds slices (``"ph": "X"``) and counters (``"ph": "C"``). The ``pid`` of a slice is a device, its
``tid`` a track, its ``cat`` a :class:`SliceKind`. Tracks:

======================== =============================================================================================
``compute forward``      a module's forward, with those of its children inside
``compute backward``     a whole backward, with one slice after the other inside: from an operation's first unpack to
                         that of the next operation
``offload``, ``reload``  bytes on their way off the device and back; ``prefetch``: back before backward asked for them
``stall``                compute waits for a transfer, named by the slice
======================== =============================================================================================

A second thread has tracks of its own, ``compute forward 2`` and so on. If an accelerator reaches a disk through host
memory, the way between host memory and the disk has the tracks ``offload disk`` and ``reload disk``. Counters have the
bytes of a :class:`MemorySample`; their times are the host's, which hands memory out.

**eager_offload** holds the other fields of a :class:`Trace`, which ``read_trace`` gives back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from eager_offload.errors import ConfigError, OffloadError

#: The version of the file format.
FORMAT = 2


class SliceKind(StrEnum):
    """The kind of work of a slice; the ``cat`` of the file."""

    COMPUTE = "compute"
    OFFLOAD = "offload"
    RELOAD = "reload"
    PREFETCH = "prefetch"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time on a track."""

    kind: SliceKind
    name: str
    device: str
    """Such as ``"cpu"`` or ``"cuda:0"``."""
    track: str
    """Slices of one device and track follow each other, or lie inside each other."""
    start: float = 0.0
    """Seconds since the trace began."""
    seconds: float = 0.0
    nbytes: int = 0
    """Bytes that travel; 0 if none do."""
    module: str = ""
    """The path of the module, beginning with the class of the outermost one; empty outside of all."""
    operation: str = ""
    """The autograd node, such as ``"MmBackward0"``; empty if it is not known."""
    tier: str = ""
    """``"host"`` or ``"disk"``, for transfers."""

    @property
    def stop(self) -> float:
        """Seconds since the trace began."""
        return self.start + self.seconds


class MemorySample(NamedTuple):
    """Bytes of saved tensors by place, from one moment until the next sample."""

    seconds: float
    """The time since the trace began."""
    device: int
    """Bytes on the device, of storages of saved tensors that are there, or brought back and not handed over.
    Parameters and storages below ``min_bytes`` do not count, as in the peaks of ``OffloadStats``."""
    host: int
    """Bytes in host memory (on a CPU device: in the host tier)."""
    disk: int
    """Bytes on disk."""
    without_offload: int
    """Bytes that autograd would hold on the device at this moment without offload."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """The saved tensors of one operation of one module with the same outcome."""

    operation: str
    """The autograd node that saved them, such as ``"MmBackward0"``; ``"compiled graph"`` for tensors that a graph moves
    by itself; empty if no backward came to the node."""
    module: str
    """The path of the module in whose forward they were saved; empty outside of every module."""
    outcome: str
    """``"offloaded"``, ``"shared"`` (with an offloaded one) or ``"kept"``."""
    reason: str
    """The reason why they were kept, as in ``OffloadStats.kept_bytes``; else empty."""
    count: int
    """The number of saves."""
    nbytes: int
    """Their bytes, as ``OffloadStats.saved_bytes`` counts."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The record of the body of ``with offload.trace(path):``."""

    seconds: float
    """The time from its beginning to its end, when transfers are over."""
    config: Mapping[str, Any]
    """The fields of ``OffloadConfig``."""
    stats: Mapping[str, Any]
    """The fields of ``OffloadStats`` over the traced time; peaks are those since the last ``reset_stats()``."""
    advice: tuple[str, ...] = ()
    """Sentences on what limited the run and which setting to change."""
    saved: tuple[SavedGroup, ...] = ()
    """The saved tensors by operation and module, most bytes first."""
    slices: tuple[Slice, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    """In the order of time."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of ``eager_offload``, ``torch`` and ``python``."""
    error: str = ""
    """The error that ended the trace."""
    dropped: int = 0
    """Slices, samples of memory and saves that were too many and are left out."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices with slices, in the order of their first slice."""
        return tuple(dict.fromkeys(one.device for one in self.slices))


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes the file of a trace. A file that exists keeps its mode; the target of a link, or a pipe, is written to.

    Raises:
        OSError: it cannot be written.
    """
    own = {"format": FORMAT, **{name: getattr(trace, name) for name in _PLAIN}}
    own["saved"] = [asdict(group) for group in trace.saved]
    content = {"traceEvents": list(_events(trace)), "displayTimeUnit": "ms", "eager_offload": own}
    text = json.dumps(content, separators=(",", ":"))  # before the file is opened: one that is there stays till then
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a file that ``write_trace`` wrote.

    Raises:
        ConfigError: it is another file, or of another version.
        OSError: it cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
            own = content["eager_offload"]
            version = int(own["format"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"path={os.fspath(path)!r} is not accepted: it is no trace of eager_offload. Take a file that "
                "`with offload.trace(path):` wrote"
            ) from None
    if version != FORMAT:
        raise ConfigError(
            f"path={os.fspath(path)!r} is not accepted: it has the format {version}, and this version of eager_offload "
            f"reads {FORMAT}. Upgrade eager_offload, or write the trace again"
        )
    try:
        events = content["traceEvents"]
        slices = list[Slice]()
        for event in (one for one in events if one["ph"] == "X"):
            known = {name: event["args"][key] for name, key in _ARGUMENTS.items() if key in event["args"]}
            times = event["ts"] / 1e6, event["dur"] / 1e6
            slices.append(Slice(SliceKind(event["cat"]), event["name"], event["pid"], event["tid"], *times, **known))
        memory = [MemorySample(event["ts"] / 1e6, **event["args"]) for event in events if event["ph"] == "C"]
        plain = {name: own[name] for name in _PLAIN} | {"advice": tuple(own["advice"])}
        saved = tuple(SavedGroup(**group) for group in own["saved"])
        return Trace(**plain, saved=saved, slices=tuple(slices), memory=tuple(memory))
    except (ValueError, KeyError, TypeError) as error:
        raise OffloadError(f"the trace {os.fspath(path)!r} is damaged ({error!r}): write it again") from error


# -- the file -------------------------------------------------------------------------------------------------------

#: Fields of a slice that are left out if empty; and fields of a trace that JSON holds as they are.
_ARGUMENTS = {"nbytes": "bytes", "module": "module", "operation": "operation", "tier": "tier"}
_PLAIN = ("seconds", "versions", "config", "stats", "advice", "error", "dropped")


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yields the events that the viewer shows."""
    for sample in trace.memory:
        nbytes = sample._asdict()
        at = _microseconds(nbytes.pop("seconds"))
        yield {"ph": "C", "pid": "saved tensors", "name": "bytes", "ts": at, "args": nbytes}
    for one in trace.slices:
        place = {"pid": one.device, "tid": one.track, "ts": _microseconds(one.start), "dur": _microseconds(one.seconds)}
        known = {key: value for name, key in _ARGUMENTS.items() if (value := getattr(one, name))}
        yield {"ph": "X", **place, "cat": one.kind.value, "name": one.name, "args": known}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
