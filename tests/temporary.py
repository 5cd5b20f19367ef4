"""Where tests put their files: on a disk, also where the usual temporary directory is memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from eager_offload.tiers.directories import filesystem_of, usual_directories

ROOT = Path(__file__).parents[1]


def move_to_a_disk() -> Callable[[], None] | None:
    """Names another temporary directory, for this process and those that it starts, where the usual one is memory.

    Returns:
        What removes it, or ``None`` where there is none: the usual one serves, or nothing does. A process that was
        started by one that has moved (a worker of xdist) finds a usual one that serves.
    """
    if filesystem_of(Path(tempfile.gettempdir())) != "tmpfs":
        return None
    for place in (*usual_directories()[1:], ROOT):
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK) and filesystem_of(place) != "tmpfs":
            found = tempfile.mkdtemp(prefix="eager_offload-tests-", dir=place)
            os.environ["TMPDIR"] = tempfile.tempdir = found
            return lambda: shutil.rmtree(found, ignore_errors=True)
    return None
