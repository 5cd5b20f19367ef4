"""H46: a saved tensor is changed in place where torch allows it: it is cloned before, or computed again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from eager_offload import Offload, SavedTensorModifiedError
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.programs import REGIMES, Around, Regime, assert_identical, exact, leaf
from tests.hazards.wrappers import parts_of, two

aten = torch.ops.aten


def changed(around: Around, *, settle: Callable[[], object] = lambda: None) -> object:
    """Saves tensors of all kinds and changes some of them, once or twice."""
    x, w, row = leaf(32, 32), leaf(32, 32, seed=2, grad=False), leaf(32, seed=3)
    with around:
        b = x.clone()
        result = (b**2).sum() + (b.sin() * w).sum() + (row * 2).exp().sum()
        unchanged = (x * 3).tanh().square().sum()
        settle()
        b.sin_()
        w.mul_(2)
        result = result + (b * w).exp().sum() + b.t().cos().sum()
        settle()
        b.add_(1)
        result = result + (b.square() * row).sum()
        del b, w
    settle()
    (result + unchanged).backward(retain_graph=True)
    (result * 2).backward()
    return x.grad, row.grad


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_h46_what_is_changed_where_torch_allows_it_is_cloned_before(regime: Regime, backend: Backend) -> None:
    backend.sources_change = True
    with allow_mutation_on_saved_tensors():
        expected = changed(nullcontext())
    offload = backend.offload(**regime.fields)
    settle = partial(offload.stats, synchronize=regime.settled)
    with allow_mutation_on_saved_tensors() as context:
        assert_identical(expected, changed(regime.around(offload), settle=settle))
        assert not context.original, "a handle that went is forgotten"
    assert assert_settled(offload).bytes_out > 0


def test_h46_a_wrapper_is_cloned_before_it_is_changed(backend: Backend) -> None:
    backend.sources_change = True

    def program(around: Around) -> object:
        x = two(lambda seed: leaf(16, 16, seed=seed, grad=False)).requires_grad_()
        with allow_mutation_on_saved_tensors():
            with around:
                b = x * 2
                result = b.sin()
                b.mul_(3)
                result = (result * b).sum()
            result.backward()
        return parts_of(x.grad)

    assert exact(program, backend.offload()).bytes_out > 0


def test_h46_what_is_small_or_a_parameter_is_cloned_too(backend: Backend) -> None:
    def program(around: Around) -> object:
        x, weight = leaf(16, 16), nn.Parameter(leaf(16, 16, seed=2).detach())
        with allow_mutation_on_saved_tensors(), around:
            y = (x @ weight).sum() + (x * 2).square().sum()
            with torch.no_grad():
                weight.mul_(2)
            y.backward()
        return x.grad, weight.grad

    assert exact(program, backend.offload(min_bytes="1MiB")).bytes_out == 0


def test_h46_outside_of_that_context_a_change_is_an_error_again(backend: Backend) -> None:
    backend.sources_change = True
    offload, x = backend.offload(), leaf(16, 16)
    with allow_mutation_on_saved_tensors(), offload:
        b = x.clone()
        y, other = b.square().sum(), (x * 2).square().sum()
    offload.stats(synchronize=True)
    b.mul_(2)
    other.backward()
    assert_identical(x.grad, 8 * x.detach())
    with pytest.raises(SavedTensorModifiedError):
        y.backward()


# -- selective checkpointing ------------------------------------------------------------------------------------------


def block(convolution: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
    h = F.relu(convolution(x), inplace=True)
    h = h.view(2, 8, -1).mul_(1.5)
    h = linear(h.mean(-1))
    return h.sin_().square() + h


OFFLOADED: dict[str, tuple[Any, ...]] = {
    "everything": (),
    "what is changed after it": (aten.convolution.default,),
    "what changes it too": (aten.convolution.default, aten.relu_.default),
    "what changes alone": (aten.relu_.default, aten.mul_.Tensor, aten.sin_.default),
    "a view": (aten.view.default, aten.mul_.Tensor),
    "what is not changed": (aten.mean.dim, aten.square.default),
}


@pytest.mark.parametrize("which", OFFLOADED)
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])
def test_h46_what_was_to_be_offloaded_and_is_changed_is_computed_again(
    policy: CheckpointPolicy, which: str, backend: Backend
) -> None:
    backend.sources_change = True
    operators = OFFLOADED[which]

    def policy_fn(context: object, operator: object, *arguments: object, **named: object) -> CheckpointPolicy:
        return policy if not operators or operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    def program(around: Around) -> object:
        torch.manual_seed(0)
        convolution, linear, x = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), leaf(2, 3, 16, 16)
        contexts = partial(create_selective_checkpoint_contexts, policy_fn)
        with around:
            y = checkpoint(block, convolution, linear, x * 2, use_reentrant=False, context_fn=contexts)
            y = (y * 2).sigmoid()
        if isinstance(around, Offload):
            around.stats(synchronize=True)
        y.sum().backward()
        return x.grad, [parameter.grad for part in (convolution, linear) for parameter in part.parameters()]

    assert exact(program, backend.offload()).bytes_out > 0
