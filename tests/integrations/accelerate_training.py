"""Trains a small model under Accelerate, with and without offload: what the tests of one and of two processes share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import eager_offload as eo
from eager_offload.integrations.accelerate import OffloadPlugin
from tests.integrations import moving

STEPS = 3


class Block(nn.Module):
    """Saves more than it takes in; ``fails`` is raised in the middle of its forward."""

    fails: BaseException | None = None

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = functional.gelu(self.wide(hidden))
        if self.fails is not None:
            raise self.fails
        return hidden + self.narrow(wide).tanh()


class Model(nn.Module):
    """Repeated blocks in a list, which is what regions are compiled by and shards are cut by."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(32, 32),
            nn.ModuleList(Block() for _ in range(2)),
            nn.Linear(32, 1),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def new_accelerator(**options: Any) -> Accelerator:
    """An accelerator on the CPU as a new process would get it; a process group that there is is used."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **options)


def new_plugin(path: Path, **fields: Any) -> OffloadPlugin:
    """One that moves all that the model saves."""
    return OffloadPlugin(**moving.fields(path), **fields)


def prepared(accelerator: Accelerator, model: nn.Module) -> tuple[nn.Module, Any, Any]:
    """Model, optimizer and loader as ``accelerator.prepare`` returns them; the loader has enough for every step."""
    micro_batches = STEPS * accelerator.gradient_accumulation_steps * accelerator.num_processes
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64 * micro_batches, 32, generator=generator),
        torch.randn(64 * micro_batches, 1, generator=generator),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=64))
    return model, optimizer, loader


@dataclass
class Trained:
    """What became of a training."""

    parameters: dict[str, Tensor]
    losses: list[float]
    stats: eo.OffloadStats
    model: nn.Module
    accelerator: Accelerator

    def equals(self, other: Trained) -> bool:
        """Whether every loss and every parameter is the same, bit for bit."""
        names = self.parameters.keys() == other.parameters.keys()
        equal = all(torch.equal(self.parameters[name], other.parameters[name]) for name in self.parameters)
        return names and equal and self.losses == other.losses


def train(
    accelerator: Accelerator,
    plugin: OffloadPlugin | None,
    *,
    form: str = "prepare",
    make: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Trained:
    """Three optimizer steps from the same start.

    Args:
        accelerator: what it says about accumulation is done.
        plugin: ``None`` trains without offload.
        form: ``"prepare"`` has the plugin prepare the model, ``"context"`` enters its ``offload``, ``"both"`` both.
        make: what is done with the model before ``accelerator.prepare``, such as compiling it.
    """
    torch.manual_seed(0)
    model, optimizer, loader = prepared(accelerator, make(Model()))
    if plugin is not None and form != "context":
        assert plugin.prepare(accelerator, model) is model
    offload = plugin.offload if plugin is not None and form != "prepare" else nullcontext()
    losses = []
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model), offload:
            # Of many ranks a mixed model's output is bf16, and in torch 2.11 a loss of two dtypes has no backward.
            loss = functional.mse_loss(model(inputs).float(), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert len(losses) == STEPS * accelerator.gradient_accumulation_steps
    stats = plugin.offload.stats(synchronize=True) if plugin is not None else eo.OffloadStats()
    return Trained(parameters_of(model), losses, stats, model, accelerator)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by its name, sharded ones as this rank's shard."""
    named = {name: one.detach() for name, one in model.named_parameters()}
    return {name: (one.to_local() if isinstance(one, DTensor) else one).clone() for name, one in named.items()}
