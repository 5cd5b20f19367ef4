"""What a plan costs, and whether training on a CPU comes to what it predicts.

    python -m benchmarks.planning
    python -m benchmarks.planning --parts cost

``cost`` plans a large model on meta in processes of their own: seconds of the processor, since one thread does it all,
and resident bytes. ``recompute`` plans models on cards at the memory that checkpointing takes, each in a process of its
own, and ``--page`` writes the table into docs/plan.md. ``recipes``, which is not run by default, plans sequences of
models on cards: the table of docs/recipes.md. ``cpu`` trains with the disk tier and the settings of plans: the
predicted peak and step beside resident bytes and seconds.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from benchmarks.common import GIB, RESULTS, ROOT, Report, command_line, drive, in_process, listed, named, parse, show
from benchmarks.cpu_defaults import UNet
from benchmarks.gpu.results import latest, read
from benchmarks.models import Llama, Shape, Stack
from benchmarks.training import release_or_refuse, reset_peak, status_bytes, text, tiny_text, windows
from eager_offload.config import parse_size

from lm.model import LanguageModel

#: Goals: seconds and bytes of a plan; by how much peak and step of training are off what was predicted.
PLAN_SECONDS, PLAN_BYTES = 4.0, 300 << 20
CPU_PEAK, CPU_STEP = 0.05, 0.10
#: Of the model that is planned.
TOKENS, WIDTH, HIDDEN, HEADS = 32 << 10, 4096, 11_008, 32
SHARES = "budgets, by the part of the way from the least one to the one for which nothing moves"


@dataclass(frozen=True)
class Cost:
    """One plan, in a process of its own. Bytes and seconds."""

    budget: int
    #: Of all threads.
    cpu_seconds: float
    #: The most that was ever resident, over what was before.
    above_bytes: int
    peak_method: str


def cost_of(share: float, options: argparse.Namespace) -> Cost:
    """Plans in this process, for a part of the bytes that a step takes."""
    with torch.device("meta"):
        model = Stack(Shape(options.layers, WIDTH, HIDDEN, HEADS))
        x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
    budget = sum(one.nbytes for one in model.parameters()) * 2
    budget += int(share * options.layers * TOKENS * 2 * (8 * WIDTH + 4 * HIDDEN))
    gc.collect()
    method, base = reset_peak(), status_bytes("VmRSS")
    began = time.process_time()
    eo.plan(model, x, loss=torch.sum, optimizer=None, device="h200", device_budget=budget)
    cpu_seconds = time.process_time() - began
    return Cost(budget, cpu_seconds, status_bytes("VmHWM") - base, method)


def cost(options: argparse.Namespace, report: Report) -> list[Cost]:
    shares = [f"cost={share}" for share in options.shares for _ in range(options.rounds)]
    found = [Cost(**one) for share in shares for one in in_process("planning", share)]
    show(f"A plan of {options.layers} blocks, {TOKENS >> 10}k tokens, on meta", found)
    taken = [
        median(one.cpu_seconds for one in found if one.budget == budget) for budget in {one.budget for one in found}
    ]
    report.at_most("cost: seconds of the processor", max(taken), PLAN_SECONDS)
    report.at_most("cost: bytes", max(one.above_bytes for one in found), PLAN_BYTES)
    return found


@dataclass(frozen=True)
class OnCpu:
    """Steps with the settings of a plan, in a process of their own. Bytes over parameters and loaded code."""

    part: float
    predicted_bytes: int
    real_bytes: int
    #: Forward and backward; the median of the steps.
    predicted_seconds: float
    real_seconds: float
    moved_bytes: int
    bytes_out: int
    peak_method: str


def on_cpu(part: float, options: argparse.Namespace) -> OnCpu:
    """Trains in this process."""
    release_or_refuse()
    torch.manual_seed(0)
    model = LanguageModel(
        options.cpu_layers, options.cpu_width, options.cpu_heads, options.sequence, checkpointing=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = text(options, options.steps)
    inputs = data[0].inputs, data[0].targets
    config = windows(options)
    plain = eo.plan(model, inputs, optimizer=None, device_budget=1 << 50, config=config)
    budget = plain.least_budget + int((plain.peak_bytes - plain.least_budget) * part)
    plan = eo.plan(model, inputs, optimizer=None, device_budget=budget, config=config)
    there = sum(one.nbytes for one in [*model.parameters(), *inputs])
    predicted, moved = plan.peak_bytes - there, plan.moved_bytes
    with TemporaryDirectory(dir=options.disk_path) as directory:
        offload = eo.Offload(plan=plan, tier="disk", disk_path=Path(directory))

        def step(inputs: Tensor, targets: Tensor, offload: eo.Offload | None) -> float:
            optimizer.zero_grad(set_to_none=True)
            began = time.perf_counter()
            with offload or nullcontext():
                loss = model(inputs, targets)
            loss.backward()
            seconds = time.perf_counter() - began
            optimizer.step()
            return seconds

        (tiny,) = tiny_text()
        step(tiny.inputs, tiny.targets, None)  # loads code
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        method, base = reset_peak(), status_bytes("VmRSS")
        seconds = median([step(batch.inputs, batch.targets, offload) for batch in data])
        real = status_bytes("VmHWM") - base
        stats = offload.stats(synchronize=True)
        offload.close()
    bytes_out = stats.bytes_out // options.steps
    return OnCpu(part, predicted, real, plan.step_seconds, seconds, moved, bytes_out, method)


def cpu(options: argparse.Namespace, report: Report) -> list[OnCpu]:
    parts = [f"cpu={part}" for part in options.shares for _ in range(options.rounds)]
    found = [OnCpu(**one) for part in parts for one in in_process("planning", part)]
    show("Training on this CPU with the disk tier, by plans: bytes over the model", found)
    # A budget's plans differ between rounds, since measured times decide: each run is compared with its own.
    report.at_most("cpu: peak off", _off(found, lambda one: one.real_bytes / one.predicted_bytes), CPU_PEAK)
    report.at_most("cpu: step off", _off(found, lambda one: one.real_seconds / one.predicted_seconds), CPU_STEP)
    return found


def _off(found: Sequence[OnCpu], ratio: Callable[[OnCpu], float]) -> float:
    """By how much the median of what was measured, of what was predicted, is off; of the worst budget."""
    parts = {one.part for one in found}
    return max(abs(median(ratio(one) for one in found if one.part == part) - 1) for part in parts)


@dataclass(frozen=True)
class Case:
    """A model on a card, with its inputs and a loss, and the most that a step may take of checkpointing's."""

    make: Callable[[], tuple[nn.Module, Tensor] | tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]]
    device: str
    goal: float
    #: ``None``: what checkpointing takes.
    budget: str | None = None
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.AdamW


