"""Selective checkpointing with values that are to go to the CPU, in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import eager_offload as eo
from tests.compile.compiled import BOTH, compare, step_of
from tests.programs import leaf
from tests.proof.bits import same_bits

WIDTH = 64
#: What a product makes.
BYTES = 32 * WIDTH * 4
MUST, PREFER = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD
PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
#: Of 4 products: their forward, and two each in backward.
ONCE = 4 + 8


class Count(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def contexts(policy: CheckpointPolicy, operators: tuple[Any, ...] = PRODUCTS) -> Callable[..., Any]:
    """Contexts in which what ``operators`` make has ``policy``; without any, everything has."""

    def decide(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return policy if not operators or operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, decide)


class Blocks(nn.Module):
    def __init__(self, policy: CheckpointPolicy, count: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(count)
        )
        self.contexts = contexts(policy)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts)
        return x


@pytest.fixture
def x() -> Tensor:
    return leaf(32, WIDTH)


def step(model: nn.Module, x: Tensor, offload: eo.Offload | None) -> tuple[list[Tensor], int]:
    """Loss and gradients, and how many matrix products that took."""
    with Count() as count:
        if offload is None:
            loss = model(x).square().sum()
        else:
            with offload:
                loss = model(x).square().sum()
        found = [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]
    return found, count.products


@pytest.mark.filterwarnings("ignore:eager_offload. nothing moved:RuntimeWarning")
@pytest.mark.parametrize(
    ("policy", "fields", "moved"),
    [
        (MUST, {"min_bytes": "1MiB"}, 4 * BYTES),
        (MUST, {"min_bytes": 0, "keep_last_bytes": "1MiB"}, 4 * BYTES),
        (PREFER, {"min_bytes": "1MiB"}, 0),
    ],
)
def test_a_value_that_must_travel_does_though_it_is_small_or_new(
    policy: CheckpointPolicy, fields: dict[str, Any], moved: int, x: Tensor
) -> None:
    offload = eo.Offload(**{"tier": "disk", "keep_last_bytes": 0, **fields})
    found, computed = step(Blocks(policy), x, offload)
    assert computed == ONCE, "what had better travel, and is too small for it, is kept and not computed again"
    assert offload.stats(synchronize=True).bytes_out >= moved
    assert moved or offload.stats().bytes_out == 0
    assert all(map(same_bits, found, step(Blocks(policy), x, None)[0]))
    offload.close()


@BOTH
@pytest.mark.parametrize("policy", [MUST, PREFER])
def test_compiled_values_travel(backend: str, policy: CheckpointPolicy) -> None:
    stats = compare(
        step_of(Blocks(policy, count=1), leaf(32, WIDTH), fullgraph=True),
        backend,
        as_eager=False,
        keep_last_bytes="1MiB",
    )
    assert stats.bytes_out >= 2 * BYTES
    assert not stats.kept_bytes.get("alive")
