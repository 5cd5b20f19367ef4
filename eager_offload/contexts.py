"""Each ``with`` of an ``Offload``: the saved-tensor hooks that it puts on a thread, and what is seen while they are on.

Contexts of one thread need not nest: of two asyncio tasks, or where a generator holds a ``with`` open, the one that was
entered first may be left first. What is saved belongs to the one that was entered last and is still open.

[Note: which hooks hide]
Autograd calls the innermost hooks only, so what is saved under them is hidden from the outer ones. Hooks of others that
are entered through ``torch.autograd.graph.saved_tensors_hooks`` (``save_on_cpu`` and most libraries) can be seen; those
that are pushed through torch's private functions cannot. A pair that is entered hides something from a context, unless

1. it is the context's own pair, which some libraries look up and enter again (``torch_remat``), or another of ours;
2. ours are not on top: what is saved goes elsewhere without that pair too. Non-reentrant checkpointing puts on hooks
   that hide what it will compute again, by design, and shows its inputs to the hooks around it. A pair in its function,
   such as that of ``torch_remat`` for what is not to be computed again, keeps that from the checkpoint and not from us;
3. it calls our pack hook for what it is given. That shows when it does: our pack hook is called while another one is on
   top. Libraries make a pair anew for each use, and not each is given something to hand on, so what shows for one of a
   kind holds for all that the context has seen.

So it is known when the context is left, unless by an exception: that step is over.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from eager_offload._torch import (
    HookFunctions,
    Patch,
    allow_hooks_again,
    are_of_checkpoint,
    autograd_sequence,
    dispatch_modes,
    function_modes,
    on_entering_hooks,
    replace_hooks,
    top_pack_hook,
    without_caller_modes,
)
from eager_offload.config import OffloadConfig
from eager_offload.errors import OffloadError
from eager_offload.tiers.finalizers import Living
from eager_offload.tiers.forking import ForkSafeLock


class Owner(Protocol):
    """The ``Offload`` that a context is of."""

    config: OffloadConfig
    #: Names the configuration in graphs.
    config_key: str
    #: Decides about a saved tensor, and returns what autograd holds in its place.
    pack: Callable[[Tensor], Any]

    def offloader_of(self, device: torch.device) -> Any:
        """Returns what carries out the transfers that compiled code asks for on ``device``."""

    def count_kept(self, region: str) -> None:
        """Counts what a compiled graph keeps that moves nothing."""


class Handle(Protocol):
    """What pack returns, and autograd holds in place of a saved tensor."""

    def unpack(self) -> Tensor:
        """Returns the saved tensor again."""


# -- whose thread -----------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    """What the calling thread is in, and what it has done so far."""

    packed = 0
    """Saved tensors that hooks of any ``Offload`` were given, but for those in ``outside``."""
    backwards = 0
    """Backwards that it has begun, but for those in ``outside``."""
    elsewhere = 0
    """Autograd nodes that it has made in ``outside``."""

    def __init__(self) -> None:
        #: The open contexts, in the order in which they were entered.
        self.contexts: list[Context] = []


thread = _Thread()
#: Set once a compiler has asked for the graph of a hook: autograd then has nodes of which no saved tensor is seen.
compiled = threading.Event()


def innermost(is_meant: Callable[[Context], object]) -> Context | None:
    """Returns the open context that the calling thread has entered last of those that are meant."""
    for context in reversed(thread.contexts):
        if is_meant(context):
            return context
    return None


def entered(owner: object) -> Context | None:
    """Returns the innermost context of ``owner`` that the calling thread is in."""
    return innermost(lambda context: context.owner is owner)


def current() -> Owner | None:
    """Returns the ``Offload`` whose context the calling thread has entered last."""
    contexts = thread.contexts
    return contexts[-1].owner if contexts else None


#: By the text of their configuration, which of them was entered last in any thread.
_latest: dict[str, weakref.ref[Owner]] = {}
#: Those that serve graphs whose code is run outside of every context, by the text of their configuration.
_standing: dict[str, Owner] = {}
_standing_lock = ForkSafeLock()


def serving(text: str, *, is_hooked: bool = False) -> Owner:
    """Returns the ``Offload`` that serves the configuration ``text`` on the calling thread.

    1. The innermost of that configuration whose context the thread is in.
    2. Where hooks of that configuration are in force, the one that was entered last on any thread: hooks travel to the
       threads that autograd runs a backward on, which are in no context themselves.
    3. One for the whole process, made when it is first needed.

    Args:
        is_hooked: takes hooks of that configuration to be in force.
    """
    if (context := innermost(lambda context: context.owner.config_key == text)) is not None:
        return context.owner
    if is_hooked or (isinstance(top := top_pack_hook(), PackHook) and top.config_key == text):
        latest = _latest.get(text)
        if latest is not None and (owner := latest()) is not None:
            return owner
    standing = _standing.get(text)
    if standing is None:
        with _standing_lock.lock:
            standing = _standing.get(text) or make_owner(OffloadConfig.from_text(text))
            _standing[text] = standing
    return standing


def _make_first_owner(config: OffloadConfig) -> Owner:
    """Makes one where compiled code is all that has asked for the library."""
    importlib.import_module("eager_offload.offload")
    return make_owner(config)


#: Makes an ``Offload``. The module of that class, which imports this one, puts the class here.
make_owner: Callable[[OffloadConfig], Owner] = _make_first_owner


# -- hooks ------------------------------------------------------------------------------------------------------------


class PackHook:
    """Packs by the configuration ``config_key``. Every pack hook of this library is one, and none of others."""

    text: str | None = None
    """What compilers are told of it; ``None``: they leave it to autograd to call it."""

    def __init__(self, config_key: str) -> None:
        self.config_key = config_key

    def __call__(self, tensor: Tensor) -> Any:
        thread.packed += 1
        if contexts := thread.contexts:
            context = contexts[-1]
            if context.above and not isinstance(top := top_pack_hook(), PackHook):
                context.delegating.add(_kind_of(top))  # which is what autograd has called
            if context.owner.config_key == self.config_key:
                return context.owner.pack(tensor)
        return serving(self.config_key, is_hooked=True).pack(tensor)


def unpack(handle: Handle) -> Tensor:
    """Gives a saved tensor back; called by autograd when backward needs it, each time that it does."""
    if dispatch_modes() or function_modes():
        with without_caller_modes():
            return handle.unpack()
    return handle.unpack()


def plain_hooks(config_key: str) -> HookFunctions:
    """Returns hooks of which compilers are told nothing."""
    return PackHook(config_key), unpack


def configuration_on_top() -> str | None:
    """Returns the text that compilers are told of the hooks in force on the calling thread, if these are ours: see
    [Note: the text of a configuration] in ``compile/aim.py``.

    It is not asked of the innermost context: where hooks of others hide ours, compilers know nothing of us, and would
    keep a graph with transfers in it for calls that are in no context at all.
    """
    top = top_pack_hook()
    return top.text if isinstance(top, PackHook) else None


def _kind_of(pack_hook: object) -> object:
    """Returns what pack hooks have in common that a library makes anew for each use: their code, or their class."""
    while isinstance(pack_hook, partial):
        pack_hook = pack_hook.func
    return getattr(getattr(pack_hook, "__func__", pack_hook), "__code__", type(pack_hook))


def _watching(replaced: Callable[[saved_tensors_hooks], None]) -> Callable[[saved_tensors_hooks], None]:
    def enter(hooks: saved_tensors_hooks) -> None:
        if enter is _entering.active and not are_of_checkpoint(hooks) and not isinstance(hooks.pack_hook, PackHook):
            top = top_pack_hook()
            hidden = innermost(lambda context: context.pack_hook is top)
            if hidden is not None:
                hidden.above.append(_kind_of(hooks.pack_hook))
        replaced(hooks)

    return enter


_entering = on_entering_hooks(_watching)


# -- patches ----------------------------------------------------------------------------------------------------------


class Patches:
    """What is in torch while anybody uses it, on whichever thread.

    Args:
        make: makes the first patches, when they are first used.
    """

    def __init__(self, make: Callable[[], Iterable[Patch]]) -> None:
        self._make = make
        self._patches: list[Patch] | None = None
        #: Weakly: a thread may end inside of a context.
        self._users: Living[object] = Living()
        self._lock = ForkSafeLock()

    def add(self, patches: Iterable[Patch]) -> None:
        """Has ``patches`` be there too from now on, while anybody uses them."""
        with self._lock.lock:
            made = self._made()
            for patch in patches:
                if patch not in made:
                    made.append(patch)
                    if self._users:
                        patch.put_on()

    def begin(self, user: object) -> None:
        """Puts the patches on, if nobody uses them yet."""
        with self._lock.lock:
            is_first = not self._users
            self._users.add(user)
            if is_first:
                for patch in self._made():
                    patch.put_on()

    def end(self, user: object) -> None:
        """Takes the patches off, if nobody else uses them. Does nothing where ``user`` does not use them."""
        with self._lock.lock:
            if self._users:
                self._users.discard(user)
                if not self._users:
                    for patch in self._made():
                        patch.take_off()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Has them on in a ``with``."""
        user = set[object]()  # which only has to be another one each time
        self.begin(user)
        try:
            yield
        finally:
            self.end(user)

    def _made(self) -> list[Patch]:
        """Returns the patches."""
        with self._lock.lock:
            if self._patches is None:
                self._patches = list(self._make())
            return self._patches


