"""The pair of saved-tensor hooks that serves eager code and tells compilers which transfers to put into their graphs.

[Note: hooks as graph modules]
If both saved-tensor hooks are ``fx.GraphModule``s, AOTAutograd traces them into its graphs and does not call them for
that region at run time. In eager code autograd calls them like any hook. So one pair serves both: eager code runs
``__call__``, and ``insert.py`` replaces the tracing. The graph of a hook only carries the key of compilers' caches,
which names the configuration and the version of the passes.

[Note: the text of a configuration]
Dynamo guards on the identity of both hooks, so a process keeps one pair for each text: a second pair for an equal text
would recompile everything. The first line of the text is the configuration's own text, which names the ``Offload`` that
serves a graph. If a plan sets the fraction of the movable bytes that moves, the fraction is the second line. With
``device_budget="auto"`` the cache keys also contain the budget in bytes.
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

#: Leading bits of an ``"auto"`` budget that count, so that a process with slightly different free memory finds the
#: graphs.
_LEADING_BITS = 5
#: Sources outside ``compile/`` that decide which bytes move, or define the operations in a graph.
_OTHERS = (
    *("config.py", "marks.py", "runtime/base.py", "tiers/memory.py"),
    *(f"core/{name}.py" for name in ("budget", "schedule", "selection")),
    *(f"planning/{name}.py" for name in ("machine", "program", "simulate")),
    *(f"torch_private/{name}.py" for name in ("__init__", "autograd", "calls", "inductor", "memory")),
)


@cache
def cache_key() -> str:
    """Returns a text that differs for each version of the library and each change of a source that affects compilation.

    Caches of compilers use it as a part of their keys. Without readable sources it is the version alone.
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
    """Returns the text for a configuration and the fraction of the movable bytes that a plan sets."""
    return f"{config_key}\n{fraction!r}"


def read_text(text: str) -> tuple[str, float | None]:
    """Returns the configuration's own text and the plan's fraction, if any."""
    config_key, _, fraction = text.partition("\n")
    return config_key, float(fraction) if fraction else None


def key_of(text: str) -> str:
    config_key, _ = read_text(text)
    if OffloadConfig.from_text(config_key).device_budget != "auto":
        return text
    return f"{text}\n{free_bytes(config_key)}"


@cache
def free_bytes(config_key: str) -> int | None:
    """Returns the bytes of ``device_budget="auto"`` in this process; ``None`` if the device does not tell its memory.

    Cached, so that all graphs of a process have the same budget.
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
    except OffloadError:  # the device is not supported, so nothing moves
        return None
    step = 1 << max(nbytes.bit_length() - _LEADING_BITS, 0)
    return nbytes // step * step


# -- the hooks ---------------------------------------------------------------------------------------------------------


class _Hook(GraphModule):
    """A graph module that builds its graph on demand. Small, because each configuration has its own."""

    text: str
    config_key: str

    def __new__(cls, *_: object) -> Self:
        return object.__new__(cls)  # torch's own generates a class for each instance

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "config_key", read_text(text)[0])

    @property  # type: ignore[misc]  # it is never set
    def graph(self) -> Graph:
        """Returns a call of ``offloads`` with a cache key: compilers cannot know the effect of a Python function."""
        contexts.compiled.set()
        graph = Graph()
        call = graph.call_function(offloads, (graph.placeholder("tensor"),))
        graph.output(call)
        call.meta["is_wrapped"], call.meta["user_cache_hash"] = True, f"{cache_key()} {key_of(self.text)}"
        return graph


for _name, _value in vars(nn.Module().eval()).items():  # empty dictionaries, shared by all hooks
    setattr(_Hook, _name, _value)


class PackHook(_Hook, contexts.PackHook):
    """Packs by the configuration ``config_key``, and tells compilers the ``text``."""

    text: str
    __call__ = contexts.PackHook.__call__


class UnpackHook(_Hook):
    __call__ = staticmethod(contexts.unpack)


class HookPair(NamedTuple):
    pack: PackHook
    unpack: UnpackHook


_pairs: dict[str, HookPair] = {}
_pairs_lock = ForkSafeLock()  # a second pair for a text would recompile everything


def hook_pair(text: str) -> HookPair:
    """Returns the process's only pair for ``text``; see [Note: the text of a configuration]."""
    pair = _pairs.get(text)
    if pair is None:
        with _pairs_lock.lock:
            pair = _pairs.setdefault(text, HookPair(PackHook(text), UnpackHook(text)))
    return pair


def offloads(packed: Tensor) -> Tensor:
    """Returns its argument; the graph of a hook calls it. Hidden from Dynamo, which would inline this body when it
    traces a backward."""
    return packed


@cache
def serve_compiled_backwards() -> None:
    """Has backwards that autograd compiles unpack the handles of these hooks, for the rest of the process."""
    unpack_before_compiled_backwards(lambda hook: hook is contexts.unpack or isinstance(hook, UnpackHook))


for hidden in (offloads, PackHook.__call__, contexts.unpack):
    hide_from_compilers(hidden)
