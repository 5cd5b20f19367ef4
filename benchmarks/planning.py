"""Whether a plan is quick, right and good: what it costs, what it predicts, and what other ways come to.

python -m benchmarks.planning
python -m benchmarks.planning --parts ways --tokens 32k

cost       seconds and memory to plan a large model on meta
training   peak and step of a plan against training that follows it on the simulated runtime, with operator times
           and links other than the plan believes, and against the schedule that knows all times, in the same room
ways       plans against fixed ways: nothing moves, all does, every second storage; checkpoints around all blocks
free       what the link hides of a Llama with 8 billion parameters, against a formula
cpu        the predicted peak against resident bytes of training on a CPU with the disk tier
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.common import MIB, Report, add_common_options, console, positive, table
from benchmarks.processes import reset_peak, run_worker, status_bytes
from benchmarks.simulate import GIB, LARGE, SEQUENCES, SMALL_WIDTH, sequences
from benchmarks.simulation.model import Shape, Stack
from benchmarks.simulation.oracle import Program, best_step
from benchmarks.simulation.stage import Stage
from eager_offload.machine import MACHINES
from eager_offload.plan.draft import draft
from eager_offload.plan.predict import Problem
from eager_offload.plan.rehearse import rehearse
from eager_offload.plan.trace import trace

from lm.data import batches, read_text
from lm.model import LanguageModel

H200 = MACHINES["h200"]
#: Windows hold so many of the largest saved tensors.
WINDOW_TENSORS = 5
#: Goals.
PLAN_SECONDS, PLAN_BYTES = 10.0, GIB
PEAK, STEP, CPU_PEAK = 0.02, 0.03, 0.05
OF_WAYS, OF_BEST = 1.01, 1.03
POINTS = 0.02


# -- what planning costs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """One plan, in a process of its own. Bytes and seconds."""

    budget: int
    seconds: float
    #: Of all threads.
    cpu_seconds: float
    #: The most that was ever resident, over what was before.
    above_bytes: int
    peak_method: str


def cost_of(share: float, options: argparse.Namespace) -> Cost:
    """Plans in this process, for a part of the bytes that a step takes."""
    tokens = SEQUENCES["32k"]
    model, x = large(replace(LARGE, layers=options.layers), tokens)
    budget = sum(one.nbytes for one in model.parameters()) * 2
    budget += int(share * options.layers * tokens * 2 * (8 * LARGE.width + 4 * LARGE.hidden))
    gc.collect()
    method, base = reset_peak(), status_bytes("VmRSS")
    began, cpu_began = time.perf_counter(), time.process_time()
    eo.plan(model, x, loss=torch.sum, device=H200, device_budget=budget)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Cost(budget, seconds, cpu_seconds, status_bytes("VmHWM") - base, method)


def cost(options: argparse.Namespace, report: Report) -> list[Cost]:
    found = [Cost(**worker("cost", share)) for share in options.shares for _ in range(options.rounds)]
    shown = table("budget GiB", "s", "of the processor", "MiB over before")
    for one in found:
        shown.add_row(
            f"{one.budget / GIB:,.0f}",
            f"{one.seconds:,.2f}",
            f"{one.cpu_seconds:,.2f}",
            f"{one.above_bytes / MIB:,.0f}",
        )
    console.print(f"A plan of {options.layers} blocks, 32k tokens, on meta")
    console.print(shown)
    # One thread does it all; what else runs on the machine has no part in that.
    taken = [
        median(one.cpu_seconds for one in found if one.budget == budget) for budget in {one.budget for one in found}
    ]
    report.at_most("cost: seconds of the processor", max(taken), PLAN_SECONDS)
    report.at_most("cost: bytes", max(one.above_bytes for one in found), PLAN_BYTES)
    return found


def large(shape: Shape, tokens: int) -> tuple[nn.Module, Tensor]:
    """A stack of blocks without bytes, and what it is given."""
    with torch.device("meta"):
        return Stack(shape), torch.empty(tokens, shape.width, dtype=torch.bfloat16)


def worker(part: str, argument: object) -> dict[str, Any]:
    """What a part finds in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.planning", *sys.argv[1:], "--worker", f"{part}={argument}"]
    found: dict[str, Any] = json.loads(run_worker("planning", part, command).splitlines()[-1])
    return found


