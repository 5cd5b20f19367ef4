"""A trace: what ran when, what was resident, and what saved it. Its file, and the objects that the file stands for.

The file is Chrome trace JSON, which https://ui.perfetto.dev and ``chrome://tracing`` open::

    {"traceEvents": [...], "displayTimeUnit": "ms", "eager_offload": {...}}

**Times** are microseconds since the trace began. On an accelerator those of slices are the device's own, by timing
events; on a CPU device they are the host's; on a simulated one they are of its virtual clock.

**traceEvents**

- ``"ph": "X"``: a slice. ``pid`` is a device and ``tid`` a track of it; both have names, by the usual ``"M"`` events.
  ``cat`` says what it is:

  ============== ======================= ==============================================================================
  ``cat``        track                   what it stands for
  ============== ======================= ==============================================================================
  ``compute``    ``compute forward``     a module's forward; those of its children lie inside
  ``compute``    ``compute backward``    a whole backward, and inside it one slice after the other: from where an
                                         operation asks for what it saved to where the next one does
  ``offload``    ``offload``             bytes on their way off the device
  ``reload``     ``reload``              bytes on their way back that were asked for
  ``prefetch``   ``prefetch``            bytes on their way back before they were asked for
  ``stall``      ``stall``               compute waits for a transfer; the name says for which
  ``stall``      ``stall host``          the host of an accelerator waits for one, which compute may not notice
  ``demotion``   ``demotion``            what could not be done as planned; the name is the kind that the stats count
  ============== ======================= ==============================================================================

  A second thread has tracks of its own, ``compute forward 2`` and so on. Where an accelerator reaches a disk through
  host memory, the part of the way between that and the disk is on tracks ``offload disk`` and ``reload disk``. ``args``
  holds, where they are known, ``bytes``, ``module``, ``operation``, ``tier`` and, of what did not arrive, ``error``.
- ``"ph": "C"``: a counter, by its name: ``device``, ``host``, ``disk`` and ``without offload``, each with
  ``{"bytes": n}`` in ``args``. Their times are the host's, which hands memory out and takes it back, also where slices
  have a device's.

**eager_offload** is what ``read_trace`` gives back as a :class:`Trace`; its fields say what they are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TextIO

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
    there anyway, do not count."""
    host: int
    """In host memory (on a CPU device: of the host tier)."""
    disk: int
    """On disk."""
    without_offload: int
    """What autograd would hold on the device at this moment if nothing was moved. Counts what was saved inside the
    trace."""


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
    own["saved"] = [dataclasses.asdict(group) for group in trace.saved]
    content = {"traceEvents": list(_events(trace)), "displayTimeUnit": "ms", "eager_offload": own}
    if path.exists() and not path.is_file():
        with open(path, "w", encoding="utf-8") as file:
            _dump(content, file)
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            _dump(content, file)
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _dump(content: dict[str, Any], file: TextIO) -> None:
    json.dump(content, file, separators=(",", ":"), default=os.fspath)  # directories, as texts


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
#: Fields of a slice that are texts and may be empty, and those of a trace that JSON holds as they are.
_ARGUMENTS = ("module", "operation", "tier", "error")
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
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    for one in trace.slices:
        pid = processes.get(one.device)
        if pid is None:
            pid = processes[one.device] = _MEMORY_PID + 1 + len(processes)
            yield _metadata("process_name", pid, 0, name=one.device)
        tid = threads.get((one.device, one.track))
        if tid is None:
            tid = threads[one.device, one.track] = 1 + len(threads)
            yield _metadata("thread_name", pid, tid, name=one.track)
            yield _metadata("thread_sort_index", pid, tid, sort_index=100 * _TRACKS[one.kind] + tid)
        known = {"bytes": one.nbytes, **{name: getattr(one, name) for name in _ARGUMENTS}}
        yield {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "cat": one.kind.value,
            "name": one.name,
            "ts": _microseconds(one.start),
            "dur": _microseconds(one.seconds),
            "args": {name: value for name, value in known.items() if value},
        }


def _metadata(what: str, pid: int, tid: int, **arguments: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments}


def _restored(events: list[dict[str, Any]], own: dict[str, Any]) -> Trace:
    """What ``write_trace`` has written."""
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name") for event in events if event["ph"] == "M"
    }
    slices: list[Slice] = []
    memory: list[MemorySample] = []
    now = dict.fromkeys(_COUNTERS, 0)
    fields = {name: field for field, name in _COUNTERS.items()}
    for event in events:
        if event["ph"] == "X":
            given = event["args"]
            slices.append(
                Slice(
                    kind=SliceKind(event["cat"]),
                    name=event["name"],
                    device=names["process_name", event["pid"], 0],
                    track=names["thread_name", event["pid"], event["tid"]],
                    start=event["ts"] / 1e6,
                    seconds=event["dur"] / 1e6,
                    nbytes=given.get("bytes", 0),
                    **{name: given.get(name, "") for name in _ARGUMENTS},
                )
            )
        elif event["ph"] == "C":
            now[fields[event["name"]]] = event["args"]["bytes"]
            sample = MemorySample(event["ts"] / 1e6, **now)
            if memory and memory[-1].seconds == sample.seconds:
                memory[-1] = sample
            else:
                memory.append(sample)
    return Trace(
        **{**{name: own[name] for name in _PLAIN}, "advice": tuple(own["advice"])},
        saved=tuple(SavedGroup(**group) for group in own["saved"]),
        slices=tuple(slices),
        memory=tuple(memory),
    )


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
