"""Peak memory and processor time of plain training on a CPU, and of the same in a bare ``Offload()``.

    python -m benchmarks.cpu_defaults
    python -m benchmarks.cpu_defaults --rounds 1 --variants "gpt;gpt, offload"

A GPT, a U-Net and a ResNet-50, fp32, AdamW, one run of one process each, with the C library's own settings and the
library's defaults. The peak is the kernel's (``VmHWM``) since the process began: first step, loaded code and optimizer
are in it. The processor time is that of all threads from the first step to the last one. Variants take turns, and
ratios are taken within a round. Both sides must end with the same parameters, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.common import MIB, Report, Spread, command_line, drive, in_process, parse, ratios, show, turns
from benchmarks.training import status_bytes

from lm.model import VOCABULARY, LanguageModel
from lm.result import hash_parameters

#: A model, and its loss.
Trained: TypeAlias = tuple[nn.Module, Callable[[nn.Module], Tensor]]


class Bottleneck(nn.Module):
    """A block of a ResNet-50: (batch, inputs, height, width) to (batch, 4 * width, ...)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        shapes = (inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in shapes)
        is_same = stride == 1 and inputs == 4 * width
        shortcut = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            out = norm(convolution(out if number == 0 else F.relu(out, inplace=True)))
        return F.relu(out + self.shortcut(x), inplace=True)


def resnet50() -> nn.Module:
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    blocks, inputs = list[nn.Module](), 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            blocks.append(Bottleneck(inputs, width, 1 if number else stride))
            inputs = 4 * width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class UNet(nn.Module):
    """Two convolutions a level, four levels down and up again; (batch, 3, size, size) to (batch, 2, size, size)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width << level for level in range(4)]

        def double(inputs: int, outputs: int) -> nn.Module:
            layers = ((nn.Conv2d(i, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU()) for i in (inputs, outputs))
            return nn.Sequential(*(layer for three in layers for layer in three))

        self.down = nn.ModuleList(double(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * o, o, 2, 2) for o in widths[:-1])
        self.after = nn.ModuleList(double(2 * o, o) for o in widths[:-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = list[Tensor]()
        for block in self.down:
            levels.append(x := block(F.max_pool2d(x, 2) if levels else x))
        for level, up, after in reversed(list(zip(levels, self.up, self.after, strict=False))):
            x = after(torch.cat((level, up(x)), 1))
        return self.head(x)


def gpt(size: int) -> Trained:
    tokens = torch.randint(VOCABULARY, (2, 8, size))
    return LanguageModel(6, 384, 6, size, checkpointing=False), lambda model: model(*tokens)


def of_images(model: nn.Module, batch: int, size: int, classes: int, *, whole: bool = False) -> Trained:
    images, targets = torch.randn(batch, 3, size, size), torch.randint(classes, (batch, *[size] * 2 * whole))
    return model, lambda model: F.cross_entropy(model(images), targets)


#: Makes each model with its loss, and the goal for its peak.
MODELS: dict[str, tuple[Callable[[bool], Trained], float]] = {
    "gpt": (lambda quick: gpt(32 if quick else 512), 0.75),
    "unet": (lambda quick: of_images(UNet(), 2, 32 if quick else 256, 2, whole=True), 0.80),
    "resnet50": (lambda quick: of_images(resnet50(), 24, 32 if quick else 128, 1000), 0.75),
}
MOST_TIME = 1.30
VARIANTS = [f"{name}{with_}" for name in MODELS for with_ in ("", ", offload")]


@dataclass(frozen=True)
class Run:
    """What one process measured: bytes, seconds, a hash of the parameters."""

    variant: str
    round: int
    peak_bytes: int
    cpu_seconds: float
    parameters_hash: str


def train(variant: str, options: argparse.Namespace) -> Sequence[Run]:
    """Trains in this process."""
    name, _, offloads = variant.partition(", ")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model, loss_of = MODELS[name][0](options.quick)
    optimizer = torch.optim.AdamW(model.parameters())
    around, began = eo.Offload() if offloads else nullcontext(), time.process_time()
    for _ in range(options.steps):
        optimizer.zero_grad()
        with around:
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
    seconds = time.process_time() - began
    return [Run(variant, options.round, status_bytes("VmHWM"), seconds, hash_parameters(model))]


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    runs: list[Run] = []
    for number, variant, shown in turns(options.rounds, options.variants):
        runs += [Run(**one) for one in in_process("cpu_defaults", variant, "--round", str(number))]
        print(f"{shown}  {variant:<18} {runs[-1].peak_bytes / MIB:>7,.0f} MiB  {runs[-1].cpu_seconds:>6.1f} s")
    rows = []
    for name in (one for one in MODELS if {one, f"{one}, offload"} <= set(options.variants)):
        peak, cpu = (Spread.of(ratios(runs, what, f"{name}, offload", name)) for what in ("peak_bytes", "cpu_seconds"))
        rows.append({"model": name, "peak": peak, "processor time": cpu})
        report.at_most(f"{name}: peak", peak.median, MODELS[name][1])
        report.at_most(f"{name}: processor time", cpu.median, MOST_TIME)
        different = {one.parameters_hash for one in runs if one.variant.startswith(name)}
        report.at_most(f"{name}: different results", len(different), 1)
    show("Of plain training: median (least .. most)", rows)
    return runs, rows


if __name__ == "__main__":
    parser = command_line(__doc__, workers=True, variants=VARIANTS, rounds=5, steps=4, threads=2)
    sys.exit(drive("cpu_defaults", parse(parser, rounds=1, steps=2), run, work=train))
