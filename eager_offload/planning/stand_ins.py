"""Stand-ins of a trace: copies of a model, its inputs and its functions, with fake tensors.

[Note: outside tensors]
A step may read tensors of neither the model nor the inputs (e.g. parameters of a head in the loss, or a global table).
Each gets a stand-in when it is first passed to a torch function, so that the user's tensor gets no writes and no
gradient. Tensors of the model map to those of the copy. If a tensor reaches an operator in another way (e.g. as an
argument of a ``torch.autograd.Function``), and the step would change it, the recorder raises.

[Note: known values]
Integers and booleans that depend on no parameter or activation (token numbers, masks, positions) are real, and results
that depend on them alone are computed, so that models can inspect masks and indices. Small constants from outside have
known values too. All other tensors are fake; reading a value of theirs is an error that names the module.

[Note: sharded models]
The copy of a model with ``fully_shard`` has whole parameters, in the dtype in which they are gathered, and none of
FSDP2's hooks. Inputs and outputs are cast as by those hooks.

[Note: tensor parallelism]
The stand-in of a ``DTensor`` wraps a stand-in of its local part, with the same mesh and placements. torch dispatches
its operators to the local parts, with collectives in between. torch also runs each operator on meta tensors of the
whole shape, to infer the shape of the result; those runs are not recorded.

[Note: modules converted in forward]
``module.to(...)`` sets the ``data`` of a real parameter, but swaps a fake one with another tensor. torch refuses to
swap a parameter that a graph or a weak reference holds. On a tracing thread ``data`` is set for both kinds.

[Note: functions]
``copy.deepcopy`` does not copy functions. A hook that closes over its model, or over a list of features, would store
tensors of the trace in the user's objects, and the copy would not find them. So each function of the copy, and the
loss, is copied:

1. it gets its own closure cells, shared between functions as the originals are;
2. copied objects in cells, and in globals that name them, are replaced with their copies;
3. containers are copied too, so that the loss, and not the user, finds the entries of a hook;
4. keys of dictionaries are replaced as values are, and the ``id`` of a module or parameter with that of its copy,
   because hooks look up their module by both.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
import traceback
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from eager_offload.contexts import Patches
from eager_offload.core.selection import plain_tensors
from eager_offload.errors import PlanError
from eager_offload.planning import OF_TORCHSCRIPT
from eager_offload.planning.numbers import CACHE, apart, is_library
from eager_offload.planning.recorder import MOST_KNOWN, MOST_READ, Recorder
from eager_offload.torch_private import Patch
from eager_offload.torch_private.calls import without_dispatch_modes
from eager_offload.torch_private.fsdp import (
    distributed,
    is_distributed,
    is_fully_sharded,
    rules_of_shapes,
    sharded_groups,
    spec_of,
    without_sharding,
)
from eager_offload.torch_private.memory import (
    flatten_with_names,
    is_fake,
    is_plain_fake,
    is_wrapper,
    storage_key,
    tree_iter,
    tree_map,
)

_local = threading.local()


def _uncounted(replaced: Callable[..., Any]) -> Callable[..., Any]:
    def propagate(*given: Any) -> Any:
        recorder = getattr(_local, "recorder", None)
        with nullcontext() if recorder is None else recorder.unseen():
            return replaced(*given)

    return propagate


def _in_place(replaced: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    def swap_tensors(t1: Any, t2: Any) -> None:
        if not (getattr(_local, "recorder", None) and is_fake(type(t1)) and is_fake(type(t2))):
            return replaced(t1, t2)
        t1.data = t2
        t1.fake_device = t2.fake_device

    return swap_tensors


_conversions = Patches(lambda: [Patch(torch.utils, "swap_tensors", _in_place)])
_shapes = Patches(lambda: [Patch(*rule, _uncounted) for rule in rules_of_shapes()])


@contextmanager
def tracing(recorder: Recorder) -> Iterator[None]:
    """Lets the calling thread convert modules with fake parameters, and run shape rules of ``DTensor`` unrecorded: see
    [Note: modules converted in forward] and [Note: tensor parallelism]."""
    before = getattr(_local, "recorder", None)
    with _conversions.used(), _shapes.used() if rules_of_shapes() else nullcontext():
        _local.recorder = recorder
        try:
            yield
        finally:
            _local.recorder = before


class StandIns(TorchFunctionMode):
    """Makes the stand-ins of a model and its inputs, and while it is entered, of outside tensors.

    Stand-ins are on ``device``. But if the model (or the inputs) already has tensors there, its CPU tensors are there
    on purpose, and stay on the CPU.
    """

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        super().__init__()
        self._recorder, self._device = recorder, device
        self._are_there = self._is_copying = False
        self._wholes: dict[int, Tensor] = {}
        self._found: dict[int, Tensor] = {}
        #: By ``id`` of a sharded parameter, the shape, dtype and DTensor spec with which it is gathered.
        self._gathered: dict[int, tuple[torch.Size, torch.dtype, Any]] = {}
        self._owners: list[object] = []  # keeps the objects alive whose ids are keys

    def copy_of(
        self, model: nn.Module, inputs: object, loss: Callable[[Any], Tensor] | None
    ) -> tuple[nn.Module, Any, Callable[[Any], Tensor] | None]:
        """Returns copies of the model, its inputs and the loss, with stand-ins for all tensors."""
        found: dict[int, Any] = {}
        groups = sharded_groups(model)
        for group in groups:
            dtype = group.policy.param_dtype
            for one, size, spec in zip(group.parameters, group.sizes, group.specs, strict=True):
                self._gathered[id(one)] = size, dtype or one.dtype, spec
        self._are_there = among_inputs = are_on(self._device, tree_iter(inputs))
        for one in tree_iter(inputs):
            if isinstance(one, Tensor):
                self._of(one)
        self._are_there = are_on(self._device, values_in(model))
        for name, module in model.named_modules():
            for value in vars(module).values():
                for one in tree_iter(value):
                    if isinstance(one, Tensor):
                        try:
                            self._of(one)
                        except PlanError as error:
                            raise PlanError(f"{name or 'the model'}: {error}") from error
                    elif isinstance(one, torch.Generator) and id(one) not in found:
                        with without_dispatch_modes():  # its state is a real tensor
                            found[id(one)] = one.clone_state()
                    elif isinstance(one, torch.jit.ScriptFunction):  # cannot be copied, and has no state
                        found[id(one)] = one
        self._are_there |= among_inputs  # for tensors inside of other objects, which may belong to either
        bare = {module: without_sharding(module) for module in model.modules() if is_fully_sharded(module)}
        memo = {**found, **{id(module): made for module, (made, _) in bare.items()}, **self._found}
        owner = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)
        kept = [attributes for _, attributes in bare.values()]
        self._is_copying = True
        with self:
            inputs = _copied(inputs, memo, "inputs")
            copied, owner, attributes = _copied((model, owner if isinstance(owner, nn.Module) else None, kept), memo)
        self._is_copying = False
        for (made, _), kept in zip(bare.values(), attributes, strict=True):
            vars(made).update(kept)
        for group in groups:
            for module in group.modules:
                _cast(bare[module][0], group.policy)
        functions = Rebound(memo)
        return copied, functions.of(inputs), functions.of(loss)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = args, dict(kwargs or {})
        if func is Tensor.__deepcopy__ and self._is_copying and type(args[0]) is Tensor and not args[0].is_sparse:
            return self._of(args[0])
        if any(self._is_outside(one) for one in tree_iter(given)):
            with self._recorder.unseen():
                given = tree_map(lambda one: self._of(one, is_outside=True) if self._is_outside(one) else one, given)
        with self._recorder.calling(func):
            return func(*given[0], **given[1])

    def _is_outside(self, one: object) -> bool:
        return type(one) in (Tensor, nn.Parameter) and self._recorder.blocks.lacks(cast(Tensor, one))

    def _of(self, tensor: Tensor, *, is_outside: bool = False) -> Tensor:
        if (known := self._found.get(id(tensor))) is not None:
            return known
        gathered = self._gathered.get(id(tensor))
        is_plain = type(tensor) in (Tensor, nn.Parameter) or is_plain_fake(tensor)
        spec = spec_of(tensor) if gathered is None and is_distributed(tensor) else gathered and gathered[-1]
        if gathered is None and spec is None and (is_wrapper(tensor) or not is_plain):
            raise PlanError(f"a plan cannot be made for a tensor of the type {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise PlanError(f"a plan cannot be made for a tensor of the layout {tensor.layout}")
        is_told = tensor.device.type == self._device.type or (self._are_there and tensor.device.type == "cpu")
        place = tensor.device if is_told else self._device
        if gathered is not None:
            made = torch.empty(gathered[0], dtype=gathered[1], device=place)
        elif spec is not None:
            made = self._of(next(plain_tensors(tensor)))
        elif _has_numbers(tensor) or (is_outside and tensor.nbytes <= MOST_READ and not tensor.requires_grad):
            with without_dispatch_modes(), torch.no_grad():
                made = tensor.detach().to(place, copy=True)
        else:
            made = self._fake(tensor, place)
        local = made
        if spec is not None:
            made = distributed(local, spec)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        elif tensor.requires_grad:
            made.requires_grad_()
        self._found[id(tensor)] = made
        self._owners.append(tensor)
        self._recorder.add_given(local)
        return made

    def _fake(self, tensor: Tensor, device: torch.device) -> Tensor:
        size, stride, dtype, storage = tensor.size(), tensor.stride(), tensor.dtype, tensor.untyped_storage()
        key = storage_key(storage)
        whole = self._wholes.get(key)
        if whole is None or whole.dtype != dtype:
            if tensor.nbytes == storage.nbytes():
                made = self._wholes[key] = torch.empty_strided(size, stride, dtype=dtype, device=device)
                return made
            whole = self._wholes[key] = torch.empty(storage.nbytes() // dtype.itemsize, dtype=dtype, device=device)
        return whole.as_strided(size, stride, tensor.storage_offset())


def _copied(one: Any, memo: dict[int, Any], name: str = "") -> Any:
    before = {**memo}
    try:
        return copy.deepcopy(one, memo)
    except PlanError:
        raise
    except Exception as error:
        memo.clear()  # a frame of the error may hold it, and it holds tensors
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if any(isinstance(frame.f_locals.get("x"), torch.jit.ScriptModule) for frame in frames):  # deepcopy's argument
            what = name or "an object that is an attribute of the model"
            raise PlanError(f"{what} has a module of {OF_TORCHSCRIPT}") from error
        if not name:
            raise PlanError(
                f"the model cannot be copied, which a plan requires ({type(error).__name__}: {error}). Give the "
                "module without its wrapper"
            ) from error
        for path, part in zip(*flatten_with_names(one)[:2], strict=True):
            try:
                copy.deepcopy(part, {**before})
            except Exception:
                name, one = f"{name}{path}", part
                break
        raise PlanError(
            f"{name} is of the type {type(one).__name__}, which cannot be copied ({type(error).__name__}: {error}): a "
            "step may change it, so a copy is traced. Give a type that can be copied, such as a list, not an iterator"
        ) from error


def _cast(module: nn.Module, policy: Any) -> None:
    def to(dtype: torch.dtype, values: Any) -> Any:
        def cast_one(one: Any) -> Any:
            return one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one

        return tree_map(cast_one, values)

    if policy.param_dtype is not None and policy.cast_forward_inputs:
        module.register_forward_pre_hook(
            lambda _, args, named: to(policy.param_dtype, (args, named)), prepend=True, with_kwargs=True
        )
    if policy.output_dtype is not None:
        module.register_forward_hook(lambda _, args, output: to(policy.output_dtype, output))


def values_in(model: nn.Module) -> Iterator[object]:
    return (one for module in model.modules() for value in vars(module).values() for one in tree_iter(value))


def are_on(device: torch.device, values: Iterable[object]) -> bool:
    return any(isinstance(one, Tensor) and one.device.type == device.type for one in values)


def _has_numbers(tensor: Tensor) -> bool:
    return (
        not is_fake(type(tensor))
        and tensor.device.type != "meta"
        and not tensor.dtype.is_floating_point
        and not tensor.dtype.is_complex
        and tensor.nbytes <= MOST_KNOWN
    )


# -- functions --------------------------------------------------------------------------------------------------------

_WEAK = (WeakKeyDictionary, WeakValueDictionary)
_CONTAINERS = (list, deque, set, WeakSet, dict, OrderedDict, defaultdict, Counter, *_WEAK)
#: Most elements of a container that is copied.
_MOST = 100_000


class Rebound:
    """Replaces references to originals with their copies in ``memo``: see [Note: functions]."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._ids = {key: id(one) for key, one in memo.items() if isinstance(one, nn.Module | nn.Parameter)}
        self._copies = {id(one): one for key, one in memo.items() if key not in (id(memo), id(one))}
        self._cells: dict[int, tuple[CellType, CellType]] = {}
        self._spaces: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._originals: list[object] = []  # keeps the objects alive whose ids are keys
        for one in [*self._copies.values()]:
            self._bind(one)

    def of(self, one: Any) -> Any:
        """Returns ``one`` with copied objects replaced by their copies; ``one`` itself if it has none."""
        if id(one) in self._memo:
            return self._memo[id(one)]
        kind = type(one)
        if kind in (int, str):
            return self._ids.get(one, one)
        if isinstance(one, tuple | frozenset):
            parts = [self.of(part) for part in one]
            if all(part is other for part, other in zip(parts, one, strict=True)):
                return one
            return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
        if isinstance(one, MethodType):
            return MethodType(self.of(one.__func__), self.of(one.__self__))
        if id(one) in self._copies:
            return one
        if isinstance(one, FunctionType):
            return self._function(one) if self._is_copied(one, set()) else one
        if (
            kind is partial
            or (kind in _CONTAINERS and len(one) <= _MOST)
            or (_is_users(kind) and any(map(self._has, [*_dict_of(one).values()])))
        ):
            made: Any = one
            with suppress(Exception):  # an object that cannot be copied is shared with the user
                made = one.copy() if kind is WeakSet else copy.copy(one)  # copy.copy of a WeakSet shares its elements
                self._know(one, made)
                self._bind(made)
            return made
        if isinstance(one, CACHE):
            return self._know(one, apart(one, self.of(one.__wrapped__)))
        return self._know(one, copy.deepcopy(one)) if _draws(one) else one

    def _know(self, one: object, made: Any) -> Any:
        self._memo[id(one)] = self._copies[id(made)] = made
        self._originals.append(one)
        return made

    def _bind(self, one: Any) -> None:
        if isinstance(one, partial):
            one.__setstate__((self.of(one.func), self.of(one.args), {**self.of(one.keywords)}, vars(one)))  # type: ignore[attr-defined]  # in no stub
        elif isinstance(one, list | deque):
            _replace(one, enumerate([*one]), self.of)
        elif isinstance(one, set | WeakSet) and any(self.of(part) is not part for part in one):
            parts = [self.of(part) for part in one]
            one.clear()
            one.update(parts)
        if isinstance(one, dict | WeakKeyDictionary | WeakValueDictionary):
            items = _items(one)
            if any(self.of(key) is not key for key, _ in items):
                items = [(self.of(key), value) for key, value in items]  # all, to keep their order
                one.clear()
                for key, value in items:
                    one[key] = value
            _replace(one, items, self.of)
        elif isinstance(one, nn.Module) or _is_users(type(one)):
            _replace(_dict_of(one), [*_dict_of(one).items()], self.of)

    def _has(self, one: Any, levels: int = 2) -> bool:
        """Returns whether ``one`` has a copy, or contains an object with a copy within ``levels``."""
        if id(one) in self._memo or (type(one) is int and one in self._ids):
            return True
        if not levels or not isinstance(one, (*_CONTAINERS, tuple, frozenset)) or len(one) > _MOST:
            return False
        parts = [part for item in _items(one) for part in item] if isinstance(one, (dict, *_WEAK)) else [*one]
        return any(self._has(part, levels - 1) for part in parts)

    def _function(self, one: FunctionType) -> FunctionType:
        cells, space = one.__closure__ or (), one.__globals__
        names = [name for name, value in _named(one) if self._is_copied(value, set())]
        if names:
            _, space = self._spaces.setdefault(id(space), (space, {**space}))
        known = [self._cells.setdefault(id(cell), (cell, CellType())) for cell in cells]
        made = FunctionType(one.__code__, space, one.__name__, None, tuple([cell for _, cell in known]))
        self._know(one, made)
        for name in names:
            if space[name] is one.__globals__[name]:
                space[name] = self.of(space[name])
        for cell, own in known:
            if not [*_contents([own])]:  # no other function has filled it
                for content in _contents([cell]):
                    own.cell_contents = content  # `of` may read this cell
                    own.cell_contents = self.of(content)
        made.__defaults__, made.__kwdefaults__ = self.of(one.__defaults__), self.of(one.__kwdefaults__)
        made.__qualname__, made.__module__ = one.__qualname__, one.__module__
        vars(made).update(vars(one))
        return made

    def _is_copied(self, one: object, seen: set[int]) -> bool:
        """Returns whether ``one`` has a copy, draws random numbers, or is a function that must be copied: a user's
        closure, or one that refers to a copied object."""
        if _draws(one) or self._has(one):
            return True
        if id(one) in seen or not isinstance(one, FunctionType):
            return False
        seen.add(id(one))
        inside = [*_contents(one.__closure__ or ()), *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        if one.__closure__ and not is_library(one.__module__):
            return True
        return any(self._is_copied(value, seen) for value in (*inside, *(value for _, value in _named(one))))


def _contents(cells: Iterable[CellType]) -> Iterator[Any]:
    for cell in cells:
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents


def _is_users(kind: type) -> bool:
    return kind is SimpleNamespace or not is_library(kind.__module__)


def _items(one: Any) -> list[tuple[Any, Any]]:
    return [*(dict.items(one) if isinstance(one, dict) else one.items())]


def _replace(container: Any, items: Any, of: Any) -> None:
    for key, value in items:
        if (made := of(value)) is not value:
            container[key] = made


def _named(one: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the globals that a function names; none for a library's function."""
    names, codes = set[str](), [] if is_library(one.__module__) else [one.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    yield from ((name, one.__globals__[name]) for name in names & {*one.__globals__})


def _dict_of(one: object) -> dict[str, Any]:
    found = object.__getattribute__(one, "__dict__") if type(one).__dictoffset__ else {}
    return found if isinstance(found, dict) else {}


def _draws(one: object) -> bool:
    numpy = sys.modules.get("numpy")
    return type(one) is random.Random or (
        numpy is not None and isinstance(one, numpy.random.Generator | numpy.random.RandomState)
    )
