"""What every framework trains here, how that may fail, and what has to hold afterwards."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from tests.hazards.backends import assert_settled, hooks_are_gone
from tests.hazards.programs import assert_identical
from tests.threads import collect

WIDTH, STEPS = 32, 3

#: The figures that a framework logs unless it is told otherwise, and some of all that there are.
THREE = {"offload/device_peak_mib", "offload/moved_mib", "offload/stall_seconds"}
FIGURES = {"offload/saved_bytes", "offload/bytes_out", "offload/bytes_in", "offload/stall_seconds"}


class Block(nn.Module):
    """Saves more than it takes in."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.narrow(functional.gelu(self.wide(hidden))).tanh()


class Model(nn.Module):
    """Repeated blocks in a list, which is what regions are compiled by and shards are cut by."""

    _no_split_modules = ("Block",)

    def __init__(self, recompute: str = "") -> None:
        """The same parameters each time.

        Args:
            recompute: ``"reentrant"`` or ``"not reentrant"`` checkpoints the last block.
        """
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[0](self.first(inputs))
        if self.recompute:
            hidden = checkpoint(self.blocks[1], hidden, use_reentrant=self.recompute == "reentrant")
        else:
            hidden = self.blocks[1](hidden)
        return self.last(hidden)


def cached_loss(model: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """A loss of all rows whose forwards run again in backward, a part at a time, as those of GradCache do."""
    with torch.no_grad():
        made = [model(part) for part in inputs.chunk(4)]
    made = [one.detach().requires_grad_() for one in made]
    loss = torch.cat(made).square().mean()
    loss.backward()

    def again(gradient: Tensor) -> None:
        with torch.enable_grad():
            for part, one in zip(inputs.chunk(4), made, strict=True):
                assert one.grad is not None
                ((model(part) * one.grad).sum() * gradient).backward()

    loss = loss.detach().requires_grad_()
    loss.register_hook(again)
    return loss


def told_by(work: Callable[[], object]) -> list[str]:
    """The warnings of this library while ``work`` is done."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        work()
    return [str(one.message) for one in caught if "eager_offload" in str(one.message)]


def long(*values: Any) -> Any:
    """A row of a parametrized test that takes its time."""
    return pytest.param(*values, marks=pytest.mark.long)


def fields(path: Path) -> dict[str, Any]:
    """Settings with which nearly all that the small models here save moves."""
    return {"min_bytes": 1024, "tier": "disk", "disk_path": str(path), "keep_last_bytes": 0}


def moved(offload: eo.Offload | None) -> int:
    assert offload is not None
    return offload.stats(synchronize=True).bytes_out


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, of a sharded one what this rank has of it."""
    named = {name: one.detach() for name, one in model.named_parameters()}
    return {name: (one.to_local() if isinstance(one, DTensor) else one).clone() for name, one in named.items()}


@dataclass
class Trained:
    """What became of a training."""

    parameters: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    """The figures of the offload, as often as they were logged."""
    owner: Any = None
    """The framework's object: an accelerator or a trainer."""
    model: Any = None


def trained(model: nn.Module, train: Callable[[], object]) -> dict[str, Tensor]:
    """The parameters after training, which changed them."""
    before = parameters(model)
    train()
    after = parameters(model)
    assert len(after) > 0
    assert any(not torch.equal(one, other) for one, other in zip(before.values(), after.values(), strict=True))
    return after


def exact(expected: Trained, found: Trained, offload: eo.Offload | None, *, foreign: bool = False) -> eo.OffloadStats:
    """Asserts that training with ``offload`` changed no bit of any loss and parameter, that bytes moved, that the stats
    balance and that neither a hook nor a saved tensor is left; returns the stats.

    Names of parameters may differ by wrappers.

    Args:
        foreign: whether hooks of others hide some saved tensors.
    """
    assert_identical(list(expected.parameters.values()), list(found.parameters.values()))
    assert expected.losses == found.losses
    assert hooks_are_gone()
    assert offload is not None
    collect()  # trainers lie in cycles
    stats = assert_settled(offload)
    assert stats.bytes_out > 0
    assert (stats.foreign_hooks > 0) == foreign
    return stats


def watched(block: nn.Module) -> list[tuple[bool, bool]]:
    """For each forward of ``block`` from now on: whether it is training, and whether hooks of saved tensors are on."""
    seen: list[tuple[bool, bool]] = []
    block.register_forward_pre_hook(lambda *_: seen.append((block.training, not hooks_are_gone())))
    return seen


def counted(model: nn.Module) -> Counter[bool]:
    """How many forwards modules of ``model`` begin from now on, in training (``True``) and in evaluation."""
    calls = Counter[bool]()
    for module in model.modules():
        module.register_forward_pre_hook(lambda called, _: calls.update([called.training]))
    return calls


def fails(block: nn.Module, error: BaseException, number: int = 2) -> None:
    """Has ``block`` raise ``error`` where its ``number``-th forward begins, and never again."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error

    block.register_forward_pre_hook(hook)


def forget(error: BaseException) -> None:
    """What was saved is held by the frames that an error came through."""
    error.__traceback__ = None
    collect()


def spill_files(directory: Path) -> list[str]:
    """Files in ``directory`` that this process has open; a spill file has no name any more."""
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            opened.append(os.readlink(descriptor))
        except FileNotFoundError:
            continue  # the listing's own
    return [path for path in opened if path.startswith(str(directory))]
