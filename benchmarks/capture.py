"""A captured training step with offload on an accelerator, beside one without, eager steps, and followed eager steps.

    python -m benchmarks.capture
    python -m benchmarks.capture --batch 16 --keep-last-bytes 256MiB
    python -m benchmarks.capture --virtual --quick      # does it run? The numbers mean nothing

A model like GPT-2 small, bf16, 4 x 512 tokens, a fused AdamW. All four ways are in one process and take turns, with the
same batches from the same state. What the link allows the captured step with offload, from the bytes D that its plan
moves, the bandwidth, probed in the same process, and the captured step without, two thirds of which are backward:

    max(T / 3, D / BW_out) + max(2 T / 3, D / BW_in)
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.common import MIB, Report, Spread, console, table
from benchmarks.options import accelerator_or_message, command_line, parse, positive
from eager_offload.graphs import capture_step
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Direction
from eager_offload.step_plan import Fate, StepPlan

from lm.model import Block

EAGER, FOLLOWED = "eager", "eager, offload followed"
PLAIN, OFFLOADED = "captured", "captured, offload"


class LanguageModel(nn.Module):
    """Like GPT-2: positions that are learnt, and embeddings that are the head too. Returns the loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Step:
    """Forward, backward and optimizer: what all ways do.

    Args:
        around: entered around forward.
    """

    def __init__(self, options: argparse.Namespace, around: AbstractContextManager[Any]) -> None:
        device = torch.device(options.device)
        torch.manual_seed(0)
        with device:
            model = LanguageModel(options.layers, options.width, options.heads, options.vocabulary, options.sequence)
        self.model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
        kind = {"capturable": True} if device.type in ("cuda", "xpu") else {}  # other devices are refused it
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, **kind)
        self.around = around

    def __call__(self, tokens: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with self.around:
            loss: Tensor = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@dataclass
class Way:
    """One way of taking steps; seconds, and bytes of the device above parameters and optimizer."""

    name: str
    run: Callable[[Tensor], Tensor]
    #: For a captured step: enqueues a replay and nothing else.
    launch: Callable[[], object] | None
    #: What the steps take of the device: the peak, or what a graph holds.
    peak_bytes: int
    plan: StepPlan | None
    stats: eo.OffloadStats | None
    #: One for each round: of a step, and of the host until one is enqueued.
    seconds: list[float] = field(default_factory=list)
    call_seconds: list[float] = field(default_factory=list)
    launch_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


# -- the ways ---------------------------------------------------------------------------------------------------------


def prepare(name: str, options: argparse.Namespace, batches: list[Tensor]) -> Way:
    """Builds a way and takes ``options.warm_up`` steps; each way takes the same number with the same batches."""
    fields = {"min_bytes": 0} if options.quick else {}
    offload = eo.Offload(tier="host", keep_last_bytes=options.keep_last_bytes, **fields)
    step = Step(options, offload if name == FOLLOWED else nullcontext())
    for batch in batches[:2]:  # parameters, gradients and the optimizer's state are not what is compared
        step.model(batch).backward()
        step.optimizer.step()
    step.optimizer.zero_grad()
    before = _reserved(options)
    if name in (EAGER, FOLLOWED):
        allocated = torch.accelerator.memory_allocated(options.device)
        for _ in range(options.warm_up):
            step(batches[0])
        torch.accelerator.synchronize(options.device)
        torch.accelerator.reset_peak_memory_stats(options.device)
        step(batches[0])
        torch.accelerator.synchronize(options.device)
        peak = torch.accelerator.max_memory_allocated(options.device) - allocated
        return Way(name, step, None, peak, None, offload.stats(synchronize=True) if name == FOLLOWED else None)
    captured = capture_step(step, (batches[0],), offload=offload if name == OFFLOADED else None, warmup=options.warm_up)
    captured(batches[0])
    return Way(
        name,
        captured,
        captured.launch,
        _reserved(options) - before,
        captured.plan if name == OFFLOADED else None,
        offload.stats(synchronize=True) if name == OFFLOADED else None,
    )


def _reserved(options: argparse.Namespace) -> int:
    """Bytes that the allocator cannot give back: of tensors that live, and of graphs."""
    gc.collect()
    torch.accelerator.synchronize(options.device)
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_reserved(options.device)


def measure(ways: list[Way], options: argparse.Namespace, batches: list[Tensor]) -> None:
    """Has the ways take turns. In each round each of them has the same batches."""
    for number in range(options.rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            torch.accelerator.synchronize(options.device)
            began = time.perf_counter()
            for index in range(options.steps):
                loss = way.run(batches[(number + index) % len(batches)])
            called = time.perf_counter()
            torch.accelerator.synchronize(options.device)
            way.seconds.append((time.perf_counter() - began) / options.steps)
            way.call_seconds.append((called - began) / options.steps)
            way.losses.append(loss.item())
    for _ in range(options.rounds):
        for way in ways:
            if way.launch is not None:
                torch.accelerator.synchronize(options.device)
                began = time.perf_counter()
                way.launch()
                way.launch_seconds.append(time.perf_counter() - began)
    torch.accelerator.synchronize(options.device)


# -- what it means ----------------------------------------------------------------------------------------------------


def summarize(ways: list[Way], report: Report, options: argparse.Namespace) -> dict[str, Any]:
    found = {way.name: way for way in ways}
    eager, followed, plain, offloaded = (found[name] for name in (EAGER, FOLLOWED, PLAIN, OFFLOADED))
    rows = {
        way.name: {
            "step_seconds": asdict(Spread.of(way.seconds)),
            "call_seconds": asdict(Spread.of(way.call_seconds)),
            "launch_seconds": asdict(Spread.of(way.launch_seconds)) if way.launch_seconds else None,
            "peak_bytes": way.peak_bytes,
            "same_losses": way.losses == eager.losses,
        }
        for way in ways
    }
    plan = offloaded.plan
    assert plan is not None
    runtime, device = accelerator_runtime(), torch.device(options.device)
    out, back = (runtime.bandwidth(device, way) for way in (Direction.OUT, Direction.IN))
    moved, alone = plan.totals.offloaded, median(plain.seconds)
    expected = max(alone / 3, moved / out) + max(2 * alone / 3, moved / back)
    step = median(offloaded.seconds)
    report.at_most("captured with offload: step, of captured without", step / alone, 1.05)
    report.at_least("captured with offload: times as fast as eager", median(eager.seconds) / step, 1.5)
    report.at_least(
        "captured with offload: peak below captured without, of the bytes that the plan moves",
        (plain.peak_bytes - offloaded.peak_bytes) / max(moved, 1),
        0.95,
    )
    report.at_most(
        "captured with offload: host time of a replay, of a step", median(offloaded.launch_seconds) / step, 0.01
    )
    return {
        "ways": rows,
        "plan": {
            **plan.totals._asdict(),
            "gone_before_the_last_save": sum(
                save.storage_nbytes for save in plan.saves if save.fate is Fate.OFFLOAD and save.release >= 0
            ),
        },
        "followed_forwards": 0 if followed.stats is None else followed.stats.followed_forwards,
        "out_bytes_per_second": out,
        "in_bytes_per_second": back,
        "expected_seconds": expected,
    }


def show(summary: dict[str, Any]) -> None:
    shown = table("way", "step ms", "call ms", "launch us", "MiB", "same losses")
    for name, row in summary["ways"].items():
        launch = row["launch_seconds"]
        shown.add_row(
            name,
            Spread(*(value * 1e3 for value in row["step_seconds"].values())).show(),
            f"{row['call_seconds']['median'] * 1e3:,.3f}",
            "" if launch is None else f"{launch['median'] * 1e6:,.0f}",
            f"{row['peak_bytes'] / MIB:,.1f}",
            "yes" if row["same_losses"] else "no",
        )
    console.print(shown)
    plan = summary["plan"]
    console.print(
        f"The plan moves {plan['offloaded'] / MIB:,.1f} MiB each way, with which the link allows a step of "
        f"{summary['expected_seconds'] * 1e3:,.3f} ms.",
        soft_wrap=True,
    )


# -- the command line -------------------------------------------------------------------------------------------------


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, batch=4, sequence=512, layers=12, rounds=21)
    parser.add_argument("--virtual", action="store_true", help="on the virtual device of the tests: whether it runs")
    parser.add_argument("--keep-last-bytes", default="auto", help="of the offload; what it keeps costs no time")
    parser.add_argument("--steps", type=positive, default=10, help="of each way in a round")
    parser.add_argument("--warm-up", type=positive, default=5, help="real steps, which a plan is made of")
    parser.set_defaults(width=768, heads=12, vocabulary=50_257)
    smaller = {"width": 32, "heads": 2, "vocabulary": 64, "layers": 2, "batch": 2, "sequence": 16}
    return parse(parser, arguments, **smaller, rounds=2, steps=2, keep_last_bytes=0)


def main() -> int:
    options = options_of()
    if options.virtual:
        from tests.virtual_device import install

        install()
    options.device = accelerator_or_message("capture", "--virtual --quick")
    if options.device is None:
        return 2
    if not accelerator_runtime().captures:
        print(f"benchmarks.capture: torch {torch.__version__} makes no graphs on {options.device}", file=sys.stderr)
        return 2
    report = Report("capture", options)
    if options.device.startswith("cuda"):
        report.environment["device"] = torch.cuda.get_device_name(options.device)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.sequence + 1)
    batches = [torch.randint(options.vocabulary, shape, generator=generator).to(options.device) for _ in range(4)]
    ways = [prepare(name, options, batches) for name in (EAGER, FOLLOWED, PLAIN, OFFLOADED)]
    measure(ways, options, batches)
    summary = summarize(ways, report, options)
    show(summary)
    samples = {
        way.name: {name: getattr(way, name) for name in ("seconds", "call_seconds", "launch_seconds", "losses")}
        for way in ways
    }
    return report.finish(samples, summary)


if __name__ == "__main__":
    sys.exit(main())
