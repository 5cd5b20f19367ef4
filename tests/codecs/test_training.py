"""A small language model that trains with codecs that round comes to the loss that it comes to without."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eager_offload import Offload

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 32, 32, 32, 16, 300


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fused(self.norms[0](x)).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


def text(count: int, seed: int) -> Tensor:
    """Texts of a language in which each letter depends on the one before it, and on the one that came before that."""
    tables = torch.randn(2, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(7)) * 2
    generator = torch.Generator().manual_seed(seed)
    letters = [torch.randint(VOCABULARY, (count,), generator=generator) for _ in range(2)]
    for _ in range(LENGTH - 1):
        likely = (tables[0, letters[-1]] + tables[1, letters[-2]]).softmax(-1)
        letters.append(torch.multinomial(likely, 1, generator=generator)[:, 0])
    return torch.stack(letters, 1)


def trained(offload: Offload | None, seed: int = 0) -> float:
    """The loss on other texts after all steps, with the seed of the weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    around: Any = nullcontext() if offload is None else offload

    def loss_of(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    for batch in text(BATCH * STEPS, 1).split(BATCH):
        with around:
            loss = loss_of(batch)
        if offload is not None:
            offload.stats(synchronize=True)  # so that nothing is served before it has left
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(loss_of(text(512, 2)))


@pytest.mark.long
def test_a_small_language_model_comes_to_the_same_loss() -> None:
    exact = trained(None)
    assert exact < 0.75 * math.log(VOCABULARY), "it has learnt something"
    for codec in ("bf16", "int8", "fp8"):
        offload = Offload(tier="host", min_bytes=0, keep_last_bytes=0, codec=codec)
        loss = trained(offload)
        stats = offload.stats(synchronize=True)
        offload.close()
        assert abs(loss - exact) < 0.003, (codec, loss, exact, f"another seed: {trained(None, seed=1)}")
        assert stats.coded_bytes[codec] > 0.4 * stats.offloaded_bytes
        assert sum(stats.packed_bytes.values()) < 0.55 * sum(stats.coded_bytes.values())
