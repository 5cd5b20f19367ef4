"""Ranks of which one fails in the middle of its third step.

Each leaves its number as a process in ``DIRECTORY/pid.RANK`` when it has moved bytes to a file in ``DIRECTORY/spill``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import eager_offload as eo
from tests.ranks.launch import Ranks
from tests.ranks.node import open_files
from tests.ranks.training import batch, blocks


class Fails(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor, fail: Callable[[], None]) -> Tensor:
        ctx.fail = fail  # type: ignore[attr-defined]  # as autograd has it
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.fail()  # type: ignore[attr-defined]  # likewise
        return gradient, None


def error() -> None:
    raise ValueError("the third step of one rank fails")


def interrupt() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait() -> None:
    """Until the launcher ends it: the other ranks stand in a collective meanwhile."""
    print("waits", flush=True)
    signal.pause()


WAYS = {"error": error, "interrupt": interrupt, "kill": kill, "wait": wait}


def sharded(model: nn.Sequential) -> nn.Module:
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def train(ranks: Ranks, strategy: str, way: str, where: str) -> None:
    """Three steps, of which the last rank fails the third."""
    spill = ranks.directory / "spill"
    spill.mkdir(exist_ok=True)
    model = sharded(blocks()) if strategy == "fsdp" else DistributedDataParallel(blocks())
    offload = eo.Offload(tier="disk", disk_path=spill, min_bytes=0, keep_last_bytes=0)
    for step in range(10):
        fails = step == 2 and ranks.rank == ranks.size - 1
        with offload:
            loss = model(batch(ranks, step)).square().mean()
            if fails and where == "forward":
                WAYS[way]()
            loss = Fails.apply(loss, WAYS[way] if fails else int)
        if step == 1:
            assert offload.stats(synchronize=True).bytes_out > 0
            assert len(set(open_files(spill))) == 1
            (ranks.directory / f"pid.{ranks.rank}").write_text(str(os.getpid()))
            ranks.at_once()
        loss.backward()
    raise AssertionError("no rank failed")


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    f"{strategy}-{way}-{where}": partial(train, strategy=strategy, way=way, where=where)
    for strategy in ("ddp", "fsdp")
    for way in WAYS
    for where in ("forward", "backward")
}
