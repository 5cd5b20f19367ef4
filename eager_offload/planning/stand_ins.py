"""What stands in a trace for the tensors that a step is given.

[Note: tensors from outside]
A step may be given tensors that neither the model nor the inputs have: a loss reads the parameters of the model itself
or those of a head, a module in a closure has statistics, a table is a global. Each has a stand-in from the first
function of torch on that it is given to, the same one ever after. So its numbers are not written to, and its gradient
is the stand-in's; what is of the model itself has the copy's. A tensor that comes to an operator in another way, as an
argument of a ``torch.autograd.Function``, is refused by the recorder if the step would change it.

[Note: known numbers]
Integers and booleans that depend on no parameter and on no activation (token numbers, masks, positions) are real in the
trace, and what follows from them alone is computed. So a mask of ones is found to be one as in a real step, which some
models do not ask of a fake tensor, and indices may be counted. Small constants from outside have numbers too. Whatever
depends on anything else is fake; a question for its value is an error that names the module.

[Note: sharded models]
The copy of a model that ``fully_shard`` has sharded has its layers as they were before: whole parameters in the type in
which they are gathered, and none of the hooks that gather them. Its inputs and outputs are cast as those hooks cast.

[Note: modules that forward converts]
``module.to(...)`` sets the ``data`` of a real parameter. That of a fake one torch exchanges with another tensor, which
it refuses where anything else has the parameter: a graph of this step, or a weak reference. A thread that traces sets
the ``data`` of both kinds.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from eager_offload.contexts import Patches
from eager_offload.errors import PlanError
from eager_offload.planning import OF_TORCHSCRIPT
from eager_offload.planning.rebound import Rebound
from eager_offload.planning.recorder import MOST_KNOWN, MOST_READ, Recorder
from eager_offload.torch_private import Patch
from eager_offload.torch_private.calls import without_dispatch_modes
from eager_offload.torch_private.fsdp import is_fully_sharded, sharded_groups, without_sharding
from eager_offload.torch_private.memory import (
    flatten_with_names,
    is_fake,
    is_plain_fake,
    is_wrapper,
    storage_key,
    tree_iter,
    tree_map,
)


class _Local(threading.local):
    is_tracing = False


_local = _Local()


def _in_place(replaced: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    def swap_tensors(t1: Any, t2: Any) -> None:
        if not (_local.is_tracing and is_fake(type(t1)) and is_fake(type(t2))):
            return replaced(t1, t2)
        t1.data = t2
        t1.fake_device = t2.fake_device

    return swap_tensors


_conversions = Patches(lambda: [Patch(torch.utils, "swap_tensors", _in_place)])


@contextmanager
def modules_convertible() -> Iterator[None]:
    """The calling thread may convert modules whose parameters are fake: see [Note: modules that forward converts]."""
    before = _local.is_tracing
    with _conversions.used():
        _local.is_tracing = True
        try:
            yield
        finally:
            _local.is_tracing = before


class StandIns(TorchFunctionMode):
    """What stands in a trace for the tensors of a model, of its inputs and, while it is entered, of all else.

    All are on ``device``. Where some of the model's are there already, those that the program has on the CPU are there
    on purpose, and so are those of the inputs.
    """

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        super().__init__()
        self._recorder, self._device = recorder, device
        self._are_there = self._is_copying = False
        self._wholes: dict[int, Tensor] = {}
        self._found: dict[int, Tensor] = {}
        #: In which type shards are gathered, by the identity of the parameter.
        self._gathered: dict[int, torch.dtype] = {}
        self._owners: list[object] = []  # no key is used twice

    def copy_of(
        self, model: nn.Module, inputs: object, loss: Callable[[Any], Tensor] | None
    ) -> tuple[nn.Module, Any, Callable[[Any], Tensor] | None]:
        """The model, its inputs and the loss, copied together, with stand-ins for all tensors; raises ``PlanError``
        where it cannot."""
        found: dict[int, Any] = {}
        groups = sharded_groups(model)
        for group in groups:
            dtype = group.policy.param_dtype
            self._gathered.update((id(one), dtype or one.dtype) for one in group.parameters)
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
                        with without_dispatch_modes():  # its state is a tensor
                            found[id(one)] = one.clone_state()
                    elif isinstance(one, torch.jit.ScriptFunction):  # cannot be copied, and has no state
                        found[id(one)] = one
        self._are_there |= among_inputs  # of tensors in objects nobody knows whose they are
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
        return type(one) in (Tensor, nn.Parameter) and self._recorder.lacks(cast(Tensor, one))

    def _of(self, tensor: Tensor, *, is_outside: bool = False) -> Tensor:
        if (known := self._found.get(id(tensor))) is not None:
            return known
        gathered = self._gathered.get(id(tensor))
        is_plain = type(tensor) in (Tensor, nn.Parameter) or is_plain_fake(tensor)
        if gathered is None and (is_wrapper(tensor) or not is_plain):
            raise PlanError(f"a {type(tensor).__name__} is none of the tensors that a plan can be made for")
        if tensor.layout is not torch.strided:
            raise PlanError(f"a tensor of the layout {tensor.layout} is none that a plan can be made for")
        if gathered is not None:
            made = torch.empty(tensor.shape, dtype=gathered, device=self._place(tensor))
        elif _has_numbers(tensor) or (is_outside and tensor.nbytes <= MOST_READ and not tensor.requires_grad):
            with without_dispatch_modes(), torch.no_grad():
                made = tensor.detach().to(self._place(tensor), copy=True)
        else:
            made = self._fake(tensor)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        elif tensor.requires_grad:
            made.requires_grad_()
        self._found[id(tensor)] = made
        self._owners.append(tensor)
        self._recorder.has(made)
        return made

    def _place(self, tensor: Tensor) -> torch.device:
        is_told = tensor.device.type == self._device.type or (self._are_there and tensor.device.type == "cpu")
        return tensor.device if is_told else self._device

    def _fake(self, tensor: Tensor) -> Tensor:
        size, stride, dtype, device = tensor.size(), tensor.stride(), tensor.dtype, self._place(tensor)
        storage = tensor.untyped_storage()
        whole = self._wholes.get(storage_key(storage))
        if whole is None or whole.dtype != dtype:
            if tensor.nbytes == storage.nbytes():
                made = torch.empty_strided(size, stride, dtype=dtype, device=device)
                self._wholes[storage_key(storage)] = made
                return made
            whole = torch.empty(storage.nbytes() // dtype.itemsize, dtype=dtype, device=device)
            self._wholes[storage_key(storage)] = whole
        return whole.as_strided(size, stride, tensor.storage_offset())


def _copied(one: Any, memo: dict[int, Any], name: str = "") -> Any:
    """Returns a copy of the model, or of what is called ``name``; raises ``PlanError`` where it cannot be made."""
    before = {**memo}
    try:
        return copy.deepcopy(one, memo)
    except PlanError:
        raise
    except Exception as error:
        memo.clear()  # a frame of the error holds it where nothing can clear that
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if any(isinstance(frame.f_locals.get("x"), torch.jit.ScriptModule) for frame in frames):  # of copy.deepcopy
            what = name or "an object that is an attribute of the model"
            raise PlanError(f"{what} has a module of {OF_TORCHSCRIPT}") from error
        if not name:
            raise PlanError(
                f"the model cannot be copied, which tracing it takes ({type(error).__name__}: {error}). Give the "
                "module inside of what wraps it"
            ) from error
        for path, part in zip(*flatten_with_names(one)[:2], strict=True):
            try:
                copy.deepcopy(part, {**before})
            except Exception:
                name, one = f"{name}{path}", part
                break
        raise PlanError(
            f"{name} is of the type {type(one).__name__}, which cannot be copied ({type(error).__name__}: {error}): a "
            "step may change it, so a copy is traced. Give what can be copied, such as a list in place of an iterator"
        ) from error


def _cast(module: nn.Module, policy: Any) -> None:
    """Has ``module`` cast its inputs and outputs to what ``policy``, of mixed precision, says."""

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
    """Yields what the modules of ``model`` have as attributes, or in containers that are attributes."""
    return (one for module in model.modules() for value in vars(module).values() for one in tree_iter(value))


def are_on(device: torch.device, values: Iterable[object]) -> bool:
    """Returns whether any of ``values`` is a tensor on a device of the kind of ``device``."""
    return any(isinstance(one, Tensor) and one.device.type == device.type for one in values)


def _has_numbers(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are there: see [Note: known numbers]."""
    return (
        not is_fake(type(tensor))
        and tensor.device.type != "meta"
        and not tensor.dtype.is_floating_point
        and not tensor.dtype.is_complex
        and tensor.nbytes <= MOST_KNOWN
    )
