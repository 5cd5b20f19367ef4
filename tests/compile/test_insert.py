"""Transfers in a forward and its backward: synchronous, asynchronous, where shapes change, and as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
import eager_offload.compile as passes
from eager_offload.compile import insert_asynchronous, ops
from eager_offload.stats import KeepReason
from tests.compile.compiled import BOTH, INDUCTOR, compare, step_of
from tests.compile.split import PARTITIONERS, Split, assert_moves_exactly
from tests.processes import printed_by
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


def tokens(batch: int, length: int, width: int = 16) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(length)).requires_grad_()


def asynchronous(one: Split) -> None:
    one.take(insert_asynchronous(one.forward.graph), insert_asynchronous(one.backward.graph))


def calls(split: Split, *targets: object) -> list[int]:
    graphs = (split.forward.graph, split.backward.graph)
    return [sum(node.target is target for graph in graphs for node in graph.nodes) for target in targets]


@pytest.fixture
def attention() -> Attention:
    torch.manual_seed(0)
    return Attention()


@pytest.mark.parametrize("partition", PARTITIONERS)
@pytest.mark.parametrize("waits", [True, False])
def test_attention_is_exact(attention: Attention, partition: str, waits: bool) -> None:
    one, choice = assert_moves_exactly(
        attention, tokens(2, 8), partition=partition, more=(lambda one: None) if waits else asynchronous
    )
    count = len(choice.groups)
    assert calls(one, ops.offload, ops.reload, ops.wait_tensor) == [count, count, 0 if waits else 2 * count]


@pytest.mark.parametrize("partition", PARTITIONERS)
@pytest.mark.parametrize("waits", [pytest.param(True, marks=pytest.mark.long), False])
def test_attention_is_exact_when_shapes_change(attention: Attention, partition: str, waits: bool) -> None:
    one, choice = assert_moves_exactly(
        attention,
        tokens(2, 8),
        partition=partition,
        dynamic=True,
        more=(lambda one: None) if waits else asynchronous,
        shapes=[(tokens(3, 5),), (tokens(4, 11),)],
    )
    assert not [reason for reason in choice.kept.values() if reason == "layout"]
    fused = max(choice.groups, key=lambda group: len(group.members))
    assert len(fused.members) >= 3, "queries, keys and values travel as the projection that they are views of"
    numbers = [node for node in one.forward.graph.nodes if node.target in (ops.offload, ops.reload)]
    assert all(isinstance(argument, torch.fx.Node) for node in numbers for argument in node.args)


@BOTH
def test_attention_is_exact_when_shapes_change_in_a_context(attention: Attention, backend: str) -> None:
    compare(step_of(attention, tokens(2, 5), dynamic=True, fullgraph=True), backend)


@pytest.mark.long
def test_changing_shapes_compile_as_often_as_without(attention: Attention) -> None:
    def frames(around: AbstractContextManager[object]) -> int:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        run = torch.compile(attention, backend=counter, dynamic=True)
        for length in (8, 5, 8):
            with around:
                loss = run(tokens(2, length)).sum()
            loss.backward()
        return counter.frame_count

    without = frames(nullcontext())
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)  # beside that of what was compiled before
    assert frames(offload) == without
    assert offload.stats(synchronize=True).bytes_in > 0
    offload.close()


def test_a_gathered_value_comes_back_to_its_strides() -> None:
    def program(x: Tensor) -> Tensor:
        y = (x + 1)[:, ::8]
        return (y * y).sum()

    seen: list[Tensor] = []

    def change(one: Split) -> None:
        (reload,) = [node for node in one.backward.graph.nodes if node.target is torch.ops.eager_offload.spread.default]
        seen.append(reload.meta["val"])

    x = torch.randn(16, 64, requires_grad=True)
    assert_moves_exactly(program, x, more=change)
    assert seen[0].stride() == (64, 8)
    compact = torch.arange(12.0).view(3, 4)
    spread = torch.ops.eager_offload.spread.default(compact, [40, 5], 7)
    assert spread.stride() == (40, 5)
    assert spread.data_ptr() % 64 == 28
    assert torch.equal(spread, compact)
    torch.library.opcheck(torch.ops.eager_offload.spread.default, (compact, [40, 5], 7))


def some_columns(x: Tensor) -> Tensor:
    y = (x @ x)[:, ::8]
    return y @ y.t()


def a_few_rows(x: Tensor) -> Tensor:
    y = (x @ x)[4:6]
    return y @ y.t()


def rows_behind_the_first(x: Tensor) -> Tensor:
    y = (x @ x).view(-1)[3:131].view(8, 16)
    return y @ y.t()


def a_transpose_and_itself(x: Tensor) -> Tensor:
    y = x @ x
    return y.t() @ y @ y[:, 1:].t().contiguous().t()[:, :4]


def a_transpose_that_is_changed(x: Tensor) -> Tensor:
    """Inductor computes the transpose, and lays what a graph returns of it out anew, for who sums it inside too."""
    y = (x @ x).sin()
    y.mT.mul_(1.5)
    return y.cumprod(1) @ y + y.softmax(0)


def counted(part: Tensor) -> Tensor:
    """Backward makes the view of a view again: of the storage from the fifth element on, wherever ``part`` began."""
    again = part.transpose(0, 1).as_strided(part.size(), part.stride(), 4)
    return again.sin().exp() * part.cos()


def counted_rows(x: Tensor) -> Tensor:
    return counted((x @ x.exp())[60:])


def counted_columns(x: Tensor) -> Tensor:
    return counted((x @ x.exp())[:, 8::8])


def one_of_several_counted(x: Tensor) -> Tensor:
    first, second, _, _ = (x @ x.exp()).split(16, 1)
    return counted(second) * first.cos()


COUNTED = [counted_rows, counted_columns, one_of_several_counted]


def square(size: int) -> Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(size)).div_(size).requires_grad_()


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor", marks=[*INDUCTOR.marks, wrong_before((2, 12), "Inductor alone gives other gradients")]
        ),
    ],
)
@pytest.mark.parametrize("program", COUNTED)
def test_compiled_code_may_count_from_the_beginning_of_a_storage(
    program: Callable[[Tensor], Tensor], backend: str
) -> None:
    stats = compare(step_of(program, square(64), fullgraph=True), backend)
    assert stats.kept_bytes.get(KeepReason.LAYOUT, 0) == 0
    assert stats.bytes_out >= 2 * 64 * 64 * 4


@BOTH
@pytest.mark.parametrize(
    "program",
    [some_columns, a_few_rows, rows_behind_the_first, a_transpose_and_itself, a_transpose_that_is_changed],
)
def test_parts_of_a_storage_are_exact(program: Callable[[Tensor], Tensor], backend: str) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    compare(step_of(program, x, fullgraph=True), backend)


@pytest.mark.long
def test_the_passes_have_docstrings_that_draw_and_import_nothing_before_they_are_asked_for() -> None:
    program = (
        "import sys, eager_offload.compile as passes; before = set(sys.modules); passes.choose; "
        "print('torch.fx.experimental.symbolic_shapes' in before, 'eager_offload.compile.select' in before, "
        "all(getattr(passes, name) for name in passes.__all__), set(passes.__all__) <= set(dir(passes)))"
    )
    assert printed_by("-c", program).split() == ["False", "False", "True", "True"]
    for name in passes.__all__:
        one = getattr(passes, name)
        if not isinstance(one, type):
            assert any("    " in line.strip() for line in one.__doc__.splitlines()), f"{name} draws nothing"
    with pytest.raises(AttributeError, match="nothing"):
        passes.nothing  # noqa: B018
