"""An ``Offload`` compiles anew when it comes or goes, and at no other time; and inside, nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule

import eager_offload as eo
from tests.compile.compiled import Compile, compare, deep, fresh_compiler
from tests.hazards.backends import DiskBackend
from tests.programs import leaf
from tests.proof.bits import same_bits


class Counted:
    """A compiled function that counts how often it was compiled."""

    def __init__(self, dynamic: bool = False) -> None:
        self._counter = CompileCounterWithBackend("aot_eager")
        self._run = torch.compile(
            lambda x, weight: deep(x, weight).exp(), backend=self._counter, fullgraph=True, dynamic=dynamic
        )

    def step(self, around: AbstractContextManager[object], rows: int = 8) -> int:
        """Runs forward and backward; returns how often it has been compiled by now."""
        x, weight = leaf(rows, 8, seed=1), leaf(8, 8, seed=2)
        with around:
            loss = self._run(x, weight).sum()
        loss.backward()
        assert x.grad is not None
        return int(self._counter.frame_count)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


def test_each_configuration_compiles_once_and_none_at_all_does_too(disk: DiskBackend) -> None:
    run, none, one, other = Counted(), nullcontext(), disk.offload(), disk.offload(min_bytes=1 << 20)
    around = [one, one, one, one, none, other, one, none, other]
    assert [run.step(each) for each in around] == [1, 1, 1, 1, 2, 3, 3, 3, 3]
    assert one.stats(synchronize=True).bytes_in > 0 == other.stats(synchronize=True).bytes_out
    stats = one.stats()
    assert (stats.compiled_graphs, stats.compiled_regions, stats.steps) == (1, 5, 5)
    assert "compiled   1 graph, 5 runs" in str(stats)
    assert stats.shared_bytes == 0, "no hook packs what the graph moves"
    assert stats.without_offload_bytes_peak == (stats.bytes_out + stats.kept_bytes["alive"]) / 5, "of one step"


def test_an_equal_offload_compiles_nothing(disk: DiskBackend) -> None:
    run = Counted()
    for _ in range(12):  # more than torch lets one function be compiled
        offload = disk.offload()
        assert run.step(offload) == 1
        assert offload.stats(synchronize=True).bytes_in > 0


def test_other_sizes_compile_as_often_as_without(offload: eo.Offload) -> None:
    frames = []
    for around in (nullcontext(), offload):
        with fresh_compiler():
            run = Counted(dynamic=True)
            frames.append([run.step(around, rows) for rows in (8, 5, 8)])
    assert frames[0] == frames[1]
    assert offload.stats(synchronize=True).bytes_in > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_moves_where_there_will_be_no_backward(mode: Any) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor]:
        run = compile(deep)
        with around, mode():
            return [run(leaf(8, 8, seed=1), leaf(8, 8, seed=2)).clone()]

    stats = compare(step, "aot_eager", moves=False)
    assert (stats.saved_bytes, stats.bytes_out) == (0, 0)


class Chain(nn.Module):
    """Layers that save as much each; ends in a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x.square().sum()


def test_the_more_room_a_budget_leaves_the_less_moves_and_another_one_compiles_anew() -> None:
    """Windows are so small that little is on its way at one time, as beside a large model."""
    model, batch = Chain(), leaf(64, 32, grad=False)
    expected = torch.autograd.grad(model(batch), [*model.parameters()])
    windows = {"max_inflight_bytes": 8192, "prefetch_bytes": 8192, "min_bytes": 0, "tier": "host"}
    counter, moved, frames = CompileCounterWithBackend("aot_eager"), [], []
    compiled = torch.compile(model, backend=counter)
    budgets = [{"device_budget": 1}, {"device_budget": "130KiB"}, {"device_budget": "1GiB"}, {"policy": "free"}]
    for fields in budgets * 2:
        with closing(eo.Offload(**windows, **fields)) as offload:
            with offload:
                loss = compiled(batch)
            assert all(map(same_bits, torch.autograd.grad(loss, [*model.parameters()]), expected)), fields
            stats = offload.stats(synchronize=True)
            assert stats.bytes_in == stats.bytes_out == stats.offloaded_bytes
            moved.append(stats.bytes_out)
            frames.append(counter.frame_count)
    assert moved[0] > moved[1] > moved[2] == 0
    assert moved[:4] == moved[4:]
    assert frames == [1, 2, 3, 4, 4, 4, 4, 4]


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
