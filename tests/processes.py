"""Python programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def python(
    *arguments: str | Path, cwd: Path = ROOT, seconds: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A process of ``python *arguments`` that has ended. It finds this checkout and all that this process finds.

    Args:
        *arguments: of the interpreter.
        cwd: where it runs.
        seconds: how long it may take.
        **environment: variables that it has besides those of this process.
    """
    found = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        cwd=cwd,
        env={**os.environ, **found, **environment},
    )


def printed_by(*arguments: str | Path, **options: Any) -> str:
    """What ``python`` prints of the same arguments; the process has to end well."""
    ended = python(*arguments, **options)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-6000:]
    return ended.stdout
