"""What it costs to look: the stats, which are always on, and a trace.

    python -m benchmarks.observe
    python -m benchmarks.observe --pairs 5

The model of ``cpu_train`` with the disk tier. Steps with a trace around them, its beginning and its end included, and
steps without take turns, the order within a pair changing; the ratio is taken within each pair. Every step has the same
batch and the same parameters, so all losses and gradients must be the same bits.

The stats cannot be switched off, so their cost is that of their code: what one saved tensor makes of it from pack to
unpack, and a call of ``offload.stats()`` in each step, times the calls in a step. Beside it stands all that pack and
unpack do, by the caller's ``time.thread_time``. A trace is measured in that way too: by the time of the thread in all
that is called while it runs, less what is called anyway, and in its beginning and its end.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import eager_offload as eo
from benchmarks.common import MIB, Report, Spread, console, drive, table
from benchmarks.options import MODEL, command_line, parse, positive
from benchmarks.training import language_model, one_batch, windows
from eager_offload.eager.handles import KeptTensor, SavedView
from eager_offload.eager.hooks import Hooks
from eager_offload.engine.transfer import BytesRecord
from eager_offload.observe.compute import Forwards
from eager_offload.observe.recorder import TraceRecorder
from eager_offload.stats import Accounts, KeepReason
from eager_offload.trace_file import read_trace

from lm.data import Batch
from lm.result import hash_losses

#: Parts of a step: the most that the stats and a trace may cost; and of what the configuration allows to be resident.
STATS, TRACE, RESIDENT = 0.01, 0.05, 1.10


@dataclass(frozen=True)
class Pair:
    """A step without a trace, and one with; seconds."""

    plain: float
    traced: float
    #: What it took to begin the trace, and to end it with the file written; part of ``traced``.
    begin: float
    end: float
    file_bytes: int
    slices: int

    @property
    def ratio(self) -> float:
        return self.traced / self.plain


class Calls:
    """The calls that a step makes, and the thread's seconds in them; those inside of others count with these."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.seconds = 0.0
        self._inside = False

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.count[name] += 1
            if self._inside:
                return call(*arguments)
            self._inside, began = True, time.thread_time()
            try:
                return call(*arguments)
            finally:
                self._inside = False
                self.seconds += time.thread_time() - began

        return run

    @contextmanager
    def counting(self) -> Iterator[Calls]:
        replaced = [(kind, name, getattr(kind, name)) for kind, name in CALLED]
        for kind, name, call in replaced:
            setattr(kind, name, self.timed(call, f"{kind.__name__}.{name}"))
        try:
            yield self
        finally:
            for kind, name, call in replaced:
                setattr(kind, name, call)


#: What a step calls; the second half only while a trace runs.
CALLED: list[tuple[type, str]] = [
    *((Hooks, "pack"), (KeptTensor, "unpack"), (SavedView, "unpack")),
    *((TraceRecorder, "pack"), (TraceRecorder, "unpack"), (Forwards, "enter"), (Forwards, "leave")),
]


