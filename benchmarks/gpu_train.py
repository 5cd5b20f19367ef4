"""Memory and time of training a model of about 1B parameters on an accelerator: ours and others' ways, by sequence.

    python -m benchmarks.gpu_train
    python -m benchmarks.gpu_train --sequences 8192 --variants "none;ours"
    python -m benchmarks.gpu_train --device cpu --quick       # does it run? The numbers mean nothing

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
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.common import GIB, Report, Spread, command_line, drive, in_process, parse, positive, show
from benchmarks.models import Llama, Shape
from benchmarks.peers import VARIANTS
from eager_offload.plan.predict import floor_seconds
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Direction

LARGE, QUICK = Shape(shared_heads=8), Shape(layers=3, width=64, hidden=192, heads=4, shared_heads=2, vocabulary=512)


@dataclass(frozen=True)
class Point:
    """What one process measured of one variant and one length; bytes, seconds, bytes a second."""

    variant: str
    sequence: int
    #: Why there are no numbers, or ``None``.
    failure: str | None = None
    peak_bytes: int = 0
    #: Of the process's own memory, above what there was before the first step.
    host_bytes: int = 0
    #: Of each step; and of its forward, backward and optimizer, where they are told apart.
    step_seconds: list[float] = field(default_factory=list)
    part_seconds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    #: Per step, each way; 0 where they are not counted.
    bytes_out: int = 0
    bytes_in: int = 0
    #: Of the link, as the library probes it; 0 where there is none.
    link_out: float = 0.0
    link_back: float = 0.0
    stats: dict[str, Any] | None = None


# -- in a process of its own ------------------------------------------------------------------------------------------


def mark(device: torch.device) -> Any:
    """A mark on the device's own time line, or the host's where the device is the CPU."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def laps(marks: list[Any]) -> list[float]:
    """Seconds between marks; waits for the last one."""
    if not marks or isinstance(marks[0], float):
        return [stop - start for start, stop in itertools.pairwise(marks)]
    marks[-1].synchronize()
    return [start.elapsed_time(stop) / 1e3 for start, stop in itertools.pairwise(marks)]


