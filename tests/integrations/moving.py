"""Settings with which nearly all that the small models here save moves, and how much of it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eager_offload as eo


def fields(path: Path) -> dict[str, Any]:
    return {"min_bytes": 1024, "tier": "disk", "disk_path": str(path), "keep_last_bytes": 0}


def moved(offload: eo.Offload | None) -> int:
    assert offload is not None
    return offload.stats(synchronize=True).bytes_out
