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
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

import eager_offload as eo
from tests.hazards.backends import assert_settled
from tests.proof.bits import same_bits
from tests.sampling import spread

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

Operator = Callable[..., Any]
OPERATORS = {op.full_name: op for op in op_db if op.supports_autograd}
DTYPES = (torch.float32, torch.complex64)
SEED = 20
MODIFIED = "a saved tensor was modified"

#: Of the tensors that autograd saves, those that are not expected to move.
EXPECTED_TO_STAY = ("small", "parameter", "layout", "device")

#: Operators that read memory which was never written, so that autograd alone differs from one run to the next. They
#: run with such memory filled.
READ_UNWRITTEN_MEMORY = {
    "linalg.lstsq": "torch hands gelsy of LAPACK pivots that were never set",
    "linalg.lstsq.grad_oriented": "torch hands gelsy of LAPACK pivots that were never set",
}

#: Operators whose samples are for other devices, or for integers, which have no gradients.
NOT_ON_A_CPU = {
    "torch.ops.aten._flash_attention_forward",
    "torch.ops.aten._efficient_attention_forward",
    "nn.functional.batch_norm.without_cudnn",
    "nn.functional.one_hot",
}


# -- what came out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one call of an operator and its backward gave."""

    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    error: str | None = None

    def differences(self, other: Run) -> list[str]:
        """What is not the same, bit for bit; empty where everything is."""
        if self.error != other.error:
            return [f"error {self.error!r} in place of {other.error!r}"]
        pairs = [("output", self.outputs, other.outputs), ("gradient", self.gradients, other.gradients)]
        return [
            f"{what} {at} is {one} in place of {two}"
            for what, ours, theirs in pairs
            for at, (one, two) in enumerate(zip(ours, theirs, strict=True))
            if not same_bits(one, two)
        ]


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


@dataclass(frozen=True)
class Arguments:
    """Fresh copies of a sample's tensors, each made from a leaf of its own where it requires grad."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Tensor]
    #: What the operator is called with.
    tensors: list[Tensor]

    @staticmethod
    def of(sample: SampleInput, *, as_leaves: bool = False) -> Arguments:
        copies: dict[int, Tensor] = {}
        leaves: list[Tensor] = []

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in copies:
                fresh = duplicate(value)
                if value.requires_grad:
                    leaves.append(fresh.requires_grad_())
                    fresh = fresh if as_leaves else Duplicate.apply(fresh)
                copies[id(value)] = fresh
            return copies[id(value)]

        args, kwargs = tree_map(copy, ((sample.input, *sample.args), dict(sample.kwargs)))
        return Arguments(args, kwargs, leaves, list(copies.values()))


@dataclass(frozen=True)
class Bump:
    """Something to change in place between forward and backward: its values stay, its version grows."""

    #: ``"argument"``, ``"leaf"`` (an argument too, which stays since it is a leaf) or ``"result"``.
    what: str
    which: int


def run(
    operator: Operator,
    sample: SampleInput,
    offload: eo.Offload | None = None,
    *,
    twice: bool = False,
    bump: Bump | None = None,
) -> Run:
    """Calls ``operator`` and differentiates what it returns, and with ``twice`` the gradients too."""
    context: AbstractContextManager[Any] = nullcontext() if offload is None else offload
    try:
        leaves, results, outputs = forward(operator, sample, context, bump)
        if not results:
            return Run(outputs)
        all_left(offload)
        if not twice:
            return Run(outputs, list(gradients_of(results, leaves)))
        with context:
            first = gradients_of(results, leaves, create_graph=True)
        results.clear()
        all_left(offload)
        again = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
        return Run(outputs, [*first, *(gradients_of(again, leaves) if again else ())])
    except Exception as error:
        return Run(error=described(error, under_offload=offload is not None))


def forward(
    operator: Operator, sample: SampleInput, context: AbstractContextManager[Any], bump: Bump | None
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What is left for backward, and nothing else is alive: leaves, copies of what was returned and can be
    differentiated, and the values of all that was returned."""
    torch.default_generator.manual_seed(SEED)
    arguments = Arguments.of(sample, as_leaves=bump is not None and bump.what == "leaf")
    with context:
        returned = sample.output_process_fn_grad(operator(*arguments.args, **arguments.kwargs))
    tensors = [value for value in tree_leaves(returned) if isinstance(value, Tensor)]
    results = [tensor.clone() for tensor in tensors if tensor.requires_grad]
    outputs = [tensor.detach().clone() for tensor in tensors]
    if bump is not None:
        changed = tensors if bump.what == "result" else arguments.tensors
        with torch.no_grad():
            changed[bump.which].add_(0)
    return arguments.leaves if results else [], results, outputs


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
                    before = offload.stats(synchronize=True)
                    wrong = run(variant, sample, offload, twice=twice).differences(plain)
                    assert not wrong, f"{dtype} {sample}: {wrong}\n{verdict(variant, sample, twice, plain)}"
                    if not twice and plain.error is None:
                        check_moved(before, offload.stats(synchronize=True), LEAST.get(op.name, 0.9))


