"""Small models, plans for them, and steps that are trained by a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import eager_offload as eo
from benchmarks import models
from tests.hazards.programs import assert_identical
from tests.simulation.stage import Stage, Step

#: Has everything move that may, in windows that a small model fills.
CONFIG = {"min_bytes": "1KiB", "max_inflight_bytes": "64KiB", "prefetch_bytes": "64KiB"}

#: Makes a model and what it is called with.
Made = Callable[[], tuple[nn.Module, Tensor]]


def slow(**rates: Any) -> eo.Machine:
    """A device on which small models take a while, with the kernels of a CPU, on which tests train."""
    usual = {
        "kernels": "cpu",
        "flops": 1e9,
        "single_flops": 1e9,
        "memory": 1e9,
        "out": 1e9,
        "back": 1e9,
        "memory_bytes": 1 << 30,
    }
    return eo.Machine("slow", **{**usual, **rates})  # type: ignore[arg-type]


class Stack(models.Stack):
    """Blocks in the style of Llama, one behind the other, in ``float32``; (tokens, width) to a number."""

    def __init__(self, layers: int, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__(models.Shape(layers, width, inner, heads, shared))
        self.float()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


class Other(nn.Module):
    """The same operators in another order, or other ones."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, Stack(2 if how == "a layer less" else 3, 32, 4, 2, 64)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "another beginning":
            x = x.double().float().sin() * self.inner.blocks[0].attention_norm.weight
        for block in self.inner.blocks:
            if self.how == "another order":
                x = x + block.feed(block.mlp_norm(x))
            x = block(x)
        if self.how == "another end":
            x = x * x.exp().cos()
        return x.sum()


class Linears(nn.Module):
    """Two linear layers, and in between what a subclass does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x).sin().exp()).sin())

    def between(self, h: Tensor) -> Tensor:
        return h.cos()


class Net(nn.Module):
    """``make`` makes its blocks; ``given``, what each of them is given in a forward."""

    def __init__(self, make: Callable[[], nn.Module], given: Callable[[], Any] | None = None, count: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.given = nn.Linear(32, 32), nn.Linear(32, 32), given
        self.blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        given = {} if self.given is None else {"given": self.given()}
        x = self.first(x)
        for block in self.blocks:
            x = block(x, **given)
        return self.last(x).square().sum()


class Shared(nn.Module):
    """Saves one mask in every layer, parts of storages, what is alive, integers and what is small."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 192) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        mask = x.detach().abs().sqrt()
        for layer in self.layers:
            a, b, c = layer(x).chunk(3, -1)
            x = (a.sigmoid() * b.tanh() + c) * mask + x[:1].square().sum()
        return torch.nn.functional.cross_entropy(x.flatten(0, 1), tokens.flatten() + 0)


def small() -> tuple[nn.Module, Tensor]:
    """A small one, and what it is called with."""
    return Stack(2, 32, 4, 2, 64), torch.randn(16, 32)


def wide() -> tuple[nn.Module, Tensor]:
    """One whose activations are larger than its parameters."""
    return Stack(3, 32, 4, 2, 64), torch.randn(256, 32)


def shared() -> tuple[nn.Module, Tensor]:
    """One that saves the same more than once."""
    torch.manual_seed(0)
    return Shared(), torch.arange(256).remainder(32).view(4, 64)


def planned(made: Made = wide, **fields: Any) -> eo.Plan:
    """A plan for a model on the slow device, without an optimizer."""
    return eo.plan(*made(), **{"device": slow(), "config": CONFIG, "optimizer": None, **fields})


def budget_of(machine: eo.Machine, made: Made, part: float, **fields: Any) -> int:
    """One between the least and that for which nothing has to move."""
    plan = planned(made, device=machine, **fields)
    return plan.least_budget + int((plan.peak_bytes - plan.least_budget) * part)


def gradients(model: nn.Module, loss_of: Callable[[], Tensor], around: Any = None) -> list[Tensor]:
    """The loss, and the gradients of all parameters; ``around``: the forward."""
    model.zero_grad(set_to_none=True)
    with around or nullcontext():
        loss = loss_of()
    loss.backward()
    return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


def assert_trained(model: nn.Module, x: Tensor, offload: eo.Offload, seeds: int = 1) -> None:
    """Steps have the bits that they have without offload."""
    for seed in range(seeds):
        torch.manual_seed(seed)
        expected = gradients(model, lambda: model(x))
        torch.manual_seed(seed)
        assert_identical(expected, gradients(model, lambda: model(x), offload))


def trained(plan: eo.Plan, model: nn.Module, x: Tensor, path: Path, steps: int = 3) -> eo.OffloadStats:
    """What is counted of so many steps with the settings of ``plan``, with exact gradients; bytes move to a disk."""
    offload = eo.Offload(plan=plan, tier="disk", disk_path=path)
    assert_trained(model, x, offload, steps)
    stats = offload.stats(synchronize=True)
    offload.close()
    assert stats.table_misses == {}
    assert stats.bytes_out > 0
    return stats


def simulated(
    stage: Stage, plan: eo.Plan, model: nn.Module, x: Tensor, steps: int
) -> tuple[list[Step], eo.OffloadStats]:
    """So many steps on a simulated device, with the settings of ``plan``, and what is counted; bytes move."""
    offload = stage.offload(plan=plan)
    expected = gradients(model, lambda: model(x))[1:]
    found = []
    for _ in range(steps):
        found.append(stage.step(offload, model, x, lambda: model(x)))
        assert_identical(expected, [one.grad for one in model.parameters()])
    stats = offload.stats(synchronize=True)
    offload.close()
    assert stats.table_misses == {}
    assert stats.bytes_out > 0
    return found, stats


class Operators(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@cache
def plan_of_blocks() -> eo.Plan:
    """Returns one in which both blocks of a ``Net`` are computed again."""
    far, x = slow(out=1e6, back=1e6), torch.empty(64, 32)
    fields: dict[str, Any] = {"device": far, "config": CONFIG, "optimizer": None}
    least = eo.plan(Net(Linears), x, **fields).least_budget
    plan = eo.plan(Net(Linears), x, device_budget=least + 1024, recompute=True, **fields)
    assert plan.again == ("blocks.0", "blocks.1")
    return plan


def batch() -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, around: AbstractContextManager[Any], x: Tensor | None = None) -> list[Tensor]:
    """Returns the losses and the gradients of two steps."""
    found = list[Tensor]()
    with around:
        for _ in range(2):
            torch.manual_seed(2)
            found += [one.clone() for one in gradients(model, lambda: model(batch() if x is None else x.sin()))]
    return found