#: What is in torch while any context is open.
patches = Patches(lambda: [_entering])


# -- contexts ---------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a thread has done: so far, or since then."""

    packed: int
    backwards: int
    nodes: int

    @classmethod
    def so_far(cls) -> Seen:
        """Returns what the calling thread has done so far."""
        return cls(thread.packed, thread.backwards, autograd_sequence() - thread.elsewhere)


@dataclass
class Forward:
    """What a thread does from where it enters an ``Offload`` until it is in no context of that any more."""

    before: Seen
    """What the thread had done when it began."""
    may_save: bool
    """Whether autograd was on when it began."""
    offloaded_before: int = 0
    """Bytes that the ``Offload`` had moved when it began."""

    def seen(self) -> Seen:
        """Returns what the calling thread has done since it began."""
        return Seen(*(now - then for now, then in zip(Seen.so_far(), self.before, strict=True)))


class Context:
    """One ``with`` of an ``Offload``.

    [Note: contexts that overlap]
    torch takes off the innermost hooks, whichever context leaves. Where contexts do not nest, those are another's:

        ours is entered, theirs is entered, ours is left, theirs is left

    So ours are looked for, and those above them are put back. They are not there if a context of others that was
    entered before ours was left before it, and took ours off. Then what it has left behind goes in their place: the
    innermost hooks that are of no context of ours. So as many are gone as have left, and none stays for ever.

    Args:
        owner: the ``Offload``.
        hooks: the pack and the unpack hook.
    """

    def __init__(self, owner: Owner, hooks: HookFunctions) -> None:
        self.owner = owner
        self.pack_hook, _ = hooks
        self._hooks = saved_tensors_hooks(*hooks)
        outer = entered(owner)
        #: Whether the thread enters its ``Offload`` with it.
        self.is_outermost = outer is None
        self.forward: Forward = Forward(Seen.so_far(), torch.is_grad_enabled()) if outer is None else outer.forward
        #: The kinds of others' pack hooks that were put right on top of its own, each as often as one was.
        self.above: list[object] = []
        #: Of these, those that call our pack hook for what they are given.
        self.delegating: set[object] = set()
        #: Whether the hooks are on, or may be: an interrupt can come between any two lines.
        self._is_on = False

    def put_on(self) -> None:
        """Puts the hooks on the calling thread.

        Raises:
            OffloadError: torch does not allow hooks here.
        """
        _latest[self.owner.config_key] = weakref.ref(self.owner)
        thread.contexts.append(self)
        self._is_on = True
        try:
            self._hooks.__enter__()
        except RuntimeError as error:
            self._is_on = False
            raise _explained(error) from error
        patches.begin(self)

    def take_off(self) -> None:
        """Takes the hooks off the calling thread, wherever in its stack they are."""
        patches.end(self)
        is_last = thread.contexts[-1] is self
        thread.contexts.remove(self)
        allow_hooks_again()  # no caller has forbidden them: ours could not have been put on
        if is_last and top_pack_hook() is self.pack_hook:
            self._hooks.__exit__(None, None, None)
        else:
            replace_hooks(partial(self._take_off, or_theirs=True))
        self._is_on = False

    def give_up(self) -> None:
        """Undoes what is still to be undone, if an error or an interrupt came before that."""
        patches.end(self)
        if self in thread.contexts:
            thread.contexts.remove(self)
        if self._is_on:
            self._is_on = False
            allow_hooks_again()
            replace_hooks(self._take_off)

    def _take_off(self, hooks: list[HookFunctions], *, or_theirs: bool = False) -> None:
        """Takes off of ``hooks`` those of its own that no open context has put on.

        Args:
            or_theirs: where there are none, what others have left behind goes in their place.
        """
        in_use = [context.pack_hook for context in thread.contexts]
        own = [number for number, (pack, _) in enumerate(hooks) if pack is self.pack_hook]
        left_behind = [number for number, (pack, _) in enumerate(hooks) if pack not in in_use]
        found = own[in_use.count(self.pack_hook) :] or (left_behind[-1:] if or_theirs else [])
        for number in reversed(found):
            del hooks[number]

    def hiding(self) -> int:
        """Returns how many pairs of others' hooks were entered that hid what was saved."""
        return sum(kind not in self.delegating for kind in self.above)


@contextmanager
def outside() -> Iterator[None]:
    """The calling thread is in no context meanwhile, and what it saves goes to no hooks; then it is as before."""
    contexts, hooks = thread.contexts, list[HookFunctions]()
    packed, backwards, nodes = thread.packed, thread.backwards, autograd_sequence()

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
        thread.contexts, thread.packed, thread.backwards = contexts, packed, backwards
        thread.elsewhere += autograd_sequence() - nodes


def explained_ban(error: BaseException | None) -> OffloadError | None:
    """Returns what to raise in place of ``error`` if torch refused hooks with it, as ``torch.func`` transforms do."""
    if isinstance(error, RuntimeError) and not isinstance(error, OffloadError) and "saved tensor hooks" in str(error):
        return _explained(error)
    return None


def _explained(error: RuntimeError) -> OffloadError:
    return OffloadError(
        f"torch does not allow saved-tensor hooks here: {error} "
        "Call the transform outside `with offload:`, or leave the context out around it"
    )
