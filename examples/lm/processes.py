"""Runs each mode in a process of its own and shows how it gets on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from lm.result import Result

__all__ = ["WorkerFailedError", "run_all", "tell"]


class WorkerFailedError(RuntimeError):
    """A worker ended with an error; the text is what it wrote about it."""


def tell(**news: object) -> None:
    """From a worker to the process that started it: one line of JSON, written at once so that threads do not mix."""
    os.write(sys.__stdout__.fileno(), json.dumps(news).encode() + b"\n")


def run_all(modes: Sequence[str], steps: int, memory: str, console: Console) -> list[Result]:
    """Runs this program again for every mode, one after the other, so that each starts from a clean process.

    Args:
        memory: the name of what is measured, for the screen.

    Raises:
        WorkerFailedError: a worker did not reach its end.
    """
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=18),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[memory]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = [
            progress.add_task(mode, total=steps, start=False, loss="  -  ", memory=f"{memory}     - MiB")
            for mode in modes
        ]
        return [_run(mode, progress, task, memory) for mode, task in zip(modes, tasks, strict=True)]


def _run(mode: str, progress: Progress, task: TaskID, memory: str) -> Result:
    progress.start_task(task)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as complaints:
        file = Path(directory) / "result.json"
        command = [sys.executable, *sys.argv, "--worker", mode, "--result", str(file)]
        # cuBLAS sums in a fixed order only with a workspace of a fixed size.
        environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    _show(json.loads(line), progress, task, memory)
            except BaseException:
                process.kill()
                raise
        progress.stop_task(task)
        complaints.seek(0)
        text = complaints.read().strip()
        if process.returncode != 0:
            raise WorkerFailedError(f"the run {mode!r} failed (exit status {process.returncode})\n{text}")
        if text:
            progress.console.print(f"{mode}: {text}", style="dim", markup=False, highlight=False)
        return Result.load(file)


def _show(news: dict[str, float], progress: Progress, task: TaskID, memory: str) -> None:
    if "nbytes" in news:
        progress.update(task, memory=f"{memory} {int(news['nbytes']) >> 20:>5,} MiB")
    if "loss" in news:
        progress.update(task, completed=news["step"], loss=f"{news['loss']:.3f}")
        if not progress.console.is_terminal:  # there the bars come once all runs are over
            row = progress.tasks[task]
            progress.console.print(
                f"{row.description}: step {news['step']} of {row.total:.0f}, loss {row.fields['loss']}, "
                f"{row.fields['memory']}",
                markup=False,
            )
