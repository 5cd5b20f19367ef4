"""How many bytes `codec="lossless"` leaves at home, what that costs, how fast codecs are and how far off gradients.

    python -m benchmarks.codecs

Two models on the disk tier, each without packing and with it, step by step in turn: blocks of a Llama in bfloat16 whose
norms compute in float32, and of a GPT in float32 with dropout. Gradients must be equal, bit for bit. Then each codec by
itself on one core, in bytes of the tensor as saved, beside a copy of as many. Last what rounding one saved tensor does
to one gradient, of numbers that follow from a fixed seed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import eager_offload as eo
from benchmarks import models
from benchmarks.common import MIB, Report, Spread, command_line, drive, parse, ratios, show
from benchmarks.training import hash_gradients, windows
from eager_offload.codecs import BF16, BitMask, BlockFP8, BlockInt, Codec, Narrow, TensorMeta
from eager_offload.codecs.names import ROUNDING
from eager_offload.codecs.rounded import BLOCK

from lm.model import Block

#: By model: the most that may travel, of the bytes without packing; and how much longer a step may take.
MOVED, STEP = {"llama": 0.92, "gpt": 0.90}, 1.02
IDENTITY, LOSSLESS = "identity", "lossless"
#: By codec, the least speed of packing and of unpacking: GB/s of saved bytes.
SPEED = {"narrow": 4.0, "bitmask of bool": 2.0, "bitmask of float32": 2.0, "bf16": 8.0, "int8, compiled": 3.0}


class RMSNorm(nn.Module):
    """As in the model's own code: in float32, over what was bfloat16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class GPTBlock(Block):
    """With dropout."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.attention_norm(x)), 0.1)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), 0.1)


def make_model(name: str, options: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    shape = models.Shape(1, options.width, options.width * 8 // 3 // 64 * 64, options.heads)
    llama = name == "llama"
    blocks = [
        models.Block(shape, RMSNorm) if llama else GPTBlock(options.width, options.heads) for _ in range(options.layers)
    ]
    dtype = torch.bfloat16 if llama else torch.float32
    x = torch.randn(options.batch, options.sequence, options.width)
    return nn.Sequential(*blocks).to(dtype), x.to(dtype)


@dataclass(frozen=True)
class Step:
    """One forward and backward: seconds of the clock and of the calling thread, and what its gradients are."""

    variant: str
    round: int
    seconds: float
    thread_seconds: float
    hash: str


def step(model: nn.Module, x: Tensor, variant: str, offload: eo.Offload | None, number: int) -> Step:
    model.zero_grad()
    torch.manual_seed(number + 1000)
    gc.collect()
    began, thread_began = time.perf_counter(), time.thread_time()
    with offload or nullcontext():
        loss = model(x).float().square().mean()
    loss.backward()
    seconds, thread_seconds = time.perf_counter() - began, time.thread_time() - thread_began
    return Step(variant, number, seconds, thread_seconds, hash_gradients(model))


def train(report: Report, name: str, options: argparse.Namespace) -> dict[str, Any]:
    model, x = make_model(name, options)
    fields = {"keep_last_bytes": 0, **windows(options)}
    offloads = {codec: eo.Offload(codec=codec, **fields) for codec in (IDENTITY, LOSSLESS)}
    variants = [("none", None), *offloads.items()]
    steps: list[Step] = []
    for number in range(-options.warm_up, options.steps):
        turn = number % len(variants)  # none always comes behind the same other one
        steps += [step(model, x, *variant, number) for variant in (*variants[turn:], *variants[:turn])]
        for offload in offloads.values() if number == -1 else ():
            offload.reset_stats()
    stats = {codec: offload.stats(synchronize=True) for codec, offload in offloads.items()}
    for offload in offloads.values():
        offload.close()
    identity, lossless = stats.values()
    if not identity.bytes_out:
        raise SystemExit("benchmarks.codecs: nothing was offloaded, so there is nothing to measure")
    differ = len({(one.round, one.hash) for one in steps}) - len({one.round for one in steps})
    counted = [one for one in steps if one.round >= 0]
    wall, thread = (ratios(counted, what, LOSSLESS, IDENTITY) for what in ("seconds", "thread_seconds"))
    moved = lossless.bytes_out / identity.bytes_out
    report.at_most(f"{name}: bytes moved, of those without packing", moved, MOVED[name])
    report.at_most(f"{name}: step, of that without packing", median(wall), STEP)
    report.at_most(f"{name}: gradients that differ", differ, 0)
    return {
        "bytes moved": moved,
        "step": Spread.of(wall),
        "thread": Spread.of(thread),
        "seconds": {who: Spread.of(one.seconds for one in counted if one.variant == who) for who, _ in variants},
        "stats": stats,
    }


# -- each by itself ---------------------------------------------------------------------------------------------------


def speed(call: Callable[[], object], nbytes: int, repeats: int) -> float:
    """GB/s, of the median."""
    call()
    samples = []
    for _ in range(repeats):
        began = time.thread_time()
        call()
        samples.append(time.thread_time() - began)
    return nbytes / median(samples) / 1e9


def measure_speeds(report: Report, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    numbers = torch.randn(options.speed_bytes // 4)
    mask = torch.rand(options.speed_bytes) < 0.9
    noise = torch.where(mask[: numbers.numel()], 1 / 0.9, 0.0)
    cases: list[tuple[str, Codec, Tensor, bool]] = [
        ("narrow", Narrow(), numbers.bfloat16().float(), False),
        ("bitmask of bool", BitMask(), mask, False),
        ("bitmask of float32", BitMask(), noise, False),
        ("bf16", BF16(), numbers, False),
        ("int8", BlockInt(), numbers, False),
        ("int8, compiled", BlockInt(), numbers, True),
        ("fp8, compiled", BlockFP8(), numbers, True),
    ]
    found = {}
    for name, codec, x, compiled in cases:
        if compiled and not options.compiled:
            continue
        layout = codec.layout(TensorMeta.of(x))
        assert layout is not None
        packed, out, target = torch.empty(layout.nbytes, dtype=torch.uint8), torch.empty_like(x), torch.empty_like(x)
        pack, unpack = (torch.compile(one, dynamic=False) if compiled else one for one in (codec.pack, codec.unpack))
        rates = {
            "pack": speed(partial(pack, x, packed), x.nbytes, options.repeats),
            "unpack": speed(partial(unpack, packed, out), x.nbytes, options.repeats),
            "copy": speed(partial(target.copy_, x), x.nbytes, options.repeats),
        }
        found[name] = {**rates, "bytes": layout.nbytes / x.nbytes}
        for way in ("pack", "unpack"):
            if name in SPEED:
                report.at_least(f"{name}: {way}, GB/s", rates[way], SPEED[name])
    return found


# -- what rounding does to gradients ----------------------------------------------------------------------------------

#: Numbers in a row.
WIDTH = 512
#: What saves a tensor of the shape of ``x``, and which gradient is looked at: that of ``x`` (0) or of ``w`` (1).
SAVES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "matmul input": (lambda x, w: x @ w, 1),
    "softmax out": (lambda x, w: x.softmax(-1), 0),
    "GELU in": (lambda x, w: F.gelu(x), 0),
    "LayerNorm in": (lambda x, w: F.layer_norm(x, w[0].shape, w[0]), 0),
    "LayerNorm weight": (lambda x, w: F.layer_norm(x, w[0].shape, w[0]), 1),
    "weight, in + 300": (lambda x, w: F.layer_norm(x + 300, w[0].shape, w[0]), 1),
}


@torch.no_grad()
def there_and_back(codec: Codec, x: Tensor) -> Tensor:
    layout = codec.layout(TensorMeta.of(x))
    assert layout is not None
    packed, out = torch.empty(layout.nbytes, dtype=torch.uint8), torch.empty_like(x)
    codec.pack(x, packed)
    codec.unpack(packed, out)
    return out


@torch.no_grad()
def finer(x: Tensor) -> Tensor:
    """As ``BlockInt`` would with the finest scale, of amax / 127, in place of a power of two."""
    blocks = x.reshape(-1, BLOCK)
    step = blocks.abs().amax(1, keepdim=True) / 127
    return (torch.round(blocks / step) * step).view(x.shape)


def measure_errors(rows: int) -> dict[str, dict[str, float]]:
    """By codec and case the root mean square error of a gradient, relative to the gradient."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(count, WIDTH, generator=generator).requires_grad_() for count in (rows, WIDTH))
    given = torch.randn(rows, WIDTH, generator=generator)

    def gradient(case: str, change: Callable[[Tensor], Tensor]) -> Tensor:
        function, which = SAVES[case]
        with saved_tensors_hooks(lambda saved: change(saved) if saved.shape == x.shape else saved, lambda kept: kept):
            out = function(x, w)
        return torch.autograd.grad(out, (x, w)[which], given)[0].double()

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        name: partial(there_and_back, codec) for name, codec in ROUNDING.items()
    }
    ways["int8, finest scale"] = finer
    found: dict[str, dict[str, float]] = {name: {} for name in ways}
    for case in SAVES:
        exact = gradient(case, lambda saved: saved)
        for name, way in ways.items():
            off = gradient(case, way) - exact
            found[name][case] = float(off.norm() / exact.norm())
    return found


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    trained = {name: train(report, name, options) for name in options.models}
    speeds = measure_speeds(report, options)
    errors = measure_errors(options.rows)
    show(
        "Training, of the same without packing",
        (
            {
                "model": name,
                **{what: found[what] for what in ("bytes moved", "step", "thread")},
                "packed": ", ".join(
                    f"{codec} {found['stats'][LOSSLESS].packed_bytes[codec] / nbytes:.2f}"
                    for codec, nbytes in found["stats"][LOSSLESS].coded_bytes.items()
                ),
            }
            for name, found in trained.items()
        ),
    )
    show("GB/s", ({"codec": name, **rates} for name, rates in speeds.items()))
    rounded = ({"codec": name, **{case: f"{one:.3f}" for case, one in cells.items()}} for name, cells in errors.items())
    show("rmse of gradients", rounded)
    found = {"trained": trained, "speeds": speeds, "errors": errors}
    return found, {}


def options_of() -> argparse.Namespace:
    parser = command_line(
        __doc__,
        layers=4,
        width=256,
        heads=4,
        batch=2,
        sequence=512,
        min_bytes="64KiB",
        window="64MiB",
        steps=60,
        warm_up=5,
        speed_bytes=16 * MIB,
        repeats=21,
        rows=1024,
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MOVED), default=list(MOVED))
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="compiled codecs too")
    return parse(parser, layers=2, steps=3, repeats=5, rows=64, compiled=False)


if __name__ == "__main__":
    sys.exit(drive("codecs", options_of(), run, on_disk=True))