def work(name: str, options: argparse.Namespace) -> Iterator[Point]:
    """Measures one variant at every length."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    method = VARIANTS[name].make(device)
    if method is None:
        return
    shape = QUICK if options.quick else replace(LARGE, layers=options.layers)
    with device:
        model = Llama(shape, method.run).to(torch.float32 if device.type == "cpu" else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    link = (0.0, 0.0)
    if device.type != "cpu":
        runtime = accelerator_runtime()
        link = runtime.bandwidth(device, Direction.OUT), runtime.bandwidth(device, Direction.IN)
    for sequence in options.sequences:
        torch._dynamo.reset()  # a graph for each length, not one for all of them
        call = method.compiled(model)
        batch = max(options.tokens // sequence, 1), sequence + 1
        generator = torch.Generator().manual_seed(sequence)
        tokens = torch.randint(shape.vocabulary, batch, generator=generator).to(device)
        forget_peak(device)
        before, host = psutil.Process().memory_info().rss, 0
        parts: list[list[float]] = []
        losses: list[float] = []
        failure = stats = loss = None
        try:
            for step in range(options.warm_up + options.steps):
                if step == options.warm_up and method.offload is not None:
                    method.offload.stats(synchronize=True)
                    method.offload.reset_stats()
                marks = [mark(device)]
                with method.around():
                    loss = call(tokens)
                marks.append(mark(device))
                host = max(host, psutil.Process().memory_info().rss - before)
                loss.backward()
                marks.append(mark(device))
                optimizer.step()
                optimizer.zero_grad()
                marks.append(mark(device))
                if step >= options.warm_up:
                    parts.append(laps(marks))
                    losses.append(loss.item())
                loss = None
        except (RuntimeError, AssertionError) as error:  # no memory, or a peer's own
            failure = why(error)
        loss = None  # or what it holds would be there in the next measurement
        out = back = 0
        if method.offload is not None:
            found = method.offload.stats(synchronize=True)
            stats = asdict(found)
            out, back = (nbytes // max(len(parts), 1) for nbytes in (found.bytes_out, found.bytes_in))
        optimizer.zero_grad()
        seconds = [sum(part) for part in parts]
        several = [list(part) for part in zip(*parts, strict=True)]
        peak = peak_bytes(device)
        yield Point(name, sequence, failure, peak, host, seconds, several, losses, out, back, *link, stats)


def why(error: BaseException) -> str:
    return f"{type(error).__name__}: " + str(error).partition("\n")[0][:200]


def forget_peak(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    return torch.accelerator.max_memory_allocated(device)


# -- what it means ----------------------------------------------------------------------------------------------------


def measured(benchmark: str, options: argparse.Namespace) -> list[Point]:
    """Every variant in a process of its own; what has no point is not installed, or of no use on the device."""
    points = []
    for name in options.variants:
        lines = in_process(benchmark, name, check=False)
        ends = [line["ended"] for line in lines if "ended" in line]
        points += [Point(**line) for line in lines if "ended" not in line]
        have = {one.sequence for one in points if one.variant == name}
        lost = [sequence for sequence in options.sequences if sequence not in have] if ends else []
        points += [Point(name, sequence, f"the process ended with status {ends[0]}") for sequence in lost]
    return points


def rows_of(points: list[Point], bases: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each point, beside the variant that computes the same without; shows them."""
    rows = []
    by_place = {(point.variant, point.sequence): point for point in points if point.step_seconds and not point.failure}
    for point in points:
        row: dict[str, Any] = {"variant": point.variant, "tokens": point.sequence}
        if (point.variant, point.sequence) not in by_place:
            rows.append(row | {"failure": point.failure or "no steps"})
            continue
        row |= {
            "peak GiB": point.peak_bytes / GIB,
            "step s": Spread.of(point.step_seconds),
            "host GiB": point.host_bytes / GIB,
        }
        base = by_place.get((bases[point.variant], point.sequence), point)
        if base is not point:
            seconds, alone = median(point.step_seconds), median(base.step_seconds)
            row |= {
                "of its base": point.peak_bytes / base.peak_bytes,
                "time of it": seconds / alone,
                "exposed s": seconds - alone,
                "same losses": point.losses == base.losses,
            }
            if point.bytes_out and point.link_out:
                forward, backward, rest = map(median, base.part_seconds)
                link = point.link_out, point.link_back
                floor = floor_seconds(forward, backward, point.bytes_out, *link) + rest
                row |= {
                    "out GB/s": point.bytes_out / median(point.part_seconds[0]) / 1e9,
                    "in GB/s": point.bytes_in / median(point.part_seconds[1]) / 1e9,
                    "over floor": seconds / floor,
                }
        rows.append(row)
    show("Median (least .. most) of the steps; the base computes the same without", rows)
    return rows


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    points = measured("gpu_train", options)
    rows = rows_of(points, {name: variant.base for name, variant in VARIANTS.items()})
    longest = [row for row in rows if row["tokens"] == max(options.sequences) and "failure" not in row]
    for row in longest:
        variant, title = VARIANTS[row["variant"]], f"{row['variant']}, {row['tokens']} tokens"
        if not variant.ours:
            continue
        if "over floor" in row:
            report.at_most(f"{title}: step over the floor", row["over floor"], 1.05)
        better = [
            other
            for other in longest
            if not (others := VARIANTS[other["variant"]]).ours
            and others.is_compiled is variant.is_compiled
            and other["peak GiB"] < row["peak GiB"]
            and other["step s"].median < row["step s"].median
        ]
        report.at_most(f"{title}: others with less memory and less time", len(better), 0)
    return points, rows


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, workers=True, variants=VARIANTS, layers=16, steps=3, warm_up=2)
    parser.add_argument("--device", help="in place of the accelerator; cpu only tries the plumbing, with --quick")
    parser.add_argument("--sequences", type=positive, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--tokens", type=positive, default=32768, help="in a batch")
    return parse(parser, sequences=[64, 128], tokens=128)


def main() -> int:
    return drive("gpu_train", options_of(), run, work=work)


if __name__ == "__main__":
    sys.exit(main())
