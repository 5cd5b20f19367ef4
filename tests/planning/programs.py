"""Steps as numbers, small models, and their training, for the tests of the planner."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import eager_offload as eo
from eager_offload.machine import Machine
from eager_offload.planning.predict import Prediction, Problem
from eager_offload.planning.program import Op, Program, Storage
from eager_offload.planning.solve import Solver
from tests.simulation.stage import Stage, Step

#: Has everything move that may, in windows that a small model fills.
CONFIG = {"min_bytes": "1KiB", "max_inflight_bytes": "64KiB", "prefetch_bytes": "64KiB"}


def chain(
    nbytes: list[int], seconds: float = 1.0, *, link: float = 1e9, window: int = 1 << 30, ahead: int = 1 << 30
) -> Problem:
    """A forward of operators that save one storage each, and a backward that asks for them in turn, twice as slow."""
    count = len(nbytes)
    storages = [
        Storage(size, size, 0, made, made + 1, made, 2 * count - 1 - made, 2 * count - made)
        for made, size in enumerate(nbytes)
    ]
    ops = (Op("mul", 0, 0, 1, True),) * (2 * count)
    program = Program(("",), ops, count, (), (), tuple(storages), (0,) * (2 * count))
    return Problem(program, [seconds] * count + [2 * seconds] * count, link, link, window, ahead)


def forward_flops(program: Program) -> int:
    """Operations of products in forward."""
    return sum(op.flops for op in program.ops[: program.forward_ops])


def every_decision(problem: Problem) -> list[Prediction]:
    """What comes of each, where nothing is computed again."""
    every = itertools.product((False, True), repeat=len(problem.program.storages))
    return [problem.predict(moves) for moves in every]


@st.composite
def problems(draw: st.DrawFn, most: int = 8) -> Problem:
    """Steps in which storages are made, saved, let go, asked for and dropped at any time."""
    count = draw(st.integers(1, most))
    forward, backward = draw(st.integers(count, 3 * count)), draw(st.integers(count, 3 * count))
    ops = forward + backward
    seconds = [draw(st.integers(0, 50)) / 10 for _ in range(ops - 1)] + [0.5]
    storages = []
    for _ in range(count):
        made = draw(st.integers(0, forward - 1))
        saved = draw(st.integers(made, min(made + 2, forward)))
        asked = draw(st.integers(forward, ops - 1))
        if draw(st.booleans()):  # in the order of a stack
            asked = min(forward + (forward - saved) * backward // forward, ops - 1)
        freed = draw(st.integers(made + 1, min(made + 3, asked)))
        nbytes = draw(st.integers(1, 20))
        moved = nbytes if draw(st.integers(0, 9)) else max(nbytes // 3, 1)
        dropped = draw(st.integers(asked + 1, min(asked + 3, ops)))
        storages.append(Storage(nbytes, moved, 0, made, freed, saved, asked, dropped))
    storages.sort(key=lambda one: one.saved)
    other = tuple(draw(st.integers(0, 20)) for _ in range(ops))
    program = Program(("",), (Op("mul", 0, 0, 1, True),) * ops, forward, (), (), tuple(storages), other)
    rates, windows = st.sampled_from([1.0, 5.0, 20.0, 50.0]), st.sampled_from([1, 10, 40])
    return Problem(program, seconds, draw(rates), draw(rates), draw(windows), draw(windows))


def assert_near_the_best(solver: Solver, every: list[Prediction], times: float = 1.02) -> None:
    """No longer than ``times`` the best of ``every`` decision that fits, and never over the budget."""
    least, most = min(one.peak_bytes for one in every), max(one.peak_bytes for one in every)
    assert solver.least.prediction.peak_bytes == least
    for budget in (least, least + (most - least) // 3, least + 2 * (most - least) // 3, most):
        found = solver.within(budget).prediction
        best = min(one.step_seconds for one in every if one.peak_bytes <= budget)
        assert found.peak_bytes <= budget
        assert found.step_seconds <= times * best
    assert solver.within(least - 1).prediction.peak_bytes == least, "nothing fits: the least is what is shown"


def slow(**rates: float) -> Machine:
    """A device on which small models take a while."""
    usual = {"flops": 1e9, "single_flops": 1e9, "memory": 1e9, "out": 1e9, "back": 1e9, "memory_bytes": 1 << 30}
    return Machine("slow", **{**usual, **rates})  # type: ignore[arg-type]


class Block(nn.Module):
    """A decoder block in the style of Llama, which saves 6 h + 2 k + 4 f numbers for each token: the inputs of the two
    norms, of the products and of the attention, and what SwiGLU multiplies."""

    def __init__(self, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.head = width // heads
        self.first, self.second = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, shared * self.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape
        normed = self.first(x)
        q, k, v = (part(normed).view(1, length, -1, self.head).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(length, width))
        normed = self.second(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Stack(nn.Module):
    """Blocks, one behind the other; (tokens, width) to a number."""

    def __init__(self, layers: int, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, shared, inner) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def small() -> tuple[nn.Module, Tensor]:
    """A small one, and what it is called with."""
    return Stack(2, 32, 4, 2, 64), torch.randn(16, 32)


def wide() -> tuple[nn.Module, Tensor]:
    """One whose activations are larger than its parameters."""
    return Stack(3, 32, 4, 2, 64), torch.randn(256, 32)


def planned(**fields: Any) -> eo.Plan:
    """A plan for that one on the slow device."""
    return eo.plan(*wide(), **{"device": slow(), "config": CONFIG, **fields})


def budget_of(machine: Machine, made: Callable[[], tuple[nn.Module, Tensor]], part: float) -> int:
    """One between the least and that for which nothing has to move."""
    model, x = made()
    plan = eo.plan(model, x, device=machine, config=CONFIG)
    return plan.least_budget + int((plan.peak_bytes - plan.least_budget) * part)


def least_moved(problem: Problem, budget: int) -> int:
    """Bytes that have to move at any rate: what is alive together between forward and backward, above the budget."""
    program = problem.program
    change = [0] * (len(program.ops) + 1)
    for one in program.storages:
        change[one.made] += one.nbytes
        change[one.dropped] -= one.nbytes
    lives = list(accumulate(change))
    return max(lives[program.forward_ops] + program.other_bytes[program.forward_ops] - budget, 0)


def followed(
    stage: Stage, plan: eo.Plan, model: nn.Module, x: Tensor, steps: int
) -> tuple[list[Step], eo.OffloadStats]:
    """So many steps, each of which follows ``plan``, and what was counted; bytes move."""
    offload = stage.offload(plan=plan)
    found = [stage.step(offload, model, x, lambda: model(x)) for _ in range(steps)]
    stats = offload.stats(synchronize=True)
    offload.close()
    assert (stats.followed_forwards, stats.plan_misses) == (steps, {})
    assert stats.bytes_out > 0
    return found, stats


def gradients(model: nn.Module, loss_of: Callable[[], Tensor], around: Any = None) -> list[Tensor]:
    """Of all parameters, and the loss; ``around``: the forward."""
    model.zero_grad(set_to_none=True)
    with around or nullcontext():
        loss = loss_of()
    loss.backward()
    return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
