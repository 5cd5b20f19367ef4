"""Transfers in a forward and its backward: synchronous, asynchronous, where shapes change, and as pure functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from eager_offload.compile import insert_asynchronous, ops
from eager_offload.stats import KeepReason
from tests.compile.compiled import INDUCTOR, compare, step_of
from tests.compile.split import PARTITIONERS, Split, assert_moves_exactly
from tests.programs import leaf
from tests.releases import wrong_before


class Attention(nn.Module):
    """Queries, keys and values are three views of one projection."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.project(self.norm(x)).split(width, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def tokens(batch: int, length: int) -> Tensor:
    return leaf(batch, length, 16, seed=length)


def asynchronous(one: Split) -> None:
    one.take(insert_asynchronous(one.forward.graph), insert_asynchronous(one.backward.graph))


def calls(split: Split, *targets: object) -> list[int]:
    graphs = (split.forward.graph, split.backward.graph)
    return [sum(node.target is target for graph in graphs for node in graph.nodes) for target in targets]


@pytest.mark.parametrize("partition", PARTITIONERS)
def test_attention_is_exact_when_shapes_change(partition: str) -> None:
    shapes = [(tokens(3, 5),), (tokens(4, 11),)]
    one, choice = assert_moves_exactly(
        Attention(), tokens(2, 8), partition=partition, dynamic=True, more=asynchronous, shapes=shapes
    )
    assert not [reason for reason in choice.kept.values() if reason == "layout"]
    fused = max(choice.groups, key=lambda group: len(group.members))
    assert len(fused.members) >= 3, "queries, keys and values travel as the projection that they are views of"
    count = len(choice.groups)
    assert calls(one, ops.offload, ops.reload, ops.wait_tensor) == [count, count, 2 * count]
    numbers = [node for node in one.forward.graph.nodes if node.target in (ops.offload, ops.reload)]
    assert all(isinstance(argument, torch.fx.Node) for node in numbers for argument in node.args)


def test_a_gathered_value_comes_back_to_its_strides() -> None:
    def program(x: Tensor) -> Tensor:
        y = (x + 1)[:, ::8]
        return (y * y).sum()

    seen: list[Tensor] = []

    def change(one: Split) -> None:
        (reload,) = [node for node in one.backward.graph.nodes if node.target is torch.ops.eager_offload.spread.default]
        seen.append(reload.meta["val"])

    assert_moves_exactly(program, leaf(16, 64), more=change)
    assert seen[0].stride() == (64, 8)
    compact = torch.arange(12.0).view(3, 4)
    spread = torch.ops.eager_offload.spread.default(compact, [40, 5], 7)
    assert spread.stride() == (40, 5)
    assert spread.data_ptr() % 64 == 28
    assert torch.equal(spread, compact)
    torch.library.opcheck(torch.ops.eager_offload.spread.default, (compact, [40, 5], 7))


def counted(part: Tensor) -> Tensor:
    """Backward makes the view of a view again: of the storage from the fifth element on, wherever ``part`` began."""
    again = part.transpose(0, 1).as_strided(part.size(), part.stride(), 4)
    return again.sin().exp() * part.cos()


def one_of_several_counted(x: Tensor) -> Tensor:
    first, second, _, _ = (x @ x.exp()).split(16, 1)
    return counted(second) * first.cos()


COUNTED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: counted((x @ x.exp())[60:]),
    "columns": lambda x: counted((x @ x.exp())[:, 8::8]),
    "one of several": one_of_several_counted,
}
WRONG = wrong_before((2, 12), "Inductor alone gives other gradients")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[*INDUCTOR.marks, WRONG])])
@pytest.mark.parametrize("case", COUNTED)
def test_compiled_code_may_count_from_the_beginning_of_a_storage(case: str, backend: str) -> None:
    given = leaf(64, 64).detach().div_(64).requires_grad_()
    stats = compare(step_of(COUNTED[case], given, fullgraph=True), backend)
    assert stats.kept_bytes.get(KeepReason.LAYOUT, 0) == 0
    assert stats.bytes_out >= 2 * 64 * 64 * 4
