"""Plans beside fixed ways, in the same room."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import eager_offload as eo
from benchmarks.common import MIB, Report, show
from eager_offload.planning.draft import draft
from eager_offload.planning.predict import Course, Problem
from eager_offload.planning.program import Program
from eager_offload.planning.rehearse import rehearse
from eager_offload.planning.trace import trace
from tests.simulation.large import H200, LARGE, SEQUENCES, large, windows

#: Goal.
OF_WAYS = 1.01


@dataclass(frozen=True)
class Compared:
    """One budget. Bytes and seconds."""

    tokens: str
    budget: int
    fits: bool
    peak_bytes: int
    step_seconds: float
    moved_bytes: int
    recomputed_bytes: int
    #: The fixed way that is best of those that fit, and its step.
    way: str
    way_seconds: float
    seconds_to_plan: float

    @property
    def of_way(self) -> float:
        return self.step_seconds / self.way_seconds


@dataclass(frozen=True)
class Way:
    """What comes of a fixed way. Bytes and seconds."""

    tokens: str
    name: str
    peak_bytes: int
    step_seconds: float


def ways(options: argparse.Namespace, report: Report) -> dict[str, list[Any]]:
    fixed, found = list[Way](), list[Compared]()
    for name in options.tokens:
        own = list(fixed_ways(name, options))
        fixed += own
        low, high = min(one.peak_bytes for one in own), max(one.peak_bytes for one in own)
        for number in range(options.budgets):
            budget = low + (high - low) * number // max(options.budgets - 1, 1)
            found.append(compared(name, budget, own, options))
    show("Fixed ways", fixed)
    show("Plans with recompute=True, beside the best fixed way that fits", found)
    report.at_most("ways: step of the best that fits", max(one.of_way for one in found), OF_WAYS)
    report.at_least("ways: plans that fit", sum(one.fits for one in found), len(found))
    return {"ways": fixed, "plans": found}


def fixed_ways(name: str, options: argparse.Namespace) -> Iterator[Way]:
    """Rehearsed as a plan is."""
    tokens = SEQUENCES[name]
    model, x = large(replace(LARGE, layers=options.layers), tokens)
    size = windows(tokens, LARGE.hidden)["max_inflight_bytes"]
    blocks = [f"blocks.{number}" for number in range(options.layers)]
    for title, found in rehearsed(lambda again: trace(model, x, torch.sum, min_bytes=MIB, again=again), blocks, size):
        yield Way(name, title, found.peak_bytes, found.step_seconds)


def rehearsed(
    traced: Callable[[Sequence[str]], Program], blocks: Sequence[str], size: int
) -> Iterator[tuple[str, Course]]:
    """What comes of each fixed way on an H200.

    Args:
        traced: the step in which those modules are computed again.
        blocks: the modules that checkpoints go around.
        size: of both windows; bytes.
    """
    for prefix, again in (("", ()), ("checkpoints", blocks)):
        program = traced(again)
        problem = Problem(program, program.seconds(H200), H200.out, H200.back, size, size)
        count = len(program.storages)
        decisions = {"": (False,) * count, "all moves": (True,) * count}
        if not again:
            decisions["half moves"] = tuple(number % 2 == 0 for number in range(count))
        for what, moves in decisions.items():
            plan = draft(problem, moves)
            assert plan is not None
            found = rehearse(problem, plan, H200.launch_seconds)
            assert found is not None
            yield ", ".join(one for one in (prefix, what) if one) or "nothing moves", found


def compared(name: str, budget: int, fixed: Sequence[Way], options: argparse.Namespace) -> Compared:
    tokens = SEQUENCES[name]
    model, x = large(replace(LARGE, layers=options.layers), tokens)
    began = time.perf_counter()
    plan = eo.plan(
        model,
        x,
        loss=torch.sum,
        device=H200,
        device_budget=budget,
        recompute=True,
        config=windows(tokens, LARGE.hidden),
    )
    seconds = time.perf_counter() - began
    best = min((one for one in fixed if one.peak_bytes <= budget), key=lambda one: one.step_seconds)
    return Compared(
        tokens=name,
        budget=budget,
        fits=plan.fits,
        peak_bytes=plan.peak_bytes,
        step_seconds=plan.step_seconds,
        moved_bytes=plan.moved_bytes,
        recomputed_bytes=plan.recomputed_bytes,
        way=best.name,
        way_seconds=best.step_seconds,
        seconds_to_plan=seconds,
    )
