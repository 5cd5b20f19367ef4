"""The pair of saved-tensor hooks that serves eager code and tells compilers what to put into their graphs.

[Note: hooks that are graph modules]
Where both saved-tensor hooks are ``fx.GraphModule``s AOTAutograd would trace them into the graphs that it makes, and it
has no hooks called for that region at run time; everywhere else autograd calls them as it calls any hook. So the same
pair serves both. Eager code is served by what a hook does when it is called. Compiled code is served by
``insert.py``, in place of the tracing: the graph of a hook only tells compilers, which key on it what they keep, for
which configuration and by which version of the passes they have compiled.

[Note: the text of a configuration]
Dynamo guards on the identity of both hooks. There is one pair for each text in a process, for ever: another pair for an
equal one would compile everything anew. The text begins with the configuration's own, one line, which names the
``Offload`` that serves a graph. Where a plan says which part of the movable bytes moves, that is the next line; and
where a budget is ``"auto"``, what that has come to is a part of the keys.
"""

from __future__ import annotations

import pkgutil
import sys
from functools import cache
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from eager_offload import contexts
from eager_offload.config import OffloadConfig
from eager_offload.errors import OffloadError
from eager_offload.tiers.forking import ForkSafeLock
from eager_offload.torch_private.calls import without_dispatch_modes
from eager_offload.torch_private.inductor import hide_from_compilers, unpack_before_compiled_backwards
from eager_offload.version import VERSION, digest

#: So many leading bits of it count: another process, which finds a little more or less, takes the same graphs.
_LEADING_BITS = 5
#: Beside the modules of this package: what decides which bytes move, and what the operations in a graph mean.
_OTHERS = (
    *("config.py", "marks.py", "runtime/base.py", "tiers/memory.py"),
    *(f"core/{name}.py" for name in ("budget", "schedule", "selection")),
    *(f"planning/{name}.py" for name in ("machine", "program", "simulate")),
    *(f"torch_private/{name}.py" for name in ("__init__", "autograd", "calls", "inductor", "memory")),
)


@cache
def cache_key() -> str:
    """Another one for each version of the library, and for each change of a source that decides what is compiled.

    Compilers key on it what they keep. Where there are no sources to read it is the version alone.
    """
    version = f"eager_offload {VERSION}"
    parts = list[str | bytes]()
    folders = [f"{place}/compile" for place in sys.modules["eager_offload"].__path__]
    modules = [f"compile/{one.name}.py" for one in pkgutil.iter_modules(folders)]
    for name in sorted([*_OTHERS, "compile/__init__.py", *modules]):
        try:
            source = pkgutil.get_data("eager_offload", name)
        except OSError:
            source = None
        if source is None:
            return version
        parts += [name, source]
    return f"{version} {digest(*parts)}"


def text_of(config_key: str, fraction: float) -> str:
    """Returns the text of a configuration beside which a plan says that part of the movable bytes."""
    return f"{config_key}\n{fraction!r}"


def read_text(text: str) -> tuple[str, float | None]:
    """Returns the configuration's own text, and the part of the movable bytes that a plan says, where one does."""
    config_key, _, fraction = text.partition("\n")
    return config_key, float(fraction) if fraction else None


def key_of(text: str) -> str:
    config_key, _ = read_text(text)
    if OffloadConfig.from_text(config_key).device_budget != "auto":
        return text
    return f"{text}\n{free_bytes(config_key)}"


@cache
def free_bytes(config_key: str) -> int | None:
    """Returns what ``device_budget="auto"`` comes to in this process; ``None`` where the device does not tell.

    It is found once, so that all graphs have the same.
    """
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    try:
        with without_dispatch_modes():
            runtime = contexts.serving(config_key, is_hooked=True).offloader_of(device).runtime
            memory = runtime.memory(device)
            if memory is None:
                return None
            nbytes: int = runtime.available_memory(device, memory.used)
    except OffloadError:  # nothing moves off such a device here
        return None
    step = 1 << max(nbytes.bit_length() - _LEADING_BITS, 0)
    return nbytes // step * step


# -- what tells compilers ----------------------------------------------------------------------------------------------


class _Hook(GraphModule):
    """A graph module that makes its graph when it is asked for it. It is small: each configuration has its own."""

    text: str
    config_key: str

    def __new__(cls, *_: object) -> Self:
        return object.__new__(cls)  # torch would make a class, with generated code, for each

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "config_key", read_text(text)[0])

    @property  # type: ignore[misc]  # it is never set
    def graph(self) -> Graph:
        """One call of ``offloads``, with what compilers key on: they cannot know what a Python function will do."""
        contexts.compiled.set()
        graph = Graph()
        call = graph.call_function(offloads, (graph.placeholder("tensor"),))
        graph.output(call)
        call.meta["is_wrapped"], call.meta["user_cache_hash"] = True, f"{cache_key()} {key_of(self.text)}"
        return graph


for _name, _value in vars(nn.Module().eval()).items():  # empty dictionaries, which all of them share
    setattr(_Hook, _name, _value)


class PackHook(_Hook, contexts.PackHook):
    """Packs by the configuration ``config_key``, and tells compilers of ``text``."""

    text: str
    __call__ = contexts.PackHook.__call__


class UnpackHook(_Hook):
    """Unpacks whatever a pack hook has made."""

    __call__ = staticmethod(contexts.unpack)


class HookPair(NamedTuple):
    """What ``saved_tensors_hooks`` takes."""

    pack: PackHook
    unpack: UnpackHook


_pairs: dict[str, HookPair] = {}
_pairs_lock = ForkSafeLock()


def hook_pair(text: str) -> HookPair:
    """The process's one pair for ``text``; see [Note: the text of a configuration]."""
    pair = _pairs.get(text)
    if pair is None:
        with _pairs_lock.lock:
            pair = _pairs.setdefault(text, HookPair(PackHook(text), UnpackHook(text)))
    return pair


def offloads(packed: Tensor) -> Tensor:
    """What the graph of a hook calls: nothing happens, if it is traced after all. Dynamo, when it traces a
    backward, must not: it would take the graph for what the hook does."""
    return packed


@cache
def serve_compiled_backwards() -> None:
    """Has backwards that autograd compiles take what these hooks have packed, for as long as the process lives."""
    unpack_before_compiled_backwards(lambda hook: hook is contexts.unpack or isinstance(hook, UnpackHook))


for hidden in (offloads, PackHook.__call__, contexts.unpack):
    hide_from_compilers(hidden)
