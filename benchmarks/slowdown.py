"""What ``policy="free"`` and ``max_slowdown`` come to: how much moves, and how much longer a step takes.

    python -m benchmarks.slowdown
    python -m benchmarks.slowdown --quick

On the virtual clock of ``simulate``, with operator times that vary, behind links of several speeds. What stays is
learnt first; the last steps are measured. Gradients must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from statistics import median
from typing import Any

from benchmarks import simulate
from benchmarks.common import GIB, Report, command_line, drive, parse, show, speeds

#: Settings to compare, by name.
SETTINGS: dict[str, dict[str, Any]] = {
    "max": {},
    "max_slowdown=0.2": {"max_slowdown": 0.2},
    "max_slowdown=0.05": {"max_slowdown": 0.05},
    "free": {"policy": "free"},
}
#: What the step of "free" may take longer: what counts as nothing exposed, and what was found stays up to a fifth more.
LIMIT = 0.01


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    quiet = simulate.options_of(["--layers", str(options.layers), "--steps", str(options.steps)])
    found, hashes = [], set[str]()
    for link in options.links:
        simulation = simulate.Simulation(simulate.SEQUENCES[options.tokens], quiet, link)
        hashes.add(simulation.expected_hash)
        for name, fields in SETTINGS.items():
            last = deque(simulation.run(**fields), maxlen=options.measured)
            hashes |= {step.gradients_hash for step in last}
            compute = [step.forward_seconds + step.backward_seconds for step in last]
            longer = median(step.step_seconds / one - 1 for step, one in zip(last, compute, strict=True))
            found.append(
                {
                    "link": f"{link:g}",
                    "setting": name,
                    "moved GiB": median(step.bytes_out for step in last) / GIB,
                    "of": simulation.large(simulation.program.total_bytes) / GIB,
                    "a step takes longer by": longer,
                    "waits by": median(step.stall_seconds / one for step, one in zip(last, compute, strict=True)),
                }
            )
            if name == "free":
                report.at_most(f"free, link {link:g}: longer by", longer, LIMIT)
    report.at_most("different gradients", len(hashes), 1)
    show("Links in multiples of PCIe 5 x16; times as parts of a step without transfers", found)
    return found, {}


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, layers=8, steps=116, measured=16)  # what stays is learnt from those before
    parser.add_argument("--links", type=speeds, default="0.25,1,2", help="in multiples of PCIe 5 x16")
    parser.add_argument("--tokens", choices=simulate.SEQUENCES, default="32k", help="of the simulated sequence")
    return parse(parser, layers=2, steps=6, measured=2, links=[1.0])


if __name__ == "__main__":
    sys.exit(drive("slowdown", options_of(), run))
