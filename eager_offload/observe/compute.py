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
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from eager_offload._torch import after_backward, current_autograd_node, current_backward, is_fake, node_sequence
from eager_offload.observe.timeline import Noted, Saver, Timeline
from eager_offload.runtime.base import Stream
from eager_offload.trace_file import Slice, SliceKind

#: What torch puts between a module and the one that it compiles.
_WRAPPED = "_orig_mod"
#: Torch says that its own wrapper around a compiled module will be seen as well, and it is.
_WRAPPER_IS_SEEN = r"Using `torch\.compile\(module\)` when there are global hooks"


class _Part(NamedTuple):
    """What a frame stands for: the ``"forward"`` of a module, a ``"backward"``, or an ``"operation"`` of one."""

    kind: str
    number: int


class _Frame(NamedTuple):
    """Something that a thread is in."""

    part: _Part
    device: torch.device
    #: Without its times.
    draft: Slice
    stream: Stream
    began: Noted


class Compute:
    """What each thread is in between ``start`` and ``stop``, as a stack: a forward within a backward that asks for it,
    a backward within a forward that begins it."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        #: By thread, the outermost first.
        self._stacks: defaultdict[int, list[_Frame]] = defaultdict(list)
        self._paths: WeakKeyDictionary[Module, str] = WeakKeyDictionary()
        self._outermost: Counter[str] = Counter()
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        # Functions, and the question first: a compiler that comes here sees that nothing happens.

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
        """May be called again."""
        while self._handles:
            self._handles[-1].remove()
            del self._handles[-1]
        for entry in [one for one in warnings.filters if getattr(one[1], "pattern", None) == _WRAPPER_IS_SEEN]:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]  # a list, whatever its declaration

    def break_off(self) -> None:
        """What has not ended ends now: an interrupt has come, or another thread is still at it."""
        for thread, stack in list(self._stacks.items()):
            if stack:
                self._end(stack[0].part, thread)

    def module(self) -> str:
        """Returns the path of the module that the calling thread is in; empty outside of all."""
        return self.at().module

    def at(self) -> Saver:
        """Returns what the calling thread is in."""
        stack = self._stacks[threading.get_ident()]
        return Saver(stack[-1].draft.module, stack[-1].draft.operation) if stack else Saver()

    def asked(self, device: torch.device, module: str) -> str:
        """An operation of ``module`` asks for what it saved on ``device``; returns its name, empty outside of a
        backward."""
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
        """A forward begins on the calling thread."""
        stack = self._stack_of(threading.get_ident())
        tensor = next((one for one in chain(arguments, module.parameters()) if isinstance(one, Tensor)), None)
        if self._timeline.is_over or (tensor is not None and is_fake(type(tensor))):
            return  # a compiler is tracing
        if stack and isinstance(module, GraphModule) and module not in self._paths:
            return  # what a compiler has made runs as one: no module of the user's
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
        """``part`` is over on that thread, by a result or an error, and what is inside of it; or it began earlier."""
        stack = self._stacks[thread]
        while any(frame.part == part for frame in stack):
            frame = stack.pop()
            ended = self._timeline.moment(frame.device, frame.stream)
            self._timeline.worked(frame.draft, frame.began, ended, thread)
            if frame.part == part:
                return

    def _backward_ended(self, backward: _Part) -> None:
        """Called by autograd, which must not hear of an error here: nothing below raises."""
        for thread in list(self._stacks):
            if not self._timeline.is_over:
                self._end(backward, thread)

    def _path_of(self, module: Module, stack: list[_Frame]) -> str:
        if (known := self._paths.get(module)) is not None:
            return known
        name = type(module).__name__
        if stack:  # made on the way, or hidden in something that is no module
            return self._paths.setdefault(module, f"{stack[-1].draft.module}.{name}".lstrip("."))
        self._outermost[name] += 1
        root = name if self._outermost[name] == 1 else f"{name} {self._outermost[name]}"
        for inner, child in module.named_modules():
            parts = [root, *(part for part in inner.split(".") if part not in ("", _WRAPPED))]
            self._paths.setdefault(child, ".".join(parts))
        return self._paths[module]
