"""Which module a thread is in, while a trace runs: the paths of modules, and when their forwards began and ended.

Torch calls global hooks around every module's forward. They are there only while a trace runs. Compilers leave global
hooks alone in graphs that they have compiled before; what is compiled while they are there is compiled once more when
they are gone.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from eager_offload._torch import autograd_sequence, is_fake

__all__ = ["ModuleCall", "Modules"]

#: What torch puts between a module and the one that it compiles.
_WRAPPED = "_orig_mod."


class ModuleCall:
    """A forward that is running."""

    __slots__ = ("began", "device", "first_node", "is_outermost", "module", "path")

    def __init__(self, module: Module, path: str, device: torch.device, *, is_outermost: bool) -> None:
        self.module = module
        self.path = path
        self.device = device
        #: Whether no other module of the thread called it.
        self.is_outermost = is_outermost
        #: The number of the first autograd node that is made in it.
        self.first_node = autograd_sequence()
        #: A mark of the device's runtime; whoever listens puts it here.
        self.began: object = None


class _Listener(Protocol):
    def forward_begins(self, call: ModuleCall) -> None: ...

    def forward_ends(self, call: ModuleCall, output: object) -> None: ...


class _Thread(threading.local):
    def __init__(self, all_calls: list[list[ModuleCall]]) -> None:
        self.calls: list[ModuleCall] = []
        all_calls.append(self.calls)


class Modules:
    """Follows the forwards of all modules in all threads between ``start`` and ``stop``."""

    def __init__(self, listener: _Listener) -> None:
        self._listener: _Listener | None = listener
        self._all_calls: list[list[ModuleCall]] = []
        self._thread = _Thread(self._all_calls)
        self._paths: dict[int, tuple[weakref.ref[Module], str]] = {}
        self._outermost: Counter[str] = Counter()
        self._handles: list[RemovableHandle] = []
        self._filter: object = None

    def start(self) -> None:
        begin, end = _hooks(self)
        # Torch says that its own wrapper around a compiled module will be seen as well, and it is.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        self._filter = warnings.filters[0]
        self._handles.append(register_module_forward_pre_hook(begin))
        self._handles.append(register_module_forward_hook(end, always_call=True))

    def stop(self) -> None:
        """May be called again."""
        while self._handles:
            self._handles[-1].remove()
            del self._handles[-1]
        if self._filter is not None and self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]  # a list, whatever its declaration
        self._filter = self._listener = None

    def break_off(self) -> None:
        """What has not ended ends now: an interrupt has come, or another thread is still at it."""
        for calls in self._all_calls:
            while calls:
                self._end(calls.pop(), None)

    @property
    def path(self) -> str:
        """Of the module that the calling thread is in; empty outside of all."""
        calls = self._thread.calls
        return calls[-1].path if calls else ""

    def enter(self, module: Module, arguments: tuple[Any, ...]) -> None:
        """A forward begins on the calling thread."""
        calls = self._thread.calls
        tensor = next((one for one in arguments if isinstance(one, Tensor)), None)
        if tensor is not None and is_fake(type(tensor)):
            return  # a compiler is tracing
        if calls and isinstance(module, GraphModule) and self._known(module) is None:
            return  # what a compiler has made runs as one: no module of the user's
        if tensor is None and not calls:
            tensor = next(module.parameters(), None)
        outer = calls[-1].device if calls else torch.device("cpu")
        device = outer if tensor is None else tensor.device
        call = ModuleCall(module, self._path_of(module), device, is_outermost=not calls)
        if self._listener is not None:
            self._listener.forward_begins(call)
            calls.append(call)

    def leave(self, module: Module, output: object) -> None:
        """A forward ends, by a result or by an exception."""
        calls = self._thread.calls
        if not any(call.module is module for call in calls):
            return  # it began before the trace
        while calls:
            call = calls.pop()
            self._end(call, output)
            if call.module is module:
                return

    def _end(self, call: ModuleCall, output: object) -> None:
        if self._listener is not None:
            self._listener.forward_ends(call, output)

    def _known(self, module: Module) -> str | None:
        known = self._paths.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def _path_of(self, module: Module) -> str:
        known = self._known(module)
        if known is not None:
            return known
        name, calls = type(module).__name__, self._thread.calls
        if calls:  # made on the way, or hidden in something that is no module
            path = f"{calls[-1].path}.{name}"
            self._paths[id(module)] = weakref.ref(module), path
            return path
        self._outermost[name] += 1
        root = name if self._outermost[name] == 1 else f"{name} {self._outermost[name]}"
        for inner, child in module.named_modules():
            path = f"{root}.{inner}".replace(_WRAPPED, "").removesuffix(f".{_WRAPPED[:-1]}").removesuffix(".")
            if self._known(child) is None:
                self._paths[id(child)] = weakref.ref(child), path
        return root


def _hooks(modules: Modules) -> tuple[Callable[..., None], Callable[..., None]]:
    # Functions, and the question first: a compiler that comes here sees that nothing happens.

    def begin(module: Module, arguments: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            modules.enter(module, arguments)

    def end(module: Module, arguments: tuple[Any, ...], output: object) -> None:
        if not torch.compiler.is_compiling():
            modules.leave(module, output)

    return begin, end
