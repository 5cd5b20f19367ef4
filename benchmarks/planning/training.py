"""What a plan predicts, beside training that follows it on the simulated runtime."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks.common import Report, show
from tests.simulation.large import SEQUENCES, Small
from tests.simulation.stage import Stage

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
        small = Small(SEQUENCES[name], options.layers)
        for part in options.shares:
            found += train(name, part, small, options)
    show("Training that follows plans, on the simulated runtime: step and peak of what was predicted", found)
    as_said = [one for one in found if one.link == 1]
    report.at_most("training: step off", max(abs(one.step - 1) for one in as_said), STEP)
    report.at_most("training: peak off", max(abs(one.peak - 1) for one in as_said), PEAK)
    report.at_most("training: peak of budget, other links too", max(one.of_budget for one in found), 1)
    report.at_most("training: step of best", max(one.of_best for one in as_said), OF_BEST)
    report.at_least("training: same bits", min(one.same_bits for one in found), 1)
    return found


def train(name: str, part: float, small: Small, options: argparse.Namespace) -> Iterator[Trained]:
    """Steps that follow a plan for one budget, at other times and links than it believes."""
    least = small.plain.least_budget
    budget = least + int((small.plain.peak_bytes - least) * part)
    plan = small.plan(budget)
    assert plan.fits
    for jitter, link in ((0.0, 1.0), (0.3, 1.0), (0.3, 0.8), (0.3, 1.2)):
        machine = small.linked(link)
        stage = Stage(machine, jitter)
        offload = stage.offload(plan=plan)
        steps, best, same = [], [], True
        for _ in range(options.steps):
            offload.reset_stats()
            steps.append(one := stage.step(offload, small.model, small.x, small.loss))
            stats = offload.stats()
            assert stats.followed_forwards == 1
            assert not stats.plan_misses
            best.append(one.seconds / small.best(one, machine, stats.resident_bytes_peak))
            same &= small.has_same_bits()
        offload.close()
        yield Trained(
            tokens=name,
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
