"""Carries out the recompute of a plan, by temporary checkpoints around modules."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from eager_offload.core.modules import INNER_MODULES, ModuleCall, modules_by_name
from eager_offload.errors import ConfigError, SavedTensorModifiedError, tell, warn
from eager_offload.planning.levels import Kept, kind_of_call
from eager_offload.planning.verify import Check, may_check, shape_of
from eager_offload.torch_private.autograd import current_backward
from eager_offload.torch_private.calls import dispatch_of, schema_of, without_torch_function
from eager_offload.torch_private.memory import storage_key, tensors_in, tree_iter, weak_storage

#: The calls that are checked: the first ones of each kind (``"auto"``), all (``True``) or none (``False``).
Verify: TypeAlias = Literal["auto"] | bool

#: With ``"auto"``: the number of steps of each kind in which calls are compared; the maximum number of unfinished
#: comparisons of a kind; and the maximum number of kinds of a module.
_STEPS, _AT_A_TIME, _KINDS = 2, 64, 64

#: Reentrant: the garbage collector may end a dropped context while the same thread is entering another one.
_lock = threading.RLock()


@dataclass
class Checks:
    verify: Verify
    calls: int = 0
    inexact: int = 0
    """Values with different bits and nearly equal sums."""


class checkpointed(AbstractContextManager[Checks]):
    """Puts checkpoints around the modules that ``again`` names, until the context exits. They keep the given results.

    Several contexts may be open, on any thread: a module then has one checkpoint, checked by the strictest ``verify``.
    Calls that have begun keep their checkpoints. A dropped context ends as if it exited, but not at interpreter exit.
    """

    def __init__(self, model: nn.Module, again: Mapping[str, Sequence[Kept]], verify: Verify = False) -> None:
        if not (isinstance(verify, bool) or verify == "auto"):
            raise ConfigError(
                f'verify={verify!r} is not accepted: apply takes True (each step), False (none) or "auto"'
            )
        self._again, self._checks = again, Checks(verify)
        self._modules = deque(_modules_named(model, again))
        self._used: list[tuple[ModuleCall, _Again]] = []
        self._end = finalize(self, _end, self._used, self._checks)
        self._end.atexit = False

    def __enter__(self) -> Checks:
        if self._used or not self._end.alive:
            raise ConfigError("this apply(...) was entered before: call plan.apply(model) for each `with`")
        with _lock:
            for name, kept in self._again.items():
                one = _modules.setdefault(self._modules[0], _Again(self._modules[0]))
                # Pops the module: an open context must not keep the model alive.
                self._used.append((ModuleCall.begin(self._modules.popleft(), one, in_regions=True), one))
                one.name = name
                one.users.append((self._checks, kept))
        return self._checks

    def __exit__(self, *raised: object) -> None:
        self._end()
        tell()


def _end(used: list[tuple[ModuleCall, _Again]], checks: Checks) -> None:
    with _lock:
        for call, one in used:
            call.end()
            one.users[:] = [user for user in one.users if user[0] is not checks]


def _modules_named(model: nn.Module, names: Iterable[str]) -> Iterator[nn.Module]:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__} is not accepted: apply takes a torch.nn.Module")

    # The planned model may have had other wrappers, whose attributes are in the names.
    def bare(name: str) -> str:
        return ".".join(part for part in name.split(".") if part not in INNER_MODULES)

    named = dict(model.named_modules(remove_duplicate=False))
    known = {bare(name): module for name, module in named.items()} | modules_by_name(model) | named
    for name in names:
        found = name if name in known else bare(name)
        if found not in known:
            raise ConfigError(
                f"model={type(model).__name__} is not accepted: the plan is for a model with a module {found!r}, which "
                "this one does not have"
            )
        yield known[found]


class _Kind:
    def __init__(self) -> None:
        #: Steps in which a call was compared. The first call after a comparison begins the next step.
        self._steps = 0
        self.is_compared = False
        #: The backward in which the last call began, as calls inside of a recomputed module do; -1 if in none.
        self._backward = -1
        self.checks = WeakSet[Check]()

    def takes_another(self) -> bool:
        """Counts a call, and returns whether to compare it."""
        backward, last = current_backward(), self._backward
        self._backward = backward
        if self.is_compared and (backward < 0 or backward != last):
            self._steps, self.is_compared = self._steps + 1, False
        return self._steps < _STEPS and len(self.checks) < _AT_A_TIME


class _Again:
    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        self._lock = threading.Lock()
        #: The name of the module in the latest plan, and the open contexts.
        self.name = ""
        self.users: list[tuple[Checks, Sequence[Kept]]] = []
        #: Kept results of plans that do not match the operators of the module.
        self._other: list[Sequence[Kept]] = []
        self._kinds: dict[object, _Kind] = {}

    def __call__(self, call: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        count, keys = len(arguments), tuple(named)

        def run(*given: Any) -> Any:
            return call(*given[:count], **dict(zip(keys, given[count:], strict=True)))

        # Keyword arguments become positional, so that the checkpoint saves them too.
        given = (*arguments, *named.values())
        if torch.compiler.is_compiling():
            return _checkpoint(run, *given)
        check, own = self._check(given), [given]
        kept = [kept for _, kept in tuple(self.users)][-1:]  # a copy: another thread may exit its context
        policy = Policy(kept[0]) if kept and kept[0] and kept[0] not in self._other else None

        def run_now(*held: Any) -> Any:
            """Calls the module: in forward with the caller's objects, in the recompute with copies of their state."""
            if own:
                if policy is not None:
                    policy.forward.begin(tree_iter(own[0]))
                call_it = partial(run, *own.pop())
                result = call_it() if check is None else check.forward(call_it)
                if policy is not None and torch.is_grad_enabled():
                    self._compare(policy)
                return result
            if policy is not None:
                policy.again.begin(tree_iter(held), policy.forward)
            call_it = partial(run, *_as_it_is(held))
            return call_it() if check is None else check.again(call_it)

        if policy is None:
            return _checkpoint(run_now, *_as_it_is(given))
        return _checkpoint(run_now, *_as_it_is(given), context_fn=policy.contexts)

    def _compare(self, policy: Policy) -> None:
        if (other := policy.other) is None:
            return
        policy.takes_nothing = True
        with self._lock:
            if policy.kept in self._other:
                return
            self._other.append(policy.kept)
        warn(
            f"module {self.name!r} does not run as it was planned: it calls {other}. So none of its results are kept "
            "from now on: all of it is recomputed, which is as exact and takes longer. Plan on the device that trains, "
            "and with inputs of the shapes and types that training uses"
        )

    def _check(self, given: tuple[Any, ...]) -> Check | None:
        users, module = tuple(checks for checks, _ in self.users), self._module()
        verify = {checks.verify for checks in users}
        if module is None or not (verify - {False} and torch.is_grad_enabled()):
            return None
        with without_torch_function():
            is_each, key = True in verify, (module.training, *map(_kind, given))
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None:
                if len(self._kinds) >= _KINDS and not is_each:
                    return None
                kind = self._kinds[key] = _Kind()
            if not (kind.takes_another() or is_each) or not may_check():
                return None
            check = Check(self.name, is_each, partial(self._passed, users, kind))
            kind.checks.add(check)
        return check

    def _passed(self, users: tuple[Checks, ...], kind: _Kind, inexact: int) -> None:
        with self._lock:
            kind.is_compared = True
            is_first = inexact and not any(checks.inexact for checks in users)
            for checks in users:
                checks.calls += 1
                checks.inexact += inexact
        if is_first:
            warn(
                f"module {self.name!r} saves values with other bits and nearly the same sums when it is computed again "
                "in backward. Either its kernels are not deterministic, or change in the first steps: then gradients "
                "are as exact as the kernels. Or the module has a state that changes a little with each call: then "
                "gradients are wrong by about as little. Reported once; plan.apply(model, verify=True) raises instead"
            )


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
        supports_higher_order_operators = True  # torch registers its rules for them by the exact class of a mode
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


