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

``with offload.trace(path):`` records the work of one ``Offload``, makes a ``Trace`` of it, and writes its file.

pack, unpack      in place of the hooks' own: who saves, who asks
copies, waits     from the log of the engine
compute           by global module hooks, and by unpacks
all of it         as moments that become times                     -> timeline.py

[Note: handles that report]
While a trace runs, autograd is given a ``RecordedHandle`` around each handle. It learns the operation when backward
asks for the tensor. After the trace it only calls the inner handle.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from eager_offload.config import OffloadConfig
from eager_offload.core.selection import logical_bytes
from eager_offload.eager.handles import KeptTensor, SavedView
from eager_offload.eager.hooks import Hooks, Packed
from eager_offload.engine.offloaders import Offloaders
from eager_offload.engine.transfer import CountedBytes, State
from eager_offload.engine.transfer_log import Copied, GraphOffloaded, Waited
from eager_offload.errors import ConfigError, OffloadError, captured, tell, warn
from eager_offload.observe.advice import advise
from eager_offload.observe.timeline import Compute, Noted, Saver, Slice, SliceKind, Timeline
from eager_offload.stats import Accounts, OffloadStats, kept_by_graph
from eager_offload.torch_private.calls import without_torch_function
from eager_offload.version import VERSION

#: The version of the file format.
FORMAT = 2


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
    for sample in trace.memory:
        nbytes = sample._asdict()
        at = round(nbytes.pop("seconds") * 1e6, 3)
        yield {"ph": "C", "pid": "saved tensors", "name": "bytes", "ts": at, "args": nbytes}
    for one in trace.slices:
        start, seconds = round(one.start * 1e6, 3), round(one.seconds * 1e6, 3)
        place = {"pid": one.device, "tid": one.track, "ts": start, "dur": seconds}
        known = {key: value for name, key in _ARGUMENTS.items() if (value := getattr(one, name))}
        yield {"ph": "X", **place, "cat": one.kind.value, "name": one.name, "args": known}


# -- recording --------------------------------------------------------------------------------------------------------


class _Traced(Protocol):
    """The part of ``Offload`` that a trace uses; ``Offload`` imports this module."""

    config: OffloadConfig
    pack: Callable[[Tensor], object]
    _accounts: Accounts
    _offloaders: Offloaders
    _hooks: Hooks

    def refuse_reentry(self) -> None: ...

    def stats(self, synchronize: bool = False) -> OffloadStats: ...


class _Save(NamedTuple):
    """A saved tensor, or a plain one inside it, whose outcome is known later."""

    saver: Saver
    nbytes: int
    #: The reason to keep it, if that is known at once.
    reason: str = ""
    #: The state of its storage, whether or not the storage is still alive.
    record: CountedBytes | None = None
    shares: bool = False

    def outcome(self) -> tuple[str, str]:
        """Returns the outcome and the reason, as in ``SavedGroup``."""
        record = self.record
        if record is None:
            return "kept", self.reason
        if record.state is State.KEPT or (record.state is State.WAITING and not self.shares):
            return "kept", record.kept.value
        return "shared" if self.shares else "offloaded", ""


@dataclass(eq=False, slots=True, weakref_slot=True)
class RecordedHandle:
    """The handle that autograd gets while a trace runs, and holds for longer; see the note."""

    inner: Packed
    saver: Saver
    device: torch.device
    recorder: weakref.ref[TraceRecorder]

    def unpack(self) -> Tensor:
        recorder = self.recorder()
        return self.inner.unpack() if recorder is None or recorder.timeline.is_over else recorder.unpack(self)


