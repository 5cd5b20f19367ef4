"""What a user gives to the command: models on meta."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.planning.programs import Stack


def seventy_billion() -> tuple[nn.Module, dict[str, Tensor]]:
    """The Llama of 70 billion parameters, and 16,384 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    tokens = torch.zeros(1, 16_384, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def two_blocks() -> tuple[nn.Module, Tensor]:
    """As large as the blocks of a Llama of 8 billion, and 4096 tokens."""
    with torch.device("meta"):
        model = Stack(2, 4096, 32, 8, 14_336).to(torch.bfloat16)
        return model, torch.empty(4096, 4096, dtype=torch.bfloat16)


def two_blocks_divided() -> tuple[nn.Module, Tensor]:
    """The same, whose SwiGLU is divided among two of sixteen ranks."""
    model, x = two_blocks()
    mesh = init_device_mesh("cpu", (8, 2), mesh_dim_names=("fsdp", "tp"))["tp"]
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:  # type: ignore[union-attr]  # it has some
        parallelize_module(block, mesh, plan)
    return model, x


def nothing() -> None:
    """Forgot to return."""


def raises() -> None:
    """Has an error of its own, of two lines."""
    raise FileNotFoundError("no\nweights")


def shapes() -> tuple[nn.Module, Tensor]:
    """Cannot run."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 1)), torch.ones(3, 8)


def questions() -> tuple[nn.Module, Tensor]:
    """Asks for a number."""

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out.sum() * out.max().item()

    return nn.Sequential(Asks(4, 4)), torch.ones(2, 4)


def blocks_of(length: int) -> tuple[nn.Module, Tensor]:
    """Two blocks that attend, and a sequence."""
    with torch.device("meta"):
        model = Stack(2, 512, 8, 8, 1024).to(torch.bfloat16)
        return model, torch.empty(length, 512, dtype=torch.bfloat16)
