"""Everything that an accelerator can show of the library, in one command of less than ten minutes.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --seconds 420 --only 'none;ours' --output out
    python -m benchmarks.gpu --small               # tiny shapes: does it run? The numbers mean nothing
    python -m benchmarks.gpu --figure out/results.jsonl

Every stage is a process with a limit of its own, and every result a line of ``results.jsonl`` as soon as it is there:
a stage that hangs, dies or is killed costs its own limit and nothing else. ``log.txt`` has what the stages printed,
``table.md`` and ``memory.png`` show the results.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import RESULTS as RESULTS_OF_ALL
from benchmarks.common import ROOT, listed
from benchmarks.gpu import figure
from benchmarks.gpu.facts import machine
from benchmarks.gpu.results import LOG, RESULTS, Job, environment
from benchmarks.gpu.stages import STAGES, Stage

#: Seconds that a process has to show where it was before it is killed; and that the figure is left at the end.
LAST_WORDS, DRAWING = 3, 15
#: Seconds that a stage with tiny shapes has to have left to begin.
SMALL = 15
#: Bytes that the log takes of the beginning of what a stage printed, and of its end.
HEAD, TAIL = 8 << 10, 120 << 10


def run(command: Sequence[str], limit: float, variables: dict[str, str]) -> tuple[str, str]:
    """Runs a process, which is killed after ``limit`` seconds with all that it started.

    Returns:
        How it ended, ``"ok"`` or why not; and what it printed.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            code = process.wait(limit)
            ended = "ok" if code == 0 else f"exit status {code}" if code > 0 else f"killed by signal {-code}"
        except subprocess.TimeoutExpired:
            ended = f"killed after its limit of {limit:.0f} s"
            process.send_signal(signal.SIGABRT)  # faulthandler shows where its threads are
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS)  # one that hangs in a driver does not end
        output.seek(0)
        text = output.read()
    if len(text) > HEAD + TAIL:
        text = text[:HEAD] + b"\n[...]\n" + text[-TAIL:]
    return ended, text.decode(errors="replace")


class Program:
    """Runs stages one after the other until the deadline.

    ``failed`` are those that did not end well, ``left_out`` those that another run has time for.
    """

    def __init__(self, options: argparse.Namespace, scratch: str) -> None:
        self.options, self.environment = options, environment(scratch)
        self.folder: Path = options.output
        self.began = time.monotonic()
        self.failed: list[str] = []
        self.left_out: list[str] = []

    @property
    def left(self) -> float:
        """Seconds."""
        seconds: float = self.options.seconds - DRAWING - (time.monotonic() - self.began)
        return seconds

    def run(self, stage: Stage) -> None:
        """Runs a stage if what it needs is there, time included; its end is a result too."""
        job, began = Job(stage.name, self.folder, self.options.small), time.monotonic()
        missing = [name for name in stage.needs if importlib.util.find_spec(name) is None]
        if missing or self.left < min(stage.expected, SMALL if self.options.small else stage.limit):
            reason = f"{missing[0]} is not installed" if missing else f"{self.left:.0f} s are left"
            job.add(what="ran", ended=f"left out: {reason}")
            self.left_out += [] if missing else [stage.name]
            return
        print(f"--- {stage.name}, after {began - self.began:.0f} s", flush=True)
        command = stage.run if isinstance(stage.run, tuple) else self._command(stage.name)
        ended, text = run(command, min(stage.limit, self.left), {**self.environment, **stage.environment})
        with (self.folder / LOG).open("a") as log:
            log.write(f"=== {stage.name}: {ended}\n{text}\n")
        if ended != "ok":
            self.failed.append(stage.name)
            print("\n".join(line[:200] for line in text.splitlines()[-6:]))
        job.add(what="ran", ended=ended, seconds=round(time.monotonic() - began, 1), limit=stage.limit)

    def draw(self) -> None:
        """Makes the table and the picture, in a process that may fail as any other."""
        command = [sys.executable, "-m", "benchmarks.gpu", "--figure", str(self.folder / RESULTS)]
        ended, text = run(command, 2 * DRAWING, self.environment)
        print(text if ended == "ok" else f"figure: {ended}\n{text[-2000:]}")

    def _command(self, name: str) -> list[str]:
        options = self.options
        command = [sys.executable, "-m", "benchmarks.gpu", "--stage", name, "--output", str(self.folder)]
        command += ["--commit", options.commit] if options.commit else []
        return command + (["--small"] if options.small else [])


def work(options: argparse.Namespace) -> None:
    """Does what a stage does, in its process."""
    stage = next(stage for stage in _stages(options) if stage.name == options.stage)
    assert not isinstance(stage.run, tuple)
    stage.run(Job(stage.name, options.output, options.small))
    if "TORCH_CUDA_SANITIZER" in os.environ:
        sys.stdout.flush()
        os._exit(
            0
        )  # torch's tracing calls Python from threads that may outlive the interpreter: a signal, and no verdict


def _stages(options: argparse.Namespace) -> list[Stage]:
    return [Stage("machine", 90, 10, partial(machine, named=options.commit)), *STAGES]


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    known = [stage.name for stage in STAGES]
    names = listed(str, known.__contains__, ";")
    parser.add_argument("--seconds", type=float, default=560, help="until everything has ended (%(default)s)")
    parser.add_argument("--only", type=names, help="stages, with semicolons between: " + ";".join(known))
    parser.add_argument("--skip", type=names, default=[], help="stages that are left out")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--commit", help="what is measured, where the checkout has no history")
    parser.add_argument("--figure", type=Path, metavar="RESULTS", help="make table and picture of these results only")
    default = Path(os.environ.get("OUT") or RESULTS_OF_ALL / "gpu")
    parser.add_argument("--output", type=Path, default=default, help="a folder; $OUT, or benchmarks/results/gpu")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.output = options.output.resolve()
    return options


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    if options.figure is not None:
        figure.make(options.figure)
        return 0
    if options.stage is not None:
        work(options)
        return 0
    if not torch.cuda.is_available():
        print("python -m benchmarks.gpu: skipped: torch finds no CUDA device on this machine")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the stage that runs ends too
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first, *others = _stages(options)
    chosen = [stage for stage in others if not options.only or stage.name in options.only]
    chosen = [stage for stage in chosen if stage.name not in options.skip]
    with tempfile.TemporaryDirectory() as scratch:
        program = Program(options, scratch)
        for stage in [first, *chosen]:
            program.run(stage)
        program.draw()
    seconds, failed = time.monotonic() - program.began, "; ".join(program.failed) or "no stage"
    print(f"{len(chosen)} stages in {seconds:.0f} s; failed: {failed}")
    if program.left_out:
        print(f"left out, for another run: --only '{';'.join(program.left_out)}'")
    return int(bool(program.failed))


if __name__ == "__main__":
    sys.exit(main())
