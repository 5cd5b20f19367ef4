"""Carries out the recompute of a plan, by temporary checkpoints around modules."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eager_offload.core.modules import INNER_MODULES, ModuleCall, modules_by_name
from eager_offload.errors import ConfigError, tell, warn
from eager_offload.planning.levels import Kept
from eager_offload.planning.selective import Policy
from eager_offload.planning.verify import Check, may_check, shape_of
from eager_offload.torch_private.autograd import current_backward
from eager_offload.torch_private.calls import without_torch_function
from eager_offload.torch_private.memory import tree_iter

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
                f"module {self.name!r} saves values with other bits and nearly the same sums when recomputed in "
                "backward. Either its kernels are not deterministic, or change in the first steps: then gradients "
                "are as exact as the kernels. Or the module has a state that changes a little with each call: then "
                "gradients are wrong by about as little. Reported once; plan.apply(model, verify=True) raises instead"
            )


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
