"""The pair of saved-tensor hooks that serves eager code and tells compilers what to put into their graphs.

[Note: hooks that are graph modules]
Where both saved-tensor hooks are ``fx.GraphModule``s AOTAutograd would trace them into the graphs that it makes, and it
has no hooks called for that region at run time; everywhere else autograd calls them as it calls any hook. So the same
pair serves both. Eager code is served by what a hook does when it is called. Compiled code is served by
``aot_hooks.py``, in place of the tracing: the graph of a hook only tells compilers, which key on it what they keep, for
which configuration and by which version of the passes they have compiled.

Dynamo guards on the identity of both hooks. There is one pair for each configuration in a process, for ever: another
pair for an equal configuration would compile everything anew.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Self

from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from eager_offload import contexts
from eager_offload.compile.cache_key import cache_key, key_of, read_text
from eager_offload.tiers.forking import ForkSafeLock
from eager_offload.torch_private.inductor import hide_from_compilers, unpack_before_compiled_backwards


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
