"""Records a traced step: operators, storages, saves and unpacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from eager_offload import marks
from eager_offload.compile.decide import OperatorCall, flops_of, is_single, traffic_of
from eager_offload.core.selection import is_parameter, logical_bytes, plain_tensors, reason_to_stay
from eager_offload.errors import PlanError
from eager_offload.planning.blocks import Block, Blocks, Calls, Place, SavedBlock, Use, written_by
from eager_offload.planning.levels import Dispatch, Recording, has_steady_results, kind_of_call
from eager_offload.planning.program import Op, Program, ProgramSave, ProgramUnpack, Weight
from eager_offload.planning.target import guessed_name
from eager_offload.stats import KeepReason
from eager_offload.torch_private.autograd import (
    autograd_sequence,
    checkpoints_have_nodes,
    current_autograd_node,
    node_sequence,
)
from eager_offload.torch_private.calls import (
    OpOverload,
    TorchDispatchMode,
    schema_of,
    without_dispatch_modes,
    without_torch_function,
)
from eager_offload.torch_private.fsdp import distributed, is_distributed, spec_of
from eager_offload.torch_private.inductor import FakeTensorMode
from eager_offload.torch_private.memory import (
    detached,
    is_fake,
    storage_of,
    tensors_in,
)

#: Most bytes of a tensor with known values; larger tensors are fake.
MOST_KNOWN = 64 << 20
#: Most bytes of a constant from outside of the model with known values of any dtype, and of copies of it.
MOST_READ = 64 << 10


class _Handle(NamedTuple):
    """The handle of a saved tensor; ``get`` holds no movable tensor."""

    save: int
    get: Callable[[], Tensor]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types for it
    """Records operators, storages, saves and unpacks; known random numbers are drawn from ``generator``."""

    def __init__(self, min_bytes: int, *, generator: torch.Generator, blocks: Blocks, is_limited: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares no types for it
        self.min_bytes, self.blocks = min_bytes, blocks
        #: Whether tensors saved outside of the modules of ``only`` are kept.
        self._is_limited = is_limited
        self._generators = {generator.device: generator}
        self._guessed: dict[str, None] = {}
        self._ops: list[Op] = []
        #: The operators of forward, views included.
        self._dispatches: list[Dispatch] = []
        self._forward_ops = 0
        self._saves: list[tuple[ProgramSave, Block | None, Use | None]] = []
        self._unpacks: list[ProgramUnpack] = []
        self._modules = [""]
        self._inside = [0]
        #: Modules that a backward function is calling (e.g. in a reentrant checkpoint).
        self._again: list[int] = []
        self._calls = Calls(self.blocks)
        #: The module of each autograd node, by sequence number.
        self._of_nodes: dict[int, int] = {}
        #: The index of each node that has saved a tensor, by sequence number.
        self._nodes: dict[int, int] = {}
        self._is_backward = False
        self._weights: list[Weight] = []
        #: Above 0 inside of an operator or the recorder itself, whose operators are not counted.
        self._depth = 0
        #: Storages whose known values a fake tensor has overwritten.
        self._stale = WeakSet[torch.UntypedStorage]()
        self._held: list[Tensor] = []

    def add_given(self, tensor: Tensor) -> None:
        """Adds a stand-in, which lives for the whole step."""
        self._held.append(tensor)
        self.blocks.add(tensor, 0, 0)

    def _refuse_changes(self, tensors: Iterable[Tensor], written: Collection[int] = ()) -> None:
        """Raises for a tensor from outside that gets a gradient, or is written to (its ``id`` is in ``written``)."""
        for one in tensors:
            if is_fake(type(one)) or not (one.requires_grad or id(one) in written) or not self.blocks.lacks(one):
                continue
            change = "a gradient of it" if one.requires_grad else "its numbers"
            raise PlanError(
                f"{self.where} takes a tensor of the shape {tuple(one.shape)} from outside of the model, and a step "
                f"changes {change}. A plan changes nothing of the program's: make it a parameter or a buffer of the "
                "model, or of a torch.nn.Module that is given as loss=..., which are copied"
            )

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as hooks:
            for number, (name, module) in enumerate(model.named_modules()):  # the first one is the model
                if number:
                    self._modules.append(name)
                entering = partial(self._entering, number)
                hooks.enter_context(module.register_forward_pre_hook(entering, prepend=True, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(self._leaving))
            yield
        known = set[Block]()
        for name, parameter in model.named_parameters():
            block = self.blocks.of(_local(parameter))
            if block is None or block in known:  # without bytes, or shared with another parameter
                continue
            made = None if parameter.grad is None else self.blocks.of(_local(parameter.grad))
            known.add(block)
            gradient = (0, 0) if made is None or made in known else (made.nbytes, made.made)
            self._weights.append(Weight(name, block.nbytes, *gradient))
            if made is not None:
                known.add(made)

    def _entering(self, number: int, module: nn.Module, *given: object) -> None:
        self._inside.append(number)
        if self._is_backward:
            self._again.append(number)
        op = len(self._ops)
        self.blocks.note_deaths(op)
        with self.unseen():
            self._calls.enter(number, self._place(), given, self.min_bytes, is_backward=self._is_backward)

    def _leaving(self, module: nn.Module, *_: object) -> None:
        self._inside.pop()
        if self._is_backward:
            del self._again[-1:]
        else:
            self._calls.leave(self._place())

    def _place(self) -> Place:
        node = -1 if checkpoints_have_nodes else self._nodes.get(autograd_sequence(), -1)
        return Place(len(self._ops), len(self._saves), len(self._dispatches), node)

    def begin_backward(self, loss: Tensor) -> None:
        with self.unseen():
            self._refuse_changes(map(_local, _leaves_of(loss)))
        self._is_backward, self._forward_ops = True, len(self._ops)

    def _module(self) -> int:
        if not self._is_backward:
            number = self._inside[-1]
            self._of_nodes.setdefault(autograd_sequence() - 1, number)  # not overwritten by operators without a node
            return number
        node = current_autograd_node()
        if self._again and isinstance(node, torch.autograd.function.BackwardCFunction):
            self._of_nodes.setdefault(autograd_sequence() - 1, self._again[-1])
            return self._again[-1]
        self._again.clear()
        number = self._of_nodes.get(-1 if node is None else node_sequence(node), self._inside[-1])
        self._inside[-1] = number
        return number

    @property
    def where(self) -> str:
        name = self._modules[self._inside[-1]]
        return ("backward of " if self._is_backward else "") + (f"module {name!r}" if name else "the model itself")

    def error(self, what: str) -> PlanError:
        return PlanError(
            f"{self.where} {what}. A plan is made without computing anything: a step may depend on shapes, and on "
            "integers and booleans among the inputs, but not on other values. Train without a plan, with "
            "Offload(device_budget=...): it measures the first steps, and moves the fewest bytes that keep the budget"
        )

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(map(is_distributed, tensors_in((args, kwargs)))):
            return NotImplemented  # a DTensor calls operators of its local tensors, which are recorded instead
        named = dict(kwargs or {})
        if self._depth:
            return func(*args, **named)
        self.blocks.note_deaths(len(self._ops))
        with self.unseen():
            written = [*written_by(OperatorCall(func, args, named, None))]
            self._refuse_changes(tensors_in((args, named)), [*map(id, written)])
            result = self._run(func, args, named)
            if any(isinstance(one, torch.Generator) for one in (*args, *named.values())):
                self._calls.changed()  # a checkpoint does not restore its state
            call, op, module = OperatorCall(func, args, named, result), len(self._ops), self._module()
            for one in written:
                self._calls.write(op, one)
            first = len(self.blocks.all)
            for one in tensors_in(result):
                self.blocks.add(one, op, module)
            if nbytes := traffic_of(call):
                name = schema_of(func).name.removeprefix("aten::")
                self._ops.append(Op(name, module, flops_of(call), nbytes, is_single(call)))
            if not self._is_backward:
                may_stay = has_steady_results(func, args, named)
                op = op if nbytes else -1
                self._dispatches.append(Dispatch(kind_of_call(func), op, first, len(self.blocks.all), may_stay))
        return result

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Suspends the recording, and ``__torch_function__``."""
        self._depth += 1
        try:
            with without_torch_function():
                yield
        finally:
            self._depth -= 1

    @contextmanager
    def calling(self, function: Callable[..., Any]) -> Iterator[None]:
        """Records ``function`` as guessed if it saves tensors, and saves others on another device."""
        saves = len(self._saves)
        yield
        if len(self._saves) > saves and (name := guessed_name(function)) is not None:
            self._guessed[name] = None

    def _run(self, func: OpOverload[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if schema_of(func).name == "aten::mkldnn_rnn_layer":
            workspace = torch.empty(_workspace_bytes(func, args), dtype=torch.uint8)
            block = self.blocks.add(workspace, len(self._ops), self._module())
            assert block is not None, "it has bytes"
            block.is_guess = True
            return (*func(*args, **named)[:-1], workspace)
        if schema_of(func).name == "_c10d_functional::wait_tensor":
            return args[0]  # torch's meta kernel would return a new tensor
        tensors = tensors_in((args, named))
        known = all(self._has_numbers(one) for one in tensors)
        try:
            result = _result_of(func, args, named)
        except Exception as error:
            if known and tensors:
                return _computed(func, args, named)
            if (said := _lacking_numbers(func, error)) is None:
                raise  # the model's own error
            raise self.error(said) from error
        made = tensors_in(result)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if known and is_random:
            device = made[0].device
            if device not in self._generators:
                self._generators[device] = torch.Generator(device)
            func, named = _drawing_from(self._generators[device], func, named)
            known = "generator" in named
        is_copy = schema_of(func).name == "aten::_to_copy" and all(one.nbytes <= MOST_READ for one in made)
        for one in made:  # compute integers and booleans, which may control the model, and no activations
            is_number = one.dtype.is_floating_point or one.dtype.is_complex or one.nbytes > MOST_KNOWN
            known &= one.numel() <= 1 or not (is_random or (is_number and not is_copy))
        if known:
            return _computed(func, args, named)
        if schema_of(func).is_mutable:
            storages = (storage_of(one) for one in tensors if not is_fake(type(one)))
            self._stale.update(one for one in storages if one is not None)
        return result

    def _has_numbers(self, tensor: Tensor) -> bool:
        return not is_fake(type(tensor)) and storage_of(tensor) not in self._stale

    def pack(self, tensor: Tensor) -> _Handle:
        with self.unseen():
            return self._pack(tensor)

    def _pack(self, saved_tensor: Tensor) -> _Handle:
        tensor = _local(saved_tensor)  # a DTensor's local part is the part that moves
        op = len(self._ops)
        self.blocks.note_deaths(op)
        storage = storage_of(tensor)
        mark = None if storage is None else marks.mark_of(storage)
        reason = reason_to_stay(tensor, self.min_bytes, preferred=mark is marks.Mark.PREFER)
        if tensor is not saved_tensor and is_parameter(saved_tensor):
            reason = KeepReason.PARAMETER
        in_region = marks.inside.has_to_stay(self._is_limited)
        if reason is None and (mark is marks.Mark.KEEP or in_region):
            reason = KeepReason.MARKED if mark is marks.Mark.KEEP else KeepReason.REGION
        if mark is not None or in_region:
            self._calls.decided.append(len(self._saves))
        block, known = None, self.blocks.of(tensor)
        if mark is not None and known is not None:
            known.mark = mark  # also for earlier saves, since no copy of those has started
        if known is not None and known.is_guess:
            reason = KeepReason.LAYOUT  # its size is only known in a real step
        if reason is None or reason is KeepReason.SMALL:
            block = self.blocks.add(tensor, op, self._inside[-1])
            if block is not None and known is None:
                block.is_outside = True
        if reason is None and (block is None or block.nbytes % tensor.itemsize or tensor.is_conj() or tensor.is_neg()):
            reason = KeepReason.LAYOUT
        goes_along = reason is KeepReason.SMALL and block is not None and block.saved is not None and tensor.numel() > 0
        number, stays = len(self._saves), None if goes_along else reason
        self._nodes.setdefault(autograd_sequence(), len(self._nodes))
        node = self._nodes[autograd_sequence()]
        save = ProgramSave(logical_bytes(tensor), tensor.requires_grad, stays, -1, op, node)
        if block is None or not (goes_along or reason is None):
            self._saves.append((save, block, None))
            with _as_it_is(tensor):
                kept = saved_tensor if saved_tensor.is_leaf else saved_tensor.detach()
            return _Handle(number, lambda: kept)
        saved = self.blocks.save(block, tensor, op)
        self._saves.append((save, block, saved.use))
        place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        get = partial(self._like, saved, tensor.dtype, place)
        if tensor is saved_tensor:
            return _Handle(number, get)
        spec = spec_of(saved_tensor)
        return _Handle(number, lambda: self._wrapped(get, spec))

    def _wrapped(self, get: Callable[[], Tensor], spec: Any) -> Tensor:
        with self.unseen():
            return detached(distributed(get(), spec))

    def unpack(self, handle: _Handle) -> Tensor:
        op = len(self._ops)
        self.blocks.note_deaths(op)
        self._unpacks.append(ProgramUnpack(handle.save, op))
        return handle.get()

    def _like(self, saved: SavedBlock, dtype: torch.dtype, place: tuple[Any, ...]) -> Tensor:
        with self.unseen():
            whole = self.blocks.unpack(saved, dtype, len(self._ops))
            with _as_it_is(whole):
                return whole.as_strided(*place)

    def recording(self) -> Recording:
        blocks, calls = self.blocks, {self._modules[call.module]: call for call in self._calls.repeatable()}
        blocks.note_deaths(len(self._ops))
        numbers, storages, values, other_bytes = blocks.result(len(self._ops))
        saves = [  # a graph of which no handle was unpacked was dropped before another one saved the block
            save._replace(storage=numbers.get(block, -1)) if block is not None and use and use.is_unpacked else save
            for save, block, use in self._saves
        ]
        program = Program(
            tuple(self._modules),
            tuple(self._ops),
            self._forward_ops,
            tuple(saves),
            tuple(self._unpacks),
            storages,
            other_bytes,
            tuple(call.module for call in calls.values()),
            tuple(sorted(self._guessed)),
            tuple(self._weights),
        )
        saved = tuple(-1 if block is None else block.number for _, block, _ in self._saves)
        written = self._calls.written
        dispatches = tuple(
            one._replace(may_stay=False) if written.intersection(blocks.all[one.first : one.last]) else one
            for one in self._dispatches
        )
        return Recording(program, self.min_bytes, values, saved, calls, dispatches)


def _local(tensor: Tensor) -> Tensor:
    return next(plain_tensors(tensor)) if is_distributed(tensor) else tensor


def _leaves_of(loss: Tensor) -> Iterator[Tensor]:
    todo, seen = [loss.grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [after for after, _ in node.next_functions]
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf


def _as_it_is(tensor: Tensor) -> AbstractContextManager[object]:
    """Returns a context in which results of a tensor with known values have known values."""
    return nullcontext() if is_fake(type(tensor)) else without_dispatch_modes()


def _computed(func: OpOverload[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    with without_dispatch_modes():
        return func(*args, **named)


def _result_of(func: OpOverload[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if schema_of(func).name == "aten::_grouped_mm" and args[0].dtype is not torch.bfloat16:
        # torch's meta kernel only takes bfloat16, its kernels also other types.
        left, right = (one.to(torch.bfloat16) for one in args[:2])
        return func(left, right, *args[2:], **named).to(args[0].dtype)
    result = func(*args, **named)
    if schema_of(func).name == "aten::mkldnn_rnn_layer_backward" and result[3] is not None and result[3] is result[4]:
        # The kernel returns separate gradients for the two biases, torch's meta kernel the same tensor twice.
        result = (*result[:4], torch.empty_like(result[3]), *result[5:])
    return result


def _workspace_bytes(func: OpOverload[..., Any], args: tuple[Any, ...]) -> int:
    """Returns the approximate size of oneDNN's workspace for a recurrent layer, which torch's meta kernel leaves out:
    measured on a short sequence, and scaled."""
    length = int(args[0].shape[0])
    short = min(length, _SHORT)
    with without_dispatch_modes():
        given = [torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, Tensor) else one for one in args]
        return int(func(given[0][:short], *given[1:])[-1].nbytes * length // short)


def _drawing_from(
    generator: torch.Generator, func: OpOverload[..., Any], named: dict[str, Any]
) -> tuple[OpOverload[..., Any], dict[str, Any]]:
    names = [one.name for one in schema_of(func).arguments]
    for overload in (func, *(getattr(func.overloadpacket, one) for one in func.overloadpacket.overloads())):
        theirs = [one.name for one in schema_of(overload).arguments]
        if "generator" in theirs and [one for one in theirs if one != "generator"] == [
            *filter("generator".__ne__, names)
        ]:
            return overload, {**named, "generator": generator}
    return func, named


#: Length of the sequence that is computed to measure a recurrent layer's workspace.
_SHORT = 16
#: torch's errors for an operator that depends on tensor values, and texts for them.
_QUESTIONS = {
    "DataDependentOutputException": "asks for the value of a tensor",
    "DynamicOutputShapeException": "makes a tensor whose size depends on the numbers in another",
}


def _lacking_numbers(func: OpOverload[..., Any], error: Exception) -> str | None:
    name = schema_of(func).name.removeprefix("aten::")
    what = _QUESTIONS.get(type(error).__name__)
    if what is None and (isinstance(error, NotImplementedError) or is_of_fakes(error)):
        return f"calls {name}, which cannot be traced ({type(error).__name__}: {error})"
    return None if what is None else f"{what} ({name})"


def is_of_fakes(error: Exception) -> bool:
    """Returns whether torch has raised ``error`` because a tensor is fake."""
    text = str(error)
    return type(error).__module__ == FakeTensorMode.__module__ or any(
        part in text for part in ("FakeTensor", "fake tensor", "tensor subclass", "data pointer", "meta tensor")
    )
