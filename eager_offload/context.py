"""One ``with`` of an ``Offload``: its saved-tensor hooks go on and off, and what was saved in between is looked at."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch

from eager_offload import active
from eager_offload._torch import (
    accelerator_in_use,
    allow_hooks_again,
    autograd_sequence,
    without_caller_modes,
)
from eager_offload.eager import foreign
from eager_offload.eager.captured import CapturedRun
from eager_offload.eager.hooks import Hooks
from eager_offload.engine.offloaders import Offloaders
from eager_offload.errors import OffloadError, warn
from eager_offload.kernels.codecs import CODECS
from eager_offload.stats import Accounts

#: How many forwards a plain loop runs before it is looked at whether anything moved.
_LOOKED_AT = 3
_EMPTY = (
    "autograd recorded operators inside the context, but no saved tensor could be seen: other hooks inside it hide "
    "them, or the forward ran elsewhere. Enter this context inside the others, around the forward alone"
)
_NESTED = (
    "another Offload, entered inside this context, took all that was saved here: autograd gives a saved tensor to the "
    "innermost one alone, so this one moves nothing. Leave one of the two out"
)
_BACKWARD_ALONE = (
    "this context is around backward alone, and what backward reads was saved before: nothing moves. Put "
    "`with offload:` around the forward; backward may run inside or outside"
)
_UNSEEN = (
    f"no saved tensor was seen in {_LOOKED_AT} contexts, so nothing moved: put `with offload:` around the forward of "
    "a model that trains, under grad mode"
)


class _Entered(active.Owner, Protocol):
    """What a context needs of an ``Offload``, which imports this module."""

    _accounts: Accounts
    _offloaders: Offloaders
    _hooks: Hooks
    _hook_pair: tuple[Callable[[Any], Any], Callable[[Any], Any]]
    _forwards: int
    _unseen: int
    _rounding: frozenset[Any]

    def _innermost(self) -> active.Context | None: ...

    def _warn_once(self, what: str, message: str) -> None: ...

    def replace_crashed(self) -> None: ...

    def warn_if_nothing_moved(self, moved_before: int = 0) -> None: ...

    def warn_of_patterns_in_vain(self) -> None: ...


class EnteredContext:
    """One ``with``: installs the hooks, and sees to what is left when they go."""

    def __init__(self, offload: _Entered) -> None:
        self.offload = offload
        self._thread = offload._hooks.thread
        # A graph of compiled code would have transfers of its own, which no capture can have: any other hooks are left
        # to autograd, and called for what the code saves.
        pair = offload._hook_pair if self._thread.step is None else (offload.pack, active.unpack)
        self._hooks = foreign.ours(*pair)
        self.pack_hook: object = self._hooks.pack_hook
        self._patched = active.patched()
        #: Whether the hooks are on, or may be: an interrupt can come between any two lines.
        self._is_on = False
        self._nodes_before = 0
        self._may_save = False
        self._packed_before = 0
        self._offloaded_before = 0
        #: Whether a backward has run inside of it.
        self.saw_backward = False
        #: Whether another context, entered after this one, has seen what was saved inside of it.
        self.hears_of_saves = False
        self.above = active.Above()

    def __enter__(self) -> None:
        offload, thread = self.offload, self._thread
        if offload._innermost() is None:
            offload.replace_crashed()
            thread.begin()
            if not isinstance(thread.step, CapturedRun):  # which is no step yet, and may not ask the driver
                offload._accounts.counters.begin()
                offload._offloaders.release_idle()
                self._compile_codecs()
        active.entered(self)
        self._packed_before = thread.packed
        self._offloaded_before = offload._accounts.counters.offloaded_bytes
        self._may_save = torch.is_grad_enabled()
        self._nodes_before = autograd_sequence()
        self._is_on = True
        try:
            self._hooks.__enter__()
        except RuntimeError as error:
            self._is_on = False
            raise _explained(error) from error
        self._patched.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        offload = self.offload
        self._patched.__exit__()
        contexts = active.thread.contexts
        position = contexts.index(self)
        earlier, later = contexts[:position], contexts[position + 1 :]
        active.left(self)
        allow_hooks_again()  # no caller has forbidden them: ours could not have been put on
        self._hooks.take_off([context.pack_hook for context in (*earlier, *later)])
        self._is_on = False
        with without_caller_modes():
            # With an exception it does not wait: an interrupt would wait for room in a full window.
            offload._hooks.leave(waits=kind is None, is_outermost=offload._innermost() is None)
        with without_caller_modes(), offload._accounts.lock:
            own = self.packed()
            seen = own or self.hears_of_saves or True in [context.packed() for context in later]
            if seen:
                for context in earlier:
                    context.hears_of_saves = True
            if kind is None:
                self._look(own=own, seen=seen, is_outermost=not contexts)
                if hiding := self.above.hiding():
                    offload.saw_foreign_hooks(hiding)
            elif not contexts:
                counters = offload._accounts.counters
                counters.failed_forwards += 1
                counters.failed_bytes += max(counters.offloaded_bytes - self._offloaded_before, 0)
        if isinstance(error, RuntimeError) and _is_forbidden(error):
            raise _explained(error) from error

    def _look(self, *, own: bool, seen: bool, is_outermost: bool) -> None:
        """Tells, once, of a context that can do nothing where it stands. The lock is held.

        Args:
            own: whether a saved tensor came to its own object.
            seen: whether one came to any.
        """
        offload = self.offload
        if seen:
            offload._unseen = 0
            if not own:
                offload._warn_once("nested", _NESTED)
            if is_outermost:
                offload._forwards += 1
                if offload._forwards == _LOOKED_AT:
                    offload.warn_if_nothing_moved()
                    if not active.compiled.is_set():  # what a compiler has traced may have called them
                        offload.warn_of_patterns_in_vain()
        elif active.compiled.is_set():
            return
        elif autograd_sequence() > self._nodes_before:
            offload._accounts.counters.empty_forwards += 1
            offload._warn_once("empty", _EMPTY)
        elif not offload._forwards and is_outermost and self._may_save:
            offload._unseen += 1
            if self.saw_backward:
                offload._warn_once("unseen", _BACKWARD_ALONE)
            elif offload._unseen == _LOOKED_AT:
                offload._warn_once("unseen", _UNSEEN)

    def _compile_codecs(self) -> None:
        accounts, codecs = self.offload._accounts, self.offload._rounding
        if codecs and accelerator_in_use():
            accelerator: Any = torch.accelerator.current_accelerator()
            CODECS.expect(codecs, torch.device(accelerator.type, torch.accelerator.current_device_index()))
        for reason in accounts.demoted("uncompiled_codec", CODECS.compile_due()):
            warn(reason)

    def give_up(self) -> None:
        """Undoes what is still to be undone, if an error or an interrupt came before that."""
        self._patched.__exit__()
        active.left(self)
        if self._is_on:
            self._is_on = False
            allow_hooks_again()
            self._hooks.leave_on([context.pack_hook for context in active.thread.contexts].count(self.pack_hook))

    def overlook(self, nodes: int) -> None:
        """So many nodes of autograd were made in it by what is none of the user's forward."""
        self._nodes_before += nodes

    def packed(self) -> bool:
        """Whether anything was packed for this object since the context was entered."""
        thread = self.offload._hooks.thread
        return thread is not self._thread or thread.packed != self._packed_before  # another: closed meanwhile


def _is_forbidden(error: RuntimeError) -> bool:
    """Whether torch refused hooks, as ``torch.func`` transforms do."""
    return "saved tensor hooks" in str(error) and not isinstance(error, OffloadError)


def _explained(error: RuntimeError) -> OffloadError:
    return OffloadError(
        f"torch does not allow saved-tensor hooks here: {error} "
        "Call the transform outside `with offload:`, or leave the context out around it"
    )
