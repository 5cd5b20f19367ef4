"""What a plan predicts, beside training that follows it on the simulated runtime."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

import eager_offload as eo
from benchmarks.common import Report, show
from benchmarks.models import Shape, Stack
from benchmarks.planning.large import H200, WINDOW_TENSORS
from benchmarks.simulate import LARGE, SEQUENCES, SMALL_WIDTH
from benchmarks.simulation.oracle import Program, best_step
from benchmarks.simulation.stage import Stage
from eager_offload.plan.predict import Problem

#: Goals.
PEAK, STEP, OF_BEST = 0.02, 0.03, 1.03


@dataclass(frozen=True)
class Trained:
    """Steps that follow one plan, as parts of what it says. Medians, but for peaks, which are the highest."""

    tokens: str
    #: Of the way from the least budget to the one for which nothing moves.
    part: float
    jitter: float
    link: float
    #: Of a step without transfers.
    predicted: float
    step: float
    peak: float
    #: The peak, as a part of the budget.
    of_budget: float
    #: The step, as a part of one by the schedule that knows all times and has the same room.
    of_best: float
    moved: float
    same_bits: bool


def training(options: argparse.Namespace, report: Report) -> list[Trained]:
    found = []
    for name in options.tokens:
        small = Small(name, options.layers)
        for part in options.shares:
            found += small.train(part, options)
    show("Training that follows plans, on the simulated runtime: step and peak of what was predicted", found)
    as_said = [one for one in found if one.link == 1]
    report.at_most("training: step off", max(abs(one.step - 1) for one in as_said), STEP)
    report.at_most("training: peak off", max(abs(one.peak - 1) for one in as_said), PEAK)
    report.at_most("training: peak of budget, other links too", max(one.of_budget for one in found), 1)
    report.at_most("training: step of best", max(one.of_best for one in as_said), OF_BEST)
    report.at_least("training: same bits", min(one.same_bits for one in found), 1)
    return found


class Small:
    """A small model on a device so much slower that it stands for the large one on an H200."""

    def __init__(self, tokens: str, layers: int) -> None:
        self.tokens = tokens
        width = LARGE.width / SMALL_WIDTH
        self._length = round(SEQUENCES[tokens] / width)
        hidden = round(LARGE.hidden / width)
        self._model = Stack(Shape(layers, SMALL_WIDTH, hidden, 1))
        self._x = torch.randn(self._length, SMALL_WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
        # Bytes are fewer by the square of that, operations by the cube.
        self._machine = replace(
            H200,
            flops=H200.flops / width,
            single_flops=H200.single_flops / width,
            launch_seconds=H200.launch_seconds / width**2,
        )
        window = WINDOW_TENSORS * 2 * self._length * hidden
        self._config = {
            "min_bytes": self._length * SMALL_WIDTH,  # half of the smallest activation
            "max_inflight_bytes": window,
            "prefetch_bytes": window,
        }
        self._loss().backward()
        self._expected = self._gradients()
        self._plain = self._plan(1 << 50)

    def _loss(self) -> Tensor:
        return self._model(self._x).float().square().mean()

    def _gradients(self) -> list[Tensor]:
        return [one.grad.clone() for one in self._model.parameters() if one.grad is not None]

    def _plan(self, budget: int) -> eo.Plan:
        def loss(out: Tensor) -> Tensor:
            return out.float().square().mean()

        return eo.plan(self._model, self._x, loss=loss, device=self._machine, device_budget=budget, config=self._config)

    def train(self, part: float, options: argparse.Namespace) -> Iterator[Trained]:
        """Steps that follow a plan for one budget, at other times and links than it believes."""
        least = self._plain.least_budget
        budget = least + int((self._plain.peak_bytes - least) * part)
        plan = self._plan(budget)
        assert plan.fits
        program = oracle_program(plan.problem)
        for jitter, link in ((0.0, 1.0), (0.3, 1.0), (0.3, 0.8), (0.3, 1.2)):
            stage = Stage(self._machine, jitter, link)
            offload = stage.offload(plan=plan)
            real = replace(self._machine, out=self._machine.out * link, back=self._machine.back * link)
            steps, best, same = [], [], True
            for _ in range(options.steps):
                offload.reset_stats()
                steps.append(stage.step(offload, self._model, self._x, self._loss))
                stats, one = offload.stats(), steps[-1]
                assert stats.followed_forwards == 1
                assert not stats.plan_misses
                room = stats.resident_bytes_peak
                best.append(one.seconds / best_step(program, one.op_seconds, one.forward_ops, real, room))
                same &= all(map(torch.equal, self._gradients(), self._expected))
            offload.close()
            yield Trained(
                tokens=self.tokens,
                part=part,
                jitter=jitter,
                link=link,
                predicted=plan.step_seconds / plan.compute_seconds,
                step=median(one.seconds for one in steps) / plan.step_seconds,
                peak=max(one.peak_bytes for one in steps) / plan.peak_bytes,
                of_budget=max(one.peak_bytes for one in steps) / budget,
                of_best=median(best),
                moved=plan.moved_bytes / plan.problem.program.movable_bytes,
                same_bits=same,
            )


def oracle_program(problem: Problem) -> Program:
    """What the schedule that knows all times is told of a step."""
    traced = problem.program
    storages = traced.storages
    last = {traced.saves[ask.save].storage: ask.op for ask in traced.asks}
    return Program(
        nbytes=[one.nbytes for one in storages],
        saved_at=[one.saved for one in storages],
        first_asked_at={number: one.asked for number, one in enumerate(storages)},
        last_asked_at={number: last[number] for number in range(len(storages))},
    )
