"""Which ``Offload`` a thread is inside of: what is saved there, in eager and in compiled code, is that one's.

Contexts of one thread need not nest: of two asyncio tasks, or where a generator holds a ``with`` open, the one that was
entered first may be left first. What is saved belongs to the one that was entered last and is still open.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from eager_offload._torch import (
    HookFunctions,
    Patch,
    autograd_sequence,
    dispatch_modes,
    function_modes,
    replace_hooks,
    top_pack_hook,
    without_caller_modes,
)
from eager_offload.config import OffloadConfig
from eager_offload.tiers.forking import ForkSafeLock


class Owner(Protocol):
    """The ``Offload`` that a context is of."""

    config: OffloadConfig
    #: Names the configuration in graphs.
    config_key: str
    #: What the saved-tensor hooks of eager code do with a tensor.
    pack: Callable[[Tensor], Any]

    def offloader_of(self, device: torch.device) -> Any:
        """What carries out the transfers that compiled code asks for on ``device``."""

    def count_kept(self, region: str) -> None:
        """Counts what a compiled graph keeps that moves nothing."""

    def saw_foreign_hooks(self, count: int) -> None:
        """So many pairs of other hooks hid what was saved inside of a context of this object."""


class Context(Protocol):
    """One ``with`` that is open."""

    @property
    def offload(self) -> Owner:
        """Whose it is."""

    pack_hook: object
    #: Whether a backward has run inside of it.
    saw_backward: bool
    #: Whether a context that was entered after this one has seen what was saved inside of this one.
    hears_of_saves: bool
    #: The hooks of others that were put right on top of its own, which may hide from it what is saved under them.
    above: Above

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def give_up(self) -> None:
        """Undoes what is still to be undone, if an error or an interrupt came before that."""

    def packed(self) -> bool:
        """Whether anything was packed for its object since it was entered."""

    def overlook(self, nodes: int) -> None:
        """So many nodes of autograd were made since it was entered by what is none of the user's forward."""


class Above:
    """The hooks of others that went on top of a context's own, by what they are made of: see ``eager/foreign.py``."""

    def __init__(self) -> None:
        #: The kinds of pack hooks, each as often as one was entered.
        self.entered: list[object] = []
        #: Of these, those that call our pack hook for what they are given.
        self.delegating: set[object] = set()

    def hiding(self) -> int:
        """How many of the hooks that were entered hide what is saved."""
        return sum(kind not in self.delegating for kind in self.entered)


def kind_of(pack_hook: object) -> object:
    """What the pack hooks have in common that a library makes anew for each use: their code, or their class."""
    while isinstance(pack_hook, partial):
        pack_hook = pack_hook.func
    return getattr(getattr(pack_hook, "__func__", pack_hook), "__code__", type(pack_hook))


class _Thread(threading.local):
    def __init__(self) -> None:
        #: The contexts that the thread is in, the one that it entered last at the end.
        self.contexts: list[Context] = []


class _Maker:
    """Makes an ``Offload``: the module of that class, which knows this one, gives it when it is imported."""

    given: Callable[[OffloadConfig], Owner] | None = None

    def new(self, config: OffloadConfig) -> Owner:
        if self.given is None:  # where compiled code is all that has asked for the library
            importlib.import_module("eager_offload.offload")
        assert self.given is not None
        return self.given(config)


maker = _Maker()
#: Set once a compiler has asked for the graph of a hook: autograd then has nodes of which no saved tensor is seen.
compiled = threading.Event()
#: Of the calling thread; changed by `entered` and `left` alone.
thread = _Thread()
#: By the text of their configuration, which of them was entered last in any thread.
_latest: dict[str, weakref.ref[Owner]] = {}
#: Those that serve graphs whose code is run outside of every ``with``, by the text of their configuration.
_standing: dict[str, Owner] = {}
_standing_lock = ForkSafeLock()
#: The texts of configurations, by the identity of their pack hooks.
_pack_hooks: dict[int, str] = {}


def entered(context: Context) -> None:
    """The calling thread goes into a ``with``."""
    _latest[context.offload.config_key] = weakref.ref(context.offload)
    thread.contexts.append(context)


def left(context: Context) -> None:
    """The calling thread is out of a ``with`` again; may be called again."""
    if context in thread.contexts:
        thread.contexts.remove(context)


#: What is in torch while any context is entered, on whichever thread.
_patches: list[Patch] = []
_patched_lock = ForkSafeLock()
_patched_by = 0


