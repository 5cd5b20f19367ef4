"""Training steps that tests of graphs capture, and run eagerly beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from eager_offload import Offload
from eager_offload.graphs import CapturedStep, DeviceScalar, capture_step, make_graphed_callable
from eager_offload.runtime.accelerator import accelerator_runtime
from tests.threads import collect
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.graphs import nodes_of

BATCH, TOKENS, WIDTH, HEADS = 2, 8, 16, 2
#: In so many replays a missing edge shows.
FEW = 20


class Block(nn.Module):
    """A block of a GPT, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).view(BATCH, TOKENS, HEADS, -1).transpose(1, 2).chunk(3, -1)
        h = nn.functional.scaled_dot_product_attention(*parts, dropout_p=0.1, is_causal=True)
        x = x + self.dropout(self.out(h.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))


class Training:
    """A block with dropout, clipping, a fused AdamW, and a rate that changes.

    Args:
        forwards: of one step, each followed by its backward: gradients are accumulated.
        scaled: whether a ``GradScaler`` leaves the optimizer's step out where gradients are not finite.
        compiled: whether a compiler runs the block.
    """

    def __init__(self, forwards: int = 1, *, scaled: bool = False, compiled: bool = False) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = Block().to(NAME)
        self.block: Any = torch.compile(self.model, backend="aot_eager") if compiled else self.model
        self.rate, self._forwards = DeviceScalar(1e-2), forwards
        self.parameters = [*self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.rate.tensor, fused=True)
        self.scaler = torch.amp.GradScaler(NAME, init_scale=16.0, growth_interval=3, enabled=scaled)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        for _ in range(self._forwards):
            loss = (self.block(x) - y).square().mean()
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach().nan_to_num(-1.0)

    def capture(self, offload: Offload | None, **arguments: Any) -> CapturedStep:
        x, y, _ = next(inputs(1, seed=9))
        return capture_step(self, (x.to(NAME), y.to(NAME)), offload=offload, scalars=[self.rate], **arguments)

    def run(self, one: Callable[[Tensor, Tensor], Tensor], state: list[Tensor], count: int) -> list[Tensor]:
        """The losses of ``count`` steps from ``state``, and all that they have changed.

        With a scaler every fifth batch is not finite.
        """
        torch.accelerator.synchronize()
        with torch.no_grad():
            for tensor, value in zip(self._changing(), state, strict=True):
                tensor.copy_(value)
        torch.manual_seed(3)
        found = []
        for number, (x, y, rate) in enumerate(inputs(count)):
            self.rate.update(rate)
            spoilt = self.scaler.is_enabled() and number % 5 == 4
            found.append(one((x * torch.inf if spoilt else x).to(NAME), y.to(NAME)).cpu())
        return found + self.state()

    def state(self) -> list[Tensor]:
        """Copies on the host of all that steps change."""
        torch.accelerator.synchronize()
        return [tensor.detach().cpu() for tensor in self._changing()]

    def _changing(self) -> list[Tensor]:
        scale = [self.scaler._growth_tracker, self.scaler._scale] if self.scaler.is_enabled() else []
        states = [value for one in self.parameters for value in self.optimizer.state[one].values()]
        return [*self.parameters, *states, *(one for one in scale if one is not None)]


class Chain:
    """Layers of which each saves what the next one writes over: small, and every byte of it crosses the link."""

    def __init__(self, forwards: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weights = [(torch.randn(8, 8, generator=generator) / 4).to(NAME).requires_grad_() for _ in range(4)]
        self._forwards = forwards
        self.batches = [torch.randn(8, 8, generator=generator).to(NAME) for _ in range(FEW)]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for _ in range(self._forwards):
            h = x
            for weight in self._weights:
                h = (h @ weight).tanh().exp()
            found += torch.autograd.grad(h.square().sum(), self._weights)
        return tuple(found)

    def capture(self, offload: Offload | None, **arguments: Any) -> CapturedStep:
        return capture_step(self, (torch.zeros(8, 8, device=NAME),), offload=offload, **arguments)

    def results(self, one: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
        """What ``one``, which is this or a replay of it, makes of each batch."""
        return [value.cpu() for x in self.batches for value in one(x)]


def inputs(count: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor, float]]:
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        x, y = (torch.randn(BATCH, TOKENS, WIDTH, generator=generator) for _ in range(2))
        yield x, y, 1e-2 / (1 + number)


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def copies(step: CapturedStep, kind: str) -> int:
    """Bytes that a replay moves one way."""
    return sum(
        region.stop - region.start for one in nodes_of(step.graph._graph) if one.kind == kind for region in one.writes
    )


def assert_captures() -> None:
    """A capture works, and its replay is right."""
    x = torch.ones(4, device=NAME)
    graph = make_graphed_callable(lambda: x + 1)
    graph.launch()
    assert graph.result.tolist() == [2.0] * 4


def graphs_alive(virtual: VirtualDevice) -> int:
    """Those that are held; one that has gone while it ran is let go of at the next launch, pack or unpack."""
    collect()
    torch.accelerator.synchronize()
    accelerator_runtime().poll()
    collect()
    return virtual.graphs_alive
