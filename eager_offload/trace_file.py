"""A trace: what ran when, what was resident, and what saved it; and its file.

The file is Chrome trace JSON, which https://ui.perfetto.dev opens, beside a profile of ``torch.profiler`` if there is
one::

    {"traceEvents": [...], "displayTimeUnit": "ms", "eager_offload": {...}}

**Times** are microseconds since the trace began. On an accelerator those of slices are the device's own, by timing
events; on a CPU device they are the host's.

**traceEvents** holds slices (``"ph": "X"``) and counters (``"ph": "C"``). Of a slice ``pid`` is a device and ``tid`` a
track of it; ``cat`` is a :class:`SliceKind`. Tracks:

======================== =============================================================================================
``compute forward``      a module's forward; those of its children lie inside
``compute backward``     a whole backward, and inside it one slice after the other: from where an operation asks for
                         what it saved to where the next one does
``offload``, ``reload``  bytes on their way off the device and back; ``prefetch``: back before they were asked for
``stall``                compute waits for a transfer, which the name says
======================== =============================================================================================

A second thread has tracks of its own, ``compute forward 2`` and so on. Where an accelerator reaches a disk through host
memory, the way between that and the disk is on ``offload disk`` and ``reload disk``. Counters have the bytes of a
:class:`MemorySample`; their times are the host's, which hands memory out.

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

#: Of the file.
FORMAT = 2


class SliceKind(StrEnum):
    """What a slice stands for; the ``cat`` of the file."""

    COMPUTE = "compute"
    OFFLOAD = "offload"
    RELOAD = "reload"
    PREFETCH = "prefetch"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took time."""

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
    """Bytes that travel; 0 for what moves none."""
    module: str = ""
    """The path of the module, beginning with the class of the outermost one; empty where there was none."""
    operation: str = ""
    """The autograd node, such as ``"MmBackward0"``; empty where it is not known."""
    tier: str = ""
    """``"host"`` or ``"disk"``, for transfers."""

    @property
    def stop(self) -> float:
        """Seconds since the trace began."""
        return self.start + self.seconds


class MemorySample(NamedTuple):
    """Bytes of what autograd saved, by where they are at one moment; it holds until the next one."""

    seconds: float
    """Since the trace began."""
    device: int
    """On the device: kept there, newest, on their way out, brought back and not handed over. Parameters, which are
    there anyway, and tensors below ``min_bytes`` do not count, as in the peaks of ``OffloadStats``."""
    host: int
    """In host memory (on a CPU device: of the host tier)."""
    disk: int
    """On disk."""
    without_offload: int
    """What autograd would hold on the device at this moment if nothing was moved."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """The saved tensors that one operation of one module saved and that came out alike."""

    operation: str
    """The autograd node that saved them, such as ``"MmBackward0"``; ``"compiled graph"`` for what a graph moves by
    itself; empty where backward never came to it."""
    module: str
    """The path of the module in whose forward they were saved; empty outside of every module."""
    outcome: str
    """``"offloaded"``, ``"shared"`` (with one that was) or ``"kept"``."""
    reason: str
    """Why they were kept, as in ``OffloadStats.kept_bytes``; else empty."""
    count: int
    """How many saves."""
    nbytes: int
    """Bytes of all of them, as ``OffloadStats.saved_bytes`` counts."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What ran inside ``with offload.trace(path):``."""

    seconds: float
    """From its beginning to its end, transfers over."""
    config: Mapping[str, Any]
    """The fields of ``OffloadConfig``."""
    stats: Mapping[str, Any]
    """The fields of ``OffloadStats`` over the traced time; peaks are those since the last ``reset_stats()``."""
    advice: tuple[str, ...] = ()
    """What limited the run, and which knob to turn; a sentence or two each."""
    saved: tuple[SavedGroup, ...] = ()
    """Which operation of which module saved what, most bytes first."""
    slices: tuple[Slice, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    """In the order of time."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of ``eager_offload``, ``torch`` and ``python``."""
    error: str = ""
    """What was raised inside and ended the trace."""
    dropped: int = 0
    """Slices, samples of memory and saves that are left out since there were too many."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that have slices, in the order in which they first do."""
        return tuple(dict.fromkeys(one.device for one in self.slices))


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes the file; one that exists keeps its mode, of a link the target is written, and to a pipe it is written.

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
        ConfigError: it is something else, or of another version.
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
        slices = [_slice_of(event) for event in events if event["ph"] == "X"]
        memory = [MemorySample(event["ts"] / 1e6, **event["args"]) for event in events if event["ph"] == "C"]
        plain = {name: own[name] for name in _PLAIN} | {"advice": tuple(own["advice"])}
        saved = tuple(SavedGroup(**group) for group in own["saved"])
        return Trace(**plain, saved=saved, slices=tuple(slices), memory=tuple(memory))
    except (ValueError, KeyError, TypeError) as error:
        raise OffloadError(f"the trace {os.fspath(path)!r} is damaged ({error!r}): write it again") from error


# -- the file -------------------------------------------------------------------------------------------------------

#: Fields of a slice that are left out where they are empty, and those of a trace that JSON holds as they are.
_ARGUMENTS = {"nbytes": "bytes", "module": "module", "operation": "operation", "tier": "tier"}
_PLAIN = ("seconds", "versions", "config", "stats", "advice", "error", "dropped")


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    """What the viewer shows."""
    for sample in trace.memory:
        nbytes = sample._asdict()
        at = _microseconds(nbytes.pop("seconds"))
        yield {"ph": "C", "pid": "saved tensors", "name": "bytes", "ts": at, "args": nbytes}
    for one in trace.slices:
        place = {"pid": one.device, "tid": one.track, "ts": _microseconds(one.start), "dur": _microseconds(one.seconds)}
        known = {key: value for name, key in _ARGUMENTS.items() if (value := getattr(one, name))}
        yield {"ph": "X", **place, "cat": one.kind.value, "name": one.name, "args": known}


def _slice_of(event: dict[str, Any]) -> Slice:
    known = {name: event["args"][key] for name, key in _ARGUMENTS.items() if key in event["args"]}
    start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
    return Slice(SliceKind(event["cat"]), event["name"], event["pid"], event["tid"], start, seconds, **known)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
