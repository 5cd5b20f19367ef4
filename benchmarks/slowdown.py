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

import torch

from benchmarks.common import GIB, Report, command_line, drive, parse, show, speeds
from benchmarks.simulate import train
from tests.simulation.large import SEQUENCES, SQUARE, Small

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
    torch.set_num_threads(1)
    found, same_bits = [], True
    for link in options.links:
        small = Small(SEQUENCES[options.tokens], options.layers)
        for name, fields in SETTINGS.items():
            last = deque(train(small, options, link, **fields), maxlen=options.measured)
            same_bits &= all(step.same_bits for step in last)
            longer = median(step.step_seconds / step.compute_seconds - 1 for step in last)
            found.append(
                {
                    "link": f"{link:g}",
                    "setting": name,
                    "moved GiB": median(step.bytes_out for step in last) / GIB,
                    "of": SQUARE * sum(small.program.nbytes) / GIB,
                    "a step takes longer by": longer,
                    "waits by": median(step.stall_seconds / step.compute_seconds for step in last),
                }
            )
            if name == "free":
                report.at_most(f"free, link {link:g}: longer by", longer, LIMIT)
    report.at_least("same bits", same_bits, 1)
    show("Links in multiples of PCIe 5 x16; times as parts of a step without transfers", found)
    return found, {}


def options_of() -> argparse.Namespace:
    parser = command_line(
        __doc__, layers=8, steps=116, measured=16, jitter=0.3
    )  # what stays is learnt from those before
    parser.add_argument("--links", type=speeds, default="0.25,1,2", help="in multiples of PCIe 5 x16")
    parser.add_argument("--tokens", choices=SEQUENCES, default="32k", help="of the simulated sequence")
    return parse(parser, layers=2, steps=6, measured=2, links=[1.0])


if __name__ == "__main__":
    sys.exit(drive("slowdown", options_of(), run))
