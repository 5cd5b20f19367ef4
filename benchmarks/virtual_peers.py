"""Peers beside ours on the virtual device: the same loop, the same bits, at three speeds of the link.

    python -m benchmarks.virtual_peers
    python -m benchmarks.virtual_peers --quick

The device of the tests (``tests/virtual_device``) has real streams, events and an allocator, and operators and copies
that take as long as this program says. So it ranks schedules, not GPUs: who waits for what, and what is held meanwhile.
Its seconds are no prediction for any accelerator, and host code counts for more here than beside one.

The link's speed is relative to compute: all that autograd saves takes a part of the time of a forward without offload
to cross a fast link, the whole of it one that is just fast enough, and four times as long a slow one.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.common import MIB, Report, Spread, console, table
from benchmarks.options import command_line, parse, positive
from benchmarks.processes import turns
from eager_offload.runtime.accelerator import accelerator_runtime
from tests.virtual_device import NAME, VirtualDevice, install

#: How long all that is saved takes to cross the link, of the time of a forward without offload.
LINKS = {"fast": 0.25, "just enough": 1.0, "slow": 4.0}
PLAIN = "none"

Around = Callable[[], AbstractContextManager[Any]]


def _ours() -> Around:
    offload = eo.Offload(tier="host", keep_last_bytes=0, min_bytes=0)
    return lambda: offload


def _ours_in_small_windows() -> Around:
    offload = eo.Offload(tier="host", keep_last_bytes=0, min_bytes=0, max_inflight_bytes="4MiB", prefetch_bytes="4MiB")
    return lambda: offload


def _ours_by_default() -> Around:
    offload = eo.Offload()
    return lambda: offload


def _trl(use_streams: bool) -> Around:
    from trl.models.activation_offloading import OffloadActivations

    # The object that is made for each step has a stream of its own, so there is one for all of them.
    around = OffloadActivations(use_streams=use_streams)
    return lambda: around


#: What stands around forward.
WAYS: dict[str, Callable[[], Around]] = {
    PLAIN: lambda: nullcontext,
    "save_on_cpu": lambda: lambda: torch.autograd.graph.save_on_cpu(pin_memory=True),
    "TRL, one stream": lambda: _trl(False),
    "TRL, streams": lambda: _trl(True),
    "ours, defaults": _ours_by_default,
    "ours, all": _ours,
    "ours, all, windows of 4 MiB": _ours_in_small_windows,
}


@dataclass(frozen=True)
class Run:
    """What some steps took; bytes, seconds."""

    way: str
    link: str
    round: int
    #: Why there are no numbers, or ``None``.
    failure: str | None
    peak_bytes: int
    step_seconds: list[float]
    #: Of a step, each way.
    bytes_out: int
    bytes_in: int
    #: On the device when all was over, beyond what there was before, until the library is called again.
    held_bytes: int
    #: How often the host waited for the device in a step.
    host_waits: float
    same_bits: bool


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x


class Loop:
    """A model and its input; all steps have the same gradients, since parameters never change."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        width, rows = options.width, options.rows
        self.model = nn.Sequential(*(Block(width) for _ in range(options.layers))).to(NAME)
        self.x = torch.randn(rows, width).to(NAME)

    def step(self, around: Around) -> None:
        self.model.zero_grad(set_to_none=True)
        with around():
            loss = self.model(self.x).square().mean()
        loss.backward()
        torch.accelerator.synchronize()

    def gradients(self) -> list[Tensor]:
        return [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]


@dataclass(frozen=True)
class Base:
    """Of the loop without offload: what the links are scaled by, and what all results must be."""

    forward_seconds: float
    saved_bytes: int
    gradients: list[Tensor]

    def bandwidth(self, link: str) -> float:
        """Bytes a second."""
        return self.saved_bytes / (LINKS[link] * self.forward_seconds)


def measure_base(loop: Loop, virtual: VirtualDevice, options: argparse.Namespace) -> Base:
    offload = eo.Offload(tier="host", keep_last_bytes=0, min_bytes=0)
    with offload:
        loss = loop.model(loop.x).square().mean()
    saved_bytes = offload.stats(synchronize=True).bytes_out  # before backward, which cancels what has not left
    loss.backward()
    offload.close()
    del loss
    seconds = []
    for _ in range(3):
        with virtual.slow_compute(options.operator_seconds):
            began = time.perf_counter()
            loss = loop.model(loop.x).square().mean()
            torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - began)
        del loss
    loop.step(nullcontext)
    return Base(Spread.of(seconds).median, saved_bytes, loop.gradients())


