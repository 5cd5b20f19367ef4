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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._inductor.utils import fresh_cache

import eager_offload as eo
from benchmarks.common import MIB, Report, Spread, console, drive, table
from benchmarks.llama import Config, Llama
from benchmarks.options import command_line, parse

#: Compiling inside an ``Offload``, against compiling without.
LIMIT = 1.10
PLAIN, WITH, BACKEND = "plain", "with offload", 'backend="eager_offload"'
VARIANTS = (PLAIN, WITH, BACKEND)
SETTINGS: dict[str, Any] = {"min_bytes": 0, "keep_last_bytes": 0}


@dataclass(frozen=True)
class Sample:
    """What compiling one step took; seconds."""

    variant: str
    clock: float
    #: Of the processor, with what the C++ compiler took.
    processor: float
    #: Bytes that the compiled step moved.
    moved: int


@dataclass(frozen=True)
class Instant:
    clock: float
    processor: float

    @classmethod
    def now(cls) -> Instant:
        used = os.times()
        return cls(time.perf_counter(), used.user + used.system + used.children_user + used.children_system)


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """A compiler that knows nothing from before."""
    torch._dynamo.reset()
    caches = {"fx_graph_cache": False, "compile_threads": 1}
    with inductor_config.patch(caches), functorch_config.patch(enable_autograd_cache=False), fresh_cache():
        yield
    torch._dynamo.reset()


def sample(variant: str, layers: int) -> Sample:
    torch.manual_seed(0)
    model = Llama(Config(layers, 128, 256, 4, 2, 512))
    tokens = torch.randint(512, (2, 64))
    offload = eo.Offload(**SETTINGS)
    with nothing_remembered():
        compiled: Callable[..., Any] = model
        if variant == BACKEND:
            compiled = torch.compile(model, backend="eager_offload", options=SETTINGS)
        else:
            compiled = torch.compile(model)

        def step() -> Instant:
            began = Instant.now()
            with nullcontext() if variant == PLAIN else offload:
                loss = compiled(tokens)
            loss.backward()
            ended = Instant.now()
            return Instant(ended.clock - began.clock, ended.processor - began.processor)

        first, later = step(), step()
    moved = offload.stats(synchronize=True).bytes_out
    offload.close()
    return Sample(variant, first.clock - later.clock, first.processor - later.processor, moved)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    for variant in VARIANTS:
        sample(variant, 1)  # imports, and what is made once in a process
    samples = [sample(variant, options.layers) for _ in range(options.rounds) for variant in VARIANTS]
    return [asdict(one) for one in samples], judge(report, samples)


def judge(report: Report, samples: list[Sample]) -> dict[str, object]:
    summary: dict[str, object] = {}
    shown = table("", "seconds", "clock", "processor", "moved, MiB")
    plain = [one for one in samples if one.variant == PLAIN]
    for variant in VARIANTS:
        ours = [one for one in samples if one.variant == variant]
        pairs = list(zip(ours, plain, strict=True))
        clock = Spread.of([one.clock / other.clock for one, other in pairs])
        processor = Spread.of([one.processor / other.processor for one, other in pairs])
        seconds = Spread.of([one.clock for one in ours])
        shown.add_row(variant, seconds.show(1), clock.show(), processor.show(), f"{ours[0].moved / MIB:,.1f}")
        summary[variant] = {"seconds": seconds, "clock": clock, "processor": processor}
        if variant != PLAIN:
            assert all(one.moved for one in ours), "nothing moved: this compares a graph with itself"
            report.at_most(f"{variant}: time to compile, against plain", processor.median, LIMIT)
    console.print(shown)
    return summary


def options_of() -> argparse.Namespace:
    return parse(command_line(__doc__, layers=8, rounds=4), layers=1, rounds=1)


if __name__ == "__main__":
    sys.exit(drive("compile_time", options_of(), run))
