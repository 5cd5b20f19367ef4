"""Keeps the results of chosen operators in recomputed blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import count
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, create_selective_checkpoint_contexts

from eager_offload.errors import SavedTensorModifiedError
from eager_offload.planning.levels import Kept, kind_of_call
from eager_offload.torch_private.calls import dispatch_of, schema_of
from eager_offload.torch_private.memory import storage_key, tensors_in


class Policy:
    """The results that one call of a module keeps, by kind of operator and index in the call."""

    def __init__(self, kept: Sequence[Kept]) -> None:
        self.kept = kept
        self._numbers = {one.kind: frozenset(one.numbers) for one in kept}
        self._calls = Counter[str]()
        #: The signatures of forward's operator calls, in order.
        self.called: list[object] = []
        #: The calls whose results are kept, counted from 1.
        self.kept_calls = set[int]()
        self.forward, self.again = _Flow(), _Flow()
        #: Whether forward has called other operators than planned.
        self.takes_nothing = False

    def keeps(self, kind: str) -> bool:
        number = self._calls[kind]
        self._calls[kind] += 1
        return number in self._numbers.get(kind, ())

    @property
    def other(self) -> str | None:
        """Returns the first kind of operator whose number of calls differs from the plan, as a text; ``None`` if none
        does."""
        for one in self.kept:
            if (calls := self._calls[one.kind]) != one.calls:
                return f"{one.kind} {calls} times instead of {one.calls}"
        return None

    def contexts(self) -> tuple[Any, Any]:
        """Returns the contexts of forward and of each recompute.

        Only operators with kept results reach torch's own modes, which take as much host time as an operator does.
        """
        saving, taking = create_selective_checkpoint_contexts(_saves)  # type: ignore[no-untyped-call]  # no types
        for mode, derived in ((saving, _saving), (taking, _taking)):
            mode.__class__ = derived(mode.__class__)  # inside an Offload, a class of ``eager/checkpointing.py``
            mode.policy = self
        return saving, _First(taking)


def _saves(*_: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


class _First:
    """Enters ``context`` in the first ``with`` only: kept results last for one backward, later ones recompute all."""

    def __init__(self, context: Any) -> None:
        self._context: Any | None = context
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        context, self._context = self._context, None
        self._entered.append(ExitStack())
        if context is not None:
            self._entered[-1].enter_context(context)

    def __exit__(self, *raised: Any) -> Any:
        return self._entered.pop().__exit__(*raised)


@cache
def _saving(base: Any) -> type:
    call_base = dispatch_of(base)

    class SavingMode(base):  # type: ignore[misc]  # a class of torch's, found when it runs
        supports_higher_order_operators = True  # torch registers their rules by the exact class of a mode
        policy: Policy

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            operator, policy = _operator(func), self.policy
            if operator.is_ignored:
                return func(*args, **(kwargs or {}))
            flow, called = policy.forward, policy.called
            called.append(flow.call(func, args, kwargs, operator))
            number = len(called)
            if policy.keeps(operator.kind):
                result = call_base(self, func, types, args, kwargs)
                policy.kept_calls.add(number)  # after the call, which may raise
            else:
                result = func(*args, **(kwargs or {}))
            flow.made(number, result)
            return result

    return SavingMode


@cache
def _taking(base: Any) -> type:
    call_base = dispatch_of(base)

    class TakingMode(base):  # type: ignore[misc]  # likewise
        """Returns kept results as long as operator calls and their arguments match those of forward.

        Results are identified by call number. After the first mismatch (e.g. a cast that autocast has cached since
        forward) numbers may refer to other results, so all later operators run. An operator whose kept result was
        written to also runs.
        """

        supports_higher_order_operators = True
        policy: Policy
        at, is_other = 0, False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            operator, policy = _operator(func), self.policy
            if self.is_other or policy.takes_nothing or operator.is_ignored:
                return func(*args, **(kwargs or {}))
            flow, called, at = policy.again, policy.called, self.at
            self.at += 1
            self.is_other = at >= len(called) or called[at] != flow.call(func, args, kwargs, operator)
            if self.is_other:
                return func(*args, **(kwargs or {}))
            is_taken = self.at in policy.kept_calls
            if is_taken:
                try:
                    result = call_base(self, func, types, args, kwargs)
                except (RuntimeError, SavedTensorModifiedError) as error:
                    if not any(text in str(error) for text in _REFUSALS):
                        raise
                    is_taken = False
            if not is_taken or self.at in policy.forward.written:
                result = func(*args, **(kwargs or {}))
            flow.made(self.at, result)
            return result

    return TakingMode


class _Operator(NamedTuple):
    is_ignored: bool
    """Whether torch's modes ignore it."""
    kind: str
    written: list[tuple[int, str]]
    """Places and names of the arguments that it writes to, by its schema."""


