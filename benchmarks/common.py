"""What every benchmark shares: spreads, limits, the environment, and the file that is left behind."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.plain import PlainConsole, PlainTable
from eager_offload.tiers.directories import filesystem_of
from eager_offload.tiers.disk import DiskTier

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ImportError:  # a machine with torch and nothing else
    Console = None  # type: ignore[assignment, misc]

__all__ = [
    "MIB",
    "Limit",
    "Report",
    "Spread",
    "console",
    "disk",
    "drive",
    "environment",
    "table",
]

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

console = PlainConsole() if Console is None else Console(width=None if sys.stdout.isatty() else 130, highlight=False)


@dataclass(frozen=True)
class Spread:
    """A measurement that was repeated."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(median(samples), min(samples), max(samples))

    def show(self, digits: int = 3) -> str:
        return f"{self.median:,.{digits}f} ({self.least:,.{digits}f} .. {self.most:,.{digits}f})"


@dataclass(frozen=True)
class Limit:
    """What was promised, beside what was measured."""

    what: str
    measured: float
    bound: float
    #: Whether the bound is the most that is allowed; else it is the least.
    most: bool = True

    @property
    def met(self) -> bool:
        return self.measured <= self.bound if self.most else self.measured >= self.bound


class Report:
    """What a benchmark leaves behind: its limits on the screen, and everything in one JSON file.

    Args:
        name: of the benchmark, and of the file where ``options.output`` is not given.
        options: the command line; see ``add_common_options``.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.options = options
        self.limits: list[Limit] = []
        self.environment = environment()
        self._started = datetime.datetime.now(datetime.UTC)
        self._clock = time.perf_counter()

    def at_most(self, what: str, measured: float, bound: float) -> None:
        self.limits.append(Limit(what, measured, bound))

    def at_least(self, what: str, measured: float, bound: float) -> None:
        self.limits.append(Limit(what, measured, bound, most=False))

    def finish(self, samples: object, summary: object) -> int:
        """Prints the limits, writes the file, and returns the exit status: 1 for a miss with ``--check``."""
        content = {
            "benchmark": self.name,
            "command": _command(self.name),
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - self._clock, 1),
            "commit": _commit(),
            "environment": self.environment,
            "options": _plain_options(self.options),
            "limits": [{**dataclasses.asdict(limit), "met": limit.met} for limit in self.limits],
            "summary": summary,
            "samples": samples,
        }
        output = self.options.output or RESULTS / f"{self.name}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(content, indent=1, default=_plain) + "\n")
        self._show_limits()
        console.print(f"All numbers: {os.path.relpath(output)}", soft_wrap=True)
        return int(self.options.check and not all(limit.met for limit in self.limits))

    def _show_limits(self) -> None:
        shown = table("limit", "measured", "bound", "")
        for limit in self.limits:
            verdict = "[green]pass" if limit.met else "[bold red]MISS"
            sign = "<=" if limit.most else ">="
            shown.add_row(limit.what, f"{limit.measured:,.3f}", f"{sign} {limit.bound:,g}", verdict)
        console.print(shown)


def drive(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[Report, argparse.Namespace], tuple[object, object]],
    *,
    prepare: Callable[[argparse.Namespace], object] = lambda options: None,
    work: Callable[[str, argparse.Namespace], Any] | None = None,
    on_disk: bool = False,
) -> int:
    """Runs a benchmark and returns the exit status.

    Args:
        measure: sets limits, shows what was found, and returns all samples and a summary of them.
        prepare: is called first of all.
        work: what a process with ``--worker`` does in its place; the dataclass that it returns is printed.
        on_disk: whether the disk of spill files is a part of the environment.
    """
    prepare(options)
    if work is not None and options.worker is not None:
        if (found := work(options.worker, options)) is not None:
            print(json.dumps(dataclasses.asdict(found)), flush=True)
        return 0
    report = Report(name, options)
    if on_disk:
        report.environment["disk"] = disk(options.disk_path)
    return report.finish(*measure(report, options))


def table(first: str, *others: str) -> Table | PlainTable:
    """A plain table: text in the first column, numbers in the others."""
    if Console is None:
        shown = PlainTable()
    else:
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    shown.add_column(first, no_wrap=True)
    for header in others:
        shown.add_column(header, justify="right", no_wrap=True)
    return shown


def environment() -> dict[str, Any]:
    """The machine and the software, without anything that names this one machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "available_bytes": psutil.virtual_memory().available,
        "load_average": list(os.getloadavg()),
        "system": platform.system(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "transparent_hugepages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "transparent_hugepages_defrag": _chosen("/sys/kernel/mm/transparent_hugepage/defrag"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def disk(path: Path | None) -> dict[str, Any]:
    """The disk that spill files go to: its filesystem, and what one transfer at a time reaches through the tier."""
    tier = DiskTier(None if path is None else [path], None)
    try:
        bandwidth = tier.measure()
        (directory,) = tier.directories
        return {
            "filesystem": filesystem_of(directory),
            "direct_io": tier.direct_io,
            "write_bytes_per_second": round(bandwidth.write),
            "read_bytes_per_second": round(bandwidth.read),
        }
    finally:
        tier.close()


def _command(name: str) -> str:
    """The command line, with paths cut down to their last part."""
    words = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    return " ".join(["python", "-m", f"benchmarks.{name}", *words])


def _commit() -> dict[str, Any]:
    """The revision that was measured, and whether anything but results differed from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return {"revision": None, "dirty": None}


def _plain_options(options: argparse.Namespace) -> dict[str, Any]:
    left_out = ("output", "check", "worker")
    return {name: value for name, value in vars(options).items() if name not in left_out}


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{value!r} is nothing for JSON")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _chosen(path: str) -> str | None:
    """The choice in brackets of a setting such as ``always [madvise] never``."""
    try:
        return Path(path).read_text().partition("[")[2].partition("]")[0] or None
    except OSError:
        return None
