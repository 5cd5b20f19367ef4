"""Runs a training step plain, compiled, and compiled inside an ``Offload``, and compares to the last bit.

What counts is the same step compiled by the same backend without an ``Offload``. ``aot_eager`` runs the operators that
eager code runs, so there the results have to be those of eager code too. Inductor makes kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import eager_offload as eo
from tests.compile.sanitizer import sanitized
from tests.hazards.backends import assert_settled, hooks_are_gone
from tests.proof.bits import same_bits
from tests.threads import collect

#: Compiles a function; takes what ``torch.compile`` takes, but not the backend.
Compile = Callable[..., Any]
#: A training step from nothing: makes its inputs, compiles with what it is given, has the forward run inside the
#: context, and returns all there is to compare.
Step = Callable[[Compile, AbstractContextManager[object]], Sequence[Tensor | None]]

#: Inductor on a CPU calls a C++ compiler for each kernel, which takes its time: a run takes some of all such tests.
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.long, pytest.mark.sampled(3, of="inductor")])
#: For tests that run on both.
BOTH = pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])


def deep(x: Tensor, weight: Tensor) -> Tensor:
    """Saves several intermediates, all of which may move."""
    for _ in range(3):
        x = (x @ weight).sin().exp().cos()
    return x


def compiler(backend: str) -> Compile:
    """``torch.compile`` with a backend."""

    def compiled(function: Any, **named: Any) -> Any:
        return torch.compile(function, backend=backend, **named)

    return compiled


def plain(function: Any, **named: Any) -> Any:
    """What stands in the place of a compiler for eager code."""
    return function


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """A compiler that knows nothing from before, and takes no graph from a disk."""
    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(inductor_config.patch(fx_graph_cache=False))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        try:
            yield
        finally:
            torch._dynamo.reset()


def results_of(step: Step, compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
    """Runs a step with the same random numbers each time."""
    torch.manual_seed(0)
    results: list[Tensor | None] = []
    for one in step(compile, around):
        results += [None] if one is None else [part.clone() for part in _plain_tensors(one)]
    return results


def _plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensor, or those that a wrapper of tensors is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _plain_tensors(getattr(tensor, name))]


def same_results(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def compare(
    step: Step,
    backend: str,
    *,
    moves: bool = True,
    regions: int = 1,
    as_eager: bool = True,
    **fields: Any,
) -> eo.OffloadStats:
    """Asserts that an ``Offload`` around a compiled step changes nothing, moves something and leaves nothing behind.

    Args:
        step: what is run.
        backend: what compiles it.
        moves: whether a byte has to move at all.
        regions: how many compiled graphs have to be counted at least.
        as_eager: whether ``aot_eager`` alone gives what eager code gives. It may add up gradients in another order.
        **fields: of the ``Offload``, which moves everything that can move if they do not say otherwise.

    Returns:
        What the ``Offload`` did.
    """
    with fresh_compiler():  # again: a compiler may take another of its graphs, for sizes that it has seen by then
        expected = [results_of(step, compiler(backend), nullcontext()) for _ in range(2)]
    if backend == "aot_eager" and as_eager:
        assert same_results(results_of(step, plain, nullcontext()), expected[0]), "the backend alone is not exact"
    with fresh_compiler(), sanitized() as found:
        offload = eo.Offload(**{"tier": "disk", "min_bytes": 0, "keep_last_bytes": 0, **fields})
        for results in expected:
            assert same_results(results_of(step, compiler(backend), offload), results), "the results are others"
    assert not found, found
    collect()  # what was compiled is full of cycles
    stats = assert_settled(offload)
    offload.close()
    assert hooks_are_gone(), "saved-tensor hooks were left behind"
    if moves:
        assert stats.offloaded_bytes > 0, "nothing moved"
        assert stats.bytes_out > 0
        assert stats.bytes_in > 0, "nothing came back"
        assert stats.compiled_regions >= regions, f"{stats.compiled_regions} compiled regions"
    return stats


def step_of(function: Callable[..., Any], *inputs: Tensor, **named: Any) -> Step:
    """The step that calls ``function`` on copies of ``inputs`` and differentiates the sum of its squared outputs.

    Its results are the outputs, the inputs as they are afterwards, and the gradients.

    Args:
        function: takes ``inputs``, returns a tensor or several.
        *inputs: those that require grad are leaves. A function gets what they times one are: leaves may not be
            changed in place.
        **named: for the compiler.
    """

    def step(compile: Compile, around: AbstractContextManager[object]) -> Sequence[Tensor | None]:
        leaves = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
        given = [leaf * 1 for leaf in leaves]
        run = compile(function, **named)
        with around:
            outputs = run(*given)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        loss = sum(one.square().sum() for one in outputs if one.requires_grad)
        loss.backward()  # type: ignore[no-untyped-call]
        return [*outputs, *given, *(leaf.grad for leaf in leaves)]

    return step
