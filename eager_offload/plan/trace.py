"""A model and its inputs, traced into a ``Program``: nothing is computed, and nothing is allocated.

[Note: tracing]
A copy of the model is run whose parameters are fake tensors on the CPU, which stand for the device. So the model itself
is not touched, which another thread may be training, and every hook that the trace needs is the copy's. A fake CPU tensor
takes autograd to the kernels of a CPU; fake tensors of an accelerator would abort where torch was built without it.

[Note: known numbers]
Integers and booleans that depend on no parameter and on no activation (token numbers, masks, positions) are real in the
trace, and what follows from them alone is computed. So a mask of ones is found to be one as in a real step, which some
models do not ask of a fake tensor, and indices may be counted. Whatever depends on anything else is fake; a question for
its value is an error that names the module.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eager_offload import marks
from eager_offload._torch import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    autograd_sequence,
    current_autograd_node,
    is_fake,
    is_plain_fake,
    is_wrapper,
    node_sequence,
    storage_key,
    tree_iter,
    tree_map,
    without_dispatch_modes,
)
from eager_offload.compile.cost import Call, flops_of, is_single, traffic_of
from eager_offload.errors import PlanError
from eager_offload.plan.blocks import Blocks, Saved
from eager_offload.plan.program import Ask, Op, Program, Save
from eager_offload.selection import reason_to_stay
from eager_offload.skipping import SkippedModules
from eager_offload.stats import KeepReason

__all__ = ["trace"]

#: Bytes of a tensor whose numbers are known; a larger one is fake.
_MOST_KNOWN = 64 << 20


def trace(
    model: nn.Module,
    inputs: object,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    min_bytes: int,
    skip: Sequence[str] = (),
) -> Program:
    """One training step of ``model`` as numbers.

    Args:
        model: real, or on ``meta``; it is neither changed nor run.
        inputs: what it is called with: a tensor, a tuple or list of arguments, or a mapping of keywords.
        loss: makes the loss of what the model returns; ``None``: that itself, or its ``loss``.
        min_bytes: a smaller saved tensor stays.
        skip: patterns of the names of modules that keep what they save.

    Raises:
        ConfigError: a pattern matches no module.
        PlanError: what the model does depends on numbers that nobody has.
    """
    recorder, skipped = _Recorder(min_bytes), SkippedModules()
    with _nothing_left_behind(), FakeTensorMode(allow_non_fake_inputs=True):
        stand_ins = _StandIns(recorder)
        arguments, named = _arguments(stand_ins.of_inputs(inputs))
        traced, made_loss = stand_ins.copy_of(model, loss)
        if skip:
            skipped.add(traced, skip)
        recorder.watch(traced)
        try:
            with recorder:
                with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
                    total = _loss_of(traced(*arguments, **named), made_loss)
                recorder.begin_backward()
                total.backward()  # type: ignore[no-untyped-call]  # torch declares no types for it
        except PlanError:
            raise
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if not _is_of_fakes(error):
                raise  # the model's own
            raise recorder.error(f"asks for the numbers of a tensor ({error})") from error
        return recorder.program()


def _loss_of(returned: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """The loss, as a number.

    Raises:
        PlanError: there is none.
    """
    found = returned if loss is None else loss(returned)
    if loss is None and not isinstance(found, Tensor):
        found = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        if found is None and isinstance(returned, Sequence) and returned:
            found = returned[0]
    if not isinstance(found, Tensor):
        raise PlanError(
            f"no loss was found: the model returns {type(returned).__name__}, which is no tensor and has no `loss`. Give "
            "loss=..., a function that makes it of what the model returns"
        )
    if not found.requires_grad:
        raise PlanError("the loss requires no gradient, so a step of this model saves nothing: no parameter is trained")
    return found if found.dim() == 0 else found.sum()


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def _is_of_fakes(error: Exception) -> bool:
    """Whether torch refuses something because a tensor has no bytes."""
    text = str(error)
    return any(part in text for part in ("FakeTensor", "fake tensor", "tensor subclass", "data pointer", "meta tensor"))


@contextmanager
def _nothing_left_behind() -> Iterator[None]:
    """Autograd is on, whatever the caller has switched off, and random numbers go on afterwards as if nothing were."""
    state, own = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    theirs = None if numpy is None else numpy.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(without_dispatch_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        device = torch.accelerator.current_accelerator()
        if device is not None and torch.is_autocast_enabled(device.type):  # what stands for it is on the CPU
            stack.enter_context(torch.autocast("cpu", torch.get_autocast_dtype(device.type)))
        try:
            yield
        finally:
            torch.set_rng_state(state)
            random.setstate(own)
            if numpy is not None:
                numpy.random.set_state(theirs)


class _StandIns:
    """What stands for the tensors of a model and its inputs."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self._wholes: dict[int, Tensor] = {}
        self._found: dict[int, Tensor] = {}
        self._owners: list[object] = []  # no key is used twice

    def of_inputs(self, inputs: object) -> Any:
        return tree_map(lambda one: self._of(one) if isinstance(one, Tensor) else one, inputs)

    def copy_of(
        self, model: nn.Module, loss: Callable[[Any], Tensor] | None
    ) -> tuple[nn.Module, Callable[[Any], Tensor] | None]:
        """The model, and the loss if that is a module, with stand-ins for all tensors.

        Raises:
            PlanError: it cannot be copied, or a parameter is of a kind that has no plain bytes.
        """
        for name, module in model.named_modules():
            for key, value in vars(module).items():
                for one in tree_iter(value):
                    if isinstance(one, Tensor):
                        try:
                            self._of(one)
                        except PlanError as error:
                            raise PlanError(f"{name or 'the model'}: {error}") from error
                    elif key in ("_parameters", "_buffers"):
                        continue
        try:
            return copy.deepcopy((model, loss), {key: tensor for key, tensor in self._found.items()})
        except Exception as error:
            raise PlanError(
                f"the model cannot be copied, which tracing it takes ({type(error).__name__}: {error}). Give the module "
                "inside of what wraps it"
            ) from error

    def _of(self, tensor: Tensor) -> Tensor:
        if (known := self._found.get(id(tensor))) is not None:
            return known
        if is_wrapper(tensor) or not (type(tensor) in (Tensor, nn.Parameter) or is_plain_fake(tensor)):
            raise PlanError(f"a {type(tensor).__name__} is none of the tensors that a plan can be made for")
        if tensor.layout is not torch.strided:
            raise PlanError(f"a tensor of the layout {tensor.layout} is none that a plan can be made for")
        made = self._known(tensor) if _is_known(tensor) else self._fake(tensor)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        elif tensor.requires_grad:
            made.requires_grad_()
        self._found[id(tensor)] = made
        self._owners.append(tensor)
        self._recorder.has(made)
        return made

    def _known(self, tensor: Tensor) -> Tensor:
        with without_dispatch_modes(), torch.no_grad():
            return tensor.detach().to("cpu", copy=True)

    def _fake(self, tensor: Tensor) -> Tensor:
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        storage = tensor.untyped_storage()
        whole = self._wholes.get(storage_key(storage))
        if whole is None or whole.dtype != dtype:
            if tensor.nbytes == storage.nbytes():
                made = self._wholes[storage_key(storage)] = torch.empty_strided(size, stride, dtype=dtype)
                return made
            whole = torch.empty(storage.nbytes() // dtype.itemsize, dtype=dtype)
            self._wholes[storage_key(storage)] = whole
        return whole.as_strided(size, stride, tensor.storage_offset())


def _is_known(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are there: see [Note: known numbers]."""
    return (
        not is_fake(type(tensor))
        and tensor.device.type != "meta"
        and not tensor.dtype.is_floating_point
        and not tensor.dtype.is_complex
        and tensor.nbytes <= _MOST_KNOWN
    )


class _Kept(NamedTuple):
    """The handle of a saved tensor that stays."""

    tensor: Tensor
    save: int


class _Moved(NamedTuple):
    """The handle of one that may move: what it was, and no tensor."""

    saved: Saved
    save: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types for it
    """Writes down operators, storages, saves and asks."""

    def __init__(self, min_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares no types for it
        self._min_bytes = min_bytes
        self._blocks = Blocks()
        self._ops: list[Op] = []
        self._forward_ops = 0
        self._saves: list[tuple[Save, Any]] = []
        self._asks: list[Ask] = []
        self._modules = [""]
        self._inside = [0]
        #: The modules whose operators made the autograd nodes with these numbers.
        self._of_nodes: dict[int, int] = {}
        self._is_backward = False
        #: Operators that other operators are made of, and those of the recorder itself, are not counted.
        self._depth = 0
        #: Known numbers that something unknown was written over.
        self._stale: set[int] = set()
        self._held: list[Tensor] = []

    # -- what there is before -----------------------------------------------------------------------------------------

    def has(self, tensor: Tensor) -> None:
        """``tensor`` is there from the beginning to the end."""
        self._held.append(tensor)
        self._blocks.add(tensor, 0, 0)

    def watch(self, model: nn.Module) -> None:
        """Names the modules of ``model``, a copy, as they are called."""
        for name, module in model.named_modules():
            if module is not model:
                self._modules.append(name)
            number = 0 if module is model else len(self._modules) - 1
            module.register_forward_pre_hook(self._entering(number), prepend=True)
            module.register_forward_hook(self._leaving)

    def _entering(self, number: int) -> Callable[..., None]:
        def entering(*_: object) -> None:
            self._inside.append(number)

        return entering

    def _leaving(self, *_: object) -> None:
        self._inside.pop()

    def begin_backward(self) -> None:
        self._is_backward, self._forward_ops = True, len(self._ops)

    def _module(self) -> int:
        """The number of the module that runs, or whose gradient is computed."""
        if not self._is_backward:
            number = self._inside[-1]
            self._of_nodes[autograd_sequence() - 1] = number
            return number
        node = current_autograd_node()
        number = self._of_nodes.get(-1 if node is None else node_sequence(node), self._inside[-1])
        self._inside[-1] = number
        return number

    def error(self, what: str) -> PlanError:
        """What is raised where tracing meets a number that nobody has."""
        name = self._modules[self._inside[-1]]
        where = f"module {name!r}" if name else "the model itself"
        when = "backward of " if self._is_backward else ""
        return PlanError(
            f"{when}{where} {what}. A plan is made without computing anything: what a step does may depend on shapes, and "
            "on integers and booleans among the inputs, but on no other numbers"
        )

    # -- operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if self._depth:
            return func(*args, **named)
        self._blocks.note_deaths(len(self._ops))
        self._depth += 1
        try:
            result = self._run(func, args, named)
        finally:
            self._depth -= 1
        self._write_down(Call(func, args, named, result))
        return result

    def _run(self, func: OpOverload[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs an operator: on fakes, or on known numbers."""
        tensors = [one for one in tree_iter((args, named)) if isinstance(one, Tensor)]
        known = all(self._has_numbers(one) for one in tensors) and torch.Tag.nondeterministic_seeded not in func.tags
        try:
            result = _called(func, args, named)
        except Exception as error:
            if known and tensors:
                return self._computed(func, args, named)
            raise self.error(_said(func, error)) from error
        made = [one for one in tree_iter(result) if isinstance(one, Tensor)]
        if known and all(_may_be_known(one) for one in made):
            return self._computed(func, args, named)
        if func._schema.is_mutable:
            self._stale.update(storage_key(one.untyped_storage()) for one in tensors if not is_fake(type(one)))
        return result

    def _computed(self, func: OpOverload[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        with without_dispatch_modes():
            return func(*args, **named)

    def _has_numbers(self, tensor: Tensor) -> bool:
        return not is_fake(type(tensor)) and storage_key(tensor.untyped_storage()) not in self._stale

    def _write_down(self, call: Call) -> None:
        op, module = len(self._ops), self._module()
        for one in tree_iter(call.result):
            if isinstance(one, Tensor):
                self._blocks.add(one, op, module)
        nbytes = traffic_of(call)
        if nbytes:
            name = call.target._schema.name.removeprefix("aten::")
            self._ops.append(Op(name, module, flops_of(call), nbytes, is_single(call)))

    # -- autograd -----------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> _Kept | _Moved:
        """A handle of what autograd saves; called while the operator that saves it is recorded."""
        self._depth += 1
        try:
            return self._pack(tensor)
        finally:
            self._depth -= 1

    def _pack(self, tensor: Tensor) -> _Kept | _Moved:
        op = len(self._ops)
        self._blocks.note_deaths(op)
        mark = marks.mark_of(tensor.untyped_storage()) if marks.any_marks() else None
        reason = reason_to_stay(tensor, self._min_bytes, preferred=mark is marks.Mark.PREFER)
        if reason is None and (mark is marks.Mark.KEEP or marks.in_no_offload_region()):
            reason = KeepReason.MARKED if mark is marks.Mark.KEEP else KeepReason.REGION
        block = None
        if reason is None or reason is KeepReason.SMALL:
            block = self._blocks.add(tensor, op, self._inside[-1])
        if reason is None and (block is None or block.nbytes % tensor.itemsize or tensor.is_conj() or tensor.is_neg()):
            reason = KeepReason.LAYOUT
        goes_along = reason is KeepReason.SMALL and block is not None and block.saved is not None and tensor.numel() > 0
        number = len(self._saves)
        self._saves.append((Save(tensor.nbytes, tensor.requires_grad, None if goes_along else reason, -1), block))
        if block is None or not (goes_along or reason is None):
            with _as_it_is(tensor):
                return _Kept(tensor if tensor.is_leaf else tensor.detach(), number)
        saved = self._blocks.save(block, tensor, op)
        return _Moved(saved, number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, handle: _Kept | _Moved) -> Tensor:
        """The saved tensor, or one like it."""
        op = len(self._ops)
        self._blocks.note_deaths(op)
        self._asks.append(Ask(handle.save, op))
        if isinstance(handle, _Kept):
            return handle.tensor
        self._depth += 1
        try:
            whole = self._blocks.ask(handle.saved, handle.dtype, op)
            with _as_it_is(whole):
                return whole.as_strided(handle.size, handle.stride, handle.offset)
        finally:
            self._depth -= 1

    # -- what came of it ----------------------------------------------------------------------------------------------

    def program(self) -> Program:
        """What was written down."""
        self._blocks.note_deaths(len(self._ops))
        numbers, storages, other_bytes = self._blocks.result(len(self._ops))
        saves = tuple(
            save if save.reason is not None else save._replace(storage=numbers.get(block, -1))
            for save, block in self._saves
        )
        modules = tuple(self._modules)
        return Program(modules, tuple(self._ops), self._forward_ops, saves, tuple(self._asks), storages, other_bytes)


def _as_it_is(tensor: Tensor) -> AbstractContextManager[object]:
    """Where what is made of a tensor with known numbers has them too."""
    return nullcontext() if is_fake(type(tensor)) else without_dispatch_modes()


def _may_be_known(tensor: Tensor) -> bool:
    """Whether a result is computed where all that it follows from is known: numbers that steer, not activations."""
    if tensor.nbytes > _MOST_KNOWN:
        return False
    return tensor.numel() <= 1 or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _called(func: OpOverload[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What ``func`` returns for tensors that may be fake."""
    if func._schema.name == "aten::_grouped_mm" and args[0].dtype is not torch.bfloat16:
        # torch's rule for tensors without bytes takes bfloat16 alone, its kernels others too.
        left, right = (one.to(torch.bfloat16) for one in args[:2])
        return func(left, right, *args[2:], **named).to(args[0].dtype)
    return func(*args, **named)


#: What torch raises where an operator's result depends on numbers, and what that is.
_QUESTIONS = {
    "DataDependentOutputException": "asks for the value of a tensor",
    "DynamicOutputShapeException": "makes a tensor whose size depends on the numbers in another",
}


def _said(func: OpOverload[..., Any], error: Exception) -> str:
    name = func._schema.name.removeprefix("aten::")
    what = _QUESTIONS.get(type(error).__name__)
    return f"{what} ({name})" if what else f"calls {name}, which cannot be traced ({type(error).__name__}: {error})"
