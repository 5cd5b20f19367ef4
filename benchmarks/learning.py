"""What a step costs when nothing is known of it, and when it goes like the steps before it.

    python -m benchmarks.learning
    python -m benchmarks.learning --rounds 1 --width 256

Three programs, each for some steps: towers whose losses go backward in the order of forward, so that the reverse of
packing is the wrong order to bring things back in; a decoder language model; and the same with a program that holds on
to the results of its blocks, so that moving them frees nothing. On the simulated device (virtual streams and clock) and
on the CPU with the disk tier. The first step, of which nothing is known, is compared with the third, which knows those
before it and follows none, and that with the last, which follows a step plan.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor

import eager_offload as eo
from benchmarks.common import Report, console, drive, table
from benchmarks.options import command_line, parse
from eager_offload.config import parse_size
from eager_offload.simulation.simulated import SimulatedRuntime
from eager_offload.simulation.timeline import Timeline

from lm.data import batches, read_text
from lm.model import LanguageModel

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
    """One step. Seconds on the virtual clock for the simulated device, on the wall for the CPU; bytes."""

    program: str
    device: str
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


@dataclass(frozen=True)
class Graphs:
    """What a forward leaves: losses in the order in which backward takes them, and what the program holds on to."""

    losses: list[Tensor]
    held: list[Tensor]


def towers(options: argparse.Namespace) -> Callable[[], Graphs]:
    x = torch.linspace(-1, 1, options.width * 1024).view(1024, options.width).requires_grad_()

    def forward() -> Graphs:
        losses = []
        for scale in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
            h = x * scale
            for _ in range(options.layers):
                h = h.exp().neg()
            losses.append(h.sum())
        return Graphs(losses, [])

    return forward


def language_model(options: argparse.Namespace, *, hold: bool) -> Callable[[], Graphs]:
    torch.manual_seed(0)
    model = LanguageModel(options.layers, options.width, 4, options.sequence, checkpointing=False)
    batch = batches(read_text(), count=1, batch=4, sequence=options.sequence, seed=0)[0]
    held: list[Tensor] = []
    if hold:
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.register_forward_hook(lambda *arguments: held.append(arguments[-1]))

    def forward() -> Graphs:
        held.clear()
        return Graphs([model(batch.inputs, batch.targets)], held)

    return forward


PROGRAMS: dict[str, Callable[[argparse.Namespace], Callable[[], Graphs]]] = {
    "towers": towers,
    "language model": lambda options: language_model(options, hold=False),
    "results held": lambda options: language_model(options, hold=True),
}


@contextmanager
def device(name: str, options: argparse.Namespace) -> Iterator[tuple[eo.Offload, SimulatedRuntime | None]]:
    """An ``Offload`` on one of the two devices."""
    window = parse_size(options.window)
    fields = {"min_bytes": options.min_bytes, "max_inflight_bytes": window, "prefetch_bytes": window}
    if name == "CPU":
        offload = eo.Offload(tier="disk", disk_path=options.disk_path, **fields)
        yield offload, None
        offload.close()
        return
    runtime = SimulatedRuntime(compute_rate=COMPUTE, out_bandwidth=LINK, in_bandwidth=LINK)
    with runtime.checked() as checker:
        offload = eo.Offload(runtime=runtime, tier="host", **fields)
        yield offload, runtime
        offload.close()
    checker.assert_clean()


def run(program: str, where: str, number: int, options: argparse.Namespace) -> list[Step]:
    """Some steps with a new ``Offload``, which knows nothing at first."""
    found = []
    with device(where, options) as (offload, runtime):
        forward = PROGRAMS[program](options)
        for step in range(STEPS):
            offload.reset_stats()
            if runtime is not None:
                runtime.timeline = Timeline()
            with offload:
                graphs = forward()
            if runtime is not None:
                offload.stats(synchronize=True)  # or the host would run so far ahead that nothing had left yet
            while graphs.losses:
                graphs.losses.pop(0).backward()
            graphs.held.clear()
            del graphs
            stats = offload.stats(synchronize=True)
            exposed = stats.stall_seconds if runtime is None else runtime.timeline.stall_seconds
            wasted = stats.forwarded_bytes + max(stats.bytes_in - stats.reloaded_bytes, 0)
            followed = stats.followed_forwards > 0 and not stats.plan_misses
            moved, peak = stats.offloaded_bytes, stats.resident_bytes_peak
            found.append(Step(program, where, number, step, followed, exposed, wasted, moved, peak))
    return found


def measure(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    steps = [
        step
        for number in range(options.rounds)
        for where in ("simulated", "CPU")
        for program in PROGRAMS
        for step in run(program, where, number, options)
    ]
    headings = [f"{name}, {step}" if step == "first" else step for _, name, _ in MEASURES for step in COMPARED]
    shown = table("program, device", *headings)
    for where in ("simulated", "CPU"):
        for program in PROGRAMS:
            compared = [
                [step for step in steps if (step.program, step.device, step.number) == (program, where, number)]
                for number in COMPARED.values()
            ]
            following = [sum(step.followed for step in some) for some in compared]
            report.at_most(
                f"{program}, {where}: first and learnt steps that follow a plan", following[0] + following[1], 0
            )
            report.at_least(f"{program}, {where}: last steps that follow one", following[2], options.rounds)
            cells: list[str] = []
            for what, name, scale in MEASURES:
                first, learnt, followed = (median(getattr(step, what) for step in some) * scale for some in compared)
                cells += [f"{value:,.2f}" for value in (first, learnt, followed)]
                if where == "simulated":
                    more, most = round(followed - learnt, 6), f"{program}: {name} of the"
                    report.at_most(f"{most} followed step, above the learnt", more, 0)
                    if what != "resident_bytes_peak":
                        report.at_most(f"{most} learnt step, above the first", round(learnt - first, 6), 0)
            shown.add_row(f"{program}, {where}", *cells)
    console.print(shown)
    return [asdict(step) for step in steps], {}


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, rounds=5, layers=6, width=256, sequence=256, window="8MiB", min_bytes="256KiB")
    return parse(parser, rounds=1)


if __name__ == "__main__":
    sys.exit(drive("learning", options_of(), measure, on_disk=True))
