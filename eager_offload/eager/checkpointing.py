"""Selective checkpointing inside of a context: what a policy saves is saved as autograd's own saves are.

torch's modes of selective checkpointing keep the results of an operator in a store of their own, where no hook sees
them. The modes here are those modes, whose store has handles in place of the tensors: the same handles that autograd
gets for what it saves.

    policy_fn says MUST_SAVE               torch's mode stores the result
    store[operator] = result               store[operator] = handle(result)
    backward asks the store                the handle brings the result back

torch computes again whatever a policy does not save, ``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD`` included, and so
do its modes here. For these two policies the modes have a second store, by operator and number of its call, whose
handles have results leave that are small or among the newest, too. The recomputation takes a result from there in place
of calling the operator, where nothing but time tells the difference:

1. An operator that does more than return a result always runs again: one that draws random numbers (else the next one
   would draw its numbers), writes, updates statistics or communicates. See :func:`has_effects`.
2. A result is taken once. A second backward of the same graph computes it again.
3. A result that was changed in place since it was stored is computed again: the handle finds out, and the bytes of its
   time cannot be had. A change through ``.data`` leaves no version: the mode drops what is written to.

A changed result of the other policies is torch's own error, or, with ``allow_cache_entry_mutation``, the result as it
is by then; so it stays on the device there.

A mode that is made in a context gets a class of this module, which derives from its own; the names of torch's classes
stay as they are, since torch and others import them. So what was decided when the forward began holds for its backward,
wherever that runs. Outside of every context the modes are torch's, and so they are for a forward that runs in backward,
as an inner checkpoint does that an outer one computes again: what it stores is asked for at once. While a compiler
traces nothing is changed: it reads the policies off its nodes (``compile/select.py``).
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
#: What it computes again.
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
#: In torch's store, beside what its operators have: the store of what is offloaded.
_OFFLOADED = "eager_offload"
#: Namespaces of operators that communicate, whatever their schemas say.
_COMMUNICATING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")

#: Names one call of an operator: its key in torch's store, and how many calls of it came before.
_Call: TypeAlias = tuple[object, int]


@dataclass
class _Offloaded:
    """Results that the recomputation takes in place of calling their operators."""

    results: dict[_Call, tuple[Any, set[int]]] = field(default_factory=dict)
    """With handles in place of tensors; and what names the storages of these."""
    written: set[_Call] = field(default_factory=set)
    """Calls whose results were written to since."""
    may_change: bool = False
    """Whether the user allows what torch stores to change, and means what is there when backward asks."""

    def take(self, call: _Call) -> Any:
        """Returns the result of a call and forgets it; ``None`` if the operator has to run again."""
        try:
            entry, _ = self.results.pop(call, (None, None))
            return None if call in self.written else tree_map(_value_of, entry)
        except SavedTensorModifiedError:
            return None

    def drop_written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Has calls run again whose results have memory that a call of ``func`` writes to."""
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
    """What a store has in place of a tensor."""

    __slots__ = ("_handle", "_unpack")

    def __init__(self, handle: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._handle, self._unpack = handle, unpack

    def value(self) -> Tensor:
        """Returns the tensor.

        Raises:
            SavedTensorModifiedError: it was changed in place since.
        """
        with sharing_versions():
            return self._unpack(self._handle)

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        """Returns the tensor; called by torch's mode, which has an argument for tensors that may change."""
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
    """Has the call of an operator return a stored result; torch's mode, which calls it, then counts it as any other."""

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

    class CachingMode(base):  # type: ignore[misc]  # a class of torch's, found when it runs
        """In force while the forward of a checkpoint runs."""

        supports_higher_order_operators = True  # torch has its rules for them by the very class of a mode
        saver: Saver
        calls: Counter[object]
        #: What the policy says of the operator that runs, if its results are to be handles.
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
        """In force while a checkpoint runs its forward again."""

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
    """Counts a call of ``func``, and names it."""
    key = checkpoint_store_key(func, args)
    calls[key] += 1
    return key, calls[key]


def _begin_caching(mode: Any, policy_fn: Callable[..., Any], storage: Any) -> None:
    """A mode of torch's for the forward of a checkpoint has been made: one of a context is one of this module."""
    is_forward = current_backward() == -1 and not torch.compiler.is_compiling()
    if (saver := _saver() if is_forward else None) is not None:
        mode.saver, mode.calls, storage[_OFFLOADED] = saver, Counter(), _Offloaded()
        mode.policy_fn = partial(_ask, weakref.ref(mode), policy_fn)  # no cycle would go before gc runs
        mode.__class__ = _caching(mode.__class__)


def _begin_cached(mode: Any, _: object, storage: Any) -> None:
    """The same of the mode that runs it again."""
    if _OFFLOADED in storage:
        storage[_OFFLOADED].may_change = mode.allow_cache_entry_mutation
        mode.__class__ = _cached(mode.__class__)


def _ask(
    weak: weakref.ref[Any], policy_fn: Callable[..., Any], context: Any, func: Any, *args: Any, **kwargs: Any
) -> Any:
    """Returns what the policy says of an operator, and notes whether its results are to be handles."""
    policy = policy_fn(context, func, *args, **kwargs)
    if not is_proxied() and (policy in _SAVES or (policy in _OFFLOADS and not has_effects(func))):
        mode = weak()
        assert mode is not None, "it asks"
        mode.policy_of_saved = policy
        mode.respect_saved_tensors_hooks = False  # from 2.15 on it may have hooks pack what it saves: once is enough
    return policy


def has_effects(func: Any) -> bool:
    """Returns whether an operator does more than return a new result, as far as it says so itself.

    Operators of batch norm write to the statistics that they are given, which only some schemas declare.
    """
    schema = schema_of(func)  # a higher-order operator has none; it neither writes nor gives back what it is given
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
    """Returns whether nothing says what an operator calls: one that torch lacks, or on tensors of classes of their own.

    Attention of other libraries draws random numbers without a tag, and compiled code may.
    """
    return bool(types) or func.namespace not in ("aten", "prims")


def _random_numbers(args: Sequence[Any]) -> object:
    """Returns what changes when an operator on ``args`` draws random numbers."""
    with without_caller_modes():
        states = [torch.get_rng_state()]
        accelerator = torch.accelerator.current_accelerator() if accelerator_in_use() else None
        for device in {one.device for one in tensors_in(args)}:
            if accelerator is not None and accelerator.type == device.type:
                if accelerator_runtime().is_capturing(device):
                    return object()  # what a graph draws is decided when it is replayed
                states.append(torch.get_device_module(device).get_rng_state(device))
        return [one.numpy().tobytes() for one in states]


def _put_handles(saver: Saver, store: Any, func: Any, args: Sequence[Any]) -> None:
    """Puts handles into the newest entry that torch's store has of an operator, in place of the tensors."""
    entries = store[checkpoint_store_key(func, args)]
    newest = len(entries) - 1 if isinstance(entries, list) else next(reversed(entries))
    parameters = _parameters(args)
    # The result of a functional collective is ready once `wait_tensor` has waited.
    is_under_way = "c10d_functional" in getattr(func, "namespace", "") and "wait_tensor" not in str(func)
    stays = is_under_way or store[_OFFLOADED].may_change

    def handle(entry: Any) -> Any:
        value = getattr(entry, "val", None)
        if not isinstance(value, Tensor) or _is_being_filled(value):
            return entry
        storages = _storages(value)
        if parameters.intersection(storages):
            return entry  # a view of one takes no memory, and below autograd nothing tells that it is one
        if saver.moves_all and storages and logical_bytes(value) >= saver.min_bytes:
            marks.prefer_offload(value)
        with sharing_versions(), marks.Region() if stays else nullcontext():
            return StoredHandle(saver.pack(value), saver.unpack)

    entries[newest] = tree_map(handle, entries[newest])


def _put_offloaded(
    saver: Saver, offloaded: _Offloaded, call: _Call, result: Any, args: Sequence[Any], policy: object
) -> None:
    """Stores the result of a call for the recomputation, unless that had better have one of its own."""
    values = tensors_in(result)
    parameters = _parameters(args)
    if not values or any(_is_being_filled(one) or not parameters.isdisjoint(_storages(one)) for one in values):
        return  # what returns nothing ran for what else it does; what shares a parameter's memory costs none

    def handle(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_large = policy is CheckpointPolicy.MUST_CPU_OFFLOAD or logical_bytes(value) >= saver.min_bytes
        with sharing_versions():
            value = value.detach()  # the result itself will own the graph that owns the store
            if is_large and _storages(value):
                marks.prefer_offload(value)
            return StoredHandle(saver.pack(value), saver.unpack)

    storages = {key for one in values for key in _storages(one)}
    offloaded.results[call] = tree_map(handle, result), storages


def _parameters(args: Sequence[Any]) -> set[int]:
    """Returns what names the storages of the parameters among ``args``."""
    return {key for one in tensors_in(args) if is_parameter(one) for key in _storages(one)}


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
    return Saver(offload.pack, contexts.unpack, offload.config.size("min_bytes"), offload.moves_all)


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