# -- what a plan predicts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Steps that follow one plan, as parts of what it says. Medians, but for peaks, which are the highest."""

    tokens: str
    #: Of the way from the least budget to the one for which nothing moves.
    part: float
    jitter: float
    link: float
    #: Of a step without transfers.
    predicted: float
    step: float
    peak: float
    #: The peak, as a part of the budget.
    of_budget: float
    #: The step, as a part of one by the schedule that knows all times and has the same room.
    of_best: float
    moved: float
    same_bits: bool


def training(options: argparse.Namespace, report: Report) -> list[Trained]:
    found = []
    for name in options.tokens:
        small = Small(name, options.layers)
        for part in options.shares:
            found += small.train(part, options)
    shown = table("tokens, budget", "times", "link", "predicted", "step", "peak", "of budget", "of best")
    for one in found:
        shown.add_row(
            f"{one.tokens}, {one.part:.0%} of the way",
            f"+-{one.jitter:.0%}",
            f"{one.link:g}",
            f"{one.predicted:,.3f}",
            f"{one.step:,.3f}",
            f"{one.peak:,.3f}",
            f"{one.of_budget:,.3f}",
            f"{one.of_best:,.3f}",
        )
    console.print("Training that follows plans, on the simulated runtime: step and peak of what was predicted")
    console.print(shown)
    as_said = [one for one in found if one.link == 1]
    report.at_most("training: step off", max(abs(one.step - 1) for one in as_said), STEP)
    report.at_most("training: peak off", max(abs(one.peak - 1) for one in as_said), PEAK)
    report.at_most("training: peak of budget, other links too", max(one.of_budget for one in found), 1)
    report.at_most("training: step of best", max(one.of_best for one in as_said), OF_BEST)
    report.at_least("training: same bits", min(one.same_bits for one in found), 1)
    return found


