"""Selective checkpointing with values that are to go to the CPU, in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.compile.compiled import BOTH, compare, step_of
from tests.programs import leaf

WIDTH = 64
#: What a product makes.
BYTES = 32 * WIDTH * 4
MUST, PREFER = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD


def contexts(policy: CheckpointPolicy) -> Callable[..., Any]:
    """Contexts in which what products make has ``policy``."""

    def decide(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return policy if operator is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, decide)


class Block(nn.Module):
    def __init__(self, policy: CheckpointPolicy) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.contexts = contexts(policy)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=self.contexts)


@BOTH
@pytest.mark.parametrize("policy", [MUST, PREFER])
def test_compiled_values_travel(backend: str, policy: CheckpointPolicy) -> None:
    stats = compare(
        step_of(Block(policy), leaf(32, WIDTH), fullgraph=True),
        backend,
        as_eager=False,
        keep_last_bytes="1MiB",
    )
    assert stats.bytes_out >= 2 * BYTES
    assert not stats.kept_bytes.get("alive")