def llama(tokens: int, *, frozen: bool = False, rank: int = 0, part: int = 0, **sizes: int) -> tuple[nn.Module, Tensor]:
    """A Llama on meta.

    Args:
        frozen: but for norms and the embedding.
        rank: if not 0, all is frozen, with LoRA beside queries and values.
        part: tokens of which the loss is computed at once; 0: all.
    """
    with torch.device("meta"):
        shape = Shape(**{"shared_heads": 8, **sizes})
        model = (LossInParts(shape, part) if part else Llama(shape)).to(torch.bfloat16).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen or rank) or (frozen and ("norm" in name or "embedding" in name)))
        for block in model.blocks if rank else ():
            block.query, block.value = (LoRA(one, rank) for one in (block.query, block.value))
    return model, torch.zeros(1, tokens + 1, dtype=torch.int64)


class LossInParts(Llama):
    """Has the logits of so many tokens at once, which backward computes again."""

    def __init__(self, shape: Shape, part: int) -> None:
        super().__init__(shape)
        self.part = part

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = self.run(block, x)
        parts = (one.flatten(0, 1).split(self.part) for one in (self.norm(x), tokens[:, 1:, None]))
        losses = [checkpoint(self.loss, *both, use_reentrant=False) for both in zip(*parts, strict=True)]
        return torch.stack(losses).sum() / x.shape[1]

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.embedding.weight), targets.flatten(), reduction="sum")


