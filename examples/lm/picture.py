"""Memory over time, drawn: a panel a run, all with the same axes, so that heights and lengths compare."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib

from lm.result import Result

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

__all__ = ["draw"]

MIB = 1 << 20
# Okabe and Ito's palette, which colour-blind readers can tell apart; every panel is named besides.
COLOURS = {"none": "#4D4D4D", "checkpoint": "#C04F00", "offload": "#0072B2", "offload+checkpoint": "#00805C"}
NAMES = {
    "none": "no offload",
    "checkpoint": "full checkpointing",
    "offload": "eager_offload",
    "offload+checkpoint": "eager_offload + checkpointing",
}
MODEL_COLOUR = "#D9D9D9"
TEXT_COLOUR = "#333333"
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "text.color": TEXT_COLOUR,
    "axes.labelcolor": TEXT_COLOUR,
    "xtick.color": TEXT_COLOUR,
    "ytick.color": TEXT_COLOUR,
}


def draw(path: Path, results: Sequence[Result], subtitle: str, measured: str) -> None:
    """Writes the picture as a PNG.

    Args:
        subtitle: what was trained, in one line.
        measured: what the vertical axis shows.
    """
    first = results[0]
    longest = max(sum(run.step_seconds) for run in results)
    height = 1.35 + 1.6 * len(results)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(results), 1, sharex=True, sharey=True, squeeze=False, figsize=(10, height), dpi=160
        )
        panels: list[Axes] = list(grid[:, 0])
        for panel, run in zip(panels, results, strict=True):
            _draw_run(panel, run, first, label_at=0.01 * longest)
        panels[0].set_xlim(0, 1.005 * longest)
        panels[0].set_ylim(0, 1.08 * max(run.peak_bytes for run in results) / MIB)
        panels[-1].set_xlabel("seconds since the first step began")
        figure.tight_layout(rect=(0.02, 0, 1, 1 - 0.62 / height), h_pad=0.8)
        figure.supylabel(measured, x=0.012, fontsize=11, color=TEXT_COLOUR)
        figure.text(0.012, 1 - 0.13 / height, "Memory while training", fontsize=14, fontweight="bold", va="top")
        figure.text(0.012, 1 - 0.41 / height, subtitle, fontsize=11, va="top")
        figure.savefig(path)
        plt.close(figure)


def _draw_run(panel: Axes, run: Result, first: Result, label_at: float) -> None:
    colour = COLOURS[run.mode]
    end = sum(run.step_seconds)
    samples = [sample for sample in run.samples if sample.seconds <= end]
    seconds = [sample.seconds for sample in samples]
    memory = [sample.nbytes / MIB for sample in samples]
    model = run.model_bytes / MIB

    panel.grid(axis="y", color="#E4E4E4", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.fill_between(seconds, [min(now, model) for now in memory], color=MODEL_COLOUR, linewidth=0)
    panel.fill_between(seconds, model, [max(now, model) for now in memory], color=colour, alpha=0.4, linewidth=0)
    panel.plot(seconds, memory, color=colour, linewidth=1.4)
    panel.vlines(list(accumulate(run.step_seconds)), 0, model, color="white", linewidth=1.2)
    panel.axhline(first.peak_bytes / MIB, color=COLOURS[first.mode], linewidth=1, linestyle=(0, (2, 3)))

    title = f"{NAMES[run.mode]}: peak {run.peak_bytes / MIB:,.0f} MiB, {run.step_time:.1f} s a step"
    panel.set_title(title, loc="left", color=colour, fontsize=11, fontweight="bold", pad=5)
    if run is first:
        label = "model, gradients, optimizer, code; above it: activations"
        behind = {"facecolor": MODEL_COLOUR, "linewidth": 0, "pad": 2}
        panel.text(label_at, model / 2, label, va="center", fontsize=9.5, bbox=behind)
    else:
        panel.text(label_at, 0.97 * first.peak_bytes / MIB, f"peak of {NAMES[first.mode]}", va="top", fontsize=9.5)
        if first.activation_bytes > 0:
            activations, time = run.activation_bytes / first.activation_bytes, run.step_time / first.step_time
            note = f"{activations:.0%} of the activations' memory, {time:.0%} of the time"
            panel.set_title(note, loc="right", color=colour, fontsize=10, pad=5)