_MADE_BY_PYTHON = torch.ops.aten.lift_fresh.default
#: Parts of the errors of torch's mode for a result that was written to, and for a missing result.
_REFUSALS = ("has been mutated", "encountered during backward")


class _Flow:
    """Names the arguments of the operators in one run of a block, without holding them.

    Each storage gets a name that is the same in each run: of an argument of the block its place, of a result its
    operator, of any other tensor (e.g. a parameter) its number in the order of first use.
    """

    def __init__(self) -> None:
        #: Names of storages, with the offset of a block argument.
        self._names = _Names()
        self._elsewhere = _Names()
        #: Operators whose results were written to. torch's check of versions misses some of these writes, because not
        #: all views share a version counter with their base.
        self.written = set[object]()
        self._given: list[int] = []
        #: For each argument, the first argument with the same storage.
        self._first: list[int] = []
        self._forward: _Flow | None = None

    def begin(self, given: Iterable[Any], forward: _Flow | None = None) -> None:
        if self._names.known:
            return  # only the first run uses kept results
        tensors = [one for one in given if type(one) in _PLAIN and _has_storage(one)]
        storages = [one.untyped_storage() for one in tensors]
        keys = [*map(storage_key, storages)]
        self._forward, self._first = forward, [keys.index(key) for key in keys] if forward is None else forward._first
        for storage, first, one in zip(storages, self._first, tensors, strict=False):
            if self._names.of(storage) is None:
                self._names.add(storage, ("given", first), one.storage_offset())

    def call(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any] | None, operator: _Operator) -> object:
        """Returns the signature of an operator call: equal for the same call in another run."""
        self._given.clear()
        if func is _MADE_BY_PYTHON:  # a constant with a new storage in each run
            return func, *((one.shape, one.dtype) if type(one) in _PLAIN else type(one) for one in args)
        told = [func, *map(self._told, args)]
        for place, name in operator.written:
            for one in tensors_in(args[place] if place < len(args) else (named or {}).get(name)):
                if type(one) in _PLAIN and _has_storage(one):
                    made = self._names.of(one.untyped_storage())
                    self.written.add(made and made[0][0])
        return [*told, *((key, self._told(one)) for key, one in named.items())] if named else told

    def made(self, number: int, result: Any) -> None:
        """Names the results of operator ``number`` (from 1), except views of its arguments, which have names."""
        for place, one in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if type(one) in _PLAIN and _has_storage(one):
                storage = one.untyped_storage()
                if storage_key(storage) not in self._given:
                    self._names.add(storage, (number, place))

    def _told(self, one: Any) -> object:
        kind = type(one)
        if kind in (list, tuple):
            return [*map(self._told, one)]
        if kind not in _PLAIN:
            return one if kind in _BY_VALUE else kind
        if not _has_storage(one):
            return kind
        storage = one.untyped_storage()
        self._given.append(storage_key(storage))
        name, offset = self._names.of(storage) or self._from_elsewhere(storage)
        return name, one.storage_offset() - offset, one.shape, one.stride(), one.dtype

    def _from_elsewhere(self, storage: torch.UntypedStorage) -> tuple[tuple[object, int], int]:
        # A tensor that forward did not use gets a name that no tensor of forward has.
        known = None if self._forward is None else self._forward._elsewhere.of(storage)
        where = "elsewhere" if self._forward is None else "new"
        name, _ = known or ((where, len(self._elsewhere.known)), 0)
        self._names.add(storage, name)
        self._elsewhere.add(storage, name)
        return name, 0


