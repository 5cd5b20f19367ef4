"""Selective checkpointing inside of a context: what a policy saves is saved as autograd's own saves are.

torch's modes of selective checkpointing keep the results of an operator in a store of their own, where no hook sees
them. The modes here are those modes, whose store has handles in place of the tensors: the same handles that autograd
gets for what it saves.

    policy_fn says MUST_SAVE               torch's mode stores the result
    store[operator] = result               store[operator] = handle(result)
    backward asks the store                the handle brings the result back

torch computes again whatever a policy does not save, ``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD`` included. Here its
mode is told ``MUST_SAVE`` for these two, which also have the result leave if it is small or one of the newest.
Operators that write to what they are given, or give back memory of it, run again as they do without the library: a
store could only hold what a later operator may still change. What was changed after it was stored does too: the handle
finds out, and the bytes of its time cannot be had from the store. A changed result of the other two policies is torch's
own error, or, with ``allow_cache_entry_mutation``, the result as it is by then; so it stays on the device there.

A mode that is made in a context gets a class of this module, which derives from its own; the names of torch's classes
stay as they are, since torch and others import them. So what was decided when the forward began holds for its backward,
wherever that runs. Outside of every context the modes are torch's, and so they are for a forward that runs in backward,
as an inner checkpoint does that an outer one computes again: what it stores is asked for at once. While a compiler
traces nothing is changed: it reads the policies off its nodes (``compile/policies.py``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from eager_offload import contexts, marks
from eager_offload._torch import (
    checkpoint_store_key,
    current_backward,
    is_collective,
    is_proxied,
    is_wrapper,
    on_checkpoints,
    returns_before_it_is_done,
    schema_of,
    sharing_versions,
    storage_key,
    tensors_in,
    tree_map,
)
from eager_offload.eager.handles import KeptTensor
from eager_offload.errors import SavedTensorModifiedError
from eager_offload.selection import inner_values, is_parameter, logical_bytes, plain_tensors


@dataclass(frozen=True, slots=True)
class Saver:
    """Where what a policy saves goes."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]
    min_bytes: int
    """What had better go to the CPU stays if it has fewer."""
    moves_all: bool = False
    """Whether nothing may stay as the newest: then what a policy saves leaves, even where something keeps it alive."""


class _Thread(threading.local):
    #: That of a plan, which the calling thread traces.
    saver: Saver | None = None


_thread = _Thread()

#: What torch's mode stores. A policy may also be a bool.
_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)
#: What it does not store unless it is told to.
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
#: In a store, beside what its operators have: what its two modes have to know of it.
_KNOWN = "eager_offload"


@dataclass
class _Known:
    """Of a store with handles in it."""

    may_change: bool = False
    """Whether the user allows what it has to change, and means what is there when backward asks."""


class StoredHandle:
    """What a mode's store has in place of a tensor."""

    __slots__ = ("_handle", "_runs_again", "_unpack")

    def __init__(self, handle: Any, unpack: Callable[[Any], Tensor], *, runs_again: bool) -> None:
        self._handle, self._unpack = handle, unpack
        #: Whether what was changed since is computed again.
        self._runs_again = runs_again

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        """The tensor; called by torch's mode, which has an argument for tensors that may change."""
        handle = self._handle
        if allow_cache_entry_mutation and not self._runs_again and isinstance(handle, KeptTensor):
            return handle.tensor
        try:
            with sharing_versions():
                return self._unpack(handle)
        except SavedTensorModifiedError as error:
            if self._runs_again:
                raise _Changed from error
            raise SavedTensorModifiedError(
                f"Tensor cached during selective activation checkpoint has been mutated: {error}"
            ) from error


@cache
def _caching(base: Any) -> type:
    class CachingMode(base):  # type: ignore[misc]  # a class of torch's, found when it runs
        """In force while the forward of a checkpoint runs."""

        supports_higher_order_operators = True  # torch has its rules for them by the very class of a mode
        saver: Saver
        #: What the policy says of the operator that runs, if its results are to be handles.
        policy_of_saved: object = None

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            respects = getattr(self, "respect_saved_tensors_hooks", None)
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
                if self.policy_of_saved is not None:
                    _put_handles(self.saver, self.storage, func, args, self.policy_of_saved)
            finally:
                self.policy_of_saved = None
                self.respect_saved_tensors_hooks = respects
            return result

    return CachingMode


@cache
def _cached(base: Any) -> type:
    class CachedMode(base):  # type: ignore[misc]  # likewise
        """In force while a checkpoint runs its forward again."""

        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except _Changed:
                return func(*args, **(kwargs or {}))

    return CachedMode


def _begin_caching(mode: Any, policy_fn: Callable[..., Any], storage: Any) -> None:
    """A mode of torch's for the forward of a checkpoint has been made: one of a context is one of this module."""
    is_forward = current_backward() == -1 and not torch.compiler.is_compiling()
    if (saver := _saver() if is_forward else None) is not None:
        mode.saver, storage[_KNOWN] = saver, _Known()
        mode.policy_fn = partial(_ask, weakref.ref(mode), policy_fn)  # no cycle would go before gc runs
        mode.__class__ = _caching(mode.__class__)


