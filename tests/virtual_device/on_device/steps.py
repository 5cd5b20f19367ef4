"""A whole training step that offloads by hand: what tests of graphs capture, and run eagerly beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from eager_offload.graphs import make_graphed_callable
from eager_offload.runtime.accelerator import accelerator_runtime
from tests.threads import collect
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.graphs import capturing

BATCH, TOKENS, WIDTH, HEADS = 2, 8, 16, 2


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


class Resumable:
    """A model and its optimizer, which go on from any state that they have had."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state(self) -> list[Tensor]:
        """Copies on the host of all that steps change."""
        torch.accelerator.synchronize()
        return [tensor.detach().cpu() for tensor in self._changing()]

    def restore(self, state: list[Tensor]) -> None:
        torch.accelerator.synchronize()
        with torch.no_grad():
            for tensor, value in zip(self._changing(), state, strict=True):
                tensor.copy_(value)

    def _changing(self) -> list[Tensor]:
        parameters = [*self.model.parameters()]
        return [*parameters, *(value for one in parameters for value in self.optimizer.state[one].values())]


class Step(Resumable):
    """Forward, backward and a fused AdamW. What backward needs of one shape crosses the link twice on the way there.

    Copies out run on a stream of their own, and so do copies in, into two slots that take turns.
    """

    def __init__(self, stream: torch.Stream) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = Block().to(NAME)
        self.stream, self.out, self.back = stream, torch.Stream(device=NAME), torch.Stream(device=NAME)
        self.rate = torch.tensor(1e-2, device=NAME)
        self.x, self.y = (torch.zeros(BATCH, TOKENS, WIDTH, device=NAME) for _ in range(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, fused=True)
        self.slots = [torch.zeros(BATCH * TOKENS, WIDTH, device=NAME) for _ in range(2)]
        self._hosts: list[Tensor] = []
        self._left: list[torch.Event] = []
        self._taken = 0

    def __call__(self) -> Tensor:
        """One step on the stream that is current; returns the loss."""
        self._left.clear()
        self._taken = 0
        self.optimizer.zero_grad()
        with saved_tensors_hooks(self._pack, self._unpack):
            loss = (self.model(self.x) - self.y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @property
    def offloads(self) -> int:
        """How many tensors a step moves."""
        return len(self._left)

    def _pack(self, tensor: Tensor) -> tuple[int, torch.Size] | Tensor:
        if tensor.numel() != BATCH * TOKENS * WIDTH or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return tensor
        number = len(self._left)
        if number == len(self._hosts):
            self._hosts.append(torch.empty(BATCH * TOKENS, WIDTH, pin_memory=True))
        self.out.wait_event(self.stream.record_event())
        with self.out:
            self._hosts[number].copy_(tensor.detach().view(BATCH * TOKENS, WIDTH), non_blocking=True)
        self._left.append(self.out.record_event())
        self.stream.wait_event(self._left[-1])  # its memory may have a new owner from here on
        return number, tensor.shape

    def _unpack(self, packed: tuple[int, torch.Size] | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, shape = packed
        slot = self._taken % len(self.slots)
        self._taken += 1
        self.back.wait_event(self.stream.record_event())  # also for the copy out, since that stream has waited
        with self.back:
            self.slots[slot].copy_(self._hosts[number], non_blocking=True)
        self.stream.wait_event(self.back.record_event())
        return self.slots[slot].view(shape)

    def run(self, batches: Iterable[tuple[Tensor, Tensor, float]], one: Callable[[], Tensor]) -> Iterator[Tensor]:
        """Yields the loss of each call of ``one``, and then all that they have changed."""
        for batch in batches:
            with self.stream:
                self.feed(*batch)
                loss = one().cpu()
            yield loss
        yield from self.state()

    def feed(self, x: Tensor, y: Tensor, rate: float) -> None:
        self.x.copy_(x)
        self.y.copy_(y)
        self.rate.fill_(rate)


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def inputs(count: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor, float]]:
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        x, y = (torch.randn(BATCH, TOKENS, WIDTH, generator=generator) for _ in range(2))
        yield x, y, 1e-2 / (1 + number)


@contextmanager
def captured() -> Iterator[tuple[Step, Any, Tensor]]:
    """A step after two real ones, its graph, and the loss that a replay writes."""
    stream = torch.Stream(device=NAME)
    with stream:
        step = Step(stream)
        for batch in inputs(2, seed=9):
            step.feed(*batch)
            step()
    torch.accelerator.synchronize()
    with capturing(stream=stream) as graph:
        loss = step()
    yield step, graph, loss
    torch.accelerator.synchronize()
    graph.reset()
