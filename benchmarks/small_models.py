"""Whether offload with its defaults ever makes the peak of a small model's training higher.

    python -m benchmarks.small_models
    python -m benchmarks.small_models --rounds 1 --models "unet;lstm" --malloc default

Ten models of different kinds whose activations are of the size of the default windows, where offload can free little.
Each trains in a process of its own with `Offload()` and without, in turn, under glibc's default settings and after
`eager_offload.release_freed_memory()`. A step on a tiny batch, without offload in either, loads torch's code and makes
gradients and the optimizer's state. What comes on top of the resident memory after it is what is compared: activations,
buffers, and all that the library needs, its code included. Losses and parameters must be equal, bit for bit.
The limit is on the released setting: by default the same program's peak differs by a tenth from run to run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.common import MIB, Report, Spread, console, drive, table
from benchmarks.options import command_line, named, parse
from benchmarks.processes import reset_peak, run_worker, status_bytes, turns

from lm.model import VOCABULARY, LanguageModel
from lm.result import hash_losses, hash_parameters

#: The most that the peak may be, as a part of that without offload.
MOST = 1.05
MALLOC = ("default", "released")

#: Each yields the losses of one step, one after the other; backward follows each. It takes the size of the batch.
Program: TypeAlias = Callable[[int], Iterator[Tensor]]


@dataclass(frozen=True)
class Model:
    """What is trained, and how."""

    modules: list[nn.Module]
    losses: Program
    batch: int


def _convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())


class UNet(nn.Module):
    """Three resolutions with skip connections, and optionally attention and a time embedding in the middle."""

    def __init__(self, width: int, *, timed: bool) -> None:
        super().__init__()
        self.begin = _convolution(3, width)
        self.down1 = _convolution(width, 2 * width)
        self.down2 = _convolution(2 * width, 4 * width)
        self.time = nn.Linear(1, 4 * width) if timed else None
        self.attention = nn.MultiheadAttention(4 * width, 4, batch_first=True) if timed else None
        self.up1 = _convolution(6 * width, 2 * width)
        self.up2 = _convolution(3 * width, width)
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        high = self.begin(x)
        middle = self.down1(F.avg_pool2d(high, 2))
        low = self.down2(F.avg_pool2d(middle, 2))
        if self.time is not None and self.attention is not None and time is not None:
            low = low + self.time(time)[:, :, None, None]
            flat = low.flatten(2).transpose(1, 2)
            low = low + self.attention(flat, flat, flat)[0].transpose(1, 2).view_as(low)
        middle = self.up1(torch.cat([F.interpolate(low, scale_factor=2), middle], 1))
        return self.end(self.up2(torch.cat([F.interpolate(middle, scale_factor=2), high], 1)))


class Residual(nn.Module):
    """Two convolutions with batch normalization beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


def unet() -> Model:
    model = UNet(32, timed=False)

    def losses(batch: int) -> Iterator[Tensor]:
        x = torch.randn(batch, 3, 64, 64)
        yield F.mse_loss(model(x), x)

    return Model([model], losses, 38)


def diffusion() -> Model:
    model = UNet(32, timed=True)

    def losses(batch: int) -> Iterator[Tensor]:
        x, noise, time = torch.randn(batch, 3, 64, 64), torch.randn(batch, 3, 64, 64), torch.rand(batch, 1)
        noisy = x * (1 - time)[:, :, None, None] + noise * time[:, :, None, None]
        yield F.mse_loss(model(noisy, time), noise)

    return Model([model], losses, 16)


def policy() -> Model:
    """Four passes over the frames of a game, as in proximal policy optimization."""
    body = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
    )
    heads = nn.ModuleList([nn.Linear(3136, 6), nn.Linear(3136, 1)])

    def losses(batch: int) -> Iterator[Tensor]:
        frames, actions, returns = torch.rand(batch, 4, 84, 84), torch.randint(6, (batch,)), torch.randn(batch)
        for _ in range(4):
            seen = body(frames)
            chances = F.log_softmax(heads[0](seen), 1)
            advantage = returns - heads[1](seen).squeeze(1)
            chosen = chances.gather(1, actions[:, None]).squeeze(1)
            yield (advantage**2).mean() - (chosen * advantage.detach()).mean() + (chances.exp() * chances).sum(1).mean()

    return Model([body, heads], losses, 512)


def _recurrent(kind: type[nn.RNNBase], batch: int) -> Model:
    model, head = kind(64, 128, 2), nn.Linear(128, 64)

    def losses(batch: int) -> Iterator[Tensor]:
        x = torch.randn(100, batch, 64)
        yield F.mse_loss(head(model(x)[0]), x)

    return Model([model, head], losses, batch)


