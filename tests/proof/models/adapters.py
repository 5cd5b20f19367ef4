"""LoRA: a frozen Llama whose projections get low-rank adapters, and nothing but those is trained."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tests.proof.models.base import Checkpointing
from tests.proof.models.llama import Llama

RANK = 4


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(F.dropout(x, 0.05)))


class Adapted(Llama):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for module in list(self.blocks.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, LoraLinear(child))

    def embed(self, inputs: Tensor) -> Tensor:
        x = super().embed(inputs)
        # A reentrant checkpoint passes no gradient to the weights inside unless some input of its needs one.
        return x.requires_grad_() if self.checkpointing is Checkpointing.REENTRANT else x
