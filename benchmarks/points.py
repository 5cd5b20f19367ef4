"""Memory against time: a panel for each length of a sequence, a point for each way to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

__all__ = ["draw_points"]

GIB = 1 << 30
# Okabe and Ito's palette, which colour-blind readers can tell apart; every point is named besides.
OURS, OTHERS = "#0072B2", "#4D4D4D"


def draw_points(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the picture as a PNG.

    Args:
        rows: the summary of ``gpu_train``; those with a failure have no point.
    """
    rows = [row for row in rows if row["failure"] is None]
    lengths = sorted({row["sequence"] for row in rows})
    if not lengths:
        return
    figure, grid = plt.subplots(1, len(lengths), squeeze=False, figsize=(5 * len(lengths), 4.5), dpi=160)
    for panel, length in zip(grid[0], lengths, strict=True):
        for row in (row for row in rows if row["sequence"] == length):
            colour = OURS if row["variant"].startswith("ours") else OTHERS
            place = row["step_seconds"]["median"], row["peak_bytes"] / GIB
            panel.plot(*place, "o", color=colour, markersize=7)
            panel.annotate(row["variant"], place, xytext=(7, 4), textcoords="offset points", color=colour, fontsize=9)
        panel.set_title(f"sequences of {length:,} tokens", loc="left", fontsize=11)
        panel.set_xlabel("seconds a step")
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.margins(x=0.25, y=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("peak of device memory, GiB")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