#: The part that moves of what could, where it is not all of it: the sample, or the operator, drops a graph of its own
#: before anything else is saved, so that what this graph saved never has to leave.
LEAST = {"cov": 0.8, "max_pool2d_with_indices_backward": 0.15}


def check_moved(before: eo.OffloadStats, after: eo.OffloadStats, least: float = 0.9) -> None:
    """Everything that could move did, and came back when it was asked for."""
    kept = {reason: nbytes - before.kept_bytes.get(reason, 0) for reason, nbytes in after.kept_bytes.items()}
    saved = after.saved_bytes - before.saved_bytes
    offloaded = after.offloaded_bytes - before.offloaded_bytes
    shared = after.shared_bytes - before.shared_bytes
    eligible = saved - sum(kept.get(reason, 0) for reason in EXPECTED_TO_STAY)
    assert saved == offloaded + shared + sum(kept.values())
    assert offloaded + shared >= least * eligible, kept
    # All sources were gone and all copies over when backward began: what it used can only have come from the disk.
    reloaded = after.reloaded_bytes - before.reloaded_bytes
    assert after.forwarded_bytes == before.forwarded_bytes
    assert reloaded + after.released_bytes - before.released_bytes == offloaded
    assert after.bytes_in - before.bytes_in > 0 or reloaded == 0


def check_modification_noticed(op: OpInfo, offload: eo.Offload, count: int) -> int:
    """Each tensor in reach is changed in place in turn: an error comes where autograd has one, and nowhere else.

    Returns:
        How often there was one.
    """
    noticed = 0
    with unwritten_memory_filled(op):
        for dtype in DTYPES:
            for sample in samples_of(op, dtype, count):
                for bump in bumps(op, sample):
                    plain = run(op, sample, bump=bump)
                    wrong = run(op, sample, offload, bump=bump).differences(plain)
                    assert not wrong, f"{bump} {dtype} {sample}: {wrong}"
                    noticed += plain.error == MODIFIED
    return noticed


def bumps(op: OpInfo, sample: SampleInput) -> list[Bump]:
    arguments = Arguments.of(sample)
    with torch.no_grad():
        results = [t for t in tree_leaves(op(*arguments.args, **arguments.kwargs)) if isinstance(t, Tensor)]
    arguments = Arguments.of(sample)  # the operator may have changed the others in place
    return [
        Bump(what, which)
        for what, tensors in (("argument", arguments.tensors), ("leaf", arguments.leaves), ("result", results))
        for which, tensor in enumerate(tensors)
        if tensor.layout is torch.strided
    ]


def samples_of(op: OpInfo, dtype: torch.dtype, count: int) -> Sequence[SampleInput]:
    """So many among all of an operator's samples, the same distance apart."""
    if dtype not in op.supported_dtypes("cpu"):
        return []
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    # Not op.sample_inputs: to say which sample a test was at, it looks through the stack, for a fifth of a second.
    return spread(count, list(op.sample_inputs_func(op, "cpu", dtype, requires_grad=True)))


def verdict(operator: Operator, sample: SampleInput, twice: bool, plain: Run) -> str:
    if any(run(operator, sample, twice=twice).differences(plain) for _ in range(20)):
        return "autograd alone is not reproducible here either: does the operator read memory that was never written?"
    return "autograd alone gives the same every time"


@contextmanager
def unwritten_memory_filled(op: OpInfo) -> Iterator[None]:
    if op.full_name not in READ_UNWRITTEN_MEMORY:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
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


@pytest.mark.parametrize("name", ["exp", "mul", "softmax", "nn.functional.conv2d", "nn.functional.layer_norm"])
def test_h01_autograd_does_notice_some(name: str, offload: eo.Offload) -> None:
    assert check_modification_noticed(OPERATORS[name], offload, 1) > 0


@pytest.mark.sampled(3, quick=True)
@pytest.mark.parametrize("name", OPERATORS)
def test_samples_of_all_kinds_are_exact(name: str, offload: eo.Offload) -> None:
    check_exact(OPERATORS[name], offload, 2)


@pytest.mark.sampled(3, shift=1, quick=True)
@pytest.mark.parametrize("name", OPERATORS)
def test_h08_double_backward_is_exact(name: str, offload: eo.Offload) -> None:
    check_exact(OPERATORS[name], offload, 1, twice=True)


@pytest.mark.sampled(3, shift=2, quick=True)
@pytest.mark.parametrize("name", OPERATORS)
def test_h01_a_modified_tensor_is_noticed_where_autograd_notices_it(name: str, offload: eo.Offload) -> None:
    check_modification_noticed(OPERATORS[name], offload, 1)
