"""Real steps of a model on the CPU, written down as a ``Program`` with the time that each operator took.

[Note: real steps]
Nothing is traced: the model itself runs, forward and backward, so what it does may depend on any number. The recorder
is the one of a trace. What autograd saves it copies, so that a storage goes when forward lets go of it, as it would if
it had left; so a step takes the memory of a step, the largest saved storage once more, and parameters and buffers
twice, which are copied to be put back. Operators are timed where they run, without what the recorder does. Gradients,
parameters, buffers and random numbers are afterwards what they were. So are tensors from outside, such as those of a
head that the loss uses, which are copied before the first operator that writes to them. Attributes and containers that
a step changes are as they are after a step. A few operators fill what they have saved only afterwards: its copy has
other numbers then, and so have gradients, which planning does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eager_offload._torch import tree_iter, tree_map, without_dispatch_modes
from eager_offload.errors import ConfigError, PlanError
from eager_offload.matched_modules import MatchedModules
from eager_offload.planning.numbers import by_itself, numbers_put_back
from eager_offload.planning.program import Program
from eager_offload.planning.recorder import Recorder
from eager_offload.planning.trace import run_step


class RealSteps(NamedTuple):
    """What real steps have done."""

    program: Program
    """Of the last one."""
    seconds: tuple[float, ...]
    """How long each of its operators took: the least of the steps that had the same ones."""


def record(
    model: nn.Module,
    inputs: object,
    loss: Callable[[Any], Tensor] | None,
    steps: int,
    *,
    min_bytes: int,
    patterns: Sequence[str] = (),
) -> RealSteps:
    """Runs ``steps`` training steps without an optimizer, on a CPU; arguments and errors as for ``trace``."""
    inputs = tree_map(_leaf, inputs)
    given = [one for one in tree_iter(inputs) if isinstance(one, Tensor)]
    parts = [one for one in (model, loss) if isinstance(one, nn.Module)]
    for one in (*_own(parts), *given):
        if one.device.type != "cpu":
            raise ConfigError(
                f"steps={steps!r} is not accepted for a model on {one.device}: real steps are timed on a CPU alone, "
                "where an operator is over when its call returns. Leave steps out: the step is traced then"
            )
    found: list[RealSteps] = []
    for _ in range(steps):
        with by_itself(), numbers_put_back(), _put_back(parts, given) as outside:
            recorder, matched = Recorder(min_bytes, outside=outside), MatchedModules()
            for one in (*_own(parts), *given):
                recorder.has(one)
            try:
                if patterns:
                    matched.add(model, patterns)
                copy_context().run(run_step, recorder, model, inputs, loss)
            finally:
                matched.end()
            found.append(RealSteps(recorder.program(), tuple(recorder.seconds)))
    last = found[-1]
    alike = [one.seconds for one in found if one.program.ops == last.program.ops]
    return RealSteps(last.program, tuple(map(min, zip(*alike, strict=True))))


def _own(parts: Sequence[nn.Module]) -> list[Tensor]:
    return [one for part in parts for one in (*part.parameters(), *part.buffers())]


def _leaf(one: object) -> object:
    """An input that belongs to no graph, which a backward would free."""
    if isinstance(one, Tensor) and not one.is_leaf:
        return one.detach().requires_grad_(one.requires_grad)
    return one


@contextmanager
def _put_back(parts: Sequence[nn.Module], given: Sequence[Tensor]) -> Iterator[Callable[[Tensor], None]]:
    """Gradients, parameters and buffers are what they were, bit for bit, and the same tensors. So is each tensor from
    outside that the function is called with, before it changes."""
    gradients: list[tuple[Tensor, Tensor | None]] = []
    numbers = [(one, one.detach().clone()) for one in _own(parts)]
    modules = [(one, dict(one.named_buffers(recurse=False))) for part in parts for one in part.modules()]
    known: set[int] = set()  # they are held by the lists

    def put_gradient_back(leaf: Tensor) -> None:
        gradients.append((leaf, leaf.grad))
        leaf.grad = None

    def put_back(tensor: Tensor) -> None:
        if id(tensor) in known:
            return
        known.add(id(tensor))
        if tensor.requires_grad and not tensor.is_leaf:
            raise PlanError(
                f"the step takes a tensor of the shape {tuple(tensor.shape)} from outside of the model, which belongs "
                "to a graph: its backward would free that. Give it as an input, or detach it"
            )
        with without_dispatch_modes():
            numbers.append((tensor, tensor.detach().clone()))
            if tensor.is_leaf and tensor.requires_grad:
                put_gradient_back(tensor)

    for one in (*_own(parts), *given):
        if one.is_leaf:
            put_gradient_back(one)
    try:
        yield put_back
    finally:
        for module, buffers in modules:  # a step may have put others in their place
            for name, buffer in buffers.items():
                setattr(module, name, buffer)
        for leaf, gradient in reversed(gradients):  # one that was noted twice is what it was first
            leaf.grad = gradient
        with torch.no_grad():
            for tensor, number in reversed(numbers):
                same = (tensor == number) | ((tensor != tensor) & (number != number))
                if not same.all():  # to write the same would spoil graphs that have saved it
                    tensor.copy_(number)