def lstm() -> Model:
    return _recurrent(nn.LSTM, 256)


def gru() -> Model:
    return _recurrent(nn.GRU, 192)


def residual() -> Model:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        *(Residual(64) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )

    def losses(batch: int) -> Iterator[Tensor]:
        yield F.cross_entropy(model(torch.randn(batch, 3, 32, 32)), torch.randint(10, (batch,)))

    return Model([model], losses, 48)


def vision_transformer() -> Model:
    patches, head = nn.Conv2d(3, 192, 8, 8), nn.Linear(192, 100)
    layer = nn.TransformerEncoderLayer(192, 3, 768, batch_first=True, norm_first=True, activation="gelu")
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def losses(batch: int) -> Iterator[Tensor]:
        tokens = patches(torch.randn(batch, 3, 96, 96)).flatten(2).transpose(1, 2)
        yield F.cross_entropy(head(body(tokens).mean(1)), torch.randint(100, (batch,)))

    return Model([patches, body, head], losses, 16)


def language_model() -> Model:
    model = LanguageModel(4, 256, 4, 512, checkpointing=False)

    def losses(batch: int) -> Iterator[Tensor]:
        text = torch.randint(VOCABULARY, (batch, 513))
        yield model(text[:, :-1], text[:, 1:])

    return Model([model], losses, 5)


def graph_network() -> Model:
    """Messages along the edges of a random graph, gathered and added up by index."""
    encode, decode = nn.Linear(16, 64), nn.Linear(64, 8)
    messages = nn.ModuleList(nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(4))

    def losses(batch: int) -> Iterator[Tensor]:
        nodes = 64 * batch
        start, stop = torch.randint(nodes, (2, 8 * nodes))
        x = encode(torch.randn(nodes, 16))
        for message in messages:
            sent = message(torch.cat([x[start], x[stop]], 1))
            x = F.layer_norm(x.index_add(0, stop, sent), (64,))
        yield F.cross_entropy(decode(x), torch.randint(8, (nodes,)))

    return Model([encode, messages, decode], losses, 64)


def adversarial() -> Model:
    """A generator and a discriminator in turn: two graphs a step, the second through both."""
    make = nn.Sequential(
        nn.Linear(64, 128 * 8 * 8),
        nn.Unflatten(1, (128, 8, 8)),
        *(nn.Upsample(scale_factor=2), nn.Conv2d(128, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Upsample(scale_factor=2), nn.Conv2d(64, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 3, 3, padding=1), nn.Tanh()),
    )
    judge = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, 1, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128 * 8 * 8, 1)),
    )

    def losses(batch: int) -> Iterator[Tensor]:
        made = make(torch.randn(batch, 64))
        yield F.softplus(-judge(torch.randn(batch, 3, 32, 32))).mean() + F.softplus(judge(made.detach())).mean()
        yield F.softplus(-judge(made)).mean()

    return Model([make, judge], losses, 96)


MODELS: dict[str, Callable[[], Model]] = {
    "unet": unet,
    "diffusion": diffusion,
    "policy": policy,
    "lstm": lstm,
    "gru": gru,
    "residual": residual,
    "vision transformer": vision_transformer,
    "language model": language_model,
    "graph network": graph_network,
    "adversarial": adversarial,
}


@dataclass(frozen=True)
class Run:
    """What one process measured; bytes."""

    model: str
    malloc: str
    offload: bool
    round: int
    #: Resident after the tiny step, before the first real one.
    base_bytes: int
    #: The most that was ever resident after that, and how that was found.
    peak_bytes: int
    peak_method: str
    #: Of each step, with offload: what autograd saves, less parameters and what is shared; what leaves and returns.
    saved_bytes: int
    bytes_out: int
    bytes_in: int
    losses_hash: str
    parameters_hash: str

    @property
    def above_bytes(self) -> int:
        return self.peak_bytes - self.base_bytes


