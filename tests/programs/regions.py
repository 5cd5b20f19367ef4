"""What else may stand around operators: contexts held open by tasks and generators, and modes of the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.programs import Flag, Run, leaf, program

_SIDE = 32


def _stage(h: Tensor, x: Tensor) -> Tensor:
    return h.sin() * x.exp()


@program("H42-tasks-of-one-event-loop", Flag.EAGER, moved=0.7)
def _(run: Run) -> object:
    async def task(pauses: int, x: Tensor) -> Tensor:
        with run.around:
            h = x
            for _ in range(3):
                h = _stage(h, x)
                for _ in range(pauses):
                    await asyncio.sleep(0)
        return h.sum()

    async def tasks(x: Tensor) -> Sequence[Tensor]:
        return await asyncio.gather(*(task(1 + number, x) for number in range(3)))

    x = leaf(_SIDE, _SIDE)
    torch.stack(list(asyncio.run(tasks(x)))).sum().backward()  # type: ignore[no-untyped-call]
    return x.grad


@program("H42-generators-that-hold-a-context-open", Flag.EAGER, moved=0.7)
def _(run: Run) -> object:
    def layers(x: Tensor) -> Iterator[Tensor]:
        with run.around:
            h = x
            while True:
                h = _stage(h, x)
                yield h

    x = leaf(_SIDE, _SIDE)
    first, second = layers(x), layers(x)
    loss = next(first).sum() + next(second).sum() + next(first).sum()
    first.close()  # type: ignore[attr-defined]
    loss = loss + next(second).sum()
    del second
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    loss.backward()  # type: ignore[no-untyped-call]
    return x.grad


@program("H44-zeros-that-are-nowhere", Flag.EAGER, Flag.HOST)
def _(run: Run) -> object:
    x = leaf(_SIDE, _SIDE)
    with run.around:
        nothing = torch._efficientzerotensor(_SIDE, _SIDE)
        loss = (x.exp() * nothing + (x * 2).sin() * nothing.t()).sum() + (x * 2).exp().square().sum()
    loss.backward()
    return x.grad


@program("H44-derivatives-in-forward-mode", Flag.EAGER, Flag.HOST, Flag.NOTHING_BACK, moved=0.4)
def _(run: Run) -> object:
    x, w = leaf(_SIDE), leaf(_SIDE, seed=2)
    with run.around, forward_ad.dual_level():
        y = (forward_ad.make_dual(x, torch.ones(_SIDE)) * w).relu()
        y = torch.where(y > 0, y.sin().exp() * x, w * 2)  # no tangent for the other part: zeros
        tangent: Any = forward_ad.unpack_dual(y).tangent
        (y.square().sum() + tangent.square().sum()).backward()
    return x.grad, w.grad


@program("H44-operations-that-are-counted", Flag.EAGER)
def _(run: Run) -> object:
    x = leaf(_SIDE, _SIDE)
    with FlopCounterMode(display=False) as counter:
        with run.around:
            loss = checkpoint(lambda h: (h @ h).tanh() @ h, x * 2, use_reentrant=False).exp().square().sum()
        loss.backward()
    return counter.get_total_flops(), x.grad
