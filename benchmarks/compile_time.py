"""How much longer torch takes to compile where an ``Offload`` is around forward.

    python -m benchmarks.compile_time
    python -m benchmarks.compile_time --layers 16 --rounds 5

A Llama's first training step with nothing in any cache, less a later one: what Dynamo, AOTAutograd, the passes and
Inductor take for forward and backward. Plain, inside an ``Offload`` and with ``backend="eager_offload"`` in turn, in
one process and with no worker, so that the seconds of the processor, those of the C++ compiler included, stand beside
those of the clock.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._inductor.utils import fresh_cache

import eager_offload as eo
from benchmarks.common import MIB, Report, Spread, command_line, drive, parse, ratios, show, turns
from benchmarks.models import Llama, Shape

#: Compiling inside an ``Offload``, against compiling without.
LIMIT = 1.10
PLAIN, WITH, BACKEND = VARIANTS = ("plain", "with offload", 'backend="eager_offload"')
SETTINGS: dict[str, Any] = {"min_bytes": 0, "keep_last_bytes": 0}


@dataclass(frozen=True)
class Sample:
    """What compiling one step took; seconds."""

    variant: str
    round: int
    clock: float
    #: Of the processor, with what the C++ compiler took.
    processor: float
    #: Bytes that the compiled step moved.
    moved: int


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """A compiler that knows nothing from before."""
    torch._dynamo.reset()
    caches = {"fx_graph_cache": False, "compile_threads": 1}
    with inductor_config.patch(caches), functorch_config.patch(enable_autograd_cache=False), fresh_cache():
        yield
    torch._dynamo.reset()


def sample(variant: str, layers: int, number: int = 0) -> Sample:
    torch.manual_seed(0)
    model = Llama(Shape(layers, 128, 256, 4, 2, 512))
    tokens = torch.randint(512, (2, 64))
    offload = eo.Offload(**SETTINGS)
    how: dict[str, Any] = {"backend": "eager_offload", "options": SETTINGS} if variant == BACKEND else {}
    with nothing_remembered():
        compiled = torch.compile(model, **how)

        def step() -> tuple[float, float]:
            clock, processor = time.perf_counter(), sum(os.times()[:4])
            with nullcontext() if variant == PLAIN else offload:
                loss = compiled(tokens)
            loss.backward()
            return time.perf_counter() - clock, sum(os.times()[:4]) - processor

        first, later = step(), step()
    moved = offload.stats(synchronize=True).bytes_out
    offload.close()
    return Sample(variant, number, first[0] - later[0], first[1] - later[1], moved)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    for variant in VARIANTS:
        sample(variant, 1)  # imports, and what is made once in a process
    samples = [sample(variant, options.layers, number) for number, variant, _ in turns(options.rounds, VARIANTS)]
    summary = {}
    for variant in VARIANTS:
        own = [one for one in samples if one.variant == variant]
        summary[variant] = {
            "seconds": Spread.of(one.clock for one in own),
            "clock": Spread.of(ratios(samples, "clock", variant, PLAIN)),
            "processor": Spread.of(ratios(samples, "processor", variant, PLAIN)),
            "moved MiB": own[0].moved / MIB,
        }
        if variant != PLAIN:
            assert all(one.moved for one in own), "nothing moved: this compares a graph with itself"
            processor = summary[variant]["processor"].median
            report.at_most(f"{variant}: time to compile, against plain", processor, LIMIT)
    show("To compile a step", ({"": variant, **found} for variant, found in summary.items()))
    return samples, summary


def options_of() -> argparse.Namespace:
    return parse(command_line(__doc__, layers=8, rounds=4), layers=1, rounds=1)


if __name__ == "__main__":
    sys.exit(drive("compile_time", options_of(), run))
