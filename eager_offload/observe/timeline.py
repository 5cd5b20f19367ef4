"""The timeline of a trace: work is noted as moments of a device, which become times when the trace ends; and the
compute of it: the forwards of modules, and the operations of backward.

[Note: not by torch.profiler] The profiler names the classes of modules and not their paths in a model, sees only the
threads on which it was started, and cannot run inside another profile. So a trace has hooks of its own to know the
module of a thread. The ranges of the library are in profiles all the same: see ``torch_private.autograd.profiled``.

Torch calls global hooks around every module's forward. A trace registers them while it runs. Graphs that were compiled
before do not call them; code that is compiled while they are registered is compiled once more when they are gone.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from eager_offload.errors import OffloadError
from eager_offload.runtime.base import Event, Moment, Runtime, Stream
from eager_offload.runtime.host import host_runtime
from eager_offload.torch_private.autograd import after_backward, current_autograd_node, current_backward, node_sequence
from eager_offload.torch_private.memory import is_fake

#: The most slices, samples and saves of a trace; more are only counted, because no viewer could show them.
MOST = 1 << 20
#: Seconds; a shorter wait is not shown.
_NO_WAIT = 1e-6
#: The name of a module inside torch's wrapper for compiled modules.
_WRAPPED = "_orig_mod"
#: A warning of torch's that its wrapper around a compiled module is seen too, which is handled here.
_WRAPPER_IS_SEEN = r"Using `torch\.compile\(module\)` when there are global hooks"

_T = TypeVar("_T")


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


class Noted(NamedTuple):
    """A moment of a device, and the seconds since the trace began when the host enqueued it."""

    device: torch.device
    moment: Moment
    enqueued: float


@dataclass(eq=False, slots=True)
class Saver:
    """The module and the operation that have saved a tensor."""

    module: str = ""
    #: Empty until backward has come to the operation.
    operation: str = ""


class Timeline:
    """The clocks of all devices of a trace, and the work that took time on them.

    [Note: two clocks] A device's moments lie on a clock of its own. Both clocks are read when all noted work is over,
    and each moment is placed by its distance from that reading. So nothing waits while the trace runs.
    """

    def __init__(self, runtime_of: Callable[[torch.device], Runtime | None]) -> None:
        self._runtime_of = runtime_of
        self._runtimes: dict[torch.device, Runtime] = {}
        self._lock = threading.RLock()
        #: The host's runtime, whose clock may be a simulated one.
        self._host = runtime_of(torch.device("cpu")) or host_runtime()
        self._began = self._host.moment(None)
        #: Functions that return the slices of noted work, once it is over.
        self._entries: list[Callable[[], Iterator[Slice]]] = []
        #: The moments that these use.
        self._noted: list[Noted] = []
        #: For each device with a clock of its own, the reading of both clocks: see [Note: two clocks].
        self._ends: dict[torch.device, Noted] = {}
        #: The threads of each track of a device, in order: each thread gets a track of its own.
        self._threads: dict[tuple[str, str], list[int]] = {}
        #: The number of entries without room.
        self.dropped = 0
        #: Whether the recording has ended.
        self.is_over = False

    def runtime(self, device: torch.device) -> Runtime:
        """Returns the runtime that tells the time of ``device``: the host's, if nothing moves off the device."""
        with self._lock:
            if device not in self._runtimes:
                try:
                    runtime = self._runtime_of(device) or self._host
                except OffloadError:
                    runtime = self._host
                self._runtimes[device] = runtime
            return self._runtimes[device]

    def stop(self) -> None:
        """Ends the recording and drops its entries; may be called again."""
        self.is_over = True
        self._entries.clear()
        self._noted.clear()

    def now(self) -> float:
        """Returns the seconds since the trace began, by the host."""
        return self.seconds_at(self._host.moment(None))

    def seconds_at(self, moment: Moment) -> float:
        """Returns the seconds since the trace began at a ``moment`` of the host; negative before that."""
        seconds = self._host.seconds_between(self._began, moment)
        assert seconds is not None, "the host's moments have come"
        return seconds

    def moment(self, device: torch.device, stream: Stream | None = None) -> Noted:
        """Returns the moment when ``stream`` reaches this point; the default is the compute stream of ``device``."""
        runtime = self.runtime(device)
        stream = runtime.current_stream(device) if stream is None else stream
        return Noted(device, runtime.moment(stream), self.now())

    def keep(self, entries: list[_T], entry: _T) -> bool:
        """Appends ``entry``, or counts it if there is no room; returns whether there was. For any thread."""
        if self.is_over or len(entries) >= MOST:
            self.dropped += not self.is_over
            return False
        entries.append(entry)
        return True

    def worked(self, draft: Slice, began: Noted, ended: Noted, thread: int) -> None:
        """Notes work of a thread, or of its compute stream; ``draft`` is its slice without times."""

        def slices() -> Iterator[Slice]:
            start = self._seconds_of(began)
            seconds = max(0.0, self._seconds_of(ended) - start)
            threads = self._threads.setdefault((draft.device, draft.track), [])
            if thread not in threads:
                threads.append(thread)
            track = f"{draft.track} {threads.index(thread) + 1}" if thread != threads[0] else draft.track
            if draft.kind is not SliceKind.STALL or seconds >= _NO_WAIT:
                yield replace(draft, track=track, start=start, seconds=seconds)

        if self.keep(self._entries, slices):
            self._noted += began, ended

    def copied(self, draft: Slice, device: torch.device, event: Event, saver: Saver) -> None:
        """Notes a copy of bytes of ``saver`` to or from ``device``, which ``event`` has timed."""
        runtime = self.runtime(device)

        def slices() -> Iterator[Slice]:
            try:
                runtime.synchronize(event)
            except OffloadError:
                return  # the copy failed, and the bytes are in their old place
            for span in runtime.spans(event):
                start, stop = self._place(device, span.began), self._place(device, span.ended)
                if start is not None and stop is not None:
                    named = replace(draft, module=saver.module, operation=saver.operation)
                    name = f"{draft.name} {span.name}".rstrip()
                    yield replace(named, name=name, track=name, start=start, seconds=max(0.0, stop - start))

        self.keep(self._entries, slices)

    def slices(self) -> tuple[Slice, ...]:
        """Returns all slices by their beginning, outer ones first; the host waits until their work is over."""
        for one in self._noted:
            if not isinstance(one.moment, float):
                self.runtime(one.device).seconds_between(one.moment, one.moment, synchronize=True)
        for device, runtime in list(self._runtimes.items()):
            end = runtime.moment(runtime.current_stream(device))
            if not isinstance(end, float) and runtime.tells_time(device):
                runtime.seconds_between(end, end, synchronize=True)
                self._ends[device] = Noted(device, end, self.now())
        found = (one for entry in self._entries for one in entry())
        return tuple(sorted(found, key=lambda one: (one.start, -one.seconds)))

    def _seconds_of(self, noted: Noted) -> float:
        """Returns the time of ``noted``; if its device does not tell the time, the time when it was enqueued."""
        seconds = self._place(noted.device, noted.moment)
        return noted.enqueued if seconds is None else seconds

    def _place(self, device: torch.device, moment: Moment) -> float | None:
        """Returns the seconds from the beginning of the trace; ``None`` if ``device`` does not tell the time."""
        if isinstance(moment, float):
            return self.seconds_at(moment)
        end = self._ends.get(device)
        if end is None:
            return None
        before_end = self.runtime(device).seconds_between(moment, end.moment, synchronize=True)
        return None if before_end is None else end.enqueued - before_end


