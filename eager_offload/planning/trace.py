"""Traces a model and its inputs into a ``Recording``, on fake tensors: nothing is computed or allocated.

[Note: tracing]
The traced model is a copy whose parameters are fake tensors of the device, or of a CPU in its place (target.py). Hooks
are on the copy only: another thread may be training the user's model. Inputs and functions have stand-ins too
(stand_ins.py). Backward runs on the calling thread, because the modes of a trace are thread-local.

[Note: leaked tensors]
A step may store a fake tensor in an object outside of the copy (e.g. in a list that a hook fills). The library does not
change the user's objects, so a tensor of the trace that is alive afterwards is an error, which names its holder.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from types import CellType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from eager_offload.core.modules import MatchedModules, own_loss
from eager_offload.eager.checkpointing import Saver, saving_with
from eager_offload.errors import PlanError
from eager_offload.planning import OF_TORCHSCRIPT
from eager_offload.planning.blocks import Blocks
from eager_offload.planning.levels import Recording
from eager_offload.planning.numbers import CACHE, by_itself, caches_apart, numbers_of_its_own
from eager_offload.planning.recorder import Recorder, is_of_fakes
from eager_offload.planning.stand_ins import StandIns, are_on, tracing, values_in
from eager_offload.planning.target import CPU, TargetKernels, autocast_of, device_of
from eager_offload.torch_private.calls import without_torch_function
from eager_offload.torch_private.inductor import FakeTensorMode
from eager_offload.torch_private.memory import tree_iter

_NO_PATTERNS: Mapping[str, Sequence[str]] = {}
#: Modules of torch whose NotImplementedError or AssertionError is about an operator, and not the model's own.
_OPERATORS = ("torch.nn.attention", "torch._ops", "torch._higher_order_ops")


def record(
    model: nn.Module,
    inputs: object,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    min_bytes: int,
    patterns: Mapping[str, Sequence[str]] = _NO_PATTERNS,
    target: str = CPU,
) -> Recording:
    """Returns the recording of one training step of ``model``.

    Args:
        model: real, or on ``meta``; it is neither changed nor run.
        inputs: a tensor, a tuple or list of arguments, or a mapping of keywords.
        loss: maps the model's result to the loss; ``None``: the result itself, or its ``loss``.
        min_bytes: smaller saved tensors are kept.
        patterns: ``skip`` and ``only`` of the configuration.
        target: the device type whose kernels are recorded: ``"cpu"`` or ``"cuda"``; an accelerator of the process takes
            the place of ``"cuda"``.

    Raises:
        ConfigError: a pattern matches no module.
        PlanError: the step depends on tensor values, cannot be traced, or leaks a tensor.
    """
    made = _Made()

    def traced_step() -> Recording:
        device = device_of(target)
        is_guess = device.type == CPU != target
        # The default device of new tensors: the caller's if the program is already on the device; otherwise the
        # device, because all of the program's tensors are traced as tensors of it.
        default = torch.get_default_device()
        is_there = default.type in (CPU, device.type) and are_on(device, (*tree_iter(inputs), *values_in(model)))
        with (
            by_itself(default if is_there else device),
            torch.autograd.set_multithreading_enabled(False),
            caches_apart(model, loss),
            numbers_of_its_own() as generator,
            _logging_no_traceback(),
            FakeTensorMode(allow_non_fake_inputs=True),
            autocast_of(target) if is_guess else nullcontext(),
        ):
            recorder = Recorder(min_bytes, generator=generator, blocks=made.blocks, is_limited="only" in patterns)
            matched = MatchedModules()
            stand_ins = StandIns(recorder, device)
            traced, given, made_loss = stand_ins.copy_of(model, inputs, loss)
            for part in (traced, made_loss):
                if isinstance(part, nn.Module):
                    made.modules += map(ref, part.modules())
            if patterns:
                matched.add(traced, patterns)
            try:
                with tracing(recorder), stand_ins, TargetKernels() if is_guess else nullcontext():
                    _run_step(recorder, traced, given, made_loss)
            except PlanError:
                raise
            except Exception as error:
                _refuse(error, recorder)
                error.add_note(
                    f"eager_offload.plan met this error in {recorder.where}, while it traced a step of a copy of the "
                    "model"
                )
                raise  # the model's own
            recording = recorder.recording()
            return recording if is_guess else replace(recording, program=replace(recording.program, guessed=()))

    with _nothing_held(made):
        return copy_context().run(traced_step)  # in a copy, so that context variables the step sets are dropped


def _refuse(error: Exception, recorder: Recorder) -> None:
    """Raises a ``PlanError`` if ``error`` is about something that cannot be traced, and is not the model's own."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    raised = str(last.f_globals.get("__name__"))
    if isinstance(error, NotImplementedError | AssertionError) and raised.startswith(_OPERATORS):
        raise PlanError(
            f"{recorder.where} calls an operator that cannot be traced ({error}). Plan with another attention in its "
            "place, such as torch.nn.functional.scaled_dot_product_attention, which saves tensors of the same sizes, "
            "or train without a plan: Offload(device_budget=...) measures the first steps and moves the fewest bytes "
            "that keep the budget"
        ) from error
    if "TorchScript interpreter" in str(error):
        raise PlanError(f"{recorder.where} calls code of {OF_TORCHSCRIPT}") from error
    if isinstance(error, RuntimeError | TypeError) and is_of_fakes(error):
        raise recorder.error(f"asks for the numbers of a tensor ({error})") from error


