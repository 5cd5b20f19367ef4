"""Trains a small model under Accelerate, with and without offload, in one process and in many."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from eager_offload.integrations.accelerate import OffloadPlugin
from tests.integrations.training import STEPS, WIDTH, Model, Trained, trained


def new_accelerator(**options: Any) -> Accelerator:
    """An accelerator on the CPU as a new process would get it; a process group that there is is used."""
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **options)


def prepared(accelerator: Accelerator, model: nn.Module) -> tuple[nn.Module, Any, Any]:
    """Model, optimizer and loader as ``accelerator.prepare`` returns them; the loader has enough for every step."""
    micro_batches = STEPS * accelerator.gradient_accumulation_steps * accelerator.num_processes
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(*(torch.randn(64 * micro_batches, width, generator=draw) for width in (WIDTH, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=64))
    return model, optimizer, loader


def train(
    accelerator: Accelerator,
    plugin: OffloadPlugin | None,
    *,
    form: str = "prepare",
    make: Callable[[], nn.Module] = Model,
    evaluates: bool = False,
) -> Trained:
    """Three optimizer steps from the same start.

    Args:
        accelerator: what it says about accumulation is done.
        plugin: ``None`` trains without offload.
        form: ``"prepare"`` has the plugin prepare the model, ``"context"`` enters its ``offload``, ``"both"`` both.
        make: makes the model that ``accelerator.prepare`` gets.
        evaluates: whether there is a forward in evaluation after each step.
    """
    model, optimizer, loader = prepared(accelerator, make())
    if plugin is not None and form != "context":
        assert plugin.prepare(accelerator, model) is model
    offload = plugin.offload if plugin is not None and form != "prepare" else nullcontext()
    losses, logged = [], []

    def steps() -> None:
        for inputs, targets in loader:
            model.train()
            with accelerator.accumulate(model), offload:
                # Of many ranks a mixed model's output is bf16, and in torch 2.11 a loss of two dtypes has no backward.
                loss = functional.mse_loss(model(inputs).float(), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if plugin is not None:
                plugin.offload.stats(synchronize=True)
                logged.append(plugin.metrics())
            if evaluates:
                model.eval()
                model(inputs)

    after = trained(model, steps)
    assert len(losses) == STEPS * accelerator.gradient_accumulation_steps
    return Trained(after, losses, [figures for figures in logged if figures], accelerator, model)


class WithPlugin:
    """A script that has its model prepared by the plugin."""

    block = "blocks.1"
    given = OffloadPlugin
    model = Model

    def train(self, path: Path, plugin: Any, model: nn.Module | None = None, evaluates: bool = False) -> Trained:
        return train(new_accelerator(), plugin, make=lambda: model or Model(), evaluates=evaluates)

    def end(self, plugin: OffloadPlugin) -> None:
        plugin.close()