class _Names:
    """Names of storages, each for as long as the storage lives, because keys are reused."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Callable[[], object], tuple[object, int], int]] = {}

    def add(self, storage: torch.UntypedStorage, name: tuple[object, int], offset: int = 0) -> None:
        self.known[storage_key(storage)] = weak_storage(storage), name, offset

    def of(self, storage: torch.UntypedStorage) -> tuple[tuple[object, int], int] | None:
        weak, name, offset = self.known.get(storage_key(storage), _NO_NAME)
        return (name, offset) if weak() is storage else None


_NO_NAME: tuple[Callable[[], object], tuple[object, int], int] = (lambda: None), ("", 0), 0


#: The only classes of tensors that are named: of a subclass, even reading the shape may call the active modes.
_PLAIN = (Tensor, nn.Parameter)
#: Arguments compared by value; others are compared by class.
_BY_VALUE = (int, float, bool, str, torch.dtype, torch.device, type(None))


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


#: Kept for the life of a module, because a plan may be applied again for each step.
_modules: WeakKeyDictionary[nn.Module, _Again] = WeakKeyDictionary()


_checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=True)


def _kind(value: Any) -> object:
    """Returns shape, dtype and device of tensors, otherwise the class."""
    if isinstance(value, Tensor):
        return shape_of(value), value.dtype, value.device
    if type(value) in _COPIED:
        return tuple(_kind(one) if isinstance(one, Tensor) else type(one) for one in tree_iter(value))
    return type(value)


#: Containers that are copied for the recompute. Other objects are not: copying may run code of their classes, share
#: resources, or close them with the copy. Checks notice if they change.
_COPIED = (list, dict, set, deque, OrderedDict, defaultdict, Counter, tuple, bytearray)


def _as_it_is(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Returns ``value`` with deep copies of its containers."""
    kind = type(value)
    if kind not in _COPIED:
        return value
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    if kind is tuple:
        return tuple([_as_it_is(one, known) for one in value])
    found = known[id(value)] = value.copy()
    places = range(len(found)) if kind in (list, deque) else () if kind in (set, bytearray) else list(found)
    for place in places:
        if type(found[place]) in _COPIED:
            found[place] = _as_it_is(found[place], known)
    return found