class Small:
    """A small model on a device so much slower that it stands for the large one on an H200."""

    def __init__(self, tokens: str, layers: int) -> None:
        self.tokens = tokens
        width = LARGE.width / SMALL_WIDTH
        self._length = round(SEQUENCES[tokens] / width)
        hidden = round(LARGE.hidden / width)
        self._model = Stack(Shape(layers, SMALL_WIDTH, hidden, 1))
        self._x = torch.randn(self._length, SMALL_WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
        # Bytes are fewer by the square of that, operations by the cube.
        self._machine = replace(
            H200,
            flops=H200.flops / width,
            single_flops=H200.single_flops / width,
            launch_seconds=H200.launch_seconds / width**2,
        )
        window = WINDOW_TENSORS * 2 * self._length * hidden
        self._config = {
            "min_bytes": self._length * SMALL_WIDTH,  # half of the smallest activation
            "max_inflight_bytes": window,
            "prefetch_bytes": window,
        }
        self._loss().backward()
        self._expected = self._gradients()
        self._plain = self._plan(1 << 50)

    def _loss(self) -> Tensor:
        return self._model(self._x).float().square().mean()

    def _gradients(self) -> list[Tensor]:
        return [one.grad.clone() for one in self._model.parameters() if one.grad is not None]

    def _plan(self, budget: int) -> eo.Plan:
        def loss(out: Tensor) -> Tensor:
            return out.float().square().mean()

        return eo.plan(self._model, self._x, loss=loss, device=self._machine, device_budget=budget, config=self._config)

    def train(self, part: float, options: argparse.Namespace) -> Iterator[Trained]:
        """Steps that follow a plan for one budget, at other times and links than it believes."""
        least = self._plain.least_budget
        budget = least + int((self._plain.peak_bytes - least) * part)
        plan = self._plan(budget)
        assert plan.fits
        program = oracle_program(plan.problem)
        for jitter, link in ((0.0, 1.0), (0.3, 1.0), (0.3, 0.8), (0.3, 1.2)):
            stage = Stage(self._machine, jitter, link)
            offload = stage.offload(plan=plan)
            real = replace(self._machine, out=self._machine.out * link, back=self._machine.back * link)
            steps, best, same = [], [], True
            for _ in range(options.steps):
                offload.reset_stats()
                steps.append(stage.step(offload, self._model, self._x, self._loss))
                stats, one = offload.stats(), steps[-1]
                assert stats.followed_forwards == 1
                assert not stats.plan_misses
                room = stats.resident_bytes_peak
                best.append(one.seconds / best_step(program, one.op_seconds, one.forward_ops, real, room))
                same &= all(map(torch.equal, self._gradients(), self._expected))
            offload.close()
            yield Trained(
                tokens=self.tokens,
                part=part,
                jitter=jitter,
                link=link,
                predicted=plan.step_seconds / plan.compute_seconds,
                step=median(one.seconds for one in steps) / plan.step_seconds,
                peak=max(one.peak_bytes for one in steps) / plan.peak_bytes,
                of_budget=max(one.peak_bytes for one in steps) / budget,
                of_best=median(best),
                moved=plan.moved_bytes / plan.problem.program.movable_bytes,
                same_bits=same,
            )


def oracle_program(problem: Problem) -> Program:
    """What the schedule that knows all times is told of a step."""
    traced = problem.program
    storages = traced.storages
    last = {traced.saves[ask.save].storage: ask.op for ask in traced.asks}
    return Program(
        nbytes=[one.nbytes for one in storages],
        saved_at=[one.saved for one in storages],
        first_asked_at={number: one.asked for number, one in enumerate(storages)},
        last_asked_at={number: last[number] for number in range(len(storages))},
    )


# -- other ways --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One budget. Bytes and seconds."""

    tokens: str
    budget: int
    fits: bool
    peak_bytes: int
    step_seconds: float
    moved_bytes: int
    recomputed_bytes: int
    #: The fixed way that is best of those that fit, and its step.
    way: str
    way_seconds: float
    seconds_to_plan: float

    @property
    def of_way(self) -> float:
        return self.step_seconds / self.way_seconds


@dataclass(frozen=True)
class Way:
    """What comes of a fixed way. Bytes and seconds."""

    tokens: str
    name: str
    peak_bytes: int
    step_seconds: float


def ways(options: argparse.Namespace, report: Report) -> dict[str, list[Any]]:
    fixed, found = list[Way](), list[Compared]()
    for name in options.tokens:
        own = list(fixed_ways(name, options))
        fixed += own
        low, high = min(one.peak_bytes for one in own), max(one.peak_bytes for one in own)
        for number in range(options.budgets):
            budget = low + (high - low) * number // max(options.budgets - 1, 1)
            found.append(compared(name, budget, own, options))
    names = table("tokens, way", "peak GiB", "step s")
    for way in fixed:
        names.add_row(f"{way.tokens}, {way.name}", f"{way.peak_bytes / GIB:,.1f}", f"{way.step_seconds:,.3f}")
    console.print("Fixed ways")
    console.print(names)
    shown = table("tokens, budget", "peak GiB", "moved", "again", "step s", "best fixed way", "step s", "of it")
    for one in found:
        shown.add_row(
            f"{one.tokens}, {one.budget / GIB:,.1f} GiB",
            f"{one.peak_bytes / GIB:,.1f}",
            f"{one.moved_bytes / GIB:,.1f}",
            f"{one.recomputed_bytes / GIB:,.1f}",
            f"{one.step_seconds:,.3f}",
            one.way,
            f"{one.way_seconds:,.3f}",
            f"{one.of_way:,.3f}",
        )
    console.print("Plans with recompute=True, beside the best fixed way that fits")
    console.print(shown)
    report.at_most("ways: step of the best that fits", max(one.of_way for one in found), OF_WAYS)
    report.at_least("ways: plans that fit", sum(one.fits for one in found), len(found))
    return {"ways": fixed, "plans": found}


def windows(tokens: int, hidden: int) -> dict[str, int]:
    size = WINDOW_TENSORS * 2 * tokens * hidden
    return {"max_inflight_bytes": size, "prefetch_bytes": size}


def fixed_ways(name: str, options: argparse.Namespace) -> Iterator[Way]:
    """Rehearsed as a plan is."""
    tokens = SEQUENCES[name]
    model, x = large(replace(LARGE, layers=options.layers), tokens)
    size = windows(tokens, LARGE.hidden)["max_inflight_bytes"]
    for prefix, again in (("", ()), ("checkpoints", [f"blocks.{number}" for number in range(options.layers)])):
        program = trace(model, x, torch.sum, min_bytes=MIB, again=again)
        problem = Problem(program, program.seconds(H200), H200.out, H200.back, size, size)
        count = len(program.storages)
        decisions = {"": (False,) * count, "all moves": (True,) * count}
        if not again:
            decisions["half moves"] = tuple(number % 2 == 0 for number in range(count))
        for what, moves in decisions.items():
            plan = draft(problem, moves)
            assert plan is not None
            rehearsal = rehearse(problem, plan, H200.launch_seconds)
            assert rehearsal is not None
            title = ", ".join(one for one in (prefix, what) if one) or "nothing moves"
            yield Way(name, title, rehearsal.peak_bytes, rehearsal.step_seconds)


def compared(name: str, budget: int, fixed: Sequence[Way], options: argparse.Namespace) -> Compared:
    tokens = SEQUENCES[name]
    model, x = large(replace(LARGE, layers=options.layers), tokens)
    began = time.perf_counter()
    plan = eo.plan(
        model,
        x,
        loss=torch.sum,
        device=H200,
        device_budget=budget,
        recompute=True,
        config=windows(tokens, LARGE.hidden),
    )
    seconds = time.perf_counter() - began
    best = min((one for one in fixed if one.peak_bytes <= budget), key=lambda one: one.step_seconds)
    return Compared(
        tokens=name,
        budget=budget,
        fits=plan.fits,
        peak_bytes=plan.peak_bytes,
        step_seconds=plan.step_seconds,
        moved_bytes=plan.moved_bytes,
        recomputed_bytes=plan.recomputed_bytes,
        way=best.name,
        way_seconds=best.step_seconds,
        seconds_to_plan=seconds,
    )


# -- what is free ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Free:
    """What the link hides, as parts of all that may move, and by how much longer than compute the step is."""

    tokens: str
    planned: float
    formula: float
    saved_bytes: int
    formula_bytes: float
    slowdown: float


class Llama(nn.Module):
    """A decoder block that saves what the formula counts: the norms, the attention and the product are one kernel each.

    Queries are grouped by a view, since the attention that a CPU has takes no groups.
    """

    width, shared, hidden, heads = 4096, 1024, 14_336, 32

    def __init__(self) -> None:
        super().__init__()
        width, shared, hidden = self.width, self.shared, self.hidden
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, shared, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length, head = x.shape[0], self.width // self.heads
        groups = self.shared // head
        normed = self.attention_norm(x)
        query = self.query(normed).view(length, groups, -1, head).permute(1, 2, 0, 3)
        key, value = (
            project(normed).view(length, groups, 1, head).permute(1, 2, 0, 3).expand(query.shape)
            for project in (self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.permute(2, 0, 1, 3).reshape(length, self.width))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    @classmethod
    def flops(cls, tokens: int) -> float:
        """Of forward, for each token."""
        width, shared, hidden = cls.width, cls.shared, cls.hidden
        return 2 * (2 * width**2 + 2 * width * shared + 3 * width * hidden) + 2 * tokens * width

    @classmethod
    def saved(cls) -> float:
        """Bytes, for each token."""
        return 12 * cls.width + 4 * cls.shared + 8 * cls.hidden


def free(options: argparse.Namespace, report: Report) -> list[Free]:
    found = []
    for name in options.tokens:
        tokens = SEQUENCES[name]
        with torch.device("meta"):
            model = nn.Sequential(*(Llama() for _ in range(options.layers))).bfloat16()
            x = torch.empty(tokens, Llama.width, dtype=torch.bfloat16)
        plan = eo.plan(model, x, loss=torch.sum, device=H200, policy="free", config=windows(tokens, Llama.hidden))
        movable = plan.problem.program.movable_bytes
        found.append(
            Free(
                tokens=name,
                planned=plan.moved_bytes / movable,
                formula=Llama.flops(tokens) / Llama.saved() / (H200.flops / H200.out),
                saved_bytes=movable,
                formula_bytes=Llama.saved() * tokens * options.layers,
                slowdown=plan.step_seconds / plan.compute_seconds - 1,
            )
        )
    shown = table("tokens", "free by the plan", "by the formula", "may move GiB", "by the formula", "step longer by")
    for one in found:
        shown.add_row(
            one.tokens,
            f"{one.planned:.1%}",
            f"{one.formula:.1%}",
            f"{one.saved_bytes / GIB:,.1f}",
            f"{one.formula_bytes / GIB:,.1f}",
            f"{one.slowdown:.2%}",
        )
        report.at_most(f"free, {one.tokens}: off the formula", abs(one.planned - one.formula), POINTS)
    console.print(f"What is free of {options.layers} blocks of a Llama 8B on an H200")
    console.print(shown)
    return found


# -- on a CPU ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnCpu:
    """Steps that follow a plan, in a process of their own. Bytes over parameters and loaded code."""

    part: float
    predicted_bytes: int
    real_bytes: int
    moved_bytes: int
    bytes_out: int
    followed: int
    peak_method: str


def on_cpu(part: float, options: argparse.Namespace) -> OnCpu:
    """Trains in this process."""
    if not eo.release_freed_memory():
        raise SystemExit("benchmarks.planning: this C library has no mallopt, so its memory cannot be compared")
    torch.manual_seed(0)
    model = LanguageModel(
        options.cpu_layers, options.cpu_width, options.cpu_heads, options.sequence, checkpointing=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = read_text()
    data = batches(text, count=options.steps, batch=options.batch, sequence=options.sequence, seed=1)
    inputs = data[0].inputs, data[0].targets
    config = {
        "tier": "disk",
        "min_bytes": options.min_bytes,
        "max_inflight_bytes": options.window,
        "prefetch_bytes": options.window,
    }
    plain = eo.plan(model, inputs, device_budget=1 << 50, config=config)
    budget = plain.least_budget + int((plain.peak_bytes - plain.least_budget) * part)
    plan = eo.plan(model, inputs, device=plain.machine, device_budget=budget, config=config)
    there = sum(one.nbytes for one in [*model.parameters(), *inputs])
    predicted, moved = plan.peak_bytes - there, plan.moved_bytes
    with TemporaryDirectory(dir=options.disk_path) as directory:
        offload = eo.Offload(plan=plan, tier="disk", disk_path=Path(directory))

        def step(inputs: Tensor, targets: Tensor, offload: eo.Offload | None) -> None:
            optimizer.zero_grad(set_to_none=True)
            with offload or nullcontext():
                loss = model(inputs, targets)
            loss.backward()
            optimizer.step()

        tiny = batches(text, count=1, batch=1, sequence=8, seed=0)[0]
        step(tiny.inputs, tiny.targets, None)  # loads code
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        method, base = reset_peak(), status_bytes("VmRSS")
        for batch in data:
            step(batch.inputs, batch.targets, offload)
        real = status_bytes("VmHWM") - base
        stats = offload.stats(synchronize=True)
        offload.close()
    return OnCpu(part, predicted, real, moved, stats.bytes_out // options.steps, stats.followed_forwards, method)


def cpu(options: argparse.Namespace, report: Report) -> list[OnCpu]:
    found = [OnCpu(**worker("cpu", part)) for part in options.shares for _ in range(options.rounds)]
    shown = table("budget", "predicted MiB", "resident MiB", "of predicted", "moved MiB")
    for one in found:
        shown.add_row(
            f"{one.part:.0%} of the way",
            f"{one.predicted_bytes / MIB:,.1f}",
            f"{one.real_bytes / MIB:,.1f}",
            f"{one.real_bytes / one.predicted_bytes:,.3f}",
            f"{one.bytes_out / MIB:,.1f}",
        )
    console.print("Training on this CPU with the disk tier, following plans: bytes over the model")
    console.print(shown)
    off = [
        abs(median(one.real_bytes for one in found if one.part == part) / one_of(found, part).predicted_bytes - 1)
        for part in options.shares
    ]
    report.at_most("cpu: peak off", max(off), CPU_PEAK)
    report.at_least("cpu: steps that follow", min(one.followed for one in found), options.steps)
    return found


def one_of(found: Sequence[OnCpu], part: float) -> OnCpu:
    return next(one for one in found if one.part == part)


# -- all of it ---------------------------------------------------------------------------------------------------------

PARTS = {"cost": cost, "training": training, "ways": ways, "free": free, "cpu": cpu}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    if options.worker is not None:
        part, _, argument = options.worker.partition("=")
        found = cost_of(float(argument), options) if part == "cost" else on_cpu(float(argument), options)
        print(json.dumps(asdict(found)))
        return 0
    report = Report("planning", options)
    samples = {part: PARTS[part](options, report) for part in options.parts}
    return report.finish(samples, {limit.what: limit.measured for limit in report.limits})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--parts", type=parts, default=",".join(PARTS), help="with commas between")
    parser.add_argument("--tokens", type=sequences, default=",".join(SEQUENCES), help="of a sequence")
    parser.add_argument(
        "--layers", type=positive, default=LARGE.layers, help="of the models that nothing is computed of"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="processes for each budget")
    parser.add_argument("--budgets", type=positive, default=8, help="at which ways are compared")
    parser.add_argument("--steps", type=positive, default=4, help="that follow a plan")
    parser.add_argument("--shares", type=shares, default="0.25,0.5,0.75", help=SHARES)
    parser.add_argument("--cpu-layers", type=positive, default=8, help="of the model on the CPU, as are those below")
    parser.add_argument("--cpu-width", type=positive, default=512)
    parser.add_argument("--cpu-heads", type=positive, default=8)
    parser.add_argument("--sequence", type=positive, default=512)
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--window", default="32MiB", help="max_inflight_bytes and prefetch_bytes")
    parser.add_argument("--min-bytes", default="256KiB")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_common_options(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.rounds, options.budgets, options.steps = min(options.layers, 4), 1, 2, 1
        options.tokens, options.shares = options.tokens[:1], options.shares[:1]
    return options


SHARES = "budgets, by the part of the way from the least one to the one for which nothing moves"


def parts(text: str) -> list[str]:
    """Names from ``PARTS`` with commas between."""
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(PARTS)}")
    return chosen


def shares(text: str) -> list[float]:
    """Parts of one with commas between."""
    found = [float(one) for one in text.split(",")]
    if not all(0 <= one <= 1 for one in found):
        raise argparse.ArgumentTypeError("a budget is a part of the way, from 0 to 1")
    return found


if __name__ == "__main__":
    sys.exit(main())
