"""However a model is cut into graphs, and however often they are differentiated, an ``Offload`` changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch.fx import GraphModule

import eager_offload as eo
from eager_offload.compile import aot_hooks
from tests.compile.compiled import BOTH, Compile, Step, compare, deep, fresh_compiler, step_of
from tests.hazards.backends import assert_settled
from tests.hazards.programs import leaf


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.wide = nn.Linear(size, 2 * size)
        self.narrow = nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def model_of(blocks: int, size: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(size) for _ in range(blocks)))


Around = AbstractContextManager[object]
#: Trains by a compiled function, of two tensors, in the context; returns what there is to compare beside gradients.
Training = Callable[[Callable[..., Tensor], Around, Tensor, Tensor], list[Tensor | None]]


def keeps_the_graph(run: Callable[..., Tensor], around: Around, x: Tensor, weight: Tensor) -> list[Tensor | None]:
    with around:
        loss = run(x, weight).sum()
    loss.backward(retain_graph=True)
    first = None if x.grad is None else x.grad.clone()
    loss.backward(retain_graph=True)
    return [loss, first, *torch.autograd.grad(loss, x)]


def keeps_the_first(run: Callable[..., Tensor], around: Around, x: Tensor, weight: Tensor) -> list[Tensor | None]:
    with around:
        loss = run(x, weight).sum()
    loss.backward(retain_graph=True)
    with around:
        other = run(x, weight).sum()
    other.backward()
    return [loss, other]


def in_any_order(run: Callable[..., Tensor], around: Around, x: Tensor, weight: Tensor) -> list[Tensor | None]:
    with around:
        losses = [run(x * scale, weight).sum() for scale in (1, 2, 3)]
        losses[1].backward()
    with around:
        losses.append(run(x * 4, weight).sum())
        losses[0].backward()
        losses.append(run(x * 5, weight).sum())
    for which in (4, 3, 2):
        losses[which].backward()
    return [*losses]


def one_into_another(run: Callable[..., Tensor], around: Around, x: Tensor, weight: Tensor) -> list[Tensor | None]:
    with around:
        loss = run(run(run(x, weight), weight), weight).sum()
    loss.backward()
    return [loss]


@BOTH
@pytest.mark.parametrize("training", [keeps_the_graph, keeps_the_first, in_any_order, one_into_another])
def test_h02_graphs_are_differentiated_in_any_order_and_again(training: Training, backend: str) -> None:
    def step(compile: Compile, around: Around) -> list[Tensor | None]:
        x, weight = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
        return [*training(compile(deep), around, x, weight), x.grad, weight.grad]

    # Inductor refuses a second backward of buffers that it may reuse; that is off where a program wants one.
    with torch._functorch.config.patch(donated_buffer=training is not keeps_the_graph):
        compare(step, backend, as_eager=training is not one_into_another)


@BOTH
def test_regions_without_gradients_stay_without(backend: str) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        hidden = (x @ weight).sin()
        with torch.no_grad():
            scale = (hidden @ weight).exp().sin()
        return (hidden * scale).exp() @ weight

    compare(step_of(function, leaf(8, 8, seed=1), leaf(8, 8, seed=2)), backend)


@BOTH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_moves_where_there_will_be_no_backward(backend: str, mode: Any) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        run = compile(deep)
        with around, mode():
            return [run(leaf(8, 8, seed=1), leaf(8, 8, seed=2)).clone()]

    stats = compare(step, backend, moves=False)
    assert (stats.saved_bytes, stats.bytes_out) == (0, 0)


@BOTH
def test_graph_breaks_leave_graphs_that_are_offloaded_one_by_one(backend: str) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        hidden = deep(x, weight)
        torch._dynamo.graph_break()
        hidden = hidden.sin() * hidden.detach().mean().item()
        return deep(hidden, weight)

    compare(step_of(function, leaf(8, 8, seed=1), leaf(8, 8, seed=2)), backend, regions=4, as_eager=False)


def test_nothing_of_the_library_is_compiled_where_a_frame_is_left_to_run_as_it_is() -> None:
    @contextmanager
    def around() -> Iterator[None]:  # a graph break in one of these cannot be gone on from
        yield

    def function(x: Tensor, weight: Tensor) -> Tensor:
        with around():
            torch._dynamo.graph_break()
            return (x @ weight).exp()

    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    x, weight = leaf(64, 64, seed=1), leaf(64, 64, seed=2)
    function(x, weight).sum().backward()
    expected = [x.grad, weight.grad]
    x.grad = weight.grad = None
    offload = eo.Offload(min_bytes=0, keep_last_bytes=0, tier="disk")
    compiled = torch.compile(function, backend=backend)
    with offload:
        loss = compiled(x, weight).sum()
    loss.backward()
    assert offload.stats(synchronize=True).bytes_out > 0
    assert all(map(torch.equal, [x.grad, weight.grad], expected))
    assert not graphs, [graph.code for graph in graphs]
    offload.close()


@BOTH
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_full_graph_is_one_region(backend: str, dynamic: bool) -> None:
    step = step_of(deep, leaf(8, 8, seed=1), leaf(8, 8, seed=2), fullgraph=True, dynamic=dynamic)
    assert compare(step, backend).compiled_regions == 2  # one for each of two steps


@BOTH
def test_compiled_blocks_in_an_eager_model_share_one_context(backend: str) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        blocks = model_of(3)
        compiled = [compile(block) for block in blocks]
        x = leaf(4, 8)
        with around:
            hidden = x
            for block in compiled:
                hidden = block(hidden).sin()  # eager in between
            loss = hidden.exp().sum()
        loss.backward()
        return [loss, x.grad, *(weight.grad for weight in blocks.parameters())]

    compare(step, backend, regions=6)


def called_once_compiled(after: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """A step of blocks that are compiled once for all, each followed by ``after`` of what it was given and returned."""

    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        blocks = model_of(2)

        @torch.compiler.nested_compile_region
        def call(block: nn.Module, x: Tensor) -> Tensor:
            return block(x)

        def whole(x: Tensor) -> Tensor:
            for block in blocks:
                given = x.sin()
                x = after(given, call(block, given))
            return x.exp()

        x = leaf(4, 8)
        run = compile(whole, fullgraph=True)
        with around:
            loss = run(x).sum()
        loss.backward()
        return [loss, x.grad, *(weight.grad for weight in blocks.parameters())]

    return step


def returned(given: Tensor, result: Tensor) -> Tensor:
    return result


def written_into(given: Tensor, result: Tensor) -> Tensor:
    return torch.slice_scatter(given, result[:2], 0, 0, 2) + result


@BOTH
@pytest.mark.parametrize("after", [returned, written_into])
def test_h35_a_region_that_is_compiled_once_for_all_blocks(backend: str, after: Any) -> None:
    """What shares memory is not known there: all that the graph saves stays, and the compiler's own bits with it."""
    stats = compare(called_once_compiled(after), backend, moves=False, as_eager=False)
    assert (stats.bytes_out, stats.compiled_regions) == (0, 0)
    assert stats.kept_bytes["region"] > 0


