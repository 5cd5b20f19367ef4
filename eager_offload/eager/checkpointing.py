"""Selective checkpointing in a context: results that a policy saves are offloaded like other saved tensors.

torch's modes of selective checkpointing keep results of operators in a store, where no saved-tensor hook sees them.
Inside a ``with offload`` their classes are replaced by subclasses, whose store has handles in place of tensors:

    policy_fn returns MUST_SAVE            torch's mode stores the result
    store[operator] = result               replaced by store[operator] = handle(result)
    backward reads the store               the handle reloads the result

torch recomputes every other result, also under ``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD``. For these two policies
the subclasses have a second store, by operator and number of its call. Its handles offload the newest results, too,
and under ``MUST_CPU_OFFLOAD`` the small ones. The recomputation takes a result from this store instead of calling the
operator if that changes nothing but the time:

1. An operator with effects always runs again: one that draws random numbers (or else the next one would draw the same
   numbers), writes, updates statistics or communicates. See :func:`has_effects`.
2. A result is taken once. A second backward of the same graph computes the result again.
3. A result that was modified in place is computed again: the handle detects the change, and the old bytes are lost. A
   change through ``.data`` does not raise the version, so the mode also looks for operators that write to the memory of
   a stored result.

Under the policies that save, backward raises torch's own error for a modified result. With
``allow_cache_entry_mutation`` it reads the modified result, so results are then kept on the device.

The class of a mode is replaced when the mode is made in a context, so the backward agrees with its forward wherever
the backward runs. The classes in torch's modules are left alone, because torch and others have imported them by name.
Modes outside of every context are unchanged, as are those of forwards that run in backward (e.g. of an inner checkpoint
that an outer one recomputes), whose results are needed at once. Nothing changes while a compiler traces: it notes the
policies on the nodes of its graph (see ``compile/select.py``).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from eager_offload import contexts, marks
from eager_offload.core.selection import inner_values, is_parameter, logical_bytes, plain_tensors
from eager_offload.eager.handles import KeptTensor
from eager_offload.errors import SavedTensorModifiedError
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.torch_private.autograd import (
    checkpoint_store_key,
    current_backward,
    on_checkpoints,
    sharing_versions,
)
from eager_offload.torch_private.calls import (
    TorchDispatchMode,
    dispatch_of,
    is_proxied,
    schema_of,
    without_caller_modes,
)
from eager_offload.torch_private.captures import accelerator_in_use
from eager_offload.torch_private.fsdp import is_collective
from eager_offload.torch_private.memory import is_wrapper, storage_key, tensors_in, tree_map


@dataclass(frozen=True, slots=True)
class Saver:
    """The hooks that pack and unpack the results that a policy saves."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]
    min_bytes: int
    """Smaller results of ``PREFER_CPU_OFFLOAD`` are kept."""
    moves_all: bool = False
    """Whether even the newest results are offloaded. Results of at least ``min_bytes`` are then marked to move."""


class _Thread(threading.local):
    #: The saver of a plan that the calling thread traces.
    saver: Saver | None = None


_thread = _Thread()

#: Policies whose results torch stores. A policy may also be a bool.
_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)
#: Policies whose results torch computes again.
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
#: The key of the second store in torch's store.
_OFFLOADED = "eager_offload"
#: Namespaces of operators that communicate.
_COMMUNICATING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")

#: Identifies a call of an operator: its key in torch's store, and its number.
_Call: TypeAlias = tuple[object, int]


@dataclass
class _Offloaded:
    """Results that the recomputation takes in place of calls."""

    results: dict[_Call, tuple[Any, set[int]]] = field(default_factory=dict)
    """The result of each call, with handles in place of tensors, and the keys of the tensors' storages."""
    written: set[_Call] = field(default_factory=set)
    """Calls whose results were modified later."""
    may_change: bool = False
    """The user's ``allow_cache_entry_mutation``: stored results may change, and backward reads the new values."""

    def take(self, call: _Call) -> Any:
        """Removes and returns the result of a call; ``None`` if the operator has to run again."""
        try:
            entry, _ = self.results.pop(call, (None, None))
            return None if call in self.written else tree_map(_value_of, entry)
        except SavedTensorModifiedError:
            return None

    def drop_written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Marks the stored calls whose results share memory with the tensors that a call of ``func`` writes to."""
        schema = schema_of(func) if self.results else None
        if schema is None or not schema.is_mutable:
            return
        given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
        written = [
            given.get(argument.name)
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        storages = {key for one in tensors_in(written) for key in _storages(one)}
        for call in [call for call, (_, own) in self.results.items() if not own.isdisjoint(storages)]:
            self.written.add(call)


class StoredHandle:
    """Stands for a tensor in a store."""

    __slots__ = ("_handle", "_unpack")

    def __init__(self, handle: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._handle, self._unpack = handle, unpack

    def value(self) -> Tensor:
        """Returns the tensor; raises ``SavedTensorModifiedError`` if it was modified in place."""
        with sharing_versions():
            return self._unpack(self._handle)

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        """Returns the tensor. torch's mode calls this method on each entry of its store."""
        if allow_cache_entry_mutation and isinstance(self._handle, KeptTensor):
            return self._handle.tensor
        try:
            return self.value()
        except SavedTensorModifiedError as error:
            raise SavedTensorModifiedError(
                f"Tensor cached during selective activation checkpoint has been mutated: {error}"
            ) from error


