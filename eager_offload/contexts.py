"""The contexts of ``Offload``: each ``with`` puts saved-tensor hooks on a thread, and notes others that hide them.

Contexts of one thread need not nest: with two asyncio tasks, or a generator that holds a ``with`` open, the context
that was entered first may be left first. A saved tensor belongs to the open context that was entered last.

[Note: which hooks hide]
Autograd calls the innermost hooks only, so saves under them are hidden from the outer ones. Hooks of others that are
entered through ``torch.autograd.graph.saved_tensors_hooks`` (``save_on_cpu`` and most libraries) can be seen; hooks
that are pushed through torch's private functions cannot. A pair that is entered hides saves from a context, unless

1. it is the context's own pair, which some libraries look up and enter again (``torch_remat``), or another of ours;
2. our hooks are not on top, so that even without that pair saves would not reach them. For example, non-reentrant
   checkpointing has hooks that by design hide the tensors that it will recompute from ours, and shows us its inputs. A
   pair inside the checkpointed function, such as that of ``torch_remat`` for tensors not to be recomputed, then hides
   tensors only from the checkpoint;
3. it hands its tensors on to our pack hook. That shows when our pack hook is called while another one is on top.
   Libraries make a new pair for each use, and some pairs receive no tensor. So as soon as one pair has handed on, all
   pairs of the same kind in the context count as handing on.

A later save may show that a kind hands on. So hiding pairs are counted when the context is left, and only if it is left
without an exception.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from eager_offload.config import OffloadConfig
from eager_offload.errors import OffloadError
from eager_offload.tiers.forking import ForkSafeLock, Living, tell_after_fork
from eager_offload.torch_private import Patch
from eager_offload.torch_private.autograd import (
    HookFunctions,
    allow_hooks_again,
    autograd_sequence,
    replace_hooks,
    top_pack_hook,
)
from eager_offload.torch_private.calls import dispatch_modes, function_modes, without_caller_modes
from eager_offload.torch_private.fsdp import pipeline_methods


class Owner(Protocol):
    """The ``Offload`` of a context."""

    config: OffloadConfig
    #: The name of the configuration in compiled graphs.
    config_key: str
    #: Whether every tensor that may move does move: no newest bytes, budget, policy or plan let some stay.
    moves_all: bool
    #: Decides about a saved tensor, and returns the handle that autograd holds in its place.
    pack: Callable[[Tensor], Any]

    def offloader_of(self, device: torch.device) -> Any:
        """Returns the offloader that serves compiled code on ``device``."""

    def count_kept(self, region: str) -> None:
        """Counts the saves of a compiled graph that moves nothing."""

    def leave_to_parent(self) -> None:
        """In a forked child, keeps tensors saved in a context that its parent had entered."""


class Handle(Protocol):
    """The object that pack returns, and that autograd holds in place of a saved tensor."""

    def unpack(self) -> Tensor:
        """Returns the saved tensor again."""


# -- whose thread -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Phase:
    """A call of a pipeline schedule: all of its saves belong to one step, in whatever order its microbatches run.

    Otherwise a rank that runs each microbatch's backward right after its forward, as the last stage does, would have
    one step for each microbatch.
    """

    is_step: bool
    """Whether the call is a training step. Before its first step a schedule runs each stage to find out shapes, and no
    step table is made from that."""


class _Thread(threading.local):
    """The open contexts and the counts of the calling thread."""

    packed = 0
    """Saved tensors given to hooks of any ``Offload``, except in ``suspended``."""
    backwards = 0
    """Backwards that the thread has begun, except in ``suspended``."""
    elsewhere = 0
    """Autograd nodes that the thread has made in ``suspended``."""
    is_outside = False
    """Whether it is in ``suspended``."""
    phase: Phase | None = None
    """The part of a pipeline schedule that runs."""

    def __init__(self) -> None:
        #: The open contexts, in the order in which they were entered.
        self.contexts: list[Context] = []


thread = _Thread()


class _Process:
    """The counts of all threads, the constructor of ``Offload``, and the handling of contexts at a fork."""

    make_owner: Callable[[OffloadConfig], Owner]
    """Set by the module of ``Offload``, which is above this one."""
    backwards = 0
    """Backwards that were begun since an ``Offload`` was made, except in ``suspended``."""

    def after_fork(self) -> None:
        """Leaves the contexts that the forking thread was in to the parent."""
        for owner in {context.owner for context in thread.contexts}:
            owner.leave_to_parent()


process = _Process()
tell_after_fork(process)
#: Set once a compiler has asked for the graph of a hook: from then on autograd may have nodes without a visible save.
compiled = threading.Event()


def innermost(is_meant: Callable[[Context], object]) -> Context | None:
    """Returns the open context for which ``is_meant`` holds and that the calling thread has entered last."""
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


#: For each text of a configuration, the owner that was entered last in any thread.
_latest: dict[str, weakref.ref[Owner]] = {}
#: For each text of a configuration, the owner that serves graphs run outside every context.
_default_owners: dict[str, Owner] = {}
_default_lock = ForkSafeLock()


def serving(text: str, *, is_hooked: bool = False) -> Owner:
    """Returns the ``Offload`` that serves the configuration ``text`` on the calling thread.

    1. The innermost of that configuration whose context the thread is in.
    2. If hooks of that configuration are in force, the one that was entered last on any thread: autograd carries hooks
       over to the threads on which it runs a backward, and these are in no context themselves.
    3. One for the whole process, made when it is first needed.

    Args:
        is_hooked: hooks of that configuration are known to be in force.
    """
    if (context := innermost(lambda context: context.owner.config_key == text)) is not None:
        return context.owner
    if is_hooked or (isinstance(top := top_pack_hook(), PackHook) and top.config_key == text):
        latest = _latest.get(text)
        if latest is not None and (owner := latest()) is not None:
            return owner
    default = _default_owners.get(text)
    if default is None:
        with _default_lock.lock:
            default = _default_owners.get(text) or process.make_owner(OffloadConfig.from_text(text))
            _default_owners[text] = default
    return default


# -- hooks ------------------------------------------------------------------------------------------------------------


class PackHook:
    """A pack hook of this library, for the configuration ``config_key``."""

    text: str | None = None
    """The text that tells compilers of the hook; ``None``: compilers leave it to autograd to call the hook."""

    owner: Owner | None = None
    """The ``Offload`` that packs, inside and outside its contexts; ``None``: the one that ``serving`` returns."""

    def __init__(self, config_key: str, owner: Owner | None = None) -> None:
        self.config_key = config_key
        self.owner = owner

    def __call__(self, tensor: Tensor) -> Any:
        thread.packed += 1
        if contexts := thread.contexts:
            context = contexts[-1]
            if context.above and not isinstance(top := top_pack_hook(), PackHook):
                context.delegating.add(_kind_of(top))  # autograd has called the hook on top, which has called this one
            if context.owner.config_key == self.config_key and self.owner is None:
                return context.owner.pack(tensor)
        return (self.owner or serving(self.config_key, is_hooked=True)).pack(tensor)


def unpack(handle: Handle) -> Tensor:
    """Returns the saved tensor of ``handle``; autograd calls it each time that backward needs the tensor."""
    if dispatch_modes() or function_modes():
        with without_caller_modes():
            return handle.unpack()
    return handle.unpack()


def plain_hooks(config_key: str) -> HookFunctions:
    """Returns hooks that compilers leave to autograd."""
    return PackHook(config_key), unpack


def configuration_on_top() -> str | None:
    """Returns the text that tells compilers of the hooks on top of the calling thread's stack, if these are ours: see
    [Note: the text of a configuration] in ``compile/keys.py``.

    The innermost context would be the wrong source: if hooks of others hide ours, compilers do not see ours, and would
    use a graph with transfers for calls outside every context too.
    """
    top = top_pack_hook()
    return top.text if isinstance(top, PackHook) else None


def _kind_of(pack_hook: object) -> object:
    """Returns the code or the class of a pack hook: equal for pairs that a library makes anew for each use."""
    while isinstance(pack_hook, partial):
        pack_hook = pack_hook.func
    return getattr(getattr(pack_hook, "__func__", pack_hook), "__code__", type(pack_hook))


def _watching(replaced: Callable[[saved_tensors_hooks], None]) -> Callable[[saved_tensors_hooks], None]:
    def enter(hooks: saved_tensors_hooks) -> None:
        # Non-reentrant checkpoints install theirs inside of others by design.
        is_known = isinstance(hooks.pack_hook, PackHook) or type(hooks).__module__ == torch.utils.checkpoint.__name__
        if enter is _entering.active and not is_known:
            top = top_pack_hook()
            hidden = innermost(lambda context: context.pack_hook is top)
            if hidden is not None:
                hidden.above.append(_kind_of(hooks.pack_hook))
        replaced(hooks)

    return enter


#: Patches the method that every `with` of saved-tensor hooks, of any library, calls on entry.
_entering = Patch(saved_tensors_hooks, "__enter__", _watching)


# -- patches ----------------------------------------------------------------------------------------------------------


class Patches:
    """Patches that are on while they have a user, on any thread. ``make``: makes the first patches, when there is a
    first user."""

    def __init__(self, make: Callable[[], Iterable[Patch]]) -> None:
        self._make = make
        self._patches: list[Patch] | None = None
        #: Held weakly, because a thread may end while it is in a context.
        self._users: Living[object] = Living()
        self._lock = ForkSafeLock()

    def add(self, patches: Iterable[Patch]) -> None:
        """Adds ``patches``, which are on from now on while there is a user."""
        with self._lock.lock:
            made = self._made()
            for patch in patches:
                if patch not in made:
                    made.append(patch)
                    if self._users:
                        patch.put_on()

    def begin(self, user: object) -> None:
        """Adds a user, and puts the patches on for the first one."""
        with self._lock.lock:
            is_first = not self._users
            self._users.add(user)
            if is_first:
                for patch in self._made():
                    patch.put_on()

    def end(self, user: object) -> None:
        """Removes a user, and takes the patches off after the last one. Does nothing if ``user`` is not a user."""
        with self._lock.lock:
            if self._users:
                self._users.discard(user)
                if not self._users:
                    for patch in self._made():
                        patch.take_off()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keeps the patches on in a ``with``."""
        user = set[object]()  # any new object that can be referred to weakly
        self.begin(user)
        try:
            yield
        finally:
            self.end(user)

    def _made(self) -> list[Patch]:
        """Returns the patches; the first call makes them."""
        with self._lock.lock:
            if self._patches is None:
                self._patches = list(self._make())
            return self._patches


