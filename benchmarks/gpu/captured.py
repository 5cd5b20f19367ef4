"""A captured training step with offload, beside one without, eager steps, and eager steps with offload.

A Llama as large as GPT-2 small, 4 x 512 tokens. All four ways are in one process and take turns, with the same batches
from the same state.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

import eager_offload as eo
from benchmarks.common import MIB
from benchmarks.gpu.bits import be_deterministic
from benchmarks.gpu.results import Job
from benchmarks.gpu.train import SMALL, SMALL_WINDOWS, decoder, random_tokens
from benchmarks.models import Shape
from benchmarks.peers import plain
from eager_offload.graphs import capture_step

GPT2 = Shape(layers=12, width=768, hidden=2048, heads=12, vocabulary=50_257)
WARM_UP, ROUNDS, STEPS = 5, 7, 5


class Step:
    """Forward, backward and optimizer: what all ways do, with ``around`` entered around forward."""

    def __init__(self, shape: Shape, around: AbstractContextManager[Any]) -> None:
        self.model, self.around = decoder(shape, plain), around
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=True)

    def __call__(self, tokens: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with self.around:
            loss: Tensor = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@dataclass
class Turns:
    """A way of taking steps, and what its turns have shown: seconds of a step, and of the host's part of it."""

    run: Callable[[Tensor], Tensor]
    #: Above parameters and optimizer: the peak, or what a graph holds.
    device_bytes: int
    moved_bytes: int = 0
    #: What the host has waited for transfers in a step, which is no work of its own.
    waited_seconds: float = 0.0
    #: Tensors that are saved in a step, and those that move.
    saved: int = 0
    moved: int = 0
    seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def capture(job: Job) -> None:
    be_deterministic()
    shape = SMALL if job.small else GPT2
    batches = list(random_tokens(shape, 16, 128 if job.small else 512).split(4))
    fields = {**SMALL_WINDOWS, "keep_last_bytes": 0} if job.small else {}
    ways = {
        "eager": _eager(shape, batches, None),
        "eager, ours": _eager(shape, batches, eo.Offload(**fields)),
        # Its hooks are called and nothing moves: what is left of the difference is the price of moving.
        "eager, hooks alone": _eager(shape, batches, eo.Offload(min_bytes="1TiB")),
        "captured": _captured(shape, batches, None),
        "captured, ours": _captured(shape, batches, eo.Offload(**fields)),
    }
    for number in range(ROUNDS):
        for way in list(ways.values())[:: 1 if number % 2 else -1]:
            _take_turn(way, batches)
    for name, way in ways.items():
        job.add(
            what="capture",
            name=name,
            step_ms=median(way.seconds) * 1e3,
            host_ms=median(way.host_seconds) * 1e3,
            device_mib=way.device_bytes / MIB,
            moved_mib=way.moved_bytes / MIB,
            waited_ms=way.waited_seconds * 1e3,
            saved=way.saved,
            moved=way.moved,
            same=way.losses == ways["eager"].losses,
            seconds=way.seconds,
        )


def _eager(shape: Shape, batches: list[Tensor], offload: eo.Offload | None) -> Turns:
    step = Step(shape, offload or nullcontext())
    _begin(step, batches)
    before = torch.cuda.memory_allocated()
    for _ in range(WARM_UP):
        step(batches[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(batches[0])
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    if offload is None:
        return Turns(step, peak)
    stats, steps = offload.stats(synchronize=True), WARM_UP + 1
    return Turns(
        step,
        peak,
        stats.bytes_out // steps,
        stats.host_wait_seconds / steps,
        stats.saved_tensors // steps,
        stats.offloaded_tensors // steps,
    )


def _captured(shape: Shape, batches: list[Tensor], offload: eo.Offload | None) -> Turns:
    step = Step(shape, nullcontext())
    _begin(step, batches)
    before = _reserved()
    captured = capture_step(step, (batches[0],), offload=offload, warmup=WARM_UP)
    captured(batches[0])
    moved = 0 if captured.plan is None else captured.plan.moved_bytes
    return Turns(captured, _reserved() - before, moved)


def _begin(step: Step, batches: list[Tensor]) -> None:
    """Makes gradients and the optimizer's state, which are not compared."""
    for batch in batches[:2]:
        step.model(batch).backward()
        step.optimizer.step()
    step.optimizer.zero_grad()


def _reserved() -> int:
    """Bytes that the allocator cannot give back: of tensors that live, and of graphs."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _take_turn(way: Turns, batches: list[Tensor]) -> None:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(STEPS):
        loss = way.run(batches[number % len(batches)])
    called = time.perf_counter()
    torch.cuda.synchronize()
    way.seconds.append((time.perf_counter() - began) / STEPS)
    way.host_seconds.append((called - began) / STEPS)
    way.losses.append(loss.item())
