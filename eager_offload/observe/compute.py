"""Compute, while a trace runs: the forwards of modules, and what backward is at.

[Note: not by torch.profiler] It names the classes of modules and not their places in a model, sees no thread but those
that it was started on, and cannot run inside of another profile. So a trace learns by hooks of its own which module a
thread is in. The ranges of the library are in a profile all the same: see ``_torch.profiled``.

Torch calls global hooks around every module's forward. They are there only while a trace runs. Compilers leave global
hooks alone in graphs that they have compiled before; what is compiled while they are there is compiled once more when
they are gone.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from eager_offload._torch import after_backward, current_autograd_node, current_backward, is_fake, node_sequence
from eager_offload.observe.timestamps import Clock, Clocks, TimeLog, Work
from eager_offload.runtime.base import Stream
from eager_offload.trace_file import SliceKind

#: What torch puts between a module and the one that it compiles.
_WRAPPED = "_orig_mod"
#: Torch says that its own wrapper around a compiled module will be seen as well, and it is.
_WRAPPER_IS_SEEN = r"Using `torch\.compile\(module\)` when there are global hooks"


class _Call(NamedTuple):
    """A forward that is running."""

    module: Module
    path: str
    clock: Clock
    began: object


class Forwards:
    """Follows the forwards of all modules in all threads between ``start`` and ``stop``."""

    def __init__(self, clocks: Clocks, time_log: TimeLog) -> None:
        self._clocks = clocks
        self._time_log = time_log
        self._is_over = False
        #: By thread, the outermost first.
        self._calls: defaultdict[int, list[_Call]] = defaultdict(list)
        self._paths: WeakKeyDictionary[Module, str] = WeakKeyDictionary()
        self._outermost: Counter[str] = Counter()
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        begin, end = _hooks(self)
        warnings.filterwarnings("ignore", message=_WRAPPER_IS_SEEN)
        self._handles.append(register_module_forward_pre_hook(begin))
        self._handles.append(register_module_forward_hook(end, always_call=True))

    def stop(self) -> None:
        """May be called again."""
        self._is_over = True
        while self._handles:
            self._handles[-1].remove()
            del self._handles[-1]
        for entry in [one for one in warnings.filters if getattr(one[1], "pattern", None) == _WRAPPER_IS_SEEN]:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]  # a list, whatever its declaration

    def break_off(self) -> None:
        """What has not ended ends now: an interrupt has come, or another thread is still at it."""
        for thread, calls in list(self._calls.items()):
            while calls:
                self._end(calls.pop(), thread)

    @property
    def path(self) -> str:
        """Of the module that the calling thread is in; empty outside of all."""
        calls = self._calls[threading.get_ident()]
        return calls[-1].path if calls else ""

    def enter(self, module: Module, arguments: tuple[Any, ...]) -> None:
        """A forward begins on the calling thread."""
        calls = self._calls[threading.get_ident()]
        tensor = next((one for one in arguments if isinstance(one, Tensor)), None)
        if self._is_over or (tensor is not None and is_fake(type(tensor))):
            return  # a compiler is tracing
        if calls and isinstance(module, GraphModule) and module not in self._paths:
            return  # what a compiler has made runs as one: no module of the user's
        if tensor is None and not calls:
            tensor = next(module.parameters(), None)
        outer = calls[-1].clock.device if calls else torch.device("cpu")
        clock = self._clocks.of(outer if tensor is None else tensor.device)
        calls.append(_Call(module, self._path_of(module, calls), clock, clock.now()))

    def leave(self, module: Module) -> None:
        """A forward ends, by a result or by an exception."""
        thread = threading.get_ident()
        calls = self._calls[thread]
        if not any(call.module is module for call in calls):
            return  # it began before the trace
        while calls:
            call = calls.pop()
            self._end(call, thread)
            if call.module is module:
                return

    def _end(self, call: _Call, thread: int) -> None:
        if not self._is_over:
            moments = call.clock, call.began, call.clock.now()
            self._time_log.add(Work(SliceKind.COMPUTE, call.path, *moments, "compute forward", call.path, "", thread))

    def _path_of(self, module: Module, calls: list[_Call]) -> str:
        if (known := self._paths.get(module)) is not None:
            return known
        name = type(module).__name__
        if calls:  # made on the way, or hidden in something that is no module
            return self._paths.setdefault(module, f"{calls[-1].path}.{name}")
        self._outermost[name] += 1
        root = name if self._outermost[name] == 1 else f"{name} {self._outermost[name]}"
        for inner, child in module.named_modules():
            parts = [root, *(part for part in inner.split(".") if part not in ("", _WRAPPED))]
            self._paths.setdefault(child, ".".join(parts))
        return self._paths[module]


def _hooks(forwards: Forwards) -> tuple[Callable[..., None], Callable[..., None]]:
    # Functions, and the question first: a compiler that comes here sees that nothing happens.

    def begin(module: Module, arguments: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            forwards.enter(module, arguments)

    def end(module: Module, arguments: tuple[Any, ...], output: object) -> None:
        if not torch.compiler.is_compiling():
            forwards.leave(module)

    return begin, end


class _Backward(NamedTuple):
    """A backward as far as one thread runs it, and the operation that it is at."""

    clock: Clock
    stream: Stream
    began: object
    node: int
    module: str
    operation: str
    #: When the operation began.
    step: object


class Backwards:
    """The backwards that run, by where an operation asks for what it saved. The accounts' lock is held."""

    def __init__(self, time_log: TimeLog) -> None:
        self._time_log = time_log
        #: By backward and thread.
        self._running: dict[tuple[int, int], _Backward] = {}
        self._is_over = False

    def asked(self, clock: Clock, module: str) -> str:
        """An operation of ``module`` asks for what it saved, on the device of ``clock``; its name, empty outside of
        a backward."""
        node: Any = current_autograd_node()
        key = current_backward(), threading.get_ident()
        if node is None or key[0] < 0 or self._is_over:
            return ""
        running, number, name = self._running.get(key), node_sequence(node), str(node.name())
        if running is not None and running.node == number:
            return name
        stream = clock.runtime.current_stream(clock.device)
        now = clock.at(stream)
        if running is None:
            after_backward(partial(self._ended, key[0]))
        else:
            self._end_step(running, now, key[1])
        began = now if running is None else running.began
        self._running[key] = _Backward(clock, stream, began, number, module, name, now)
        return name

    def close(self) -> None:
        """The trace ends. A backward that has not come to its end ends where it was seen last."""
        self._is_over = True
        for (_, thread), running in self._running.items():
            self._end(running, running.step, thread)
        self._running = {}

    def _ended(self, task: int) -> None:
        """Called by autograd, which must not hear of an error here: nothing below raises."""
        if not self._is_over:
            for key in [key for key in list(self._running) if key[0] == task]:
                if (running := self._running.pop(key, None)) is not None:
                    self._end(running, running.clock.at(running.stream), key[1])

    def _end_step(self, one: _Backward, now: object, thread: int) -> None:
        where = ("compute backward", one.module, one.operation, thread)
        name = one.module or one.operation
        self._time_log.add(Work(SliceKind.COMPUTE, name, one.clock, one.step, now, *where))

    def _end(self, one: _Backward, now: object, thread: int) -> None:
        self._end_step(one, now, thread)
        whole = ("compute backward", "", "", thread)
        self._time_log.add(Work(SliceKind.COMPUTE, "backward", one.clock, one.began, now, *whole))
