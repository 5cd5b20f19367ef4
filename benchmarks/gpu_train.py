"""Memory and time of training a model of about 1B parameters on an accelerator: ours and others' ways, by sequence.

    python -m benchmarks.gpu_train
    python -m benchmarks.gpu_train --sequences 8192 --variants "none;ours"
    python -m benchmarks.gpu_train --device cpu --quick       # does it run? The numbers mean nothing
    python -m benchmarks.gpu_train --draw benchmarks/results/gpu_train.json

bf16, AdamW, random tokens, the same number of tokens for each length of a sequence. Every variant runs in a process of
its own and is timed by the device's own events: forward, backward, optimizer. The floor of a step that offloads is

    max(T_forward, D / BW_out) + max(T_backward, D / BW_in) + T_optimizer

with the times of the variant without offload that computes the same, the bytes D that crossed the link each way, and
the link's bandwidth, probed in the same process.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.common import ROOT, Report, Spread, console, table
from benchmarks.llama import Config, Llama
from benchmarks.options import accelerator_or_message, command_line, named, parse, positive
from benchmarks.peers import VARIANTS, Method
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Direction

GIB = 1 << 30
QUICK = Config(layers=3, width=64, inner=192, heads=4, shared_heads=2, vocabulary=512)


@dataclass(frozen=True)
class Point:
    """What one process measured of one variant and one length; bytes, seconds, bytes a second."""

    variant: str
    sequence: int
    batch: int
    #: Why there are no numbers, or ``None``.
    failure: str | None
    peak_bytes: int
    #: Of the process's own memory, above what there was before the first step.
    host_bytes: int
    forward_seconds: list[float]
    backward_seconds: list[float]
    optimizer_seconds: list[float]
    losses: list[float]
    #: Per step, each way; 0 where they are not counted.
    bytes_out: int
    bytes_in: int
    stats: dict[str, Any] | None

    @property
    def seconds(self) -> float:
        """Of a step: the median."""
        parts = zip(self.forward_seconds, self.backward_seconds, self.optimizer_seconds, strict=True)
        return median(sum(part) for part in parts)


@dataclass(frozen=True)
class Link:
    """Bytes a second between device and host, as the library probes it; 0 where there is no link."""

    out: float
    back: float
    out_while_both: float
    back_while_both: float


# -- in a process of its own ------------------------------------------------------------------------------------------


class Clock:
    """Marks on the device's own time line, or the host's where the device is the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._device.type == "cpu":
            self._marks.append(time.perf_counter())
        else:
            event = torch.Event(device=self._device, enable_timing=True)
            event.record(torch.accelerator.current_stream(self._device))
            self._marks.append(event)

    def laps(self) -> list[float]:
        """Seconds between marks; waits for the last one."""
        marks = self._marks
        pairs = list(itertools.pairwise(marks))
        if self._device.type == "cpu":
            return [stop - start for start, stop in pairs]
        marks[-1].synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in pairs]


