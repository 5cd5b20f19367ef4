"""A captured training step with offload on an accelerator, beside one without, eager steps, and followed eager steps.

    python -m benchmarks.capture
    python -m benchmarks.capture --batch 16 --keep-last-bytes 256MiB
    python -m benchmarks.capture --virtual --quick      # does it run? The numbers mean nothing

A Llama as large as GPT-2 small, bf16, 4 x 512 tokens, a fused AdamW. All four ways are in one process and take turns,
with the same batches from the same state. What the link allows the captured step with offload, from the bytes D that
its plan moves, the bandwidth, probed in the same process, and the captured step without, two thirds of which are
backward:

    max(T / 3, D / BW_out) + max(2 T / 3, D / BW_in)
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

import eager_offload as eo
from benchmarks.common import MIB, Report, Spread, command_line, drive, parse, show
from benchmarks.models import Llama, Shape
from eager_offload.graphs import capture_step
from eager_offload.plan.predict import floor_seconds
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Direction
from eager_offload.step_plan import Fate, StepPlan

EAGER, FOLLOWED = "eager", "eager, offload followed"
PLAIN, OFFLOADED = "captured", "captured, offload"


class Step:
    """Forward, backward and optimizer: what all ways do.

    Args:
        around: entered around forward.
    """

    def __init__(self, options: argparse.Namespace, around: AbstractContextManager[Any]) -> None:
        device = torch.device(options.device)
        torch.manual_seed(0)
        with device:
            model = Llama(
                Shape(options.layers, options.width, 8 * options.width // 3, options.heads, 0, options.vocabulary)
            )
        self.model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
        kind = {"capturable": True} if device.type in ("cuda", "xpu") else {}  # other devices are refused it
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, **kind)
        self.around = around

    def __call__(self, tokens: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with self.around:
            loss: Tensor = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@dataclass
class Way:
    """One way of taking steps; seconds, and bytes of the device above parameters and optimizer."""

    run: Callable[[Tensor], Tensor]
    #: What the steps take of the device: the peak, or what a graph holds.
    peak_bytes: int
    stats: eo.OffloadStats | None
    #: For a captured step: enqueues a replay and nothing else; and what it was made of.
    launch: Callable[[], object] | None = None
    plan: StepPlan | None = None
    #: One for each round: of a step, and of the host until one is enqueued.
    seconds: list[float] = field(default_factory=list)
    call_seconds: list[float] = field(default_factory=list)
    launch_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def prepare(name: str, options: argparse.Namespace, batches: list[Tensor]) -> Way:
    """Builds a way and takes ``options.warm_up`` steps; each way takes the same number with the same batches."""
    fields = {"min_bytes": 0} if options.quick else {}
    offload = eo.Offload(tier="host", keep_last_bytes=options.keep_last_bytes, **fields)
    step = Step(options, offload if name == FOLLOWED else nullcontext())
    for batch in batches[:2]:  # parameters, gradients and the optimizer's state are not what is compared
        step.model(batch).backward()
        step.optimizer.step()
    step.optimizer.zero_grad()
    before = _reserved(options)
    if name in (PLAIN, OFFLOADED):
        ours = offload if name == OFFLOADED else None
        captured = capture_step(step, (batches[0],), offload=ours, warmup=options.warm_up)
        captured(batches[0])
        stats = ours and ours.stats(synchronize=True)
        return Way(captured, _reserved(options) - before, stats, captured.launch, captured.plan)
    allocated = torch.accelerator.memory_allocated(options.device)
    for _ in range(options.warm_up):
        step(batches[0])
    torch.accelerator.synchronize(options.device)
    torch.accelerator.reset_peak_memory_stats(options.device)
    step(batches[0])
    torch.accelerator.synchronize(options.device)
    peak = torch.accelerator.max_memory_allocated(options.device) - allocated
    return Way(step, peak, offload.stats(synchronize=True) if name == FOLLOWED else None)


def _reserved(options: argparse.Namespace) -> int:
    """Bytes that the allocator cannot give back: of tensors that live, and of graphs."""
    gc.collect()
    torch.accelerator.synchronize(options.device)
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_reserved(options.device)


def measure(ways: list[Way], options: argparse.Namespace, batches: list[Tensor]) -> None:
    """Has the ways take turns. In each round each of them has the same batches."""
    for number in range(options.rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            torch.accelerator.synchronize(options.device)
            began = time.perf_counter()
            for index in range(options.steps):
                loss = way.run(batches[(number + index) % len(batches)])
            called = time.perf_counter()
            torch.accelerator.synchronize(options.device)
            way.seconds.append((time.perf_counter() - began) / options.steps)
            way.call_seconds.append((called - began) / options.steps)
            way.losses.append(loss.item())
    for _ in range(options.rounds):
        for way in ways:
            if way.launch is not None:
                torch.accelerator.synchronize(options.device)
                began = time.perf_counter()
                way.launch()
                way.launch_seconds.append(time.perf_counter() - began)
    torch.accelerator.synchronize(options.device)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    runtime, device = accelerator_runtime(), torch.device(options.device)
    if not runtime.captures:
        raise SystemExit(f"benchmarks.capture: torch {torch.__version__} makes no graphs on {device}")
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.sequence + 1)
    batches = [torch.randint(options.vocabulary, shape, generator=generator).to(device) for _ in range(4)]
    ways = {name: prepare(name, options, batches) for name in (EAGER, FOLLOWED, PLAIN, OFFLOADED)}
    measure(list(ways.values()), options, batches)
    rows = {
        name: {
            "step ms": Spread.of(way.seconds, 1e-3),
            "call ms": median(way.call_seconds) * 1e3,
            "launch us": median(way.launch_seconds) * 1e6 if way.launch_seconds else None,
            "MiB": way.peak_bytes / MIB,
            "same losses": way.losses == ways[EAGER].losses,
        }
        for name, way in ways.items()
    }
    show("Four ways", ({"way": name, **row} for name, row in rows.items()))
    offloaded, plain, plan = ways[OFFLOADED], ways[PLAIN], ways[OFFLOADED].plan
    assert plan is not None
    moved, alone, step = plan.totals.offloaded, median(plain.seconds), median(offloaded.seconds)
    link = runtime.bandwidth(device, Direction.OUT), runtime.bandwidth(device, Direction.IN)
    expected = floor_seconds(alone / 3, 2 * alone / 3, moved, *link)
    print(f"The plan moves {moved / MIB:,.1f} MiB each way: the link allows a step of {expected * 1e3:,.3f} ms.")
    ours = "captured with offload"
    report.at_most(f"{ours}: step, of captured without", step / alone, 1.05)
    report.at_least(f"{ours}: times as fast as eager", median(ways[EAGER].seconds) / step, 1.5)
    freed = (plain.peak_bytes - offloaded.peak_bytes) / max(moved, 1)
    report.at_least(f"{ours}: peak below captured without, of the bytes that the plan moves", freed, 0.95)
    report.at_most(f"{ours}: host time of a replay, of a step", median(offloaded.launch_seconds) / step, 0.01)
    gone = sum(save.storage_nbytes for save in plan.saves if save.fate is Fate.OFFLOAD and save.release >= 0)
    stats = ways[FOLLOWED].stats
    summary = {
        "ways": rows,
        "plan": {**plan.totals._asdict(), "gone_before_the_last_save": gone},
        "followed_forwards": stats.followed_forwards if stats else 0,
        "link": link,
        "expected_seconds": expected,
    }
    samples = {
        name: {what: getattr(way, what) for what in ("seconds", "call_seconds", "launch_seconds", "losses")}
        for name, way in ways.items()
    }
    return samples, summary


def main() -> int:
    sizes = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50_257, "batch": 4, "sequence": 512}
    parser = command_line(__doc__, rounds=21, steps=10, warm_up=5, **sizes)
    parser.add_argument("--virtual", action="store_true", help="on the virtual device of the tests: whether it runs")
    parser.add_argument("--keep-last-bytes", default="auto", help="of the offload; what it keeps costs no time")
    smaller = {"width": 32, "heads": 2, "vocabulary": 64, "layers": 2, "batch": 2, "sequence": 16}
    options = parse(parser, **smaller, rounds=2, steps=2, keep_last_bytes=0)
    if options.virtual:
        from tests.virtual_device import install

        install()
    options.device = None  # the accelerator that there is
    return drive("capture", options, run)


if __name__ == "__main__":
    sys.exit(main())