def _value_of(entry: Any) -> Any:
    return entry.value() if isinstance(entry, StoredHandle) else entry


class _Instead(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types for it
    """Makes the call of an operator return a stored result. torch's mode makes the call and counts it as usual."""

    supports_higher_order_operators = True

    def __init__(self, func: Any, result: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._func, self._result = func, result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._result if func is self._func else func(*args, **(kwargs or {}))


@cache
def _caching(base: Any) -> type:
    call_base = dispatch_of(base)

    class CachingMode(base):  # type: ignore[misc]  # a class of torch's, known at run time
        """Active while the forward of a checkpoint runs."""

        supports_higher_order_operators = True  # torch looks up its rules for them by the exact class of a mode
        saver: Saver
        calls: Counter[object]
        #: The policy of the running operator, if its results become handles.
        policy_of_saved: object = None

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            call = _next_call(self.calls, func, args)
            self.storage[_OFFLOADED].drop_written(func, args, kwargs or {})
            respects = getattr(self, "respect_saved_tensors_hooks", None)
            numbers = _random_numbers(args) if _is_opaque(func, types) else None
            try:
                result = call_base(self, func, types, args, kwargs)
                if self.policy_of_saved in _SAVES:
                    _put_handles(self.saver, self.storage, func, args)
                elif self.policy_of_saved is not None and (numbers is None or numbers == _random_numbers(args)):
                    _put_offloaded(self.saver, self.storage[_OFFLOADED], call, result, args, self.policy_of_saved)
            finally:
                self.policy_of_saved = None
                self.respect_saved_tensors_hooks = respects
            return result

    return CachingMode


@cache
def _cached(base: Any) -> type:
    call_base = dispatch_of(base)

    class CachedMode(base):  # type: ignore[misc]  # likewise
        """Active while a checkpoint recomputes its forward."""

        supports_higher_order_operators = True
        calls: Counter[object]

        def __enter__(self) -> Any:
            self.calls = Counter()
            return super().__enter__()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = self.storage[_OFFLOADED].take(_next_call(self.calls, func, args))
            with nullcontext() if result is None else _Instead(func, result):
                return call_base(self, func, types, args, kwargs)

    return CachedMode


def _next_call(calls: Counter[object], func: object, args: Sequence[Any]) -> _Call:
    """Counts a call of ``func`` and returns its identity."""
    key = checkpoint_store_key(func, args)
    calls[key] += 1
    return key, calls[key]


def _begin_caching(mode: Any, policy_fn: Callable[..., Any], storage: Any) -> None:
    """Replaces the class of a new mode for the forward of a checkpoint, in a context."""
    is_forward = current_backward() == -1 and not torch.compiler.is_compiling()
    if (saver := _saver() if is_forward else None) is not None:
        mode.saver, mode.calls, storage[_OFFLOADED] = saver, Counter(), _Offloaded()
        mode.policy_fn = partial(_ask, weakref.ref(mode), policy_fn)  # weak: a cycle would live until gc runs
        mode.__class__ = _caching(mode.__class__)


def _begin_cached(mode: Any, _: object, storage: Any) -> None:
    """Replaces the class of a new mode for the recomputation."""
    if _OFFLOADED in storage:
        storage[_OFFLOADED].may_change = mode.allow_cache_entry_mutation
        mode.__class__ = _cached(mode.__class__)


def _ask(
    weak: weakref.ref[Any], policy_fn: Callable[..., Any], context: Any, func: Any, *args: Any, **kwargs: Any
) -> Any:
    """Returns the policy of an operator, and notes it if the results become handles."""
    policy = policy_fn(context, func, *args, **kwargs)
    if not is_proxied() and (policy in _SAVES or (policy in _OFFLOADS and not has_effects(func))):
        mode = weak()
        assert mode is not None, "the mode calls this function"
        mode.policy_of_saved = policy
        mode.respect_saved_tensors_hooks = False  # otherwise torch 2.15 may pack the results by hooks, too
    return policy


def has_effects(func: Any) -> bool:
    """Returns whether an operator does more than return new results, by its schema and tags.

    Operators of batch norm write to the statistics among their arguments, which only some schemas declare.
    """
    schema = schema_of(func)  # higher-order operators have none: they neither write nor return arguments
    return schema is not None and (
        schema.is_mutable
        or any(result.alias_info for result in schema.returns)
        or any(argument.name.startswith("running_") for argument in schema.arguments)
        or not _EFFECTS.isdisjoint(func.tags)
        or func.namespace in _COMMUNICATING
    )


#: Tags of operators with effects.
_EFFECTS = {torch.Tag.nondeterministic_seeded, torch.Tag.maybe_aliasing_or_mutating}


def _is_opaque(func: Any, types: Sequence[type]) -> bool:
    """Returns whether an operator may have effects that its schema and tags do not declare.

    Such are operators of other libraries (e.g. attention that draws random numbers without a tag), and operators on
    tensor subclasses.
    """
    return bool(types) or func.namespace not in ("aten", "prims")


def _random_numbers(args: Sequence[Any]) -> object:
    """Returns the state of the random number generators that an operator on ``args`` may use."""
    with without_caller_modes():
        states = [torch.get_rng_state()]
        accelerator = torch.accelerator.current_accelerator() if accelerator_in_use() else None
        for device in {one.device for one in tensors_in(args)}:
            if accelerator is not None and accelerator.type == device.type:
                if accelerator_runtime().is_capturing(device):
                    return object()  # equal to no other: a graph draws its numbers at each replay
                states.append(torch.get_device_module(device).get_rng_state(device))
        return [one.numpy().tobytes() for one in states]


def _put_handles(saver: Saver, store: Any, func: Any, args: Sequence[Any]) -> None:
    """Replaces the tensors in the newest entry of an operator in torch's store by handles."""
    entries = store[checkpoint_store_key(func, args)]
    newest = len(entries) - 1 if isinstance(entries, list) else next(reversed(entries))
    parameters = _parameters(args)
    # A functional collective fills its result until `wait_tensor` has waited.
    is_under_way = "c10d_functional" in getattr(func, "namespace", "") and "wait_tensor" not in str(func)
    stays = is_under_way or store[_OFFLOADED].may_change

    def handle(entry: Any) -> Any:
        value = getattr(entry, "val", None)
        if not isinstance(value, Tensor) or _is_being_filled(value):
            return entry
        storages = _storages(value)
        if parameters.intersection(storages):
            return entry  # a view of a parameter takes no memory; below autograd, only its storage tells
        if saver.moves_all and storages and logical_bytes(value) >= saver.min_bytes:
            marks.prefer_offload(value)
        with sharing_versions(), marks.Region() if stays else nullcontext():
            return StoredHandle(saver.pack(value), saver.unpack)

    entries[newest] = tree_map(handle, entries[newest])


def _put_offloaded(
    saver: Saver, offloaded: _Offloaded, call: _Call, result: Any, args: Sequence[Any], policy: object
) -> None:
    """Stores the result of a call for the recomputation, except views of parameters, results that a collective may
    still be filling, and results without tensors."""
    values = tensors_in(result)
    parameters = _parameters(args)
    if not values or any(_is_being_filled(one) or not parameters.isdisjoint(_storages(one)) for one in values):
        return  # without tensors only effects matter; views of parameters take no memory

    def handle(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_large = policy is CheckpointPolicy.MUST_CPU_OFFLOAD or logical_bytes(value) >= saver.min_bytes
        with sharing_versions():
            value = value.detach()  # avoids a cycle: the result will own the graph that owns the store
            if is_large and _storages(value):
                marks.prefer_offload(value)
            return StoredHandle(saver.pack(value), saver.unpack)

    storages = {key for one in values for key in _storages(one)}
    offloaded.results[call] = tree_map(handle, result), storages


def _parameters(args: Sequence[Any]) -> set[int]:
    """Returns the keys of the storages of the parameters among ``args``."""
    return {key for one in tensors_in(args) if is_parameter(one) for key in _storages(one)}


def _is_being_filled(tensor: Tensor) -> bool:
    """Returns whether a collective may be filling ``tensor`` or a tensor inside; reading it would wait for its end."""
    return is_collective(tensor) or (
        is_wrapper(tensor) and any(map(_is_being_filled, tensors_in(inner_values(tensor))))
    )


def _storages(tensor: Tensor) -> set[int]:
    """Returns the keys of the storages that ``tensor`` has bytes in; none for layouts without a storage."""
    plain = plain_tensors(tensor) if is_wrapper(tensor) else (tensor,)
    strided = [one for one in plain if one.layout is torch.strided and not one.is_nested]
    return {storage_key(one.untyped_storage()) for one in strided}


def _saver() -> Saver | None:
    if _thread.saver is not None:
        return _thread.saver
    offload = contexts.current()
    if offload is None:
        return None
    return Saver(offload.pack, contexts.unpack, offload.config.size("min_bytes"), offload.moves_all)


@contextmanager
def saving_with(saver: Saver) -> Iterator[None]:
    """Makes the calling thread's checkpoints save with ``saver``, without an ``Offload``."""
    before = _thread.saver
    with contexts.patches.used():
        _thread.saver = saver
        try:
            yield
        finally:
            _thread.saver = before


# In force only while an ``Offload`` is entered.
contexts.patches.add(on_checkpoints(_begin_caching, _begin_cached))
