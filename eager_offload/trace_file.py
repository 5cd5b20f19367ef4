"""A trace: what ran when, what was resident, and what saved it. Its file, and the objects that the file stands for.

The file is Chrome trace JSON, which https://ui.perfetto.dev and ``chrome://tracing`` open, beside a profile of
``torch.profiler`` if there is one::

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
``stall``                compute waits for a transfer, which the name says; ``stall host``: the host of an accelerator
                         waits for one, which compute may not notice
``demotion``             what could not be done as planned; the name is the kind that the stats count
======================== =============================================================================================

A second thread has tracks of its own, ``compute forward 2`` and so on. Where an accelerator reaches a disk through host
memory, the way between that and the disk is on ``offload disk`` and ``reload disk``. Counters are ``device``, ``host``,
``disk`` and ``without offload``, each with ``{"bytes": n}``; their times are the host's, which hands memory out.

**eager_offload** holds the other fields of a :class:`Trace`, which ``read_trace`` gives back.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from eager_offload.errors import ConfigError, OffloadError

#: Of the file; a reader takes this one and older ones.
FORMAT = 1


class SliceKind(StrEnum):
    """What a slice stands for; the ``cat`` of the file."""

    COMPUTE = "compute"
    OFFLOAD = "offload"
    RELOAD = "reload"
    PREFETCH = "prefetch"
    STALL = "stall"
    DEMOTION = "demotion"


#: The track of what the host of an accelerator waits, and what the tracks of further threads begin with.
HOST_STALLS = "stall host"


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took time."""

    kind: SliceKind
    name: str
    device: str
    """Such as ``"cpu"`` or ``"cuda:0"``."""
    track: str
    """Slices of one device and track follow each other, or lie inside each other."""
    start: float
    """Seconds since the trace began."""
    seconds: float
    nbytes: int = 0
    """Bytes that travel; 0 for what moves none."""
    module: str = ""
    """The path of the module, beginning with the class of the outermost one; empty where there was none."""
    operation: str = ""
    """The autograd node, such as ``"MmBackward0"``; empty where it is not known."""
    tier: str = ""
    """``"host"`` or ``"disk"``, for transfers."""
    error: str = ""
    """What made a transfer fail."""

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
    """Writes the file, whole or not at all: it appears under its name when it is complete.

    A file that exists keeps its mode, of a link the target is written, and what is no plain file, such as
    ``/dev/stdout`` or a named pipe, is written to where it is.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(os.path.realpath(path))
    own = {"format": FORMAT, **{name: getattr(trace, name) for name in _PLAIN}}
    own["saved"] = [asdict(group) for group in trace.saved]
    content = {"traceEvents": list(_events(trace)), "displayTimeUnit": "ms", "eager_offload": own}
    text = json.dumps(content, separators=(",", ":"))
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8")
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text, "utf-8")
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a file that ``write_trace`` wrote.

    Raises:
        ConfigError: it is something else, or from a newer version.
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
    if version > FORMAT:
        raise ConfigError(
            f"path={os.fspath(path)!r} is not accepted: it has the format {version}, and this version of eager_offload "
            f"reads up to {FORMAT}. Upgrade eager_offload"
        )
    try:
        return _restored(content["traceEvents"], own)
    except (ValueError, KeyError, TypeError) as error:
        raise OffloadError(f"the trace {os.fspath(path)!r} is damaged ({error!r}): write it again") from error


# -- the file -------------------------------------------------------------------------------------------------------

_COUNTERS = {"device": "device", "host": "host", "disk": "disk", "without_offload": "without offload"}
#: The order of the tracks of a device, from the top.
_TRACKS = {kind: place for place, kind in enumerate(SliceKind)}
_MEMORY_PID = 1
#: Fields of a slice that are left out where they are empty, and those of a trace that JSON holds as they are.
_ARGUMENTS = {"nbytes": "bytes", "module": "module", "operation": "operation", "tier": "tier", "error": "error"}
_PLAIN = ("seconds", "versions", "config", "stats", "advice", "error", "dropped")


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    """What the viewer shows."""
    yield _metadata("process_name", _MEMORY_PID, 0, name="saved tensors, bytes")
    last: MemorySample | None = None
    for sample in trace.memory:
        for which, name in _COUNTERS.items():
            nbytes = getattr(sample, which)
            if last is None or nbytes != getattr(last, which):
                at = {"pid": _MEMORY_PID, "name": name, "ts": _microseconds(sample.seconds)}
                yield {"ph": "C", **at, "args": {"bytes": nbytes}}
        last = sample
    processes = {device: _MEMORY_PID + 1 + place for place, device in enumerate(trace.devices)}
    threads: dict[tuple[str, str], int] = {}
    for device, pid in processes.items():
        yield _metadata("process_name", pid, 0, name=device)
    for one in trace.slices:
        pid, track = processes[one.device], (one.device, one.track)
        if track not in threads:
            tid = threads[track] = 1 + len(threads)
            yield _metadata("thread_name", pid, tid, name=one.track)
            yield _metadata("thread_sort_index", pid, tid, sort_index=100 * _TRACKS[one.kind] + tid)
        place = {"pid": pid, "tid": threads[track], "ts": _microseconds(one.start), "dur": _microseconds(one.seconds)}
        known = {key: value for name, key in _ARGUMENTS.items() if (value := getattr(one, name))}
        yield {"ph": "X", **place, "cat": one.kind.value, "name": one.name, "args": known}


def _metadata(what: str, pid: int, tid: int, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments}


def _restored(events: list[dict[str, Any]], own: dict[str, Any]) -> Trace:
    """What ``write_trace`` has written."""
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name") for event in events if event["ph"] == "M"
    }
    slices: list[Slice] = []
    memory: list[MemorySample] = []
    fields = {name: field for field, name in _COUNTERS.items()}
    for event in events:
        given = event["args"]
        if event["ph"] == "X":
            device = names["process_name", event["pid"], 0]
            track = names["thread_name", event["pid"], event["tid"]]
            known = {name: given[key] for name, key in _ARGUMENTS.items() if key in given}
            start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
            slices.append(Slice(SliceKind(event["cat"]), event["name"], device, track, start, seconds, **known))
        elif event["ph"] == "C":
            last, seconds = memory[-1] if memory else MemorySample(-1.0, 0, 0, 0, 0), event["ts"] / 1e6
            if last.seconds == seconds:
                memory.pop()
            memory.append(last._replace(seconds=seconds, **{fields[event["name"]]: given["bytes"]}))
    plain = {name: own[name] for name in _PLAIN} | {"advice": tuple(own["advice"])}
    saved = tuple(SavedGroup(**group) for group in own["saved"])
    return Trace(**plain, saved=saved, slices=tuple(slices), memory=tuple(memory))


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
