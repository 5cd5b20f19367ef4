"""Every operator that torch can differentiate, with torch's own samples: outputs and gradients equal to the last bit.

An operator runs on fresh copies of a sample's arguments, once with autograd alone and once under an ``Offload`` that
moves everything. The copies are no leaves, so that what an operator saves of its arguments may move, and all but a copy
of the result is dropped between forward and backward, so that it really has to come back. Where autograd raises, the
same error is expected. No operator is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

import eager_offload as eo
from tests.hazards.backends import assert_balanced, assert_settled
from tests.proof.bits import same_results
from tests.sampling import spread

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

Operator = Callable[..., Any]
OPERATORS = {op.full_name: op for op in op_db if op.supports_autograd}
DTYPES = (torch.float32, torch.complex64)
SEED = 20
MODIFIED = "a saved tensor was modified"

#: Of the tensors that autograd saves, those that are not expected to move.
EXPECTED_TO_STAY = ("small", "parameter", "layout", "device")

#: Operators that read memory which was never written, so that autograd alone differs from one run to the next: torch
#: hands gelsy of LAPACK pivots that were never set. They run with such memory filled.
READ_UNWRITTEN_MEMORY = {"linalg.lstsq", "linalg.lstsq.grad_oriented"}

#: Operators whose samples are for other devices, or for integers, which have no gradients.
NOT_ON_A_CPU = {
    "torch.ops.aten._flash_attention_forward",
    "torch.ops.aten._efficient_attention_forward",
    "nn.functional.batch_norm.without_cudnn",
    "nn.functional.one_hot",
}


#: Values of what an operator returned and gradients, or what was raised.
Results = list[Tensor | None] | str


# -- one run ----------------------------------------------------------------------------------------------------------


def duplicate(tensor: Tensor) -> Tensor:
    """A copy with the same strides and offset, in a storage of the same size."""
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    copy = torch.empty(0, dtype=tensor.dtype)
    copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.size(), tensor.stride())
    copy = copy.conj() if tensor.is_conj() else copy
    return torch._neg_view(copy) if tensor.is_neg() else copy


class Duplicate(torch.autograd.Function):
    """A differentiable ``duplicate``."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return duplicate(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def copied(sample: SampleInput) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """Fresh copies of a sample's arguments, and the leaves of which those are made that require grad."""
    copies: dict[int, Tensor] = {}
    leaves: list[Tensor] = []

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            fresh = duplicate(value)
            if value.requires_grad:
                leaves.append(fresh.requires_grad_())
                fresh = Duplicate.apply(fresh)
            copies[id(value)] = fresh
        return copies[id(value)]

    args, kwargs = tree_map(copy, ((sample.input, *sample.args), dict(sample.kwargs)))
    return args, kwargs, leaves


def run(operator: Operator, sample: SampleInput, offload: eo.Offload | None = None, *, twice: bool = False) -> Results:
    """Calls ``operator`` and differentiates what it returns, and with ``twice`` the gradients too."""
    context: AbstractContextManager[Any] = nullcontext() if offload is None else offload
    try:
        leaves, results, outputs = forward(operator, sample, context)
        if not results:
            return outputs
        all_left(offload)
        if not twice:
            return [*outputs, *gradients_of(results, leaves)]
        with context:
            first = gradients_of(results, leaves, create_graph=True)
        results.clear()
        all_left(offload)
        again = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
        return [*outputs, *first, *(gradients_of(again, leaves) if again else ())]
    except Exception as error:
        return described(error, under_offload=offload is not None)


def forward(
    operator: Operator, sample: SampleInput, context: AbstractContextManager[Any]
) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """What is left for backward, and nothing else is alive: leaves, copies of what was returned and can be
    differentiated, and the values of all that was returned."""
    torch.default_generator.manual_seed(SEED)
    args, kwargs, leaves = copied(sample)
    with context:
        returned = sample.output_process_fn_grad(operator(*args, **kwargs))
    tensors = [value for value in tree_leaves(returned) if isinstance(value, Tensor)]
    results = [tensor.clone() for tensor in tensors if tensor.requires_grad]
    outputs: list[Tensor | None] = [tensor.detach().clone() for tensor in tensors]
    return leaves if results else [], results, outputs


def all_left(offload: eo.Offload | None) -> None:
    if offload is not None:
        offload.stats(synchronize=True)


