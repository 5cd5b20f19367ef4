"""What a step costs when nothing is known of it, and when it goes like the steps before it.

    python -m benchmarks.learning
    python -m benchmarks.learning --rounds 1 --width 256

Three programs, each for some steps: towers whose losses go backward in the order of forward, so that the reverse of
packing is the wrong order to bring things back in; a decoder language model; and the same with a program that holds on
to the results of its blocks, so that moving them frees nothing. All on the simulated device, with virtual streams and
clock. The first step, of which nothing is known, is compared with the third, which knows those before it and follows
none, and that with the last, which follows a step plan.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor

import eager_offload as eo
from benchmarks.common import Report, command_line, drive, parse, show, turns
from benchmarks.training import language_model as make_model
from benchmarks.training import text, windows
from eager_offload.simulation.simulated import SimulatedRuntime
from eager_offload.simulation.timeline import Timeline

STEPS = 6
#: Numbers of the steps that are compared: with ``"auto"`` a plan is followed once three steps were alike.
COMPARED = {"first": 0, "learnt": 2, "followed": STEPS - 1}
#: Fields of a step, what they are called, and in which unit that is.
MEASURES = (
    ("exposed_seconds", "exposed ms", 1e3),
    ("wasted_bytes", "wasted MiB", 2**-20),
    ("resident_bytes_peak", "held MiB", 2**-20),
)
#: Of the simulated device: bytes a second that operators touch, and that each link carries.
COMPUTE, LINK = 1e9, 6e8


@dataclass(frozen=True)
class Step:
    """One step. Seconds on the virtual clock, and bytes."""

    program: str
    round: int
    number: int
    #: Whether it was like its plan to the end.
    followed: bool
    #: How long compute waited for transfers.
    exposed_seconds: float
    #: Bytes that left and were asked for while they were still on the device, or came back and were not asked for.
    wasted_bytes: int
    offloaded_bytes: int
    resident_bytes_peak: int


#: What a forward leaves: losses in the order in which backward takes them, and what the program holds on to.
Graphs: TypeAlias = tuple[list[Tensor], list[Tensor]]


def towers(options: argparse.Namespace) -> Callable[[], Graphs]:
    x = torch.linspace(-1, 1, options.width * 1024).view(1024, options.width).requires_grad_()

    def forward() -> Graphs:
        losses = []
        for scale in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
            h = x * scale
            for _ in range(options.layers):
                h = h.exp().neg()
            losses.append(h.sum())
        return losses, []

    return forward


def language_model(options: argparse.Namespace, *, hold: bool) -> Callable[[], Graphs]:
    model = make_model(options)
    (batch,) = text(options, seed=0)
    held: list[Tensor] = []
    if hold:
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.register_forward_hook(lambda *arguments: held.append(arguments[-1]))

    def forward() -> Graphs:
        held.clear()
        return [model(batch.inputs, batch.targets)], held

    return forward


PROGRAMS: dict[str, Callable[[argparse.Namespace], Callable[[], Graphs]]] = {
    "towers": towers,
    "language model": lambda options: language_model(options, hold=False),
    "results held": lambda options: language_model(options, hold=True),
}


def run(program: str, number: int, options: argparse.Namespace) -> Iterator[Step]:
    """Some steps with a new ``Offload``, which knows nothing at first."""
    runtime = SimulatedRuntime(compute_rate=COMPUTE, out_bandwidth=LINK, in_bandwidth=LINK)
    with runtime.checked() as checker:
        offload = eo.Offload(runtime=runtime, **windows(options, "host"))
        forward = PROGRAMS[program](options)
        for step in range(STEPS):
            offload.reset_stats()
            runtime.timeline = Timeline()
            with offload:
                losses, held = forward()
            offload.stats(synchronize=True)  # or the host would run so far ahead that nothing had left yet
            while losses:
                losses.pop(0).backward()
            held.clear()
            stats = offload.stats(synchronize=True)
            wasted = stats.forwarded_bytes + max(stats.bytes_in - stats.reloaded_bytes, 0)
            followed = stats.followed_forwards > 0 and not stats.plan_misses
            exposed, moved, peak = runtime.timeline.stall_seconds, stats.offloaded_bytes, stats.resident_bytes_peak
            yield Step(program, number, step, followed, exposed, wasted, moved, peak)
        offload.close()
    checker.assert_clean()


def measure(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    places = turns(options.rounds, list(PROGRAMS))
    steps = [step for number, program, _ in places for step in run(program, number, options)]
    rows = []
    for program in PROGRAMS:
        own = [step for step in steps if step.program == program]
        first, learnt, followed = ([step for step in own if step.number == number] for number in COMPARED.values())
        early = sum(step.followed for step in (*first, *learnt))
        report.at_most(f"{program}: first and learnt steps that follow a plan", early, 0)
        late = sum(step.followed for step in followed)
        report.at_least(f"{program}: last steps that follow one", late, options.rounds)
        row: dict[str, object] = {"program": program}
        for what, name, scale in MEASURES:
            values = [median(getattr(step, what) for step in some) * scale for some in (first, learnt, followed)]
            row |= {f"{name}, {when}": value for when, value in zip(COMPARED, values, strict=True)}
            more_learnt, more_followed = (round(two - one, 6) for one, two in pairwise(values))
            report.at_most(f"{program}: {name} of the followed step, above the learnt", more_followed, 0)
            if what != "resident_bytes_peak":
                report.at_most(f"{program}: {name} of the learnt step, above the first", more_learnt, 0)
        rows.append(row)
    show("Medians", rows)
    return steps, rows


def options_of() -> argparse.Namespace:
    parser = command_line(
        __doc__, rounds=5, layers=6, width=256, heads=4, sequence=256, batch=4, window="8MiB", min_bytes="256KiB"
    )
    return parse(parser, rounds=1)


if __name__ == "__main__":
    sys.exit(drive("learning", options_of(), measure))