def train(name: str, options: argparse.Namespace) -> Run:
    """Trains in this process."""
    malloc, offloads = options.worker_malloc, options.offload
    if malloc == "released" and not eo.release_freed_memory():
        raise SystemExit("benchmarks.small_models: this C library has no mallopt: choose --malloc default")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD([p for module in model.modules for p in module.parameters()], lr=1e-3, momentum=0.9)
    offload = eo.Offload(disk_path=options.disk_path) if offloads else None
    found: list[float] = []

    def step(batch: int, offload: eo.Offload | None) -> None:
        steps = model.losses(batch)
        while True:
            with offload or nullcontext():
                loss = next(steps, None)
            if loss is None:
                break
            loss.backward()
            found.append(loss.item())
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step(2, None)
    gc.collect()
    peak_method = reset_peak()
    base = status_bytes("VmRSS")
    for _ in range(options.steps):
        step(model.batch, offload)
    peak = status_bytes("VmHWM")
    stats = offload.stats(synchronize=True) if offload is not None else eo.OffloadStats()
    saved = stats.saved_bytes - stats.shared_bytes - stats.kept_bytes.get("parameter", 0)
    return Run(
        model=name,
        malloc=malloc,
        offload=offloads,
        round=options.round,
        base_bytes=base,
        peak_bytes=peak,
        peak_method=peak_method,
        saved_bytes=saved // options.steps,
        bytes_out=stats.bytes_out // options.steps,
        bytes_in=stats.bytes_in // options.steps,
        losses_hash=hash_losses(found),
        parameters_hash=hash_parameters(nn.ModuleList(model.modules)),
    )


def run_in_process(name: str, malloc: str, offloads: bool, number: int) -> Run:
    """Trains in a new process."""
    worker = ["--worker", name, "--worker-malloc", malloc, "--round", str(number), *(["--offload"] if offloads else [])]
    command = [sys.executable, "-m", "benchmarks.small_models", *sys.argv[1:], *worker]
    return Run(**json.loads(run_worker("small_models", name, command).splitlines()[-1]))


def judge(report: Report, runs: list[Run], options: argparse.Namespace) -> dict[str, dict[str, Spread]]:
    """Ratios within each round, the limits among them, and the table."""
    summary: dict[str, dict[str, Spread]] = {}
    shown = table("model, malloc", "saved MiB", "out MiB", "in MiB", "peak MiB", "with offload", "of that without")
    for name in options.models:
        for malloc in options.malloc:
            own = [run for run in runs if (run.model, run.malloc) == (name, malloc)]
            plain = {run.round: run for run in own if not run.offload}
            with_offload = [run for run in own if run.offload]
            before = Spread.of([run.above_bytes / MIB for run in plain.values()])
            after = Spread.of([run.above_bytes / MIB for run in with_offload])
            ratio = Spread.of([run.above_bytes / plain[run.round].above_bytes for run in with_offload])
            summary[f"{name}, {malloc}"] = {"plain_mib": before, "offload_mib": after, "ratio": ratio}
            if malloc == "released":  # by default glibc's own blocks make the peaks of equal runs differ by a tenth
                report.at_most(f"{name}: peak", ratio.median, MOST)
            last = with_offload[-1]
            moved = (f"{nbytes / MIB:,.0f}" for nbytes in (last.saved_bytes, last.bytes_out, last.bytes_in))
            shown.add_row(f"{name}, {malloc}", *moved, before.show(0), after.show(0), ratio.show())
        results = {(run.losses_hash, run.parameters_hash) for run in runs if run.model == name}
        report.at_most(f"{name}: different results", len(results), 1)
    console.print("Peaks on top of what is resident after a tiny step; of one step: saved, out and in")
    console.print(shown)
    return summary


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    runs: list[Run] = []
    for number, (name, malloc), shown in turns(options.rounds, list(product(options.models, options.malloc))):
        pair = [run_in_process(name, malloc, offloads, number) for offloads in (False, True)]
        runs += pair
        plain, ours = (run.above_bytes / MIB for run in pair)
        console.print(f"{shown}  {name + ', ' + malloc:<30} {plain:>6,.0f} -> {ours:>6,.0f} MiB  {ours / plain:.3f}")
    summary = judge(report, runs, options)
    return [asdict(run) for run in runs], summary


def options_of() -> argparse.Namespace:
    parser = command_line(__doc__, workers=MODELS, rounds=3, steps=4, threads=1)
    many = "with semicolons between"
    parser.add_argument("--models", type=named(MODELS, ";"), default=";".join(MODELS), help=many)
    parser.add_argument("--malloc", type=named(MALLOC, ";"), default=";".join(MALLOC), help=many)
    parser.add_argument("--worker-malloc", choices=MALLOC, default=MALLOC[0], help=argparse.SUPPRESS)
    parser.add_argument("--offload", action="store_true", help=argparse.SUPPRESS)
    return parse(parser, rounds=1, steps=2)


if __name__ == "__main__":
    sys.exit(drive("small_models", options_of(), run, work=train, on_disk=True))
