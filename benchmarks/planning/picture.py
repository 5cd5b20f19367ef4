"""Draws memory against time: what every budget buys, a plan, and the fixed ways that others have.

python -m benchmarks.planning.picture --output docs/images/plans.png

The model is the one that the page on planning begins with: a Llama of 8 billion parameters, 8192 tokens, on an H200.
Nothing is run: plans and fixed ways are rehearsed alike, by the library itself on its simulated device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.common import GIB, MIB, positive
from benchmarks.planning.ways import rehearsed
from eager_offload.planning.trace import trace
from tests.simulation.large import H200

from lm.picture import STYLE  # which draws into files alone

#: Okabe and Ito's palette, which colour-blind readers can tell apart; every mark is named besides.
MOVING, AGAIN, CHOSEN, OTHERS = "#0072B2", "#00805C", "#C04F00", "#4D4D4D"
#: What has these ways, and where its name stands beside the mark, in points.
NAMES = {
    "nothing moves": ("nothing moves", (-8, 10), "right"),
    "all moves": ("all moves, as save_on_cpu\nand OffloadActivations have it", (10, -4), "left"),
    "half moves": ("every second storage moves", (10, 4), "left"),
    "checkpoints": ("checkpoints around\nall layers", (-22, 20), "left"),
    "checkpoints, all moves": ("checkpoints, and\ntheir inputs move", (10, -3), "left"),
}
POINTS, POINTS_AGAIN = 24, 6


def llama(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """As on the page on planning, with fewer layers where they are wanted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    tokens = torch.zeros(1, 8192, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="the PNG")
    parser.add_argument("--budget", default="60GiB", help="of the plan that is marked")
    parser.add_argument("--layers", type=positive, default=32)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, inputs = llama(options.layers)
    chosen = eo.plan(model, inputs, device=H200, device_budget=options.budget)
    size = chosen.problem.window
    names = [f"model.layers.{number}" for number in range(options.layers)]
    ways = {
        title: (found.peak_bytes / GIB, found.step_seconds)
        for title, found in rehearsed(lambda again: trace(model, inputs, min_bytes=MIB, again=again), names, size)
    }
    front = [(point.peak_bytes / GIB, point.step_seconds) for point in chosen.front(POINTS)]
    high = max(peak for peak, _ in front)
    computed = eo.plan(model, inputs, device=H200, device_budget=0, recompute=True)
    low = computed.least_budget / GIB
    again = [(computed.peak_bytes / GIB, computed.step_seconds)]
    for number in range(1, POINTS_AGAIN):
        budget = int((low + (high - low) * number / POINTS_AGAIN) * GIB)
        one = eo.plan(model, inputs, device=H200, device_budget=budget, recompute=True)
        again.append((one.peak_bytes / GIB, one.step_seconds))
    title = f"Llama, {options.layers} layers of width 4096, 8192 tokens, H200 (planned and rehearsed, not run)"
    draw(options.output, title, front, again, (chosen.peak_bytes / GIB, chosen.step_seconds), ways)
    for title, (peak, seconds) in ways.items():
        print(f"{title:<26} {peak:6.1f} GiB  {seconds:.3f} s")
    for title, line in (("front", front), ("with recompute", again)):
        print(title, *(f"{peak:.1f} GiB {seconds:.3f} s" for peak, seconds in line), sep="; ")
    return 0


_Points = Sequence[tuple[float, float]]


def draw(
    path: Path,
    title: str,
    front: _Points,
    again: _Points,
    chosen: tuple[float, float],
    ways: dict[str, tuple[float, float]],
) -> None:
    """Writes the picture as a PNG; points are GiB and seconds."""
    line = {"linewidth": 1.8, "marker": "."}
    square = {"marker": "s", "color": OTHERS, "markersize": 7, "linestyle": "none"}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 5.6), dpi=160)
        axes.grid(color="#E4E4E4", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.plot(*zip(*sorted(set(front)), strict=True), color=MOVING, label="plans for every budget", **line)
        fitting = zip(*sorted(set(again)), strict=True)
        axes.plot(*fitting, color=AGAIN, linestyle=(0, (5, 2)), label="the same, with recompute=True", **line)
        for way, place in ways.items():
            name, offset, side = NAMES[way]
            axes.plot(*place, **square)
            text = {"ha": side, "va": "center", "fontsize": 10, "color": OTHERS}
            axes.annotate(name, place, offset, textcoords="offset points", **text)
        marked = f"the plan for {chosen[0]:.0f} GiB"
        axes.plot(*chosen, marker="o", color=CHOSEN, markersize=11, linestyle="none", label=marked)
        axes.plot([], [], label="fixed ways", **square)
        axes.set(xlabel="peak of the device, GiB", ylabel="forward and backward, s")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="upper right")
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