class LoRA(nn.Module):
    """A frozen layer, and two trained ones beside it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer, self.out_features = layer, layer.out_features
        self.down = nn.Linear(layer.in_features, rank, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(rank, layer.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def vit_huge() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """The blocks of ViT-H/14 at 224 pixels, 128 images."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(1280, 16, 5120, 0.0, "gelu", batch_first=True, norm_first=True)
        model = nn.TransformerEncoder(layer, 32, enable_nested_tensor=False).to(torch.bfloat16).train()
        return model, torch.empty(128, 257, 1280, dtype=torch.bfloat16), torch.sum


def unet() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """Four levels of convolutions, 16 images of 512 pixels."""
    with torch.device("meta"):
        return UNet(64).to(torch.bfloat16).train(), torch.empty(16, 3, 512, 512, dtype=torch.bfloat16), torch.sum


EIGHT = {"width": 4096, "hidden": 14_336, "vocabulary": 128_256}
THREE = {"layers": 28, "width": 3072, "hidden": 8192, "heads": 24}
CASES = {
    "1B, 32k": Case(partial(llama, 32_768), "h100", 0.90),
    "1B, 32k, 16 GiB": Case(partial(llama, 32_768), "h100", 0.88, "16GiB"),
    "1B, 32k, 20 GiB": Case(partial(llama, 32_768), "h100", 0.86, "20GiB"),
    "16 blocks of 8B, frozen, 64k": Case(partial(llama, 65_536, frozen=True, **EIGHT), "h100", 0.97, None, None),
    "1B, 8k": Case(partial(llama, 8192), "rtx4090", 0.97),
    "1B, 32k, frozen": Case(partial(llama, 32_768, frozen=True), "rtx4090", 0.97, None, None),
    "3B, 16k, frozen": Case(partial(llama, 16_384, frozen=True, **THREE), "a100", 0.97, None, None),
    "8B, 16 blocks, LoRA, 16k": Case(partial(llama, 16_384, rank=16, **EIGHT), "rtx4090", 1.0),
    "ViT-H at 224, 128 images": Case(vit_huge, "a100", 1.0),
    "U-Net, 16 images of 512": Case(unet, "rtx4090", 1.0),
}
#: Of the other models and cards, at checkpointing's own memory.
MEDIAN = 0.90


@dataclass(frozen=True)
class Recomputed:
    """A plan with recompute, in a process of its own. Bytes and seconds, predicted."""

    model: str
    device: str
    peak_bytes: int
    step: float
    of_checkpointing: float
    goal: float
    #: Bytes that come back.
    moved_bytes: int
    cpu_seconds: float


def recomputed(name: str) -> Recomputed:
    """Plans in this process, for half a percent more than checkpointing takes, or for the budget that is given."""
    case = CASES[name]
    model, inputs, loss = (*case.make(), None)[:3]
    given = {"loss": loss, "device": case.device, "optimizer": case.optimizer, "recompute": True}
    whole = eo.plan(model, inputs, device_budget=1 << 50, **given).checkpointing
    assert whole is not None, "blocks of it repeat"
    began = time.process_time()
    plan = eo.plan(model, inputs, device_budget=case.budget or int(1.005 * whole.peak_bytes), **given)
    seconds = time.process_time() - began
    part, moved = plan.step_seconds / whole.step_seconds, plan.moved_bytes
    return Recomputed(name, case.device, plan.peak_bytes, plan.step_seconds, part, case.goal, moved, seconds)


def recompute(options: argparse.Namespace, report: Report) -> list[Recomputed]:
    found = [Recomputed(**one) for name in CASES for one in in_process("planning", f"recompute={name}")]
    show("Plans with recompute at checkpointing's memory, or at that of their name", found)
    for one in found:
        report.at_most(f"recompute: {one.model}, of checkpointing's step", one.of_checkpointing, one.goal)
    others = [one.of_checkpointing for one in found[3:]]
    report.at_most("recompute: the median of the other models", median(others), MEDIAN)
    if options.page:
        columns = "model, tokens | card | peak, GiB | step, s | of checkpointing's | moves, GiB"
        write_table("plan", "recompute", columns, map(_cells_of_plan, found))
    return found


