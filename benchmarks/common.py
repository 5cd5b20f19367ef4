"""What every benchmark shares: command line, spreads, limits, tables, turns, processes, and the file that is left."""

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil
import torch

from eager_offload.config import size_text
from eager_offload.tiers.disk import DiskTier, filesystem_of

MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: The model that several of them train on a CPU, and its windows.
MODEL: dict[str, int | str] = {
    "layers": 8,
    "width": 768,
    "heads": 12,
    "sequence": 1024,
    "batch": 4,
    "window": "64MiB",
    "min_bytes": "1MiB",
}
#: What the help says of options that several of them have.
_HELP = {
    "threads": "of torch",
    "window": "max_inflight_bytes and prefetch_bytes",
    "min_bytes": "a smaller saved tensor stays",
}
#: Of the environment, what changes how the C library and torch's CPU allocator work.
_ALLOCATION = ("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")

T = TypeVar("T")


# -- what was measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A measurement that was repeated."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Iterable[float], unit: float = 1.0) -> Spread:
        values = [sample / unit for sample in samples]
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{_cell(self.median)} ({_cell(self.least)} .. {_cell(self.most)})"


@dataclass(frozen=True)
class Limit:
    """What was promised, beside what was measured."""

    what: str
    measured: float
    bound: float
    met: bool


def ratios(runs: Iterable[Any], what: str, variant: str, base: str) -> list[float]:
    """Of each round, what a variant needed as a part of what ``base`` did; of several runs the one with the most."""
    most: dict[tuple[str, int], float] = {}
    for run in runs:
        place = run.variant, run.round
        most[place] = max(getattr(run, what), most.get(place, 0.0))
    rounds = [number for name, number in most if name == variant and (base, number) in most]
    return [most[variant, number] / most[base, number] for number in rounds]


def show(title: str, rows: Iterable[object]) -> None:
    """Prints a table with a column for each key or field, text to the left in the first one."""
    print(f"\n{title}\n{table(rows)}", flush=True)


def table(rows: Iterable[object]) -> str:
    """What a row has not is empty; numbers have four digits, or all before the point; bytes have a unit."""
    found: list[Mapping[str, object]] = [row if isinstance(row, Mapping) else vars(row) for row in rows]
    columns = list(dict.fromkeys(column for row in found for column in row))
    cells = [
        [column.removesuffix("_bytes").replace("_", " ") for column in columns],
        *([_cell(row.get(column), column) for column in columns] for row in found),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ([cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)] for line in cells)
    return "\n".join("  ".join([line[0].ljust(widths[0]), *rest]) for line, rest in zip(cells, lines, strict=True))


def _cell(value: object, column: str = "") -> str:
    if isinstance(value, float | int) and column.endswith("bytes"):
        return size_text(int(value))
    if isinstance(value, float):
        return f"{value:,.{max(4 - len(str(int(abs(value)))), 0)}f}"
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


# -- the driver -------------------------------------------------------------------------------------------------------


