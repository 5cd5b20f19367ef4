"""The runs side by side: a table, a verdict on equality, and the raw numbers."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.table import Table

from lm.result import Result

__all__ = ["differences", "save", "table"]

MIB = 1 << 20


def table(results: Sequence[Result]) -> Table:
    """One row a mode: medians of its runs, with half of their spread; ratios are to the first. Fits 80 columns."""
    runs: dict[str, list[Result]] = {}
    for run in results:
        runs.setdefault(run.mode, []).append(run)
    first = next(iter(runs.values()))
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, header_style="bold")
    shown.add_column("", no_wrap=True)
    for header in (
        "peak\nMiB",
        "activ.\nMiB",
        "ratio\n",
        "step\ns",
        "ratio\n",
        "moved\nMiB/step",
        "stall\ns/step",
    ):
        shown.add_column(header, justify="right", no_wrap=True)
    for mode, own in runs.items():
        activations, seconds = ([of(run) for run in own] for of in (_activations, _step_time))
        shown.add_row(
            mode,
            _spread([run.peak_bytes / MIB for run in own], 0),
            f"{median(activations):,.0f}",
            _ratio(median(activations), median(map(_activations, first))),
            _spread(seconds, 2),
            _ratio(median(seconds), median(map(_step_time, first))),
            f"{median(run.offloaded_bytes / run.steps for run in own) / MIB:,.0f}",
            f"{median(run.stall_seconds / run.steps for run in own):.2f}",
            style="bold" if mode == "offload" else None,
        )
    return shown


def differences(results: Sequence[Result]) -> list[str]:
    """What is not equal to the first run, bit for bit, by hash; empty if all is."""
    first = results[0]
    found = []
    for run in results[1:]:
        if run.losses_hash != first.losses_hash:
            step = next(i for i, pair in enumerate(zip(run.losses, first.losses, strict=True)) if pair[0] != pair[1])
            found.append(f"the losses of {run.mode!r} are not those of {first.mode!r}, from step {step + 1} on")
        if run.parameters_hash != first.parameters_hash:
            found.append(f"the final parameters of {run.mode!r} are not those of {first.mode!r}")
    return found


def save(path: Path, results: Sequence[Result], options: dict[str, Any]) -> None:
    """Everything measured, as JSON: options, environment, and the runs with all samples."""
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    content = {
        "options": options,
        "environment": environment,
        "equal": not differences(results),
        "runs": [run.as_dict() for run in results],
    }
    path.write_text(json.dumps(content, default=str) + "\n")


def _activations(run: Result) -> float:
    return run.activation_bytes / MIB


def _step_time(run: Result) -> float:
    return run.step_time


def _spread(values: Sequence[float], digits: int) -> str:
    """The median, and half of what lies between the least and the most, if there are several."""
    around = f" ±{(max(values) - min(values)) / 2:,.{digits}f}" if len(values) > 1 else ""
    return f"{median(values):,.{digits}f}{around}"


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2f}" if reference > 0 else "-"