#: The patches that are in torch while any context is open.
patches = Patches(lambda: [_entering])


def _phase(replaced: Callable[..., Any], *, is_step: bool) -> Callable[..., Any]:
    @wraps(replaced)
    def call(*given: Any, **named: Any) -> Any:
        before, thread.phase = thread.phase, Phase(is_step=is_step)
        try:
            return replaced(*given, **named)
        finally:
            thread.phase = before

    return call


_pipelines: list[Patch] = []


def watch_pipelines() -> None:
    """Once torch's pipeline schedules are imported, patches them to set ``thread.phase`` while any context is open."""
    if not _pipelines and (methods := pipeline_methods()):
        _pipelines[:] = [Patch(kind, name, partial(_phase, is_step=is_step)) for kind, name, is_step in methods]
        patches.add(_pipelines)


# -- contexts ---------------------------------------------------------------------------------------------------------


class AutogradCounts(NamedTuple):
    """Counts of a thread: so far, or since a moment."""

    packed: int
    backwards: int
    nodes: int

    @classmethod
    def so_far(cls) -> AutogradCounts:
        """Returns the counts of the calling thread so far."""
        return cls(thread.packed, thread.backwards, autograd_sequence() - thread.elsewhere)


@dataclass
class Forward:
    """A forward: from the moment that a thread enters an ``Offload`` until it has left all of its contexts."""

    before: AutogradCounts
    """The counts of the thread at the beginning."""
    may_save: bool
    """Whether autograd was on at the beginning."""
    offloaded_before: int = 0
    """Bytes that the ``Offload`` had moved before."""

    def seen(self) -> AutogradCounts:
        """Returns the counts of the calling thread since the beginning."""
        return AutogradCounts(*(now - then for now, then in zip(AutogradCounts.so_far(), self.before, strict=True)))


