"""Draws the memory of one training step over time: without offload, with checkpointing, and by a plan.

    python -m benchmarks.step_picture     writes docs/images/step.png

A Llama of 1B parameters, one sequence of 32,768 tokens, AdamW, simulated on the data sheet of an H100: peaks are within
3 % of measured ones (``tests/planning/test_card.py``), steps without offload are about 10 % too short. No card has
recorded its memory over time.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

import eager_offload as eo
from benchmarks.common import GIB, ROOT
from benchmarks.gpu.train import LARGE
from benchmarks.models import Llama, Run
from benchmarks.peers import checkpointed, plain

PATH = ROOT / "docs" / "images" / "step.png"
TOKENS = 32_768
#: Bytes of cards, as they are sold.
CARDS = {"80 GB": 80e9, "24 GB": 24e9}


def planned(run: Run, budget: int | str, *, recompute: bool = False) -> eo.Plan:
    with torch.device("meta"):
        model = Llama(LARGE, run).to(torch.bfloat16).train()
    tokens = torch.zeros(1, TOKENS + 1, dtype=torch.int64)
    optimizer = partial(torch.optim.AdamW, fused=True)
    return eo.plan(model, tokens, device="h100", device_budget=budget, optimizer=optimizer, recompute=recompute)


def draw(path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    alike = planned(checkpointed, "500GiB")
    curves = {
        "without": (planned(plain, "500GiB"), "tab:gray", 1.2),
        "gradient checkpointing": (alike, "tab:orange", 1.2),
        "eager_offload, a plan": (planned(plain, int(1.005 * alike.peak_bytes), recompute=True), "tab:blue", 1.8),
    }
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for name, (plan, color, width) in curves.items():
        seconds = [*plan.problem.begins, plan.step_seconds][: len(plan.live_bytes)]
        scale = plan.step_seconds / (seconds[-1] or 1.0)
        said = f"{name}: {plan.peak_bytes / GIB:.1f} GiB, {plan.step_seconds:.2f} s"
        gib = [one / GIB for one in plan.live_bytes]
        axes.plot([scale * one for one in seconds], gib, color=color, linewidth=width, label=said)
    for name, nbytes in CARDS.items():
        axes.axhline(nbytes / GIB, color="tab:red", linewidth=0.8, linestyle="--")
        axes.annotate(
            f"a card of {name}",
            (1, nbytes / GIB),
            (-4, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            horizontalalignment="right",
            color="tab:red",
        )
    axes.set(xlabel="time in the step, s", ylabel="device memory, GiB", ylim=(0, 82), xlim=(0, None))
    axes.set_title("One training step of a 1B Llama, 32,768 tokens, simulated on an H100's numbers")
    axes.legend(loc="center right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=PATH, help="where the picture goes")
    draw(parser.parse_args().output)
