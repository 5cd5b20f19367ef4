"""What ``policy="free"`` and ``max_slowdown`` come to: how much moves, and how much longer a step takes.

    python -m benchmarks.slowdown
    python -m benchmarks.slowdown --quick

On the virtual clock of ``simulate``, with operator times that vary, behind links of several speeds; and on the CPU,
behind a token bucket around the disk tier that is slower than the model, as in ``cpu_floor``. What stays is learnt
first. The last steps are measured, on the CPU the variants and a run without offload in turn. Gradients must be equal
bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks import cpu_floor, simulate
from benchmarks.common import MIB, Report, Spread, console, drive, table
from benchmarks.options import command_line, parse, positive, speeds
from benchmarks.simulate import GIB, SEQUENCES, Simulation
from benchmarks.training import on_a_quiet_cpu

#: Settings to compare, by name.
SETTINGS: dict[str, dict[str, Any]] = {
    "max": {},
    "max_slowdown=0.2": {"max_slowdown": 0.2},
    "max_slowdown=0.05": {"max_slowdown": 0.05},
    "free": {"policy": "free"},
}
#: What the step of "free" may take longer on the virtual clock: what counts as nothing exposed, and what was found
#: stays up to a fifth more.
LIMIT = 0.01
#: The link of the CPU, in multiples of the one that hides all.
CPU_LINK = 0.25


@dataclass(frozen=True)
class Found:
    """One setting behind one link, once it is learnt. Bytes of the large model on the virtual clock."""

    where: str
    setting: str
    #: By which part of a step without transfers one takes longer, and of that what compute waits for transfers.
    slowdown: float
    waited: float
    saved_bytes: float
    bytes_out: float


def simulated(options: argparse.Namespace) -> tuple[list[Found], int]:
    """On the virtual clock; and how many different gradients there were."""
    quiet = simulate.options_of(["--layers", str(options.layers), "--steps", str(options.steps)])
    found, hashes = [], set[str]()
    for link in options.links:
        simulation = Simulation(SEQUENCES[options.tokens], quiet, link)
        hashes.add(simulation.expected_hash)
        for name, fields in SETTINGS.items():
            last = deque(simulation.run(**fields), maxlen=options.measured)
            hashes |= {step.gradients_hash for step in last}
            compute = [step.forward_seconds + step.backward_seconds for step in last]
            found.append(
                Found(
                    where=f"simulated, link {link:g}",
                    setting=name,
                    slowdown=median(step.step_seconds / one - 1 for step, one in zip(last, compute, strict=True)),
                    waited=median(step.stall_seconds / one for step, one in zip(last, compute, strict=True)),
                    saved_bytes=simulation.large(simulation.program.total_bytes),
                    bytes_out=median(step.bytes_out for step in last),
                )
            )
    return found, len(hashes)


def on_the_cpu(options: argparse.Namespace) -> tuple[list[Found], int]:
    """Behind a token bucket; and how many different gradients there were."""
    trainer = cpu_floor.Trainer(options)
    trainer.step(None, -1, None)  # loads code and makes the gradients
    plain = trainer.step(None, -1, None)
    natural = trainer.offload(keep_last_bytes=0)
    moved = trainer.step(None, -1, natural).bytes_out
    natural.close()
    around = cpu_floor.throttled(CPU_LINK * moved / plain.forward_seconds)
    offloads = {name: trainer.offload(around, **fields) for name, fields in SETTINGS.items()}
    for name, offload in offloads.items():
        for _ in range(options.steps if SETTINGS[name] else 6):
            trainer.step(None, -1, offload)
    rounds: list[dict[str, cpu_floor.Timed]] = []
    waited = {name: list[float]() for name in SETTINGS}
    for number in range(options.measured):
        one = {"none": trainer.step(None, number, None)}
        for name, offload in offloads.items():
            one[name] = trainer.step(None, number, offload)
            waited[name].append(offload.stats().stall_seconds / max(one[name].seconds - one[name].stall_seconds, 1e-9))
        rounds.append(one)
    for offload in offloads.values():
        offload.close()
    found = [
        Found(
            where=f"CPU, link {CPU_LINK:g} of what hides all",
            setting=name,
            slowdown=median(one[name].seconds / one["none"].seconds - 1 for one in rounds),
            waited=median(waited[name]),
            saved_bytes=moved,
            bytes_out=median(one[name].bytes_out for one in rounds),
        )
        for name in SETTINGS
    ]
    return found, len({one.gradients_hash for turn in rounds for one in turn.values()})


def show(found: list[Found]) -> None:
    shown = table("where", "setting", "moved", "of", "a step takes longer by", "waits by")
    for one in found:
        size, unit = (GIB, "GiB") if one.saved_bytes > GIB else (MIB, "MiB")
        shown.add_row(
            one.where,
            one.setting,
            f"{one.bytes_out / size:,.1f} {unit}",
            f"{one.saved_bytes / size:,.1f} {unit}",
            f"{one.slowdown:+.1%}",
            f"{one.waited:.1%}",
        )
    console.print(shown)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    on_clock, kinds = simulated(options)
    found, others = on_the_cpu(options)
    found = [*on_clock, *found]
    report.at_most("different gradients, simulated", kinds, 1)
    report.at_most("different gradients, CPU", others, 1)
    for one in on_clock:
        if one.setting == "free":
            report.at_most(f"free, {one.where}: longer by", one.slowdown, LIMIT)
    show(found)
    summary = {f"{one.where}: {one.setting}": Spread.of([one.slowdown]) for one in found}
    return [asdict(one) for one in found], summary


def options_of() -> argparse.Namespace:
    parser = command_line(
        __doc__,
        layers=8,
        width=256,
        heads=4,
        sequence=256,
        batch=4,
        threads=1,
        window="4MiB",
        min_bytes="256KiB",
    )
    parser.add_argument("--links", type=speeds, default="0.25,1,2", help="in multiples of PCIe 5 x16")
    parser.add_argument("--tokens", choices=SEQUENCES, default="32k", help="of the simulated model's sequence")
    parser.add_argument("--steps", type=positive, default=100, help="from which is learnt what stays")
    parser.add_argument("--measured", type=positive, default=16, help="steps; the last ones")
    options = parse(parser, steps=4, measured=2)
    if options.quick:
        options.links = options.links[:1]
    return options


if __name__ == "__main__":
    sys.exit(drive("slowdown", options_of(), run, prepare=on_a_quiet_cpu))
