"""A model and its inputs, traced into a ``Program``: nothing is computed, and nothing is allocated.

[Note: tracing]
A copy of the model is run whose parameters are fake tensors on the CPU, which stand for the device. So the model
itself is not touched, which another thread may be training, and every hook that the trace needs is the copy's. A fake
CPU tensor takes autograd to the kernels of a CPU; those of an accelerator would abort where torch was built without it.

[Note: known numbers]
Integers and booleans that depend on no parameter and on no activation (token numbers, masks, positions) are real in the
trace, and what follows from them alone is computed. So a mask of ones is found to be one as in a real step, which some
models do not ask of a fake tensor, and indices may be counted. Whatever depends on anything else is fake; a question
for its value is an error that names the module.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eager_offload._torch import (
    FakeTensorMode,
    is_fake,
    is_plain_fake,
    is_wrapper,
    storage_key,
    tree_iter,
    tree_map,
    without_dispatch_modes,
)
from eager_offload.codecs import CodecPolicy
from eager_offload.eager.checkpointing import saving_with
from eager_offload.errors import PlanError
from eager_offload.plan.apply import checkpointed
from eager_offload.plan.numbers import by_itself, numbers_of_its_own
from eager_offload.plan.program import Program
from eager_offload.plan.recorder import MOST_KNOWN, PLAIN, Recorder, is_of_fakes
from eager_offload.skipping import SkippedModules


def trace(
    model: nn.Module,
    inputs: object,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    min_bytes: int,
    skip: Sequence[str] = (),
    again: Sequence[str] = (),
    policy: CodecPolicy = PLAIN,
) -> Program:
    """One training step of ``model`` as numbers.

    Args:
        model: real, or on ``meta``; it is neither changed nor run.
        inputs: what it is called with: a tensor, a tuple or list of arguments, or a mapping of keywords.
        loss: makes the loss of what the model returns; ``None``: that itself, or its ``loss``.
        min_bytes: a smaller saved tensor stays.
        skip: patterns of the names of modules that keep what they save.
        again: names of modules that are computed again, as :meth:`Plan.apply` has them.
        policy: the codecs that may pack what moves.

    Raises:
        ConfigError: a pattern matches no module.
        PlanError: what the model does depends on numbers that no trace has.
    """
    with (
        by_itself(),
        numbers_of_its_own() as generator,
        _logging_no_traceback(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        recorder, skipped = Recorder(min_bytes, policy, generator=generator), SkippedModules()
        stand_ins = _StandIns(recorder.has)
        inputs = stand_ins.of_inputs(inputs)
        traced, made_loss = stand_ins.copy_of(model, loss)
        if skip:
            skipped.add(traced, skip)
        try:
            run_step(recorder, traced, inputs, made_loss, again)
        except PlanError:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError | TypeError) and is_of_fakes(error):
                raise recorder.error(f"asks for the numbers of a tensor ({error})") from error
            error.add_note(
                f"eager_offload.plan met this error in {recorder.where}, while it traced a step. If real steps have "
                'none, plan from them: eo.plan(..., device="here", steps=2)'
            )
            raise  # the model's own
        return recorder.program()


@contextmanager
def _logging_no_traceback() -> Iterator[None]:
    """Of an operator that raises, torch's rules log no traceback for the calling thread: the error itself has it."""
    thread, logger = threading.get_ident(), logging.getLogger(FakeTensorMode.__module__)

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != thread or not str(record.msg).startswith("failed while attempting to run meta")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def run_step(
    recorder: Recorder, model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor] | None, again: Sequence[str] = ()
) -> None:
    """Has ``recorder`` write down a forward of ``model`` and its backward, with those modules computed again."""
    if isinstance(inputs, Mapping):
        call = partial(model, **inputs)
    else:
        call = partial(model, *(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    with recorder.watching(model), recorder:
        with (
            torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack),
            saving_with(recorder.saver),
            checkpointed(model, again),
        ):
            total = _loss_of(call(), loss)
        recorder.begin_backward()
        total.backward()  # type: ignore[no-untyped-call]  # torch declares no types for it
        del total


def _loss_of(returned: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """The loss, as a number; raises ``PlanError`` where there is none."""
    found = returned if loss is None else loss(returned)
    if loss is None and not isinstance(found, Tensor):
        found = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        if found is None and isinstance(returned, Sequence) and returned:
            found = returned[0]
    if not isinstance(found, Tensor) and loss is not None:
        raise PlanError(
            f"loss=... returns {type(found).__name__}, of which there are no gradients: it takes what the model "
            "returns and has to return the loss as a tensor"
        )
    if not isinstance(found, Tensor):
        raise PlanError(
            f"no loss was found: the model returns {type(returned).__name__}, which is no tensor and has no `loss`. "
            "Give loss=..., a function that makes it of what the model returns"
        )
    if not found.requires_grad:
        raise PlanError("the loss requires no gradient, so a step of this model saves nothing: no parameter is trained")
    return found if found.dim() == 0 else found.sum()


# -- what stands for the tensors of a model and its inputs ------------------------------------------------------------


class _StandIns:
    def __init__(self, has: Callable[[Tensor], None]) -> None:
        #: Is called with each.
        self._has = has
        self._wholes: dict[int, Tensor] = {}
        self._found: dict[int, Tensor] = {}
        self._owners: list[object] = []  # no key is used twice

    def of_inputs(self, inputs: object) -> Any:
        return tree_map(lambda one: self._of(one) if isinstance(one, Tensor) else one, inputs)

    def copy_of(
        self, model: nn.Module, loss: Callable[[Any], Tensor] | None
    ) -> tuple[nn.Module, Callable[[Any], Tensor] | None]:
        """The model, and the loss if that is a module, with stand-ins for all tensors; raises ``PlanError`` where it
        cannot."""
        found: dict[int, Any] = {}
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
        try:
            return copy.deepcopy((model, loss), {**found, **self._found})
        except Exception as error:
            raise PlanError(
                f"the model cannot be copied, which tracing it takes ({type(error).__name__}: {error}). Give the "
                "module inside of what wraps it"
            ) from error

    def _of(self, tensor: Tensor) -> Tensor:
        if (known := self._found.get(id(tensor))) is not None:
            return known
        if is_wrapper(tensor) or not (type(tensor) in (Tensor, nn.Parameter) or is_plain_fake(tensor)):
            raise PlanError(f"a {type(tensor).__name__} is none of the tensors that a plan can be made for")
        if tensor.layout is not torch.strided:
            raise PlanError(f"a tensor of the layout {tensor.layout} is none that a plan can be made for")
        if _has_numbers(tensor):
            with without_dispatch_modes(), torch.no_grad():
                made = tensor.detach().to("cpu", copy=True)
        else:
            made = self._fake(tensor)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        elif tensor.requires_grad:
            made.requires_grad_()
        self._found[id(tensor)] = made
        self._owners.append(tensor)
        self._has(made)
        return made

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


def _has_numbers(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are there: see [Note: known numbers]."""
    return (
        not is_fake(type(tensor))
        and tensor.device.type != "meta"
        and not tensor.dtype.is_floating_point
        and not tensor.dtype.is_complex
        and tensor.nbytes <= MOST_KNOWN
    )
