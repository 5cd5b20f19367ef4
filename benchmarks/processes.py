"""What benchmarks share that train each variant in processes of its own, and look at their memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import eager_offload as eo
from benchmarks.common import ROOT, console

__all__ = ["release_or_refuse", "reset_peak", "run_worker", "status_bytes", "turns"]

#: Of the environment, what changes how the C library and torch's CPU allocator work.
_ALLOCATION = ("MALLOC_", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")

V = TypeVar("V")


def turns(rounds: int, variants: Sequence[V]) -> Iterator[tuple[int, V, str]]:
    """Every variant once in each round: the round from 0, the variant, and what its line on the screen begins with."""
    for number in range(rounds):
        for variant in variants:
            yield number, variant, f"round {number + 1}/{rounds}"


def run_worker(benchmark: str, name: str, command: Sequence[str], **environment: str) -> str:
    """Runs a variant in a new process, with the C library's own settings whatever the environment says.

    Args:
        benchmark: its name, for the error.
        name: of the variant, likewise.
        environment: what is set all the same.

    Returns:
        What it printed.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_ALLOCATION)}
    ended = subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True)
    if ended.returncode != 0:
        raise SystemExit(f"benchmarks.{benchmark}: the run of {name!r} failed\n{ended.stdout}{ended.stderr}")
    if ended.stderr.strip():
        console.print(ended.stderr.strip(), style="yellow", markup=False)
    return ended.stdout


def release_or_refuse(benchmark: str) -> None:
    """Has freed memory go back to the system, without which peaks say nothing."""
    if not eo.release_freed_memory():
        raise SystemExit(f"benchmarks.{benchmark}: this C library has no mallopt, so its memory cannot be compared")


def status_bytes(field: str) -> int:
    """A figure of this process by the kernel's own account, such as ``VmRSS`` or its peak, ``VmHWM``."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field + ":"))


def reset_peak() -> str:
    """Makes the kernel's peak start anew at what is resident now; how it was done, or that it could not be."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return "VmHWM since the process began"
    return "VmHWM, reset after the tiny step"