class TraceRecorder:
    """The recorder of one trace, with the stats ``before`` it; see the module."""

    def __init__(self, offload: _Traced, before: OffloadStats) -> None:
        self._before, self._config, self._pack = before, offload.config, offload._hooks.pack
        self._accounts, self._counters = offload._accounts, offload._accounts.counters
        self._offloaders = offloaders = offload._offloaders
        self.timeline = Timeline(offloaders.runtime_of)
        self._compute = Compute(self.timeline)
        self._saves: list[_Save] = []
        #: The first saver of each storage, by its key.
        self._savers: dict[int, Saver] = {}
        self._memory: list[MemorySample] = []
        self._log, self._reader = offloaders.transfer_log, offloaders.transfer_log.reader()

    def start(self) -> None:
        self._log.on_entry = self._read_log
        self._compute.start()
        self._sample()

    def stop(self) -> None:
        """Removes the hooks of the recorder; may be called again."""
        if self._log.on_entry == self._read_log:
            self._log.on_entry = None
        self._compute.stop()
        self.timeline.stop()

    def finish(self, after: OffloadStats) -> Trace:
        """Returns the trace, once transfers are over and the stats are ``after``."""
        timeline = self.timeline
        with self._accounts.lock:
            self._sample()
            seconds = timeline.now()
            self._compute.break_off()
            timeline.is_over = True
            sizes: dict[tuple[str, str, str, str], list[int]] = {}
            for one in self._saves:
                sizes.setdefault((one.saver.operation, one.saver.module, *one.outcome()), []).append(one.nbytes)
            counted = after.since(self._before) if self._counters is self._accounts.counters else after
        slices = timeline.slices()
        groups = (SavedGroup(*key, count=len(nbytes), nbytes=sum(nbytes)) for key, nbytes in sizes.items())
        return Trace(
            seconds=max([seconds, *(one.stop for one in slices)]),  # compute may go on when transfers are over
            config=self._config.to_dict(),
            stats=counted.to_dict(),
            advice=advise(counted, self._config),
            saved=tuple(sorted(groups, key=lambda group: -group.nbytes)),
            slices=slices,
            memory=tuple(self._memory),
            versions={"eager_offload": VERSION, "torch": torch.__version__, "python": platform.python_version()},
            dropped=timeline.dropped,
        )

    # -- hooks ------------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Packed | RecordedHandle:
        """Packs ``tensor``, in place of the pack hook."""
        with without_torch_function():  # a subclass sees no more calls than without a trace
            handle = self._pack(tensor)
            with self._accounts.lock:
                if self.timeline.is_over:
                    return handle
                saver = self._note(tensor, handle)
                self._sample()
            return RecordedHandle(handle, saver, tensor.device, weakref.ref(self))

    def unpack(self, handle: RecordedHandle) -> Tensor:
        """Unpacks ``handle``, in place of the unpack hook."""
        saver = handle.saver
        saver.operation = self._compute.note_unpack(handle.device, saver.module) or saver.operation
        try:
            return handle.inner.unpack()
        finally:
            self._sample()

    def _note(self, tensor: Tensor, handle: Packed) -> Saver:
        saver = Saver(self._compute.at().module)
        if isinstance(handle, KeptTensor):
            self.timeline.keep(self._saves, _Save(saver, logical_bytes(tensor), handle.reason.value))
            return saver
        if isinstance(handle, SavedView) and not handle.shares:
            saver = self._savers.setdefault(handle.storage.record.key, saver)  # the copy's entry may have come before
        for one in [handle] if isinstance(handle, SavedView) else handle.views():
            nbytes = one.size.numel() * one.dtype.itemsize
            self.timeline.keep(self._saves, _Save(saver, nbytes, "", one.storage.record, one.shares))
        return saver

    # -- the log ------------------------------------------------------------------------------------------------------

    def _read_log(self) -> None:
        """Reads the entries written since the last call: see the note in ``engine/transfer_log.py``."""
        for entry in self._log.read(self._reader):
            if isinstance(entry, Waited):
                self._waited(entry)
            elif isinstance(entry, Copied):
                self._copied(entry)
            else:
                self._graph_offloaded(entry)

    def _copied(self, copy: Copied) -> None:
        device, saver = copy.device, Saver(self._compute.at().module)
        saver = saver if copy.key is None else self._savers.setdefault(copy.key, saver)
        draft = Slice(SliceKind(copy.what), copy.what, str(device), copy.what, nbytes=copy.nbytes, tier=copy.tier)
        self.timeline.copied(draft, device, copy.event, saver)
        if copy.what != SliceKind.OFFLOAD:
            self._compute.note_unpack(device, "")  # by a graph, whose saves have no handle here
        self._sample()

    def _waited(self, wait: Waited) -> None:
        device, at = wait.device, self._compute.at()
        called = self.timeline.seconds_at(wait.called)
        if not wait.what or called < 0:
            return  # not for a transfer of this Offload, or begun before the trace
        track = SliceKind.STALL.value
        draft = Slice(SliceKind.STALL, wait.what, str(device), track, module=at.module, operation=at.operation)
        began, ended = Noted(device, wait.before, called), Noted(device, wait.after, self.timeline.now())
        self.timeline.worked(draft, began, ended, threading.get_ident())

    def _graph_offloaded(self, graph: GraphOffloaded) -> None:
        saver, record = Saver(self._compute.at().module, "compiled graph"), graph.record
        saves = [_Save(saver, record.logical_bytes, record=record)]
        saves += (_Save(saver, nbytes, reason.value) for reason, nbytes in kept_by_graph(graph.region).items())
        for save in saves:
            self.timeline.keep(self._saves, save)
        self._sample()

    def _sample(self) -> None:
        with self._accounts.lock:
            live, memory, tiers = self._accounts.counters.live, self._memory, self._offloaders.tiers()
            live.poll()
            sample = MemorySample(
                self.timeline.now(),
                device=live.on_device,
                host=sum(tier.used_bytes for tier in tiers if tier.name != "disk"),
                disk=sum(tier.used_bytes for tier in tiers if tier.name == "disk"),
                without_offload=live.without_offload,
            )
            if (not memory or memory[-1][1:] != sample[1:]) and not self.timeline.keep(memory, sample):
                memory[-1] = sample  # the last sample stays, which shows the bytes held at the end


