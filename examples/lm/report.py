"""The runs side by side: a table, a verdict on equality, and the raw numbers."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from lm.result import Result

__all__ = ["differences", "save", "table"]

MIB = 1 << 20


def table(results: Sequence[Result]) -> Table:
    """One row a run; ratios are to the first. Fits a terminal of 80 columns."""
    first = results[0]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    shown.add_column("", no_wrap=True)
    for header in (
        "peak\nMiB",
        "ratio\n",
        "activ.\nMiB",
        "ratio\n",
        "step\ns",
        "ratio\n",
        "offloaded\nMiB/step",
        "stall\ns/step",
    ):
        shown.add_column(header, justify="right", no_wrap=True)
    for run in results:
        shown.add_row(
            run.mode,
            f"{run.peak_bytes / MIB:,.0f}",
            _ratio(run.peak_bytes, first.peak_bytes),
            f"{run.activation_bytes / MIB:,.0f}",
            _ratio(run.activation_bytes, first.activation_bytes),
            f"{run.step_time:.2f}",
            _ratio(run.step_time, first.step_time),
            f"{run.offloaded_bytes / run.steps / MIB:,.0f}",
            f"{run.stall_seconds / run.steps:.2f}",
            style="bold" if run.mode == "offload" else None,
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


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2f}" if reference > 0 else "-"