def _cells_of_plan(one: Recomputed) -> str:
    sizes = f"{one.peak_bytes / GIB:.1f} | {one.step:.3f} | {one.of_checkpointing:.2f} | {one.moved_bytes / GIB:.1f}"
    return f"{one.model} | {one.device} | {sizes}"


def write_table(page: str, part: str, columns: str, rows: Iterable[str]) -> None:
    """Writes a table into its place on a page of the documentation, with the command that does so above it."""
    path = ROOT / "docs" / f"{page}.md"
    begins, ends = f"<!-- python -m benchmarks.planning --parts {part} --page -->\n", "\n<!-- end -->"
    before, rest = path.read_text().split(begins)
    lines = ["", f"| {columns} |", "| --- " * (columns.count("|") + 1) + "|", *(f"| {row} |" for row in rows)]
    path.write_text(f"{before}{begins}{chr(10).join(lines)}\n{ends}{rest.split(ends, 1)[1]}")


#: What docs/recipes.md has rows of: cards with their names and budgets, and models, whose loss is computed in parts.
CARDS = {
    "rtx4090": ("RTX 4090, 24 GB", "22GiB"),
    "l40s": ("L40S, 48 GB", "42GiB"),
    "h100": ("H100, 80 GB", "75GiB"),
    "h200": ("H200, 141 GB", "132GiB"),
}
VOCABULARY = {"vocabulary": 128_256, "part": 4096}
MODELS = {
    "1B": {},  # as on an H100
    "3B": THREE | VOCABULARY,
    "8B": {"layers": 32} | EIGHT | VOCABULARY,
    "14B": {"layers": 40, "width": 5120, "hidden": 17_408, "heads": 40} | VOCABULARY,
}
#: Sequences that are planned, the window (by default a plan chooses among five), and LoRA's rank where all do not fit.
LENGTHS, WINDOW, RANK = (8192, 32_768), "528MiB", 16
#: Of a card's budget, what weights, gradients and states of AdamW may take.
STATES = 0.9


@dataclass(frozen=True)
class Recipe:
    """A sequence of a model on a card. Bytes and seconds, predicted."""

    card: str
    model: str
    #: Empty where the weights do not fit, whose bytes the peak is then.
    trains: str
    length: int
    fits: bool
    peak_bytes: int
    #: Of steps with neither, whether they fit or not, and with checkpointing.
    of_none: float
    of_checkpointing: float
    host_bytes: int
    #: Without offload, with checkpointing, and the least of a plan.
    peaks: tuple[int, ...]


def recipes_of(card: str, name: str, lengths: Sequence[int]) -> Iterator[Recipe]:
    """Plans in this process."""
    budget, sizes = parse_size(CARDS[card][1], "budget"), MODELS[name]
    weights = sum(one.nbytes for one in llama(1, **sizes)[0].parameters())
    if weights > STATES * budget:
        yield Recipe(card, name, "", 0, False, weights, 0.0, 0.0, 0, ())
        return
    rank = 0 if 4 * weights <= STATES * budget else RANK  # with gradients, and AdamW's two states
    config = {"max_inflight_bytes": WINDOW, "prefetch_bytes": WINDOW}
    for length in lengths:
        model, inputs = llama(length, rank=rank, **sizes)
        plan = eo.plan(model, inputs, device=card, device_budget=budget, recompute=True, config=config)
        assert plan.checkpointing is not None, "blocks of it repeat"
        parts = (plan.step_seconds / one for one in (plan.compute_seconds, plan.checkpointing.step_seconds))
        peaks = (plan.whole or plan.problem).unmoved_peak, plan.checkpointing.peak_bytes, plan.least_budget
        trains = "LoRA" if rank else "all"
        yield Recipe(card, name, trains, length, plan.fits, plan.peak_bytes, *parts, plan.host_bytes, peaks)


def longest_of(budget: int, rows: Sequence[Recipe], way: int) -> str:
    """Returns about how many tokens fit, by the straight line through the peaks of two lengths."""
    (x, low), (y, high) = ((one.length, one.peaks[way]) for one in rows)
    return f"{max(x + (budget - low) * (y - x) // (high - low), 0) >> 10}k"


