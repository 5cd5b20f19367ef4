"""Pipeline schedules: several microbatches are between their forward and their backward at any time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from tests.programs import leaf
from tests.ranks.launch import Ranks
from tests.ranks.training import WIDTH, Around, Block, Storages, exact, steps

MICROBATCHES, ROWS = 4, 8


def stages(number: int) -> list[nn.Module]:
    """The parts of one model, the same in every rank."""
    torch.manual_seed(0)
    return [nn.Sequential(Block(), Block()) for _ in range(number)]


def trained(ranks: Ranks, schedule: Callable[..., Any], each: int = 1, v_shaped: bool = False) -> None:
    """Trains a model in stages under ``schedule``.

    Args:
        each: how many stages a rank has.
        v_shaped: the last stage is at the first rank.
    """
    number = each * ranks.size
    own = [ranks.rank + ranks.size * part for part in range(each)]
    if v_shaped:
        own = [ranks.rank, number - 1 - ranks.rank]

    def program(offload: Around, weights: Storages) -> object:
        model = stages(number)
        mine = nn.ModuleList(model[index] for index in own)
        parts = [PipelineStage(model[index], index, number, torch.device("cpu")) for index in own]
        loop = schedule(parts if each > 1 else parts[0], MICROBATCHES, loss_fn=F.mse_loss)
        weights += [parameter.untyped_storage() for parameter in mine.parameters()]

        def step(index: int) -> Tensor:
            x, y = (leaf(MICROBATCHES * ROWS, WIDTH, seed=10 * index + k, grad=False) for k in (1, 2))
            losses: list[Tensor] = []
            given: dict[str, Any] = {}
            if number - 1 in own:
                given = {"target": y, "losses": losses}
            with offload:
                loop.step(*([x] if 0 in own else []), **given)
            return torch.stack(losses).mean() if losses else torch.zeros(())

        return steps(mine, step)

    exact(ranks, program, reloads=False, held=True, moved=0.7)


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    "gpipe": partial(trained, schedule=ScheduleGPipe),
    "one_forward_one_backward": partial(trained, schedule=Schedule1F1B),
    "interleaved": partial(trained, schedule=ScheduleInterleaved1F1B, each=2),
    "breadth_first": partial(trained, schedule=ScheduleLoopedBFS, each=2),
    "interleaved_zero_bubble": partial(trained, schedule=ScheduleInterleavedZeroBubble, each=2),
    "v_shaped_zero_bubble": partial(trained, schedule=ScheduleZBVZeroBubble, each=2, v_shaped=True),
}
