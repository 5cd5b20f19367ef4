"""Selective checkpointing inside of a context: values whose policy is to go to the CPU do.

torch's modes of selective checkpointing keep the results of an operator in a store of their own if its policy says
*save*, and compute them again in backward if it says anything else, ``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD``
included. The modes here are those modes, to which such a policy says *save*, and afterwards the store has handles in
place of the tensors: the same handles that autograd gets for what it saves.

    policy_fn says MUST_CPU_OFFLOAD        torch's mode is told MUST_SAVE
    store[operator] = result               store[operator] = handle(result)
    backward asks the store                the handle brings the result back

Operators that write to what they are given, or give back memory of it, run again as they do without the library: a
store could only hold what a later operator may still change. What was changed after it was stored does too: the handle
finds out, and the bytes of its time cannot be had from the store.

What was decided when the forward began holds for its backward, wherever that runs. While a compiler traces nothing is
changed: it reads the policies off its nodes (``compile/policies.py``). Outside of every context the modes are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from eager_offload import active, marks
from eager_offload._torch import (
    Patch,
    checkpoint_is_traced,
    checkpoint_store_key,
    is_wrapper,
    on_checkpoints,
    schema_of,
    sharing_versions,
    storage_key,
    version_of,
)
from eager_offload.eager.handles import KeptTensor
from eager_offload.errors import SavedTensorModifiedError
from eager_offload.stats import KeepReason

_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
#: In a mode's store: whether what has such a policy is in it.
_TRAVELS = "eager_offload"


class Travelling:
    """What a mode's store has in place of a tensor that travels."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        """The tensor; called by torch's mode, which has an argument for tensors that may change."""
        try:
            return active.unpack(self._handle)
        except SavedTensorModifiedError as error:
            raise _Changed from error


def _caching(base: Any) -> type:
    class CachingMode(base):  # type: ignore[misc]  # a class of torch's, found when it runs
        """In force while the forward of a checkpoint runs."""

        def __init__(self, policy_fn: Callable[..., Any], storage: Any, *arguments: Any, **named: Any) -> None:
            self._offload = None if torch.compiler.is_compiling() else active.current()
            self._travels: CheckpointPolicy | None = None
            super().__init__(policy_fn, storage, *arguments, **named)
            if self._offload is not None:
                storage[_TRAVELS] = {}

        @property
        def policy_fn(self) -> Callable[..., Any]:
            # Not a method kept on the instance: that would be a cycle, which keeps all that is stored until gc runs.
            return self._policy if self._offload is None else partial(_ask, self)

        @policy_fn.setter
        def policy_fn(self, policy: Callable[..., Any]) -> None:
            self._policy = policy

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if self._offload is None:
                return super().__torch_dispatch__(func, types, args, kwargs)
            respects = getattr(self, "respect_saved_tensors_hooks", None)
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
                if self._travels is not None:
                    _send(self._offload, self.storage[checkpoint_store_key(func, args)], self._travels, args)
            finally:
                self._travels = None
                self.respect_saved_tensors_hooks = respects
            return result

    return CachingMode


def _cached(base: Any) -> type:
    class CachedMode(base):  # type: ignore[misc]  # likewise
        """In force while a checkpoint runs its forward again. 2.11 asks the policy there too; later ones do not."""

        @property
        def policy_fn(self) -> Callable[..., Any]:
            return partial(_saved, self._policy) if _TRAVELS in self.storage else self._policy

        @policy_fn.setter
        def policy_fn(self, policy: Callable[..., Any]) -> None:
            self._policy = policy

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except _Changed:
                return func(*args, **(kwargs or {}))

    return CachedMode


class _Changed(Exception):
    """What the store has a handle of was changed in place since."""


def _ask(mode: Any, context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The policy of an operator whose result was or will be made, as torch's mode is to be told."""
    policy = mode._policy(context, func, *args, **kwargs)
    if not _is_stored(policy, func, args, kwargs):
        return policy
    mode._travels = policy
    mode.respect_saved_tensors_hooks = False  # from 2.15 on it may have hooks pack what it saves: once is enough
    return CheckpointPolicy.MUST_SAVE


def _saved(policy_fn: Callable[..., Any], context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    policy = policy_fn(context, func, *args, **kwargs)
    return CheckpointPolicy.MUST_SAVE if _is_stored(policy, func, args, kwargs) else policy


def _is_stored(policy: object, func: Any, args: object, kwargs: object) -> bool:
    """Whether the results of an operator go into a store although torch's mode would not put them there."""
    if policy not in _OFFLOADS or checkpoint_is_traced(func, args, kwargs):
        return False
    schema = schema_of(func)
    return not schema.is_mutable and all(result.alias_info is None for result in schema.returns)


def _send(offload: active.Owner, entries: Any, policy: CheckpointPolicy, args: Sequence[Any]) -> None:
    """Puts handles into the newest of ``entries``, in place of the tensors."""
    newest = len(entries) - 1 if isinstance(entries, list) else next(reversed(entries))
    theirs = {storage_key(one.untyped_storage()) for one in args if _has_storage(one)}
    entries[newest] = _with_handles(offload, entries[newest], policy, theirs)


def _with_handles(offload: active.Owner, entry: Any, policy: CheckpointPolicy, theirs: set[int]) -> Any:
    if isinstance(entry, list | tuple):
        return type(entry)(_with_handles(offload, one, policy, theirs) for one in entry)
    value = getattr(entry, "val", None)
    if type(value) is not Tensor or value.layout is not torch.strided:
        return entry
    if storage_key(value.untyped_storage()) in theirs:  # given to the operator, undeclared: it has no bytes of its own
        return Travelling(KeptTensor(value, version_of(value), KeepReason.LAYOUT))
    if policy is CheckpointPolicy.MUST_CPU_OFFLOAD or value.nbytes >= offload.config.size("min_bytes"):
        marks.prefer_offload(value)
    with sharing_versions():
        return Travelling(offload.pack(value))


def _has_storage(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided and not is_wrapper(value)


@cache
def patches() -> tuple[Patch, ...]:
    """What has torch's selective checkpointing use the modes of this module."""
    return tuple(on_checkpoints(_caching, _cached))
