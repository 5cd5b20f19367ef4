"""Pipeline schedules: several microbatches are between their forward and their backward at any time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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

import eager_offload as eo
from tests.hazards.programs import assert_identical
from tests.planning.programs import CONFIG
from tests.programs import leaf
from tests.ranks.launch import Ranks
from tests.ranks.training import WIDTH, Around, Block, Storages, exact, steps

MICROBATCHES, ROWS = 4, 8


def stages(number: int) -> list[nn.Module]:
    """The parts of one model, the same in every rank."""
    torch.manual_seed(0)
    return [nn.Sequential(Block(), Block()) for _ in range(number)]


class Program:
    """A model in stages under ``schedule``.

    Args:
        each: how many stages a rank has.
        v_shaped: the last stage is at the first rank.
    """

    def __init__(self, ranks: Ranks, schedule: Callable[..., Any], each: int, *, v_shaped: bool) -> None:
        self.number = each * ranks.size
        self.own = [ranks.rank + ranks.size * part for part in range(each)]
        if v_shaped:
            self.own = [ranks.rank, self.number - 1 - ranks.rank]
        model = stages(self.number)
        self.mine = nn.ModuleList(model[index] for index in self.own)
        parts = [PipelineStage(model[index], index, self.number, torch.device("cpu")) for index in self.own]
        self._loop = schedule(parts if each > 1 else parts[0], MICROBATCHES, loss_fn=F.mse_loss)

    def step(self, index: int, offload: Around) -> Tensor:
        x, y = (leaf(MICROBATCHES * ROWS, WIDTH, seed=10 * index + k, grad=False) for k in (1, 2))
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": y, "losses": losses} if self.number - 1 in self.own else {}
        with offload:
            self._loop.step(*([x] if 0 in self.own else []), **given)
        return torch.stack(losses).mean() if losses else torch.zeros(())


def trained(ranks: Ranks, schedule: Callable[..., Any], each: int = 1, v_shaped: bool = False) -> None:
    """Trains a model in stages: see ``Program``."""

    def program(offload: Around, weights: Storages) -> object:
        made = Program(ranks, schedule, each, v_shaped=v_shaped)
        weights += [parameter.untyped_storage() for parameter in made.mine.parameters()]
        return steps(made.mine, lambda index: made.step(index, offload))

    exact(ranks, program, reloads=False, held=True, moved=0.7)


def a_step_is_one_of_the_schedule_on_every_rank(ranks: Ranks) -> None:
    """What finds out the shapes of the stages teaches nothing: the fourth of six steps is looked up, wherever the
    context is."""
    for schedule, each in ((Schedule1F1B, 1), (ScheduleInterleavedZeroBubble, 2)):
        for is_around in (False, True):
            seen = []
            for enabled in (False, True):
                offload = eo.Offload(
                    enabled=enabled, tier="disk", disk_path=ranks.directory, keep_last_bytes=0, **CONFIG
                )
                made = Program(ranks, schedule, each, v_shaped=False)
                with offload if is_around else nullcontext():
                    losses = [made.step(index, nullcontext() if is_around else offload) for index in range(6)]
                seen.append([*losses, *(one.grad for one in made.mine.parameters())])
                stats = offload.stats(synchronize=True)
                offload.close()
            assert_identical(*seen, "six steps")
            assert stats.bytes_out > 0
            assert (stats.steps, stats.table_forwards, stats.table_misses) == (6, 3, {}), (schedule, is_around)


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    "a_step_is_one_of_the_schedule_on_every_rank": a_step_is_one_of_the_schedule_on_every_rank,
    "gpipe": partial(trained, schedule=ScheduleGPipe),
    "one_forward_one_backward": partial(trained, schedule=Schedule1F1B),
    "interleaved": partial(trained, schedule=ScheduleInterleaved1F1B, each=2),
    "breadth_first": partial(trained, schedule=ScheduleLoopedBFS, each=2),
    "interleaved_zero_bubble": partial(trained, schedule=ScheduleInterleavedZeroBubble, each=2),
    "v_shaped_zero_bubble": partial(trained, schedule=ScheduleZBVZeroBubble, each=2, v_shaped=True),
}
