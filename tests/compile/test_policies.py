"""Selective checkpointing with values that are to go to the CPU, in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import eager_offload as eo
from tests.compile.compiled import BOTH, compare, step_of
from tests.proof.bits import same_bits

WIDTH = 64
MUST, PREFER = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD
PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


class Count(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def products(policy: CheckpointPolicy) -> Callable[..., Any]:
    """Contexts in which matrix products have ``policy``."""

    def decide(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return policy if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, decide)


class Blocks(nn.Module):
    def __init__(self, policy: CheckpointPolicy, count: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)
        )
        self.contexts = products(policy)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts)
        return x


@pytest.fixture
def x() -> Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def results(model: nn.Module, x: Tensor, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


def step(model: nn.Module, x: Tensor, offload: eo.Offload | None) -> tuple[list[Tensor], int]:
    """Loss and gradients, and how many matrix products that took."""
    with Count() as count:
        if offload is None:
            loss = model(x).square().sum()
        else:
            with offload:
                loss = model(x).square().sum()
        found = results(model, x, loss)
    return found, count.products


#: Of 4 products: their forward, and two each in backward.
ONCE, AGAIN = 4 + 8, 8 + 8
BYTES = 32 * WIDTH * 4


@pytest.mark.parametrize("policy", [MUST, PREFER])
def test_eager_values_travel_and_are_not_computed_again(
    policy: CheckpointPolicy, x: Tensor, offload: eo.Offload
) -> None:
    model = Blocks(policy)
    expected, computed = step(model, x, None)
    assert computed > ONCE, "without a context torch computes them again"
    for _ in range(3):
        found, computed = step(model, x, offload)
        assert all(map(same_bits, found, expected))
        assert computed == ONCE
    stats = offload.stats(synchronize=True)
    assert stats.offloaded_bytes == 3 * 4 * BYTES
    assert stats.bytes_out >= 3 * 4 * BYTES


def test_a_value_that_must_travel_does_though_it_is_small_or_new(x: Tensor) -> None:
    for fields in ({"min_bytes": "1MiB"}, {"min_bytes": 0, "keep_last_bytes": "1MiB"}):
        with eo.Offload(**{"tier": "disk", "keep_last_bytes": 0, **fields}) as offload:
            loss = Blocks(MUST)(x).square().sum()
        loss.backward()
        assert offload.stats(synchronize=True).bytes_out >= 4 * BYTES
        offload.close()


def test_a_value_that_had_better_travel_stays_if_it_is_small(x: Tensor) -> None:
    offload = eo.Offload(tier="disk", min_bytes="1MiB", keep_last_bytes=0)
    found, computed = step(Blocks(PREFER), x, offload)
    assert computed == ONCE, "it is kept, not computed again"
    assert offload.stats(synchronize=True).bytes_out == 0
    assert all(map(same_bits, found, step(Blocks(PREFER), x, None)[0]))
    offload.close()


def test_outside_of_a_context_nothing_changes(x: Tensor, offload: eo.Offload) -> None:
    expected, before = step(Blocks(MUST), x, None)
    step(Blocks(MUST), x, offload)
    offload.reset_stats()
    found, after = step(Blocks(MUST), x, None)
    assert after == before
    assert all(map(same_bits, found, expected))
    assert offload.stats(synchronize=True).saved_bytes == 0


def test_a_value_that_is_changed_in_place_is_computed_again(x: Tensor, offload: eo.Offload) -> None:
    def program(x: Tensor) -> Tensor:
        return (x @ x.t()).add_(1).exp()

    (expected,) = torch.autograd.grad(program(x).sum(), [x])
    with offload:
        loss = checkpoint(program, x, use_reentrant=False, context_fn=products(MUST)).sum()
    (found,) = torch.autograd.grad(loss, [x])
    assert same_bits(found, expected)
    assert offload.stats(synchronize=True).bytes_out > 0


def test_views_have_no_bytes_of_their_own(x: Tensor, offload: eo.Offload) -> None:
    def decide(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return MUST

    contexts = partial(create_selective_checkpoint_contexts, decide)
    linear = nn.Linear(WIDTH, WIDTH)

    def program(x: Tensor) -> Tensor:
        return linear(x).view(-1).tanh()

    expected = torch.autograd.grad(program(x).sum(), [x, linear.weight])
    with offload:
        loss = checkpoint(program, x, use_reentrant=False, context_fn=contexts).sum()
    found = torch.autograd.grad(loss, [x, linear.weight])
    assert all(map(same_bits, found, expected))
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out <= 3 * BYTES, "the weight stays, and so do views"
    assert stats.bytes_out >= 2 * BYTES


@BOTH
@pytest.mark.parametrize("policy", [MUST, PREFER])
def test_compiled_values_travel(backend: str, policy: CheckpointPolicy) -> None:
    model = Blocks(policy, count=1)
    x = torch.randn(32, WIDTH, requires_grad=True)
    stats = compare(step_of(model, x, fullgraph=True), backend, as_eager=False, keep_last_bytes="1MiB")
    assert stats.bytes_out >= 2 * BYTES
    assert not stats.kept_bytes.get("alive")