def recipes(options: argparse.Namespace, report: Report) -> list[Recipe]:
    pairs = [f"{card}/{name}" for card in CARDS for name in MODELS]
    found = [
        [Recipe(**one) for one in in_process("planning", f"recipes={pair}")]
        for pair in (pairs[:1] if options.quick else pairs)
    ]
    rows = [row for of_pair in found for row in of_pair]
    show("Sequences on cards", rows)
    for one in filter(lambda row: row.trains, rows):
        what = f"recipes: {one.model} on {one.card}, {one.length} tokens, of checkpointing's step"
        report.at_most(what, one.of_checkpointing, 1.0)
    if options.page:
        columns = "card | model | longest: none, checkpointing, plan | " + " | ".join(
            f"{one >> 10}k" for one in LENGTHS
        )
        write_table("recipes", "recipes", columns, [*map(_cells_of_recipe, found), _measured()])
    return rows


def _cells_of_recipe(rows: Sequence[Recipe]) -> str:
    (card, size), first = CARDS[rows[0].card], rows[0]
    if not first.trains:
        return f"{card} | {first.model} | does not fit: {first.peak_bytes / GIB:.0f} GiB of weights | |"
    budget = parse_size(size, "budget")
    longest = ", ".join(longest_of(budget, rows, way) for way in range(3))
    cells = [
        f"{'none' if one.peaks[0] <= budget else 'plan'}: {one.peak_bytes / GIB:.0f}, {one.of_none:.2f} "
        f"({one.of_checkpointing:.2f}), {one.host_bytes / GIB:.0f}"
        if one.fits
        else "does not fit"
        for one in rows
    ]
    return f"{card} | {first.model}, {first.trains} | {longest} | {' | '.join(cells)}"


def _measured() -> str:
    """A row of a model on an H100, as ``benchmarks.gpu`` has left it."""
    runs = (latest(read(RESULTS / "gpu" / f"h100_run{number}.jsonl"), "train") for number in (3, 4))
    found = {stage: row for run in runs for stage, row in run.items() if not row["failure"]}
    base, whole, row = (found[stage] for stage in ("none", "checkpointing", "ours + checkpointing"))
    none, again, step = (median(one["steps"]["step"]) for one in (base, whole, row))
    way = f"checkpointing, `Offload()`: {row['peak_gib']:.0f}, {step / none:.2f} ({step / again:.2f})"
    return f"{CARDS['h100'][0]} | 1B, all, measured | | | {way}, {row['host_gib']:.0f}"


PARTS = {"cost": cost, "recompute": recompute, "cpu": cpu, "recipes": recipes}


def work(name: str, options: argparse.Namespace) -> Iterator[Cost | Recomputed | OnCpu | Recipe]:
    part, _, argument = name.partition("=")
    if part == "recipes":
        card, name = argument.split("/")
        yield from recipes_of(card, name, [one >> 2 for one in LENGTHS] if options.quick else LENGTHS)
        return
    if part == "recompute":
        yield recomputed(argument)
        return
    yield (cost_of if part == "cost" else on_cpu)(float(argument), options)


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    samples = {part: PARTS[part](options, report) for part in options.parts}
    return samples, {limit.what: limit.measured for limit in report.limits}


def options_of() -> argparse.Namespace:
    # Rounds are processes for each budget, and steps are trained in each.
    several = {"rounds": 3, "steps": 4, "cpu_layers": 8, "cpu_width": 512, "cpu_heads": 8}
    model = {"layers": 32, "sequence": 512, "batch": 4, "window": "32MiB", "min_bytes": "256KiB"}
    parser = command_line(__doc__, workers=True, **several, **model)
    parser.add_argument("--parts", type=named(PARTS), default="cost,recompute,cpu", help="with commas between")
    parser.add_argument("--page", action="store_true", help="write tables of recompute and recipes into their pages")
    shares = listed(float, lambda one: 0 <= one <= 1)
    parser.add_argument("--shares", type=shares, default="0.25,0.5,0.75", help=SHARES)
    options = parse(parser, layers=4, rounds=1, steps=1)
    if options.quick:
        options.shares = options.shares[:1]
    return options


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(drive("planning", options_of(), run, work=work))
