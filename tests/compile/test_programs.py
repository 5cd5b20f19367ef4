"""Programs that ``torch.compile`` takes: an ``Offload`` around them changes nothing, and counts what it leaves.

Each gives the same results, or raises the same error, as without; and either bytes move or a reason says why not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload.compile import aot_hooks
from tests.compile.compiled import BOTH, INDUCTOR, Compile, Step, compare, compiler, fresh_compiler, step_of
from tests.hazards.programs import leaf


@torch.library.custom_op("eager_offload_programs::note", mutates_args=())
def note(x: Tensor) -> None:
    """Has an effect, and a place among the effects of the program."""


note.register_fake(lambda x: None)
_register_effectful_op(torch.ops.eager_offload_programs.note.default, _EffectType.ORDERED)


def well(x: Tensor) -> Tensor:
    return x @ x.t() + 8 * torch.eye(8)


def an_effect(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).exp()
    note(h.detach())
    return (h @ w).sin()


def a_print(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).exp()
    torch._higher_order_ops.print("{}", 1)
    return (h @ w).sin()


def cholesky(x: Tensor, w: Tensor) -> Tensor:
    return (torch.linalg.cholesky(well(x)) @ w).sin()


def solve(x: Tensor, w: Tensor) -> Tensor:
    return torch.linalg.solve(well(x), w).sin().exp()


def inverse(x: Tensor, w: Tensor) -> Tensor:
    return (torch.linalg.inv(well(x)) @ w).sin()


def lu(x: Tensor, w: Tensor) -> Tensor:
    _, lower, upper = torch.linalg.lu(well(x))
    return (lower @ upper.sin() @ w).exp()


def a_branch(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: (x @ w).sin().exp(), lambda x: (x @ w).cos(), (x,)).sin()


def a_loop(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).sin()
    _, again = while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, y * 2), (torch.zeros(()), h.detach()))
    return (h.exp() * again).cos()


def a_scan(x: Tensor, w: Tensor) -> Tensor:
    carry, each = scan(lambda c, y: ((c * y).sin(), (c + y).cos()), torch.ones(8), (x @ w).sin(), dim=0)
    return carry + each.sum(0)


def a_prefix_scan(x: Tensor, w: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a * b, (x @ w).sin(), 0, combine_mode="generic").exp()


def a_map(x: Tensor, w: Tensor) -> Tensor:
    return map_rows(lambda row, w: (row @ w).sin().exp(), x, w).cos()


def data_dependent(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).sin()
    index = (h.detach() > 0).nonzero()[:, 0]
    return (h[index] @ w).exp().sin()


def an_item(x: Tensor, w: Tensor) -> Tensor:
    n = (x.detach() * 0 + 4).max().long().item()
    torch._check(n >= 2)
    torch._check(n <= 8)
    return ((x @ w).sin().narrow(0, 0, n) @ w).exp()


def a_sparse_value(x: Tensor, w: Tensor) -> Tensor:
    values = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [1, 2, 3]]), (x @ w).sin()[0, :3], (8, 8))
    return torch.sparse.mm(values, w.cos()).exp()


#: Those that broke once.
BROKEN = (an_effect, cholesky, a_loop)
OTHERS = (
    a_print,
    solve,
    inverse,
    lu,
    a_branch,
    a_scan,
    a_prefix_scan,
    a_map,
    data_dependent,
    an_item,
    a_sparse_value,
)
FUNCTIONS = [pytest.param(one, id=one.__name__) for one in BROKEN] + [
    pytest.param(one, id=one.__name__, marks=pytest.mark.long) for one in OTHERS
]
SEEN_WHEN_RUN = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_h45_what_compiles_without_compiles_with(function: Callable[..., Any]) -> None:
    with dynamo_config.patch(SEEN_WHEN_RUN):
        step = step_of(function, leaf(8, 8, seed=1), leaf(8, 8, seed=2))
        compare(step, "aot_eager", regions=0 if function is a_sparse_value else 1, as_eager=False)


@pytest.mark.parametrize("backend", [INDUCTOR])
@pytest.mark.parametrize("function", [an_effect, cholesky, a_loop, data_dependent])
def test_h45_what_inductor_compiles_without_it_compiles_with(function: Callable[..., Any], backend: str) -> None:
    with dynamo_config.patch(SEEN_WHEN_RUN):
        compare(step_of(function, leaf(8, 8, seed=1), leaf(8, 8, seed=2)), backend)


def of_module(make: Callable[[], nn.Module], given: Tensor) -> Step:
    """The step of a module, which takes integers or what needs no gradient."""

    def step(compile: Compile, around: AbstractContextManager[object]) -> Sequence[Tensor | None]:
        torch.manual_seed(1)
        module = make()
        run = compile(module)
        with around:
            result = run(given.clone())
        result = result[0] if isinstance(result, tuple) else result
        result.square().sum().backward()
        grads = [one.grad for one in module.parameters()]
        return [result, *(one.to_dense() if one is not None and one.is_sparse else one for one in grads)]

    return step


WORDS = torch.arange(12).view(3, 4) % 7


@BOTH
@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_h45_sparse_gradients(table: type[nn.Module], backend: str) -> None:
    compare(of_module(lambda: nn.Sequential(table(7, 8, sparse=True), nn.Linear(8, 8), nn.GELU()), WORDS), backend)


@pytest.mark.long
@pytest.mark.parametrize("inside", [True, False], ids=["compiled", "beside what is compiled"])
def test_h45_recurrent_layers(inside: bool) -> None:
    with dynamo_config.patch(allow_rnn=inside):
        length = 5 if inside else 100  # eager code: what is saved first has arrived when backward begins
        step = of_module(lambda: nn.GRU(8, 8), torch.randn(length, 3, 8, generator=torch.Generator().manual_seed(1)))
        compare(step, "aot_eager", regions=int(inside), as_eager=False)


def deep(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sin().exp() @ w).cos()


@BOTH
def test_h45_sizes_that_only_data_tell_move(backend: str) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> Sequence[Tensor | None]:
        x, w = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
        mark_unbacked(x, 0)
        run = compile(deep)
        with around:
            result = run(x, w)
        result.square().sum().backward()
        return [result, x.grad, w.grad]

    stats = compare(step, backend)
    assert stats.offloaded_bytes >= 2 * 3 * 8 * 8 * 4, "three intermediates of each of two steps"
    assert stats.kept_bytes["parameter"] > 0, "and the inputs stay"


@pytest.mark.parametrize("made", ["inside", "outside"])
def test_h45_jagged_values_move(made: str) -> None:
    def ragged(rows: Tensor, offsets: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(rows, offsets, min_seqlen=2, max_seqlen=4)

    def program(values: Tensor, w: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(values, w).sin().exp(), w).cos().values()

    def step(compile: Compile, around: AbstractContextManager[object]) -> Sequence[Tensor | None]:
        rows, w, offsets = leaf(9, 8, seed=1), leaf(8, 8, seed=2), torch.tensor([0, 2, 5, 9])
        several = torch.nested.as_nested_tensor([one * 1 for one in rows.split([2, 3, 4])], layout=torch.jagged)
        with around:
            if made == "inside":
                result = compile(lambda rows, offsets, w: program(ragged(rows, offsets), w))(rows, offsets, w)
            else:
                result = compile(program)(ragged(several.values(), several.offsets()), w)
        result.square().sum().backward()
        return [result, rows.grad, w.grad]

    compare(step, "aot_eager", as_eager=False)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_h45_a_reentrant_checkpoint_around_a_compiled_block(inside: bool) -> None:
    """What it saves itself is its input; its recomputation is seen where backward runs inside."""

    def step(compile: Compile, around: AbstractContextManager[object]) -> Sequence[Tensor | None]:
        x, w = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
        run = compile(deep)
        with around:
            result = checkpoint(run, x * 1, w, use_reentrant=True)
            loss = result.square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [result, x.grad, w.grad]

    stats = compare(step, "aot_eager", moves=inside)
    assert stats.bytes_out > 0
    assert stats.kept_bytes["parameter"] > 0


@BOTH
def test_h45_a_graph_that_moves_nothing_says_what_it_keeps(backend: str) -> None:
    step = step_of(deep, leaf(8, 8, seed=1), leaf(8, 8, seed=2))
    moved = compare(step, backend)
    kept = compare(step, backend, moves=False, min_bytes=1 << 20)
    assert (kept.bytes_out, kept.compiled_regions) == (0, 0)
    assert kept.kept_bytes["small"] >= moved.offloaded_bytes > 0
    assert kept.saved_bytes == moved.saved_bytes == sum(kept.kept_bytes.values())


def test_h45_a_pass_that_fails_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise IndexError("a defect")

    step = step_of(deep, leaf(8, 8, seed=1), leaf(8, 8, seed=2))
    moved = compare(step, "aot_eager")
    monkeypatch.setattr(aot_hooks, "insert_into_pair", fails)
    with pytest.warns(RuntimeWarning, match="a compiled graph is not offloaded.*IndexError: a defect"):
        stats = compare(step, "aot_eager", moves=False)
    assert stats.bytes_out == 0
    assert stats.kept_bytes["failed"] == stats.saved_bytes == moved.saved_bytes > 0


def test_h45_an_error_is_the_one_that_there_is_without() -> None:
    def twice(compile: Compile, around: AbstractContextManager[object]) -> str:
        x, w = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
        run = compile(deep)
        with around:
            result = run(x, w)
        with pytest.raises(RuntimeError) as caught:
            torch.autograd.grad(torch.autograd.grad(result.sum(), x, create_graph=True)[0].sum(), w)
        return str(caught.value)

    with fresh_compiler():
        expected = twice(compiler("aot_eager"), nullcontext())
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)
    with fresh_compiler():
        assert twice(compiler("aot_eager"), offload) == expected
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()