def gradients_of(
    results: list[Tensor], leaves: list[Tensor], *, create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    weights = [
        torch.randn(result.shape, dtype=result.dtype) if result.layout is torch.strided else result.detach().clone()
        for result in results
    ]
    return torch.autograd.grad(results, leaves, weights, allow_unused=True, create_graph=create_graph)


def described(error: Exception, *, under_offload: bool) -> str:
    """What has to be the same about an error with and without offload."""
    if "modified by an inplace operation" in str(error):
        assert isinstance(error, eo.SavedTensorModifiedError) is under_offload, repr(error)
        return MODIFIED
    if "has been modified inplace" in str(error):
        # Of one among several views autograd says this; it looks for the view's node before it looks at the version.
        assert not under_offload, repr(error)
        return MODIFIED
    return f"{type(error).__name__}: {error}"


# -- what is expected -------------------------------------------------------------------------------------------------


def check_exact(op: OpInfo, offload: eo.Offload, count: int, *, twice: bool = False) -> None:
    """The operator and its in-place variant give the same with and without ``offload``, for the samples chosen."""
    with unwritten_memory_filled(op):
        for variant in filter(None, (op, op.inplace_variant)):
            for dtype in DTYPES:
                for sample in samples_of(op, dtype, count):
                    plain = run(variant, sample, twice=twice)
                    offload.reset_stats()
                    found = run(variant, sample, offload, twice=twice)
                    assert same_results(found, plain), f"{dtype} {sample}: {found} in place of {plain}"
                    if not twice and not isinstance(plain, str):
                        check_moved(offload.stats(synchronize=True), LEAST.get(op.name, 0.9))


#: The part that moves of what could, where it is not all of it: the sample, or the operator, drops a graph of its own
#: before anything else is saved, so that what this graph saved never has to leave.
LEAST = {"cov": 0.8, "max_pool2d_with_indices_backward": 0.15}


def check_moved(stats: eo.OffloadStats, least: float) -> None:
    """Everything that could move did, and came back when it was asked for."""
    assert_balanced(stats)
    eligible = stats.saved_bytes - sum(stats.kept_bytes.get(reason, 0) for reason in EXPECTED_TO_STAY)
    assert stats.offloaded_bytes + stats.shared_bytes >= least * eligible, stats.kept_bytes
    # All sources were gone and all copies over when backward began: what it used can only have come from the disk.
    assert stats.forwarded_bytes == 0
    assert stats.reloaded_bytes + stats.released_bytes == stats.offloaded_bytes
    assert stats.bytes_in > 0 or stats.reloaded_bytes == 0


def samples_of(op: OpInfo, dtype: torch.dtype, count: int) -> Sequence[SampleInput]:
    """So many among all of an operator's samples, the same distance apart."""
    if dtype not in op.supported_dtypes("cpu"):
        return []
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    # Not op.sample_inputs: to say which sample a test was at, it looks through the stack, for a fifth of a second.
    return spread(count, list(op.sample_inputs_func(op, "cpu", dtype, requires_grad=True)))


@contextmanager
def unwritten_memory_filled(op: OpInfo) -> Iterator[None]:
    torch.use_deterministic_algorithms(op.full_name in READ_UNWRITTEN_MEMORY, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def offload() -> Iterator[eo.Offload]:
    """One object for all operators. When they are through, nothing is left in it."""
    offload = eo.Offload(min_bytes=0, tier="disk", keep_last_bytes=0)
    yield offload
    assert_settled(offload)
    offload.close()


# -- the tests --------------------------------------------------------------------------------------------------------


def test_all_but_a_few_of_the_operators_run_on_a_cpu() -> None:
    assert len(OPERATORS) > 500
    without = {name for name, op in OPERATORS.items() if not op.supported_dtypes("cpu").intersection(DTYPES)}
    assert without == NOT_ON_A_CPU


@pytest.mark.sampled(3, quick=True)
@pytest.mark.parametrize("name", OPERATORS)
def test_samples_of_all_kinds_are_exact(name: str, offload: eo.Offload) -> None:
    check_exact(OPERATORS[name], offload, 2)


@pytest.mark.sampled(3, shift=1, quick=True)
@pytest.mark.parametrize("name", OPERATORS)
def test_h08_double_backward_is_exact(name: str, offload: eo.Offload) -> None:
    check_exact(OPERATORS[name], offload, 1, twice=True)