# -- compute -----------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """The subject of a frame: the ``"forward"`` of a module, a ``"backward"``, or an ``"operation"`` of a backward."""

    kind: str
    number: int


class _Frame(NamedTuple):
    part: _Part
    device: torch.device
    #: The slice without its times.
    draft: Slice
    stream: Stream
    began: Noted


class Compute:
    """The stack of frames of each thread between ``start`` and ``stop``: a recomputed forward lies within its backward,
    and a backward that a forward begins within that forward."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        #: By thread, the outermost first.
        self._stacks: defaultdict[int, list[_Frame]] = defaultdict(list)
        self._paths: WeakKeyDictionary[Module, str] = WeakKeyDictionary()
        self._outermost: Counter[str] = Counter()
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        # Plain functions that ask first, so that a compiler which traces them sees that nothing happens.

        def begin(module: Module, arguments: tuple[Any, ...]) -> None:
            if not torch.compiler.is_compiling():
                self._enter(module, arguments)

        def end(module: Module, arguments: tuple[Any, ...], output: object) -> None:
            if not torch.compiler.is_compiling():
                self._end(_Part("forward", id(module)), threading.get_ident())

        warnings.filterwarnings("ignore", message=_WRAPPER_IS_SEEN)
        self._handles.append(register_module_forward_pre_hook(begin))
        self._handles.append(register_module_forward_hook(end, always_call=True))

    def stop(self) -> None:
        """Removes the hooks; may be called again."""
        while self._handles:
            self._handles[-1].remove()
            del self._handles[-1]
        for entry in [one for one in warnings.filters if getattr(one[1], "pattern", None) == _WRAPPER_IS_SEEN]:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]  # a list, whatever its declaration

    def break_off(self) -> None:
        """Ends all frames, which an interrupt or a thread still at work has left."""
        for thread, stack in list(self._stacks.items()):
            if stack:
                self._end(stack[0].part, thread)

    def at(self) -> Saver:
        """Returns the module and the operation that the calling thread is in; empty outside of all."""
        stack = self._stacks[threading.get_ident()]
        return Saver(stack[-1].draft.module, stack[-1].draft.operation) if stack else Saver()

    def note_unpack(self, device: torch.device, module: str) -> str:
        """Notes that an operation of ``module`` asks for a tensor on ``device``. Returns the name of the operation;
        empty outside of a backward."""
        node: Any = current_autograd_node()
        task, thread = current_backward(), threading.get_ident()
        if node is None or task < 0 or self._timeline.is_over:
            return ""
        backward, operation, name = _Part("backward", task), _Part("operation", node_sequence(node)), str(node.name())
        stack = self._stack_of(thread)
        parts = [frame.part for frame in stack]
        if operation in parts:
            return name
        if backward not in parts:
            after_backward(partial(self._backward_ended, backward))
            self._begin(stack, backward, device, "backward")
        elif parts[-1] != backward:
            self._end(parts[parts.index(backward) + 1], thread)  # the operation before
        self._begin(stack, operation, device, module or name, module, name)
        return name

    def _enter(self, module: Module, arguments: tuple[Any, ...]) -> None:
        """Notes that a forward begins on the calling thread."""
        stack = self._stack_of(threading.get_ident())
        tensor = next((one for one in chain(arguments, module.parameters()) if isinstance(one, Tensor)), None)
        if self._timeline.is_over or (tensor is not None and is_fake(type(tensor))):
            return  # a compiler is tracing
        if stack and isinstance(module, GraphModule) and module not in self._paths:
            return  # a compiled graph is not a module of the user's
        outer = stack[-1].device if stack else torch.device("cpu")
        path = self._path_of(module, stack)
        part = _Part("forward", id(module))
        self._begin(stack, part, outer if tensor is None else tensor.device, path, path)

    def _stack_of(self, thread: int) -> list[_Frame]:
        """Returns the stack of the calling thread, without backwards that an error has ended."""
        stack = self._stacks[thread]
        if current_backward() < 0:
            for part in [frame.part for frame in stack if frame.part.kind == "backward"]:
                self._end(part, thread)
        return stack

    def _begin(
        self, stack: list[_Frame], part: _Part, device: torch.device, name: str, module: str = "", operation: str = ""
    ) -> None:
        track = "compute forward" if part.kind == "forward" else "compute backward"
        draft = Slice(SliceKind.COMPUTE, name, str(device), track, module=module, operation=operation)
        stream = self._timeline.runtime(device).current_stream(device)
        stack.append(_Frame(part, device, draft, stream, self._timeline.moment(device, stream)))

    def _end(self, part: _Part, thread: int) -> None:
        """Ends ``part`` on that thread with all frames inside it; does nothing if it began before the trace."""
        stack = self._stacks[thread]
        while any(frame.part == part for frame in stack):
            frame = stack.pop()
            ended = self._timeline.moment(frame.device, frame.stream)
            self._timeline.worked(frame.draft, frame.began, ended, thread)
            if frame.part == part:
                return

    def _backward_ended(self, backward: _Part) -> None:
        """Ends the frames of a backward. Called by autograd, so nothing here may raise."""
        for thread in list(self._stacks):
            if not self._timeline.is_over:
                self._end(backward, thread)

    def _path_of(self, module: Module, stack: list[_Frame]) -> str:
        if (known := self._paths.get(module)) is not None:
            return known
        name = type(module).__name__
        if stack:  # a module that was made in the forward, or is hidden in an object that is not a module
            return self._paths.setdefault(module, f"{stack[-1].draft.module}.{name}".lstrip("."))
        self._outermost[name] += 1
        root = name if self._outermost[name] == 1 else f"{name} {self._outermost[name]}"
        for inner, child in module.named_modules():
            parts = [root, *(part for part in inner.split(".") if part not in ("", _WRAPPED))]
            self._paths.setdefault(child, ".".join(parts))
        return self._paths[module]
