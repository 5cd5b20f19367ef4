"""H12, H13, H21: ragged batches (jagged nested tensors), which are wrappers of their values and offsets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hazards.backends import Backend
from tests.hazards.programs import Around, leaf, same_gradients

WIDTH, HEADS = 16, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_h13_h21_a_transformer_of_ragged_batches(backend: Backend) -> None:
    def program(offload: Around) -> object:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step, lengths in enumerate([(3, 9, 5), (7, 2), (4, 4, 8, 1)]):
            with offload:
                parts = [leaf(length, WIDTH, seed=10 * step + length, grad=False) for length in lengths]
                loss = model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().square().mean()
            del parts
            loss.backward()
            losses.append(loss.detach())
            del loss
            optimizer.step()
            optimizer.zero_grad()
        return losses, [parameter.detach() for parameter in model.parameters()]

    for stats in same_gradients(program, backend):
        # Of each block and batch at least the input, the norm's result, and both sides of the activation.
        assert stats.bytes_out >= 0.9 * 2 * (17 + 9 + 17) * (2 + 2 * 2) * WIDTH * 4