class Tracing:
    """One trace of one ``Offload``; see ``Offload.trace``."""

    def __init__(self, offload: _Traced, path: str | os.PathLike[str]) -> None:
        self._offload = offload
        #: The path of the file.
        self.path = _writable(path)
        self._recorder: TraceRecorder | None = None

    def __enter__(self) -> Self:
        offload = self._offload
        offload.refuse_reentry()
        if offload._offloaders.is_capturing():
            raise captured("a trace was begun")
        if offload._offloaders.transfer_log.on_entry is not None:
            raise OffloadError(
                f"this Offload is being traced already, so no second trace can be written to {self.path}: leave the "
                "first `with offload.trace(...)`, or trace another Offload"
            )
        self._process = os.getpid()
        try:
            before = offload.stats(synchronize=True)
            recorder = self._recorder = TraceRecorder(offload, before)
            with offload._accounts.lock:
                recorder.start()
            offload.pack = recorder.pack
        except BaseException:
            self._take_all_away()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder, offload = self._recorder, self._offload
        if recorder is None:
            raise OffloadError("this trace is left but was not entered: use `with offload.trace(path):`")
        try:
            if os.getpid() != self._process:
                return  # a forked child: the file is its parent's
            found = recorder.finish(offload.stats(synchronize=True))
        finally:
            self._take_all_away()
        if error is None and not (found.saved or found.slices):
            warn(
                f"nothing ran inside `with offload.trace({os.fspath(self.path)!r}):`, so no trace is written: put it "
                "around whole steps, forward and backward"
            )
            tell()
            return
        if error is not None:
            found = dataclasses.replace(found, error=f"{type(error).__name__}: {error}")
        try:
            write_trace(found, self.path)
        except OSError as failure:
            message = f"the trace could not be written to {self.path}: {failure}. The traced code is not affected"
            if error is None:
                raise OffloadError(message) from failure
            warn(message)

    def _take_all_away(self) -> None:
        """Removes the recorder, also if an interrupt comes in its midst."""
        try:
            self._take_away()
        except BaseException:
            self._take_away()
            raise

    def _take_away(self) -> None:
        """Removes the recorder; may be called again."""
        offload, recorder = self._offload, self._recorder
        if recorder is not None:
            offload.pack = offload._hooks.pack
            recorder.stop()
            self._recorder = None


def _writable(path: str | os.PathLike[str]) -> Path:
    """Returns ``path``; raises ``ConfigError`` if no file can be written there."""
    try:
        found = Path(os.fsdecode(path)).absolute()
    except TypeError:
        raise ConfigError(f"path={path!r} is not accepted: trace takes the path of a file") from None
    target = Path(os.path.realpath(found))
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        os.stat(os.path.join(target.parent, ""))  # which has to be a directory
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"path={os.fspath(path)!r} is not accepted ({error.strerror}): trace takes the path of a file in a "
            "directory that exists and can be written to"
        ) from error
    return found