class Context:
    """One ``with`` of an ``Offload``.

    [Note: contexts that overlap]
    torch takes off the innermost hooks, whichever context is left. If contexts do not nest, those are another's:

        ours is entered, theirs is entered, ours is left, theirs is left

    So our hooks are searched for and removed, and the hooks above them stay on. If a context of others was entered
    before ours and is also left before ours, it has taken off our hooks instead of its own. Then its own are still on,
    and we take off the innermost hooks that belong to no open context of ours. So each context that is left removes one
    pair, and no pair stays forever.
    """

    def __init__(self, owner: Owner, hooks: HookFunctions) -> None:
        self.owner = owner
        self.pack_hook, _ = hooks
        self._hooks = saved_tensors_hooks(*hooks)
        outer = entered(owner)
        #: Whether the thread was in no other context of the ``Offload``.
        self.is_outermost = outer is None
        self.forward: Forward = (
            Forward(AutogradCounts.so_far(), torch.is_grad_enabled()) if outer is None else outer.forward
        )
        #: The kinds of others' pack hooks that were put right on top of its own, one entry for each pair.
        self.above: list[object] = []
        #: The kinds that hand their tensors on to our pack hook.
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
        """Takes the hooks off the calling thread, wherever they are in its stack."""
        patches.end(self)
        is_last = thread.contexts[-1] is self
        thread.contexts.remove(self)
        allow_hooks_again()  # no caller has banned hooks, or ours could not have been put on
        if is_last and top_pack_hook() is self.pack_hook:
            self._hooks.__exit__(None, None, None)
        else:
            replace_hooks(partial(self._take_off, or_theirs=True))
        self._is_on = False

    def give_up(self) -> None:
        """Removes the hooks and patches that an error or an interrupt left behind."""
        patches.end(self)
        if self in thread.contexts:
            thread.contexts.remove(self)
        if self._is_on:
            self._is_on = False
            allow_hooks_again()
            replace_hooks(self._take_off)

    def _take_off(self, hooks: list[HookFunctions], *, or_theirs: bool = False) -> None:
        """Deletes from ``hooks`` its own pairs that no open context has put on; ``or_theirs``: if there are none, the
        innermost pair that others have left behind."""
        in_use = [context.pack_hook for context in thread.contexts]
        own = [number for number, (pack, _) in enumerate(hooks) if pack is self.pack_hook]
        left_behind = [number for number, (pack, _) in enumerate(hooks) if pack not in in_use]
        found = own[in_use.count(self.pack_hook) :] or (left_behind[-1:] if or_theirs else [])
        for number in reversed(found):
            del hooks[number]

    def hiding(self) -> int:
        """Returns how many pairs of others' hooks were entered that hid saves."""
        return sum(kind not in self.delegating for kind in self.above)


@contextmanager
def suspended() -> Iterator[None]:
    """Takes the calling thread out of every context, and takes all hooks off it; restores both at the end."""
    contexts, hooks = thread.contexts, list[HookFunctions]()
    packed, backwards, nodes = thread.packed, thread.backwards, autograd_sequence()
    was_outside, thread.is_outside = thread.is_outside, True

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
        thread.is_outside = was_outside
        thread.elsewhere += autograd_sequence() - nodes


def explained_ban(error: BaseException | None) -> OffloadError | None:
    """Returns our error for one with which torch refuses hooks, as in ``torch.func``; ``None`` for any other."""
    if isinstance(error, RuntimeError) and not isinstance(error, OffloadError) and "saved tensor hooks" in str(error):
        return _explained(error)
    return None


def _explained(error: RuntimeError) -> OffloadError:
    return OffloadError(
        f"torch does not allow saved-tensor hooks here: {error} "
        "Call the transform outside `with offload:`, or do not use the context around it"
    )