def add_patches(patches: Iterable[Patch]) -> None:
    """They too are to be there from now on, while any context is."""
    if any(patch not in _patches for patch in patches):
        with _patched_lock.lock:
            for patch in patches:
                if patch not in _patches:
                    _patches.append(patch)
                    if _patched_by:
                        patch.put_on()


class patched:
    """While one is entered, on whichever thread, what the library puts into torch for contexts is there."""

    def __init__(self) -> None:
        self._counted = False

    def __enter__(self) -> None:
        global _patched_by
        with _patched_lock.lock:
            _patched_by += 1
            self._counted = True
            if _patched_by == 1:
                for patch in _patches:
                    patch.put_on()

    def __exit__(self, *_: object) -> None:
        """Ends it, as far as it had begun; may be called again."""
        global _patched_by
        with _patched_lock.lock:
            if not self._counted:
                return
            self._counted = False
            _patched_by -= 1
            if _patched_by == 0:
                for patch in _patches:
                    patch.take_off()


@contextmanager
def outside() -> Iterator[None]:
    """The calling thread is in no ``with`` meanwhile, and what it saves goes to no hooks; then it is as before."""
    contexts, nodes, hooks = thread.contexts, autograd_sequence(), list[HookFunctions]()

    def take_off(found: list[HookFunctions]) -> None:
        hooks[:], found[:] = found, []

    def put_back(found: list[HookFunctions]) -> None:
        found[:] = hooks

    try:
        thread.contexts = []
        replace_hooks(take_off)
        yield
    finally:
        replace_hooks(put_back)
        thread.contexts = contexts
        for context in contexts:
            context.overlook(autograd_sequence() - nodes)


def current() -> Owner | None:
    """The one whose ``with`` the calling thread entered last."""
    contexts = thread.contexts
    return contexts[-1].offload if contexts else None


def packing(text: str) -> Owner:
    """Whose saved tensors the calling thread packs, by hooks for the configuration ``text``.

    The innermost ``with`` is the one whose hooks autograd calls.
    """
    contexts = thread.contexts
    if contexts:
        if (above := contexts[-1].above).entered and not is_ours(top := top_pack_hook()):
            above.delegating.add(kind_of(top))  # which is what autograd has called
        if (offload := contexts[-1].offload).config_key == text:
            return offload
    return _innermost(text) or _entered_last(text) or serving(text)


class Handle(Protocol):
    """What pack returns, and autograd holds in place of a saved tensor."""

    def unpack(self) -> Tensor:
        """The saved tensor again."""


def unpack(handle: Handle) -> Tensor:
    """Gives a saved tensor back; called by autograd when backward needs it, each time that it does."""
    if dispatch_modes() or function_modes():
        with without_caller_modes():
            return handle.unpack()
    return handle.unpack()


def serving(text: str) -> Owner:
    """What carries out what a graph compiled for the configuration ``text`` asks for, on the calling thread.

    The innermost of that configuration whose ``with`` the thread is in; outside, one for the whole process, made when
    it is first needed.
    """
    if (innermost := _innermost(text)) is not None:
        return innermost
    if (configuration_on_top() or "").partition("\n")[0] == text and (last := _entered_last(text)) is not None:
        return last
    standing = _standing.get(text)
    if standing is None:
        with _standing_lock.lock:
            standing = _standing.get(text) or maker.new(OffloadConfig.from_text(text))
            _standing[text] = standing
    return standing


def has_hook(text: str, pack_hook: object) -> None:
    """Tells by which pack hook, which lives for ever, the configuration ``text`` is known to autograd."""
    _pack_hooks[id(pack_hook)] = text


def is_ours(pack_hook: object) -> bool:
    """Whether autograd's saved tensors go to this library by ``pack_hook``, whoever has put it on."""
    return id(pack_hook) in _pack_hooks or any(context.pack_hook is pack_hook for context in thread.contexts)


def configuration_on_top() -> str | None:
    """The text of the configuration whose hooks the calling thread's saved tensors go to now; behind its first line,
    what a plan was made for: see [Note: the text of a configuration] in ``compile/aim.py``.

    Not that of the innermost ``with``: where other hooks hide ours, compilers know nothing of us, and would keep a
    graph with transfers in it for calls that are in no ``with`` at all.
    """
    return _pack_hooks.get(id(top_pack_hook()))


def _innermost(text: str) -> Owner | None:
    """The innermost of the configuration ``text`` whose ``with`` the calling thread is in."""
    for context in reversed(thread.contexts):
        if context.offload.config_key == text:
            return context.offload
    return None


def _entered_last(text: str) -> Owner | None:
    """Hooks also travel to the threads that autograd runs a backward on, which are in no ``with`` themselves."""
    latest = _latest.get(text)
    return None if latest is None else latest()