def measure(
    way: str, link: str, number: int, loop: Loop, base: Base, virtual: VirtualDevice, options: argparse.Namespace
) -> Run:
    """Some steps of one way, the first of which is not counted."""
    seconds: list[float] = []
    moved, waits, steps = virtual.copied_bytes, virtual.host_waits, options.steps
    loop.model.zero_grad(set_to_none=True)
    before = torch.accelerator.memory_allocated()
    try:
        around = WAYS[way]()
        with virtual.slow_compute(options.operator_seconds), virtual.slow_links(bandwidth=base.bandwidth(link)):
            for step in range(steps + 1):
                if step == 1:
                    torch.accelerator.reset_peak_memory_stats()
                    moved, waits = virtual.copied_bytes, virtual.host_waits
                began = time.perf_counter()
                loop.step(around)
                seconds.append(time.perf_counter() - began)
            now, waited = virtual.copied_bytes, virtual.host_waits
        peak = torch.accelerator.max_memory_allocated() - before
        same = all(torch.equal(a, b) for a, b in zip(loop.gradients(), base.gradients, strict=True))
        out, back = ((after - earlier) // steps for after, earlier in zip(now, moved, strict=True))
        del around
        loop.model.zero_grad(set_to_none=True)
        gc.collect()
        held = torch.accelerator.memory_allocated() - before
        return Run(way, link, number, None, peak, seconds[1:], out, back, held, (waited - waits) / steps, same)
    except (ImportError, RuntimeError, AttributeError, TypeError, ValueError) as error:  # a peer's own
        why = f"{type(error).__name__}: " + str(error).partition("\n")[0][:160]
    return Run(way, link, number, why, 0, [], 0, 0, 0, 0.0, False)


def summarize(report: Report, runs: list[Run]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for link in LINKS:
        console.print(f"link: {link} (schedules are ranked here, not GPUs)")
        shown = table(
            "way", "step s", "of none", "peak MiB", "of none", "out MiB", "in MiB", "held MiB", "waits", "bits"
        )
        plain = {run.round: run for run in runs if (run.way, run.link) == (PLAIN, link)}
        for way in dict.fromkeys(run.way for run in runs):
            own = [run for run in runs if (run.way, run.link) == (way, link)]
            failed = next((run.failure for run in own if run.failure is not None), None)
            if failed is not None:
                shown.add_row(way, failed[:80])
                summary[f"{way}, {link}"] = {"failure": failed}
                continue
            step = Spread.of([second for run in own for second in run.step_seconds])
            ratio = Spread.of([_median(run) / _median(plain[run.round]) for run in own])
            peak = Spread.of([run.peak_bytes / MIB for run in own])
            of_none = Spread.of([run.peak_bytes / plain[run.round].peak_bytes for run in own])
            same = all(run.same_bits for run in own)
            last = own[-1]
            moved = [f"{nbytes / MIB:,.0f}" for nbytes in (last.bytes_out, last.bytes_in, last.held_bytes)]
            verdict = "equal" if same else "[bold red]DIFFER"
            shown.add_row(
                way,
                step.show(),
                f"{ratio.median:.2f}",
                peak.show(0),
                f"{of_none.median:.2f}",
                *moved,
                f"{last.host_waits:,.0f}",
                verdict,
            )
            summary[f"{way}, {link}"] = {"step": step, "ratio": ratio, "peak_mib": peak, "peak_ratio": of_none}
            if way.startswith("ours"):
                report.at_most(f"{way}, {link}: steps with other bits", sum(not run.same_bits for run in own), 0)
        console.print(shown)
    return summary


def _median(run: Run) -> float:
    return Spread.of(run.step_seconds).median


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    torch.set_num_threads(1)
    virtual = install()
    report = Report("virtual_peers", options)
    loop = Loop(options)
    base = measure_base(loop, virtual, options)
    report.environment["link_bytes_per_second"] = {link: round(base.bandwidth(link)) for link in LINKS}
    report.environment["forward_seconds"], report.environment["saved_bytes"] = base.forward_seconds, base.saved_bytes
    console.print(f"saved {base.saved_bytes / MIB:,.0f} MiB, a forward takes {base.forward_seconds:.3f} s")
    runs: list[Run] = []
    places = [(way, link) for link in LINKS for way in WAYS]
    for number, (way, link), shown in turns(options.rounds, places):
        run = measure(way, link, number, loop, base, virtual, options)
        accelerator_runtime().poll()  # or what ours still holds would be in the next one's peak
        runs.append(run)
        result = run.failure or f"{_median(run):.3f} s  {run.peak_bytes / MIB:,.0f} MiB"
        console.print(f"{shown}  {way + ', ' + link:<32} {result}", markup=False)
    return report.finish([asdict(run) for run in runs], summarize(report, runs))


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, rounds=3, layers=4, width=512)
    parser.add_argument("--steps", type=positive, default=1, help="counted ones, in each round")
    parser.add_argument("--rows", type=positive, default=512)
    parser.add_argument("--operator-seconds", type=float, default=4e-3, help="what an operator takes beyond its kernel")
    return parse(parser, arguments, rounds=1, steps=1, layers=3, rows=256)


if __name__ == "__main__":
    sys.exit(main())