@contextmanager
def _logging_no_traceback() -> Iterator[None]:
    """Drops torch's log of a failed fake operator on the calling thread: the error itself has the traceback."""
    thread, logger = threading.get_ident(), logging.getLogger(FakeTensorMode.__module__)

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != thread or not str(record.msg).startswith("failed while attempting to run meta")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _run_step(recorder: Recorder, model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor] | None) -> None:
    with recorder.watching(model), recorder:
        with (
            torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack),
            saving_with(Saver(recorder.pack, recorder.unpack, recorder.min_bytes)),
        ):
            total = loss_of_step(model, inputs, loss)
        recorder.begin_backward(total)
        torch.autograd.backward(total)  # not `total.backward()`, which would disable function modes
        del total


def loss_of_step(model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """Runs a forward with the arguments of ``plan``, and returns its loss as a scalar tensor."""
    if isinstance(inputs, Mapping):
        return _loss_of(model(**inputs), loss)
    return _loss_of(model(*(inputs if isinstance(inputs, tuple | list) else (inputs,))), loss)


def _loss_of(returned: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    found = returned if loss is None else loss(returned)
    if loss is None and not isinstance(found, Tensor):
        found = own_loss(found)
        if found is None and isinstance(returned, Sequence) and returned:
            found = returned[0]
    if not isinstance(found, Tensor) and loss is not None:
        raise PlanError(
            f"loss=... returns {type(found).__name__}, which has no gradients: give a function that takes the model's "
            "output and returns the loss as a tensor"
        )
    if not isinstance(found, Tensor):
        raise PlanError(
            f"no loss was found: the model returns {type(returned).__name__}, which is not a tensor and has no `loss`. "
            "Give loss=..., a function that takes the model's output and returns the loss"
        )
    if not found.requires_grad:
        raise PlanError("the loss requires no gradient, so a step of this model saves nothing: no parameter is trained")
    return found if found.dim() == 0 else found.sum()


#: Types of holders that are not named themselves: their own holders are searched, up to this many levels.
_FOLLOWED, _LEVELS = (tuple, list, set, frozenset, CellType, FunctionType), 4
_HELD = (
    "a tensor of the plan's trace is held by {}, but has no values: plan in a separate process, with python -m "
    "eager_offload plan, or let the model keep the tensor in an attribute, which a copy of the model has too"
)
_A_DICT = "a dict"


class _Made:
    """Weak references to the storages and module copies of a trace."""

    def __init__(self) -> None:
        self.blocks, self.modules = Blocks(), list[ref[nn.Module]]()

    def is_alive(self) -> bool:
        return self.blocks.are_alive() or any(weak() is not None for weak in self.modules)


@contextmanager
def _nothing_held(made: _Made) -> Iterator[None]:
    """Checks after the ``with`` that nothing of ``made`` is alive: see [Note: leaked tensors].

    Raises:
        PlanError: an object is alive. An error of the ``with`` itself gets a note instead.
    """
    seen = [sys.exception()]
    try:
        yield
    except BaseException as error:
        found: BaseException | None = error
        while found is not None and found not in seen:  # the frames of its traceback would hold tensors
            seen.append(found)
            traceback.clear_frames(found.__traceback__)
            found = found.__cause__ or found.__context__
        if names := _holders(made):
            error.add_note(f"eager_offload: {_HELD.format(', '.join(names))}")
        raise
    names = _holders(made)
    if made.is_alive():
        raise PlanError(_HELD.format(", ".join(names or ["something that Python cannot see"])))


def _holders(made: _Made) -> list[str]:
    if not made.is_alive():
        return []
    is_frozen = gc.get_freeze_count() > 0
    try:
        gc.unfreeze()  # frozen objects are neither collected nor found as referrers
        gc.collect()
        with without_torch_function():  # the objects include tensors of any class
            return _found(made) if made.is_alive() else []
    finally:
        if is_frozen:
            gc.freeze()


def _found(made: _Made) -> list[str]:
    targets: list[Any] = [one for weak in made.modules if (one := weak()) is not None]
    own = {id(part) for one in targets for part in (one, vars(one), *vars(one).values())}
    targets += [one for one in gc.get_objects() if issubclass(type(one), Tensor) and made.blocks.has(one)]
    names, last = dict[str, None](), list[Any]()
    for _ in range(_LEVELS + 1):
        own |= {id(targets), id(last)}
        found = [one for one in gc.get_referrers(*targets) if id(one) not in own]
        ids, last = {*map(id, targets)}, [one for one in found if isinstance(one, _FOLLOWED)] or last
        others = (one for one in found if not isinstance(one, (*_FOLLOWED, FrameType, TracebackType)))
        names |= dict.fromkeys(_named(one, ids) for one in others)
        if last is targets:
            break
        targets, own = last, {*own, id(found)}
    # A function without another holder belongs to a frame (e.g. a comprehension).
    return [*names] or [*dict.fromkeys(f"a {type(one).__name__}" for one in last if type(one) is not FunctionType)]


def _named(holder: Any, ids: set[int], levels: int = 2) -> str:
    """Names ``holder`` of the objects with ``ids``; for a dictionary, its keys and its owner, up to ``levels`` up."""
    if not isinstance(holder, dict):
        return f"a {type(holder).__name__}"
    keys = ", ".join(repr(key) for key, one in [*dict.items(holder)] if id(one) in ids and type(key) is str)
    keys = keys or "a value"
    owners = gc.get_referrers(holder)
    for owner in owners:
        if isinstance(owner, type | ModuleType | CACHE):
            return (
                f"{keys} of {owner.__module__ if isinstance(owner, CACHE) else type(owner).__name__} {owner.__name__}"
            )
        if type(owner).__dictoffset__ and object.__getattribute__(owner, "__dict__") is holder:
            return f"{keys} of a {type(owner).__name__}"
    for owner in owners if levels else ():
        found = ""
        if isinstance(owner, dict):
            found = _named(owner, {id(holder)}, levels - 1)
        elif isinstance(owner, CellType):
            found = _variable(owner)
        if found and not found.endswith(_A_DICT):
            return f"{keys} of {found}"
    return f"{keys} of {_A_DICT}"


def _variable(cell: CellType) -> str:
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if type(closure) is tuple else ():
            cells = function.__closure__ if isinstance(function, FunctionType) else None
            if cells is not None and cells is closure:
                names = (name for name, one in zip(function.__code__.co_freevars, cells, strict=True) if one is cell)
                return f"{next(names)!r} of function {function.__qualname__}"
    return ""