@cache
def _operator(func: Any) -> _Operator:
    given = getattr(schema_of(func), "arguments", ())  # a higher-order operator has no schema
    written = [(place, one.name) for place, one in enumerate(given) if one.alias_info and one.alias_info.is_write]
    return _Operator(func in SAC_IGNORED_OPS, kind_of_call(func), written)


#: The name of a storage, and its argument's offset in elements: offsets of tensors are compared relative to it.
_Name: TypeAlias = tuple[tuple[object, int], int]
_MADE_BY_PYTHON = torch.ops.aten.lift_fresh.default
#: Parts of the errors of torch's mode for a result that was written to, and for a missing result.
_REFUSALS = ("has been mutated", "encountered during backward")


class _Flow:
    """Names the arguments of the operators in one run of a block, without holding them.

    Each storage has a name that is equal in each run: its place, if it belongs to an argument of the block; its
    operator's number and result's place, if an operator made it; otherwise (e.g. a parameter) its number in the order
    of first use.
    """

    def __init__(self) -> None:
        #: Names of storages, with the offset of a block argument; and the names of those from elsewhere.
        self._names = WeakKeyDictionary[torch.UntypedStorage, _Name]()
        self._elsewhere = WeakKeyDictionary[torch.UntypedStorage, _Name]()
        self._numbers = count()
        self._has_begun = False
        #: Operators whose results were written to. torch's check of versions misses some of these writes, because not
        #: all views share a version counter with their base.
        self.written = set[object]()
        self._given: list[int] = []
        #: For each argument, the first argument with the same storage.
        self._first: list[int] = []
        self._forward: _Flow | None = None

    def begin(self, given: Iterable[Any], forward: _Flow | None = None) -> None:
        if self._has_begun:
            return  # only the first run uses kept results
        self._has_begun = True
        tensors = [one for one in given if type(one) in _PLAIN and _has_storage(one)]
        storages = [one.untyped_storage() for one in tensors]
        keys = [*map(storage_key, storages)]
        self._forward, self._first = forward, [keys.index(key) for key in keys] if forward is None else forward._first
        for storage, first, one in zip(storages, self._first, tensors, strict=False):
            self._names.setdefault(storage, (("given", first), one.storage_offset()))

    def call(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any] | None, operator: _Operator) -> object:
        """Returns the signature of an operator call: equal for the same call in another run."""
        self._given.clear()
        if func is _MADE_BY_PYTHON:  # a constant with a new storage in each run
            return func, *((one.shape, one.dtype) if type(one) in _PLAIN else type(one) for one in args)
        told = [func, *map(self._told, args)]
        for place, name in operator.written:
            for one in tensors_in(args[place] if place < len(args) else (named or {}).get(name)):
                if type(one) in _PLAIN and _has_storage(one):
                    made = self._names.get(one.untyped_storage())
                    self.written.add(made and made[0][0])
        return [*told, *((key, self._told(one)) for key, one in named.items())] if named else told

    def made(self, number: int, result: Any) -> None:
        """Names the results of operator ``number`` (from 1), except views of its arguments, which have names."""
        for place, one in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if type(one) in _PLAIN and _has_storage(one):
                storage = one.untyped_storage()
                if storage_key(storage) not in self._given:
                    self._names[storage] = (number, place), 0

    def _told(self, one: Any) -> object:
        """Returns the part of a call's signature for one argument."""
        kind = type(one)
        if kind in (list, tuple):
            return [*map(self._told, one)]
        if kind not in _PLAIN:
            return one if kind in _BY_VALUE else kind
        if not _has_storage(one):
            return kind
        storage = one.untyped_storage()
        self._given.append(storage_key(storage))
        name, offset = self._names.get(storage) or self._from_elsewhere(storage)
        return name, one.storage_offset() - offset, one.shape, one.stride(), one.dtype

    def _from_elsewhere(self, storage: torch.UntypedStorage) -> _Name:
        # A tensor that forward did not use gets a name that no tensor of forward has.
        known = None if self._forward is None else self._forward._elsewhere.get(storage)
        where = "elsewhere" if self._forward is None else "new"
        name = self._names[storage] = self._elsewhere[storage] = known or ((where, next(self._numbers)), 0)
        return name


#: The only classes of tensors that are named: of a subclass, even reading the shape may call the active modes.
_PLAIN = (Tensor, nn.Parameter)
#: Arguments compared by value; others are compared by class.
_BY_VALUE = (int, float, bool, str, torch.dtype, torch.device, type(None))


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