def _begin_cached(mode: Any, policy_fn: Callable[..., Any] | None, storage: Any) -> None:
    """The same of the mode that runs it again."""
    if _KNOWN in storage:
        storage[_KNOWN].may_change = mode.allow_cache_entry_mutation
        if policy_fn is not None:  # 2.11 asks it there too; later ones do not
            mode.policy_fn = partial(_stored, policy_fn)
        mode.__class__ = _cached(mode.__class__)


class _Changed(Exception):
    """What the store has a handle of was changed in place since."""


def _ask(
    weak: weakref.ref[Any], policy_fn: Callable[..., Any], context: Any, func: Any, *args: Any, **kwargs: Any
) -> Any:
    """The policy of an operator whose result was or will be made, as torch's mode is to be told."""
    policy = policy_fn(context, func, *args, **kwargs)
    if is_proxied() or not (policy in _SAVES or _travels(policy, func)):
        return policy
    mode = weak()
    assert mode is not None, "it asks"
    mode.policy_of_saved = policy
    mode.respect_saved_tensors_hooks = False  # from 2.15 on it may have hooks pack what it saves: once is enough
    return CheckpointPolicy.MUST_SAVE


def _stored(policy_fn: Callable[..., Any], context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    policy = policy_fn(context, func, *args, **kwargs)
    is_stored = _travels(policy, func) and not is_proxied()
    return CheckpointPolicy.MUST_SAVE if is_stored else policy


def _travels(policy: object, func: Any) -> bool:
    """Whether the results of an operator go into a store although torch's mode would not put them there."""
    if policy not in _OFFLOADS:
        return False
    schema = schema_of(func)  # a higher-order operator has none; it neither writes nor gives back what it is given
    return schema is None or not (schema.is_mutable or any(result.alias_info for result in schema.returns))


def _put_handles(saver: Saver, store: Any, func: Any, args: Sequence[Any], policy: object) -> None:
    """Puts handles into the newest entry of an operator, in place of the tensors."""
    entries = store[checkpoint_store_key(func, args)]
    newest = len(entries) - 1 if isinstance(entries, list) else next(reversed(entries))
    parameters = {key for one in tensors_in(args) if is_parameter(one) for key in _storages(one)}
    to_the_cpu = policy in _OFFLOADS
    stays = returns_before_it_is_done(func) or (store[_KNOWN].may_change and not to_the_cpu)

    def handle(entry: Any) -> Any:
        value = getattr(entry, "val", None)
        if not isinstance(value, Tensor) or _is_being_filled(value):
            return entry
        storages = _storages(value)
        if parameters.intersection(storages):
            return entry  # a view of one takes no memory, and below autograd nothing tells that it is one
        is_large = policy is CheckpointPolicy.MUST_CPU_OFFLOAD or logical_bytes(value) >= saver.min_bytes
        if (to_the_cpu or saver.moves_all) and is_large and storages:
            marks.prefer_offload(value)
        with sharing_versions(), marks.Region() if stays else nullcontext():
            return StoredHandle(saver.pack(value), saver.unpack, runs_again=to_the_cpu)

    entries[newest] = tree_map(handle, entries[newest])


def _is_being_filled(tensor: Tensor) -> bool:
    """Whether a collective may be filling ``tensor``, or what is inside: to take it would be to wait for that."""
    return is_collective(tensor) or (
        is_wrapper(tensor) and any(map(_is_being_filled, tensors_in(inner_values(tensor))))
    )


def _storages(tensor: Tensor) -> set[int]:
    """What names the storages that ``tensor`` has bytes in; none of a layout without one."""
    plain = plain_tensors(tensor) if is_wrapper(tensor) else (tensor,)
    strided = [one for one in plain if one.layout is torch.strided and not one.is_nested]
    return {storage_key(one.untyped_storage()) for one in strided}


def _saver() -> Saver | None:
    """That of the calling thread."""
    if _thread.saver is not None:
        return _thread.saver
    offload = contexts.current()
    if offload is None:
        return None
    config = offload.config
    moves_all = config.newest_bytes(1) == 0 and config.device_budget is None and config.slowdown is None
    return Saver(offload.pack, contexts.unpack, config.size("min_bytes"), moves_all)


@contextmanager
def saving_with(saver: Saver) -> Iterator[None]:
    """What the calling thread's checkpoints save goes to ``saver``, without any ``with offload:``."""
    before = _thread.saver
    with contexts.patches.used():
        _thread.saver = saver
        try:
            yield
        finally:
            _thread.saver = before


#: In a context, selective checkpointing uses the modes of this module.
contexts.patches.add(on_checkpoints(_begin_caching, _begin_cached))