def work(name: str, options: argparse.Namespace) -> None:
    """Measures one variant at every length, and prints a line of JSON for each and one for the link."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    method = VARIANTS[name].make(device)
    if method is None:
        return
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with device:
        model = Llama(_config(options), method.run).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    print(json.dumps({"link": asdict(_probe(device))}), flush=True)
    for sequence in options.sequences:
        torch._dynamo.reset()  # a graph for each length, not one for all of them
        point = _measure(name, sequence, method.compiled(model), optimizer, method, options)
        print(json.dumps({"point": asdict(point)}), flush=True)


def _measure(
    name: str,
    sequence: int,
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    method: Method,
    options: argparse.Namespace,
) -> Point:
    device = torch.device(options.device)
    batch = max(options.tokens // sequence, 1)
    vocabulary = _config(options).vocabulary
    tokens = torch.randint(vocabulary, (batch, sequence + 1), generator=torch.Generator().manual_seed(sequence))
    tokens = tokens.to(device)
    _forget_peak(device)
    before = psutil.Process().memory_info().rss
    laps: list[list[float]] = []
    losses: list[float] = []
    host = moved_out = moved_in = 0
    failure = stats = loss = None
    try:
        for step in range(options.warm_up + options.steps):
            if step == options.warm_up and method.offload is not None:
                method.offload.stats(synchronize=True)
                method.offload.reset_stats()
            clock = Clock(device)
            clock.mark()
            with method.around():
                loss = model(tokens)
            clock.mark()
            host = max(host, psutil.Process().memory_info().rss - before)
            loss.backward()
            clock.mark()
            optimizer.step()
            optimizer.zero_grad()
            clock.mark()
            if step >= options.warm_up:
                laps.append(clock.laps())
                losses.append(loss.item())
            loss = None
    except torch.OutOfMemoryError as error:
        failure = "out of memory: " + str(error).partition("\n")[0][:200]
    except (RuntimeError, AssertionError) as error:  # a peer's own
        failure = f"{type(error).__name__}: " + str(error).partition("\n")[0][:200]
    loss = None  # or what it holds would be there in the next measurement
    if method.offload is not None:
        found = method.offload.stats(synchronize=True)
        stats = asdict(found)
        moved_out, moved_in = (nbytes // max(len(laps), 1) for nbytes in (found.bytes_out, found.bytes_in))
    optimizer.zero_grad()
    forward, backward, rest = ([lap[part] for lap in laps] for part in range(3))
    return Point(
        name, sequence, batch, failure, _peak(device), host, forward, backward, rest, losses, moved_out, moved_in, stats
    )


def _probe(device: torch.device) -> Link:
    if device.type == "cpu":
        return Link(0.0, 0.0, 0.0, 0.0)
    runtime, both = accelerator_runtime(), (Direction.OUT, Direction.IN)
    alone = [runtime.bandwidth(device, way) for way in both]
    return Link(*alone, *(runtime.duplex_bandwidth(device, way) for way in both))


def _forget_peak(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    return torch.accelerator.max_memory_allocated(device)


def _config(options: argparse.Namespace) -> Config:
    return QUICK if options.quick else Config(layers=options.layers)


# -- what it means ----------------------------------------------------------------------------------------------------


def summarize(points: list[Point], links: dict[str, Link], report: Report) -> list[dict[str, Any]]:
    """A row for each point, and the limits of the longest sequence."""
    rows = []
    by_place = {(point.variant, point.sequence): point for point in points if point.failure is None}
    for point in points:
        row: dict[str, Any] = {"variant": point.variant, "sequence": point.sequence, "failure": point.failure}
        if point.failure is None:
            row |= {
                "peak_bytes": point.peak_bytes,
                "host_bytes": point.host_bytes,
                "step_seconds": asdict(Spread(point.seconds, *_extremes(point))),
            }
            base = by_place.get((VARIANTS[point.variant].base, point.sequence))
            if base is not None and base is not point:
                row["exposed_seconds"] = point.seconds - base.seconds
                row["same_losses"] = point.losses == base.losses
            if base is not None and point.bytes_out and links[point.variant].out:
                row |= _link_use(point, base, links[point.variant])
        rows.append(row)
    _set_limits(rows, report)
    return rows


def _extremes(point: Point) -> tuple[float, float]:
    parts = zip(point.forward_seconds, point.backward_seconds, point.optimizer_seconds, strict=True)
    steps = [sum(part) for part in parts]
    return min(steps), max(steps)


def _link_use(point: Point, base: Point, link: Link) -> dict[str, float]:
    forward, backward = median(base.forward_seconds), median(base.backward_seconds)
    floor = max(forward, point.bytes_out / link.out) + max(backward, point.bytes_in / link.back)
    floor += median(base.optimizer_seconds)
    return {
        "out_bytes_per_second": point.bytes_out / median(point.forward_seconds),
        "in_bytes_per_second": point.bytes_in / median(point.backward_seconds),
        "out_of_probe": point.bytes_out / median(point.forward_seconds) / link.out,
        "in_of_probe": point.bytes_in / median(point.backward_seconds) / link.back,
        "floor_seconds": floor,
        "over_floor": point.seconds / floor,
    }


def _set_limits(rows: list[dict[str, Any]], report: Report) -> None:
    longest = max(row["sequence"] for row in rows)
    rows = [row for row in rows if row["sequence"] == longest and row["failure"] is None]
    for ours in (row for row in rows if VARIANTS[row["variant"]].ours):
        name = f"{ours['variant']}, {longest} tokens"
        if "over_floor" in ours:
            report.at_most(f"{name}: step over the floor", ours["over_floor"], 1.05)
        better = [
            row["variant"]
            for row in rows
            if not VARIANTS[row["variant"]].ours
            and VARIANTS[row["variant"]].is_compiled is VARIANTS[ours["variant"]].is_compiled
            and row["peak_bytes"] < ours["peak_bytes"]
            and row["step_seconds"]["median"] < ours["step_seconds"]["median"]
        ]
        report.at_most(f"{name}: others with less memory and less time", len(better), 0)


def show(rows: list[dict[str, Any]]) -> None:
    shown = table("variant", "tokens", "peak GiB", "step s", "exposed s", "out GB/s", "in GB/s", "host GiB", "floor")
    for row in rows:
        if row["failure"] is not None:
            shown.add_row(row["variant"], f"{row['sequence']:,}", row["failure"][:60])
            continue
        shown.add_row(
            row["variant"],
            f"{row['sequence']:,}",
            f"{row['peak_bytes'] / GIB:,.2f}",
            f"{row['step_seconds']['median']:,.3f}",
            _number(row, "exposed_seconds", 1),
            _number(row, "out_bytes_per_second", 1e9),
            _number(row, "in_bytes_per_second", 1e9),
            f"{row['host_bytes'] / GIB:,.2f}",
            _number(row, "over_floor", 1),
        )
    console.print(shown)


def _number(row: dict[str, Any], name: str, unit: float) -> str:
    return f"{row[name] / unit:,.3f}" if name in row else ""


# -- the command line -------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> tuple[list[Point], dict[str, Link]]:
    """Every variant in a process of its own."""
    points, links = [], {}
    for name in options.variants:
        command = [sys.executable, "-m", "benchmarks.gpu_train", *sys.argv[1:], "--worker", name]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ}, stdout=subprocess.PIPE, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        found = [Point(**line["point"]) for line in lines if "point" in line]
        for line in lines:
            if "link" in line:
                links[name] = Link(**line["link"])
        if done.returncode != 0:
            lost = [sequence for sequence in options.sequences if sequence not in {point.sequence for point in found}]
            why = f"the process ended with status {done.returncode}"
            found += [Point(name, length, 0, why, 0, 0, [], [], [], [], 0, 0, None) for length in lost]
        elif not lines:
            console.print(f"{name}: not installed, or of no use on {options.device}")
        points += found
    return points, links


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, layers=16, steps=3)
    parser.add_argument("--device", help="in place of the accelerator; cpu only tries the plumbing, with --quick")
    parser.add_argument("--sequences", type=positive, nargs="+", help="2048 8192 32768, but with --quick")
    parser.add_argument("--tokens", type=positive, help="in a batch; 32768, but with --quick")
    parser.add_argument("--warm-up", type=positive, default=2)
    known = named(VARIANTS, ";")
    parser.add_argument("--variants", type=known, default=";".join(VARIANTS), help="with semicolons between")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only draw the picture of these results, beside them")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parse(parser, arguments)
    options.sequences = options.sequences or ([64, 128] if options.quick else [2048, 8192, 32768])
    options.tokens = options.tokens or (128 if options.quick else 32768)
    return options


def main() -> int:
    options = options_of()
    if options.draw is not None:
        return draw(options.draw)
    if options.device is None:
        options.device = accelerator_or_message("gpu_train", "--device cpu --quick")
        if options.device is None:
            return 2
    if options.worker is not None:
        work(options.worker, options)
        return 0
    report = Report("gpu_train", options)
    if options.device.startswith("cuda"):
        report.environment["device"] = torch.cuda.get_device_name(options.device)
    points, links = run(options)
    rows = summarize(points, links, report)
    show(rows)
    samples = {"points": [asdict(point) for point in points], "links": {n: asdict(link) for n, link in links.items()}}
    status = report.finish(samples, rows)
    draw(options.output or ROOT / "benchmarks" / "results" / "gpu_train.json")
    return status


def draw(results: Path) -> int:
    """Writes the picture beside the results, where matplotlib is installed."""
    try:
        from benchmarks.points import draw_points
    except ImportError:
        console.print("matplotlib is not installed: draw the picture elsewhere, with --draw FILE")
        return 0
    draw_points(json.loads(results.read_text())["summary"], results.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
