"""Captured steps that round: what the warm-ups have rounded is packed by the graph, to the same numbers each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload import Offload
from eager_offload.codecs import BlockFP8, Codec, TensorMeta
from eager_offload.codecs.names import ROUNDING
from eager_offload.graphs import CapturedStep, ScheduleMismatchError, capture_step
from eager_offload.step_plan import Fate, StepPlan
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.graphs import nodes_of, violations
from tests.virtual_device.on_device.steps import same
from tests.virtual_device.on_device.test_captured_steps import copies, link_bytes

SIZE, FEW = 64, 12
BYTES = SIZE * SIZE * 4


@pytest.fixture
def offloads(offloads: Callable[..., Offload]) -> Callable[..., Offload]:
    """With room for one copy in the window: what a captured step has on its way when forward ends stays."""
    return partial(offloads, max_inflight_bytes=1)


class Products:
    """A chain of products and activations, whose inputs are saved.

    Args:
        differs: the number of the call in which another codec is in force.
    """

    def __init__(self, forwards: int = 1, differs: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weights = [(torch.randn(SIZE, SIZE, generator=generator) / 8).to(NAME).requires_grad_() for _ in range(5)]
        self.batches = [torch.randn(SIZE, SIZE, generator=generator).to(NAME) for _ in range(FEW)]
        self._forwards, self._differs, self._calls = forwards, differs, 0

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        self._calls += 1
        found: list[Tensor] = []
        for _ in range(self._forwards):
            h = x
            with eo.codec("bf16") if self._calls == self._differs else nullcontext():
                for weight in self._weights:
                    h = torch.nn.functional.gelu(h @ weight) + 0.0
                    h = h + h @ weight
            found += torch.autograd.grad(h.square().sum(), self._weights)
        return tuple(found)

    def capture(self, offload: Offload) -> CapturedStep:
        return capture_step(self, (torch.ones(SIZE, SIZE, device=NAME),), offload=offload, debug=True)

    def rounded(self, x: Tensor, plans: Sequence[StepPlan], codec: Codec) -> list[Tensor]:
        """The step without a capture and without offload, in which the saves that ``plans`` rounds are rounded."""
        coded = [one.owner >= 0 and plan.saves[one.owner].coded is not None for plan in plans for one in plan.saves]
        number = itertools.count()

        def pack(tensor: Tensor) -> Tensor:
            return there_and_back(codec, tensor) if coded[next(number)] else tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = self(x)
        assert next(number) == len(coded)
        return [value.cpu() for value in found]


def there_and_back(codec: Codec, x: Tensor) -> Tensor:
    """What ``codec`` makes of the whole of a storage."""
    elements = x.detach().view(-1)
    layout = codec.layout(TensorMeta.of(elements))
    assert layout is not None
    packed, back = torch.empty(layout.nbytes, dtype=torch.uint8, device=NAME), torch.empty_like(elements)
    codec.pack(elements, packed)
    codec.unpack(packed, back)
    return back.view(x.shape)


def later(x: Tensor) -> Tensor:
    """What is saved after what is to leave."""
    for _ in range(6):
        x = x.cos()
    return x


def coded_saves(step: CapturedStep) -> int:
    """How many of the first plan's saves leave rounded."""
    return sum(one.fate is Fate.OFFLOAD and one.coded is not None for one in step.plan.saves)


@pytest.mark.parametrize("codec", ROUNDING.values(), ids=ROUNDING)
@pytest.mark.parametrize("forwards", [1, 2])
def test_replays_are_steps_in_which_what_the_plan_says_is_rounded(
    virtual: VirtualDevice, codec: Codec, forwards: int, offloads: Any
) -> None:
    products, offload = Products(forwards), offloads(codec=codec.name)
    with products.capture(offload) as step:
        assert not violations(nodes_of(step.graph._graph))
        assert coded_saves(step)
        expected = [products.rounded(x, step.plans, codec) for x in products.batches]
        with virtual.replays(1):
            replayed = [[value.cpu() for value in step(x)] for x in products.batches]
        assert all(map(same, expected, replayed))
        unrounded = [value.cpu() for value in products(products.batches[0])]
        assert not same(unrounded, expected[0]), "else the test says nothing"
        moved = copies(step, "copy out"), copies(step, "copy in")
        assert moved[0] == moved[1] == sum(plan.totals.slots for plan in step.plans)
        layout = codec.layout(TensorMeta((BYTES // 4,), (1,), torch.float32))
        assert layout is not None
        slots = [plan.slots[one.slot] for plan in step.plans for one in plan.saves if one.coded is not None]
        assert set(slots) == {layout.nbytes}
        assert link_bytes(virtual, step.launch) == moved


@pytest.mark.long
def test_each_edge_of_a_step_that_rounds_is_needed(virtual: VirtualDevice, offloads: Any) -> None:
    """Left out, the checker reports it; and what it is reported of changes numbers, in some order of the replay."""
    products, offload = Products(), offloads(codec="fp8")
    with products.capture(offload) as step:
        nodes = nodes_of(step.graph._graph)
        expected = [products.rounded(x, step.plans, BlockFP8()) for x in products.batches]

        def is_exact(seed: int, without: list[tuple[int, int]]) -> bool:
            with virtual.replays(seed, without):
                return all(
                    same(one, [value.cpu() for value in step(x)])
                    for one, x in zip(expected, products.batches, strict=True)
                )

        assert is_exact(0, [])
        edges = {edge for node in nodes for edge in node.edges if nodes[edge[0]].stream != nodes[edge[1]].stream}
        reported = {edge for edge in edges if violations(nodes, [edge])}
        assert len(reported) >= 3 * coded_saves(step) > 0
        assert not any(is_exact(1, [edge]) for edge in reported)


def test_another_codec_in_the_capture_is_a_difference(offloads: Any) -> None:
    products, offload = Products(differs=4), offloads(codec="int8")
    with pytest.raises(ScheduleMismatchError, match=r"differs first at save .* with the codec int8, .* bf16"):
        products.capture(offload)


@pytest.mark.parametrize("codec", ["identity", "lossless"])
def test_what_changes_no_bit_travels_as_it_is(virtual: VirtualDevice, codec: str, offloads: Any) -> None:
    """A mask of ``bool`` is no save that is decided anew, as in eager steps, which would stay."""
    weight = torch.ones(SIZE, SIZE, device=NAME).requires_grad_()

    def step(x: Tensor) -> Tensor:
        h = torch.where(x > 0, weight.sin(), weight)
        return torch.autograd.grad((h + later(weight)).sum(), weight)[0]

    offload = offloads(codec=codec)
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)).to(NAME)
    with capture_step(step, (x,), offload=offload, debug=True) as captured:
        masks = [one for one in captured.plan.saves if one.storage_nbytes == SIZE * SIZE]
        assert [one.fate for one in masks] == [Fate.OFFLOAD]
        assert torch.equal(captured(x).cpu(), step(x).cpu())
        assert link_bytes(virtual, captured.launch)[0] == sum(captured.plan.slots) >= SIZE * SIZE