def test_the_passes_work_on_a_joint_graph_that_was_exported(offload: eo.Offload) -> None:

    def run(around: AbstractContextManager[object]) -> list[Tensor | None]:
        model, x = model_of(2), leaf(4, 8)
        with ExitStack() as stack, around:
            joint = aot_export_joint_with_descriptors(stack, model, (x,))
            compiled = aot_compile_joint_with_descriptors(joint)
        weights = list(model.parameters())
        with offload:
            result = compiled(*weights, x)
            loss = (result[0] if isinstance(result, list | tuple) else result).exp().sum()
        loss.backward()
        return [loss.detach(), x.grad, *(weight.grad for weight in weights)]

    with fresh_compiler():
        expected = run(nullcontext())
        before = offload.stats().compiled_regions
        ours = run(aot_hooks.compiling_for(offload.config_key))
    assert before == 0
    assert all(
        torch.equal(one, two) for one, two in zip(ours, expected, strict=True) if one is not None and two is not None
    )
    stats = offload.stats(synchronize=True)
    assert stats.compiled_regions == 1
    assert stats.bytes_in > 0
    assert_settled(offload)


@BOTH
@pytest.mark.parametrize("inside", [False, True])
def test_h72_compiled_autograd_changes_nothing(backend: str, inside: bool) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        """Eager code saves too; what unpacks it breaks no graph of the backward."""
        x, weight = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
        run = compile(deep)
        compiled_backward = torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True))
        with around:
            loss = run(x, weight).exp().sin().sum()
            if inside:
                with compiled_backward:
                    loss.backward()
        if not inside:
            with compiled_backward:
                loss.backward()
        return [loss, x.grad, weight.grad]

    compare(step, backend)