class Report:
    """What a benchmark leaves behind: its limits on the screen, and everything in one JSON file.

    Args:
        name: of the benchmark, and of the file where ``options.output`` is not given.
        options: the command line; see ``command_line``.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.options = options
        self.limits: list[Limit] = []
        self.environment = environment()
        self._started = datetime.datetime.now(datetime.UTC)
        self._clock = time.perf_counter()

    def at_most(self, what: str, measured: float, bound: float) -> None:
        self.limits.append(Limit(what, measured, bound, measured <= bound))

    def finish(self, samples: object, summary: object) -> int:
        """Prints the limits, writes the file, and returns the exit status: 1 for a miss with ``--check``."""
        content = {
            "benchmark": self.name,
            "command": _command(self.name),
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(time.perf_counter() - self._clock, 1),
            "commit": commit(),
            "environment": self.environment,
            "options": _plain_options(self.options),
            "limits": self.limits,
            "summary": summary,
            "samples": samples,
        }
        output = self.options.output or RESULTS / f"{self.name}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(content, indent=1, default=_plain) + "\n")
        limits = (
            {
                "limit": limit.what,
                "measured": float(limit.measured),
                "bound": f"<= {limit.bound:,g}",
                "": "pass" if limit.met else "MISS",
            }
            for limit in self.limits
        )
        show("Limits", limits)
        print(f"All numbers: {os.path.relpath(output)}")
        return int(self.options.check and not all(limit.met for limit in self.limits))


def drive(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[Report, argparse.Namespace], tuple[object, object]],
    *,
    work: Callable[[str, argparse.Namespace], Any] | None = None,
    on_disk: bool = False,
) -> int:
    """Runs a benchmark and returns the exit status.

    Args:
        measure: sets limits, shows what was found, and returns all samples and a summary of them.
        work: what a process with ``--worker`` does in its place; ``in_process`` returns the dataclasses that it yields.
        on_disk: whether the disk of spill files is a part of the environment.
    """
    if work is not None and options.worker is not None:
        for found in work(options.worker, options):
            sys.stdout.write(json.dumps(found, default=_plain) + "\n")  # at once, as ranks share it
            sys.stdout.flush()
        return 0
    report = Report(name, options)
    if on_disk:
        report.environment["disk"] = disk(options.disk_path)
    return report.finish(*measure(report, options))


def in_process(
    benchmark: str, worker: str, *arguments: str, launch: Sequence[str] = (), **environment: str
) -> list[dict[str, Any]]:
    """What a process of a benchmark's own finds, with the C library's own settings whatever the environment says.

    Args:
        arguments: besides those of this process, and ``--worker``.
        launch: what Python is given ahead of the module.
        environment: what is set all the same.
    """
    command = [sys.executable, *launch, "-m", f"benchmarks.{benchmark}", *sys.argv[1:], "--worker", worker, *arguments]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_ALLOCATION)}
    ended = subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True)
    if ended.returncode != 0:
        raise SystemExit(f"benchmarks.{benchmark}: the run of {worker!r} failed\n{ended.stdout}{ended.stderr}")
    if ended.stderr.strip():
        print(ended.stderr.strip(), file=sys.stderr)
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def turns(rounds: int, variants: Sequence[T]) -> Iterator[tuple[int, T, str]]:
    """Every variant once in each round: the round from 0, the variant, and what its line on the screen begins with."""
    for number in range(rounds):
        for variant in variants:
            yield number, variant, f"round {number + 1}/{rounds}"


# -- the command line -------------------------------------------------------------------------------------------------


def command_line(
    doc: str | None, *, workers: bool = False, variants: Collection[str] = (), **shared: int | float | str
) -> argparse.ArgumentParser:
    """A parser with ``--quick``, ``--check``, ``--output``, ``--disk-path``, and an option for each of ``shared``.

    Args:
        doc: of the benchmark; its first line describes it.
        workers: whether it has processes of its own, each of which is told by ``--worker`` and ``--round``.
        variants: of which ``--variants`` chooses.
        **shared: defaults; whole numbers are from 1.
    """
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in shared.items():
        kind: Callable[[str], Any] = positive if isinstance(default, int) else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=_HELP.get(name))
    if variants:
        known, every = named(variants, ";"), ";".join(variants)
        parser.add_argument("--variants", type=known, default=every, help="with semicolons between")
    if workers:
        parser.add_argument("--worker", help=argparse.SUPPRESS)
        parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument(
        "--quick", action="store_true", help="a short run, to see that it works; its numbers mean little"
    )
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a limit is missed")
    parser.add_argument("--output", type=Path, metavar="FILE", help="in place of benchmarks/results/NAME.json")
    parser.add_argument(
        "--disk-path", type=Path, metavar="DIR", help="of the spill file, in place of what the library chooses"
    )
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None = None, **quick: Any) -> argparse.Namespace:
    """What the command line says; of numbers with ``--quick`` at most those of ``quick``, which come in place of texts.

    Args:
        arguments: in place of the process's own.
    """
    options = parser.parse_args(arguments)
    for name, value in quick.items() if options.quick else ():
        given = getattr(options, name)
        setattr(options, name, min(given, value) if isinstance(value, int) and isinstance(given, int) else value)
    return options


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def listed(
    read: Callable[[str], T], accepts: Callable[[T], bool] = lambda one: True, separator: str = ","
) -> Callable[[str], list[T]]:
    """A type for argparse: what ``read`` makes of texts with ``separator`` between, each of which ``accepts`` takes."""

    def of(text: str) -> list[T]:
        found = [read(one.strip()) for one in text.split(separator)]
        if refused := [one for one in found if not accepts(one)]:
            raise argparse.ArgumentTypeError(f"{refused[0]!r} is not one of what is accepted")
        return found

    return of


def named(known: Collection[str], separator: str = ",") -> Callable[[str], list[str]]:
    """A type for argparse: names out of ``known`` with ``separator`` between."""
    return listed(str, known.__contains__, separator)


# -- the environment --------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """The machine and the software, without anything that names this one machine."""
    return {
        "cpu": _setting("/proc/cpuinfo", "model name", "\n") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "available_bytes": psutil.virtual_memory().available,
        "load_average": list(os.getloadavg()),
        "system": platform.system(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "transparent_hugepages": _setting("/sys/kernel/mm/transparent_hugepage/enabled", "[", "]"),
        "transparent_hugepages_defrag": _setting("/sys/kernel/mm/transparent_hugepage/defrag", "[", "]"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def disk(path: Path | None) -> dict[str, Any]:
    """The disk that spill files go to: its filesystem, and what one transfer at a time reaches through the tier."""
    tier = DiskTier(path, None)
    try:
        link = tier.measure()
        return {
            "filesystem": filesystem_of(tier.directory),
            "direct_io": tier.direct_io,
            "write_bytes_per_second": round(link.out.median),
            "read_bytes_per_second": round(link.back.median),
        }
    finally:
        tier.close()


def _command(name: str) -> str:
    """The command line, with paths cut down to their last part."""
    words = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    return " ".join(["python", "-m", f"benchmarks.{name}", *words])


def commit() -> dict[str, Any]:
    """The revision that was measured, and whether anything but results differed from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return {"revision": None, "dirty": None}


def _plain_options(options: argparse.Namespace) -> dict[str, Any]:
    left_out = ("output", "check", "worker", "round")
    return {name: value for name, value in vars(options).items() if name not in left_out}


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{value!r} is nothing for JSON")


def _setting(path: str, begin: str, end: str) -> str | None:
    """What stands in a file of the kernel's between ``begin`` and ``end``, as in ``always [madvise] never``."""
    try:
        return Path(path).read_text().partition(begin)[2].partition(end)[0].lstrip("\t :") or None
    except OSError:
        return None
