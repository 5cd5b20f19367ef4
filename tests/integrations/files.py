"""What this process has open."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["spill_files"]


def spill_files(directory: Path) -> list[str]:
    """Files in ``directory`` that this process has open; a spill file has no name any more."""
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            opened.append(os.readlink(descriptor))
        except FileNotFoundError:
            continue  # the listing's own
    return [path for path in opened if path.startswith(str(directory))]