class Training:
    """One model and one batch, again and again."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        self.model = language_model(options)
        self.offload = eo.Offload(**windows(options))
        self._batch = one_batch(options)
        #: Of all steps; a set of one if looking changes nothing.
        self.results: set[tuple[float, str]] = set()

    def step(self, around: AbstractContextManager[object] | None = None) -> float:
        """Forward and backward; the seconds."""
        batch: Batch = self._batch
        self.model.zero_grad(set_to_none=False)
        began = time.perf_counter()
        with around or nullcontext():
            with self.offload:
                loss = self.model(batch.inputs, batch.targets)
            loss.backward()
        seconds = time.perf_counter() - began
        gradients = [float(one.grad.double().sum()) for one in self.model.parameters() if one.grad is not None]
        self.results.add((loss.item(), hash_losses(gradients)))
        return seconds


class Around:
    """A trace that says what its beginning and its end took."""

    def __init__(self, offload: eo.Offload, path: Path) -> None:
        self._trace = offload.trace(path)
        self.begin = self.end = 0.0

    def __enter__(self) -> None:
        began = time.perf_counter()
        self._trace.__enter__()
        self.begin = time.perf_counter() - began

    def __exit__(self, *error: Any) -> None:
        began = time.perf_counter()
        self._trace.__exit__(*error)
        self.end = time.perf_counter() - began


def pair(training: Training, number: int, path: Path) -> Pair:
    around = Around(training.offload, path)
    if number % 2:
        traced = training.step(around)
        plain = training.step()
    else:
        plain = training.step()
        traced = training.step(around)
    return Pair(plain, traced, around.begin, around.end, path.stat().st_size, len(read_trace(path).slices))


@dataclass(frozen=True)
class Counted:
    """Two steps with a clock around every call, without a trace and with; seconds of the thread."""

    calls: dict[str, int]
    hook_seconds: float
    #: What the trace adds to that, its beginning and its end included.
    trace_seconds: float


def count(training: Training, path: Path) -> Counted:
    with Calls().counting() as plain:
        training.step()
    around = Around(training.offload, path)
    with Calls().counting() as traced:
        training.step(around)
    seconds = traced.seconds - plain.seconds + around.begin + around.end
    return Counted(dict(traced.count), plain.seconds, seconds)


def seconds_of_counting(calls: int = 200_000) -> float:
    """What the stats do for one saved tensor that leaves and comes back, in seconds of the thread."""
    accounts = Accounts()
    nbytes, held, record = MIB, 0, BytesRecord(accounts)
    began = time.thread_time()
    for _ in range(calls):
        counters = accounts.counters
        record.save(counters, nbytes, KeepReason.NEWEST)
        record.leave()
        counters.bytes_out += nbytes
        held += nbytes
        for _ in range(3):  # window, resident bytes in forward and in backward
            if held > counters.resident_bytes_peak:
                counters.resident_bytes_peak = held
        counters.reloaded_bytes += nbytes
        counters.bytes_in += nbytes
        waits = time.perf_counter()
        counters.stall_seconds += time.perf_counter() - waits
        counters.out_seconds += 0.0
        counters.in_seconds += 0.0
        held -= nbytes
    return (time.thread_time() - began) / calls


def seconds_of_stats(offload: eo.Offload, calls: int = 200) -> float:
    """A call of ``offload.stats()``, and its report, in seconds of the thread."""
    began = time.thread_time()
    for _ in range(calls):
        str(offload.stats())
    return (time.thread_time() - began) / calls


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    eo.release_freed_memory()
    training = Training(options)
    for _ in range(2):  # code is loaded; then the library knows the step
        training.step()
    gc.collect()
    training.offload.reset_stats()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "step.json"
        counted = [count(training, path) for _ in range(max(1, options.pairs // 4))]
        pairs = [pair(training, number, path) for number in range(options.pairs)]
    stats = training.offload.stats(synchronize=True)
    step = Spread.of([one.plain for one in pairs])
    ratio = Spread.of([one.ratio for one in pairs])
    per_save, per_report = seconds_of_counting(), seconds_of_stats(training.offload)
    calls = counted[0].calls
    share = (per_save * calls["Hooks.pack"] + per_report) / step.median
    trace_share = Spread.of([one.trace_seconds / step.median for one in counted])
    config = training.offload.config
    allowed = config.size("max_inflight_bytes") + config.size("prefetch_bytes") + config.delay_bytes
    report.at_most("stats, part of a step", share, STATS)
    report.at_most("trace, part of a step (cost of its calls)", trace_share.median, TRACE)
    report.at_most("trace, part of a step more (beside one without)", ratio.median - 1, TRACE)
    report.at_most("peak resident bytes, of window + prefetch + newest", stats.resident_bytes_peak / allowed, RESIDENT)
    report.at_most("different results", len(training.results), 1)
    summary = {
        "step_seconds": step,
        "trace_ratio": ratio,
        "trace_begin_seconds": Spread.of([one.begin for one in pairs]),
        "trace_end_seconds": Spread.of([one.end for one in pairs]),
        "trace_file_bytes": pairs[-1].file_bytes,
        "trace_slices": pairs[-1].slices,
        "stats_seconds_per_save": per_save,
        "stats_seconds_per_report": per_report,
        "stats_share": share,
        "calls": calls,
        "trace_share": trace_share,
        "hooks_share": Spread.of([one.hook_seconds / step.median for one in counted]),
        "resident_bytes_peak": stats.resident_bytes_peak,
        "resident_bytes_allowed": allowed,
        "saved_bytes_a_step": stats.saved_bytes // (2 * len(pairs) + 2 * len(counted)),
    }
    show(summary)
    console.print(str(stats), markup=False, highlight=False)
    if not stats.bytes_in:
        raise SystemExit("benchmarks.observe: nothing came back from the disk, so nothing was measured")
    training.offload.close()
    return {"counted": [asdict(c) for c in counted], "pairs": [asdict(one) for one in pairs]}, summary


def show(summary: dict[str, Any]) -> None:
    shown = table("what", "measured")
    shown.add_row("step, s", summary["step_seconds"].show(2))
    shown.add_row("traced step, of the one beside it", summary["trace_ratio"].show())
    shown.add_row("of that, s: to begin", summary["trace_begin_seconds"].show())
    shown.add_row("and to end, file written", summary["trace_end_seconds"].show())
    shown.add_row("slices; KiB of the file", f"{summary['trace_slices']:,}; {summary['trace_file_bytes'] / 1024:,.0f}")
    calls = summary["calls"]
    unpacks = calls["KeptTensor.unpack"] + calls["SavedView.unpack"]
    shown.add_row("calls of pack and of unpack in a step", f"{calls['Hooks.pack']:,}; {unpacks:,}")
    per_save, per_report = (1e6 * summary[f"stats_seconds_per_{what}"] for what in ("save", "report"))
    shown.add_row("stats, us: of a save; of a report", f"{per_save:.2f}; {per_report:.0f}")
    shown.add_row("stats, part of a step", f"{summary['stats_share']:.6f}")
    shown.add_row("all that pack and unpack do, part of a step", summary["hooks_share"].show(4))
    shown.add_row("all that a trace does, part of a step", summary["trace_share"].show(4))
    console.print(shown)


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, threads=2, **MODEL | {"sequence": 512})
    parser.add_argument("--pairs", type=positive, default=6)
    smaller = {"pairs": 2, "layers": 2, "width": 192, "sequence": 256, "min_bytes": "64KiB", "window": "1MiB"}
    return parse(parser, **smaller)


if __name__ == "__main__":
    sys.exit(drive("observe", options_of(), run, on_disk=True))
