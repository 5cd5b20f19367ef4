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
from benchmarks.common import MIB, Report, Spread, console, drive, table
from benchmarks.options import command_line, parse, positive
from benchmarks.training import hash_gradients
from eager_offload.codecs import BF16, BitMask, BlockFP8, BlockInt, Codec, Narrow, TensorMeta

#: By model: the most that may travel, of the bytes without packing; and how much longer a step may take.
MOVED, STEP = {"llama": 0.92, "gpt": 0.90}, 1.02
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


class LlamaBlock(nn.Module):
    """Attention and SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, inner = heads, width * 8 // 3 // 64 * 64
        self.before, self.between = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(self.qkv(self.before(x)), self.heads, 0.0))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class GPTBlock(nn.Module):
    """Attention and GELU, with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(0.1)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.out(attend(self.qkv(self.before(x)), self.heads, 0.0)))
        return x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))


def attend(qkv: Tensor, heads: int, dropout: float) -> Tensor:
    batch, length, triple = qkv.shape
    q, k, v = qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    found = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    return found.transpose(1, 2).reshape(batch, length, triple // 3)


@dataclass(frozen=True)
class Step:
    """One forward and backward: seconds of the clock and of the calling thread, and what its gradients are."""

    seconds: float
    thread_seconds: float
    hash: str


@dataclass
class Variant:
    """A setting, and its steps."""

    name: str
    offload: eo.Offload | None
    steps: list[Step]


def make_model(name: str, options: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    block, dtype = (LlamaBlock, torch.bfloat16) if name == "llama" else (GPTBlock, torch.float32)
    model = nn.Sequential(*(block(options.width, options.heads) for _ in range(options.layers))).to(dtype)
    return model, torch.randn(options.batch, options.sequence, options.width).to(dtype)


def step(model: nn.Module, x: Tensor, variant: Variant, seed: int) -> Step:
    model.zero_grad()
    torch.manual_seed(seed)
    gc.collect()
    began, thread_began = time.perf_counter(), time.thread_time()
    with variant.offload or nullcontext():
        loss = model(x).float().square().mean()
    loss.backward()
    seconds, thread_seconds = time.perf_counter() - began, time.thread_time() - thread_began
    return Step(seconds, thread_seconds, hash_gradients(model))


def train(report: Report, name: str, options: argparse.Namespace) -> dict[str, Any]:
    model, x = make_model(name, options)
    fields: dict[str, Any] = {"tier": "disk", "disk_path": options.disk_path, "min_bytes": options.min_bytes}
    fields |= {"keep_last_bytes": 0, "max_inflight_bytes": options.window, "prefetch_bytes": options.window}
    codecs = ("identity", "lossless")
    variants = [Variant("none", None, []), *(Variant(one, eo.Offload(codec=one, **fields), []) for one in codecs)]
    differ = 0
    for number in range(-options.warm_up, options.steps):
        turn = number % len(variants)  # none always comes behind the same other one
        in_turn = [*variants[turn:], *variants[:turn]]
        found = {variant.name: step(model, x, variant, number + 1000) for variant in in_turn}
        differ += len({one.hash for one in found.values()}) - 1
        if number == -1:
            for variant in variants[1:]:
                assert variant.offload is not None
                variant.offload.reset_stats()
        if number >= 0:
            for variant in variants:
                variant.steps.append(found[variant.name])
    stats = [variant.offload.stats(synchronize=True) for variant in variants[1:] if variant.offload is not None]
    for variant in variants[1:]:
        assert variant.offload is not None
        variant.offload.close()
    identity, lossless = stats
    if not identity.bytes_out:
        raise SystemExit("benchmarks.codecs: nothing was offloaded, so there is nothing to measure")
    _, plain, packed = variants
    wall = [two.seconds / one.seconds for one, two in zip(plain.steps, packed.steps, strict=True)]
    thread = [two.thread_seconds / one.thread_seconds for one, two in zip(plain.steps, packed.steps, strict=True)]
    report.at_most(
        f"{name}: bytes moved, of those without packing", lossless.bytes_out / identity.bytes_out, MOVED[name]
    )
    report.at_most(f"{name}: step, of that without packing", median(wall), STEP)
    report.at_most(f"{name}: gradients that differ", differ, 0)
    return {
        "bytes_out": {one: each.bytes_out for one, each in zip(codecs, stats, strict=True)},
        "coded_bytes": lossless.coded_bytes,
        "packed_bytes": lossless.packed_bytes,
        "refused": lossless.refused,
        "step_ratio": Spread.of(wall),
        "thread_ratio": Spread.of(thread),
        "seconds": {variant.name: Spread.of([one.seconds for one in variant.steps]) for variant in variants},
        "followed_forwards": {one: each.followed_forwards for one, each in zip(codecs, stats, strict=True)},
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
    seed = torch.tensor([1])
    cases: list[tuple[str, Codec, Tensor, bool]] = [
        ("narrow", Narrow(), numbers.bfloat16().float(), False),
        ("bitmask of bool", BitMask(), mask, False),
        ("bitmask of float32", BitMask(), noise, False),
        ("bf16", BF16(), numbers, False),
        ("int8", BlockInt(8), numbers, False),
        ("int8, compiled", BlockInt(8), numbers, True),
        ("int8_sr, compiled", BlockInt(8, rounding="sr"), numbers, True),
        ("fp8, compiled", BlockFP8(), numbers, True),
    ]
    found = {}
    for name, codec, x, compiled in cases:
        if compiled and not options.compiled:
            continue
        layout = codec.layout(TensorMeta.of(x))
        assert layout is not None
        packed, out, target = torch.empty(layout.nbytes, dtype=torch.uint8), torch.empty_like(x), torch.empty_like(x)
        pack: Callable[..., object] = torch.compile(codec.pack, dynamic=False) if compiled else codec.pack
        unpack: Callable[..., object] = torch.compile(codec.unpack, dynamic=False) if compiled else codec.unpack
        rates = {
            "pack": speed(lambda x=x, packed=packed, pack=pack: pack(x, packed, seed), x.nbytes, options.repeats),
            "unpack": speed(
                lambda out=out, packed=packed, unpack=unpack: unpack(packed, out), x.nbytes, options.repeats
            ),
            "copy": speed(lambda x=x, target=target: target.copy_(x), x.nbytes, options.repeats),
        }
        found[name] = {**rates, "ratio": layout.nbytes / x.nbytes}
        for way in ("pack", "unpack"):
            if name in SPEED:
                report.at_least(f"{name}: {way}, GB/s", rates[way], SPEED[name])
    return found


# -- what rounding does to gradients ----------------------------------------------------------------------------------

#: Numbers in a row; and of stochastic rounding, how often it is done.
WIDTH, DRAWS = 512, 16
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
def there_and_back(codec: Codec, x: Tensor, seed: int) -> Tensor:
    layout = codec.layout(TensorMeta.of(x))
    assert layout is not None
    packed, out = torch.empty(layout.nbytes, dtype=torch.uint8), torch.empty_like(x)
    codec.pack(x, packed, torch.tensor([seed]))
    codec.unpack(packed, out)
    return out


@torch.no_grad()
def finer(codec: BlockInt, x: Tensor, seed: int) -> Tensor:
    """As ``codec`` would with the finest scale, of amax / 127 or amax / 7, in place of a power of two."""
    blocks = x.reshape(-1, codec.block)
    step = blocks.abs().amax(1, keepdim=True) / (2 ** (codec.bits - 1) - 1)
    noise = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(seed)) if codec.unbiased else 0.5
    return (torch.floor(blocks / step + noise) * step).view(x.shape)


def measure_errors(rows: int) -> dict[str, dict[str, dict[str, float]]]:
    """By codec and case the error of a gradient, and what its draws have in common, relative to the gradient."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(count, WIDTH, generator=generator).requires_grad_() for count in (rows, WIDTH))
    given = torch.randn(rows, WIDTH, generator=generator)

    def gradient(case: str, change: Callable[[Tensor], Tensor]) -> Tensor:
        function, which = SAVES[case]
        with saved_tensors_hooks(lambda saved: change(saved) if saved.shape == x.shape else saved, lambda kept: kept):
            out = function(x, w)
        return torch.autograd.grad(out, (x, w)[which], given)[0].double()

    integers = [BlockInt(8, rounding="sr"), BlockInt(8), BlockInt(4, rounding="sr"), BlockInt(4)]
    ways: dict[str, tuple[Callable[..., Tensor], Codec]] = {one.name: (there_and_back, one) for one in integers}
    ways |= {one.name: (there_and_back, one) for one in (BlockFP8(), BF16())}
    ways |= {f"{one.name}, finest scale": (finer, one) for one in integers}
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in ways}
    for case in SAVES:
        exact = gradient(case, lambda saved: saved)
        for name, (way, codec) in ways.items():
            count = DRAWS if codec.unbiased else 1
            off = [gradient(case, partial(way, codec, seed=seed)) - exact for seed in range(count)]
            squares, total = sum(float(one.square().mean()) for one in off), float(sum(off).square().mean())
            # A mean over pairs of draws: that of all draws would have the noise of each in it.
            bias = (total - squares) / (count * (count - 1)) if codec.unbiased else squares
            scale = float(exact.square().mean())
            found[name][case] = {"rmse": (squares / count / scale) ** 0.5, "bias": (max(bias, 0.0) / scale) ** 0.5}
    return found


def show(
    trained: dict[str, Any], speeds: dict[str, dict[str, float]], errors: dict[str, dict[str, dict[str, float]]]
) -> None:
    shown = table("model", "bytes moved", "step", "thread", "packed")
    for name, found in trained.items():
        moved = found["bytes_out"]["lossless"] / found["bytes_out"]["identity"]
        packed = ", ".join(
            f"{one} {found['packed_bytes'][one] / nbytes:.2f}" for one, nbytes in found["coded_bytes"].items()
        )
        shown.add_row(name, f"{moved:.3f}", found["step_ratio"].show(), found["thread_ratio"].show(), packed)
    console.print(shown)
    shown = table("GB/s", "pack", "unpack", "copy", "bytes")
    for name, rates in speeds.items():
        shown.add_row(name, *(f"{rates[one]:.1f}" for one in ("pack", "unpack", "copy")), f"{rates['ratio']:.3f}")
    console.print(shown)
    shown = table("rmse/bias", *SAVES)
    for name, found in errors.items():
        shown.add_row(name, *(f"{one['rmse']:.3f}/{one['bias']:.3f}" for one in found.values()))
    console.print(shown)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    trained = {name: train(report, name, options) for name in options.models}
    speeds = measure_speeds(report, options)
    errors = measure_errors(options.rows)
    show(trained, speeds, errors)
    found = {"trained": trained, "speeds": speeds, "errors": errors}
    return found, found


def options_of() -> argparse.Namespace:
    parser = command_line(
        __doc__,
        layers=4,
        width=256,
        heads=4,
        batch=2,
        sequence=512,
        steps=60,
        min_bytes="64KiB",
        window="64MiB",
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MOVED), default=list(MOVED))
    parser.add_argument("--warm-up", type=positive, default=5)
    parser.add_argument("--speed-bytes", type=positive, default=16 * MIB, help="of the tensor that codecs are timed on")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="compiled ones too")
    parser.add_argument("--repeats", type=positive, default=21)
    parser.add_argument("--rows", type=positive, default=1024, help="of 512 numbers, of what is rounded for a gradient")
    return parse(parser, layers=2, steps=3, repeats=5, rows=64, compiled=False)


if __name__ == "__main__":
    sys.exit(drive("codecs", options_of(), run, on_disk=True))
