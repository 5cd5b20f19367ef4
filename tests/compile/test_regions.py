"""What a graph says of the memory that the regions that it calls hand back, on graphs made by hand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from eager_offload.compile.graphs import outputs_of, storage_of
from eager_offload.compile.regions import keep_operands, name_results, name_results_of_pair

invoke = torch.ops.higher_order.invoke_subgraph


def graph_around(region: GraphModule, *inputs: Tensor, calls: int = 1) -> Graph:
    """A graph that calls ``region`` with its own inputs, each time with what the call before returned first."""
    module = GraphModule(nn.Module(), Graph())
    module.add_module("region", region)
    graph = module.graph
    mode = region.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    given: list[Node] = []
    for number, value in enumerate(inputs):
        given.append(graph.placeholder(f"primals_{number}"))
        given[-1].meta["val"] = mode.from_tensor(value)
    results: list[Node] = []
    for _ in range(calls):
        call = graph.call_function(invoke, (graph.get_attr("region"), "region", *given))
        for index, inner in enumerate(outputs_of(region.graph)):
            with graph.inserting_after(call):  # the last one first, as a partitioner leaves them
                result = graph.call_function(operator.getitem, (call, index))
            with mode:  # as tracers leave it: each result seems to be new
                result.meta["val"] = torch.empty_like(inner.meta["val"])
            results.append(result)
        given = [results[-len(outputs_of(region.graph))], *given[1:]]
    graph.output(tuple(results))
    graph.lint()
    return graph


def traced(function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(one) for one in inputs]
    return make_fx(function, tracing_mode="real")(*fakes)


def run(graph: Graph, *inputs: Tensor) -> list[Tensor]:
    graph.owning_module.recompile()
    return list(graph.owning_module(*inputs))


def argument(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    return x @ w, x


def view_of_an_argument(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    return x @ w, x.t()[1:]


def part_of_an_argument(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    return x @ w, w.chunk(2, -1)[1].t()


def earlier_result(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    y = (x @ w).sin()
    return y, y, y.t()[1:]


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("function", [argument, view_of_an_argument, part_of_an_argument, earlier_result])
def test_h35_what_a_region_hands_back_is_named_by_what_it_is(
    function: Callable[..., Sequence[Tensor]], calls: int
) -> None:
    x, w = torch.randn(6, 6), torch.randn(6, 6)
    graph = graph_around(traced(function, x, w), x, w, calls=calls)
    expected = run(graph, x, w)
    name_results(graph)
    results = run(graph, x, w)
    assert all(map(torch.equal, results, expected))
    assert all(one.stride() == other.stride() for one, other in zip(results, expected, strict=True))
    for one, output in zip(results, outputs_of(graph), strict=True):
        # What shares memory when the graph runs shares it in the graph.
        for other, said in zip(results, outputs_of(graph), strict=True):
            shares = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            assert shares == (storage_of(output) == storage_of(said))
    inputs = [storage_of(node) for node in graph.find_nodes(op="placeholder")]
    assert (storage_of(outputs_of(graph)[1]) in inputs) == (function is not earlier_result and calls == 1) or calls == 2


def test_h35_what_cannot_be_said_outside_is_copied_inside() -> None:
    def function(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        return x @ w, w.as_strided((3, 3), (6, 1), 7)  # counts from the beginning of whatever memory it is given

    x, w = torch.randn(6, 6), torch.randn(6, 6)
    graph = graph_around(traced(function, x, w), x, w, calls=2)
    expected = run(graph, x, w)
    name_results(graph)
    results = run(graph, x, w)
    assert all(map(torch.equal, results, expected))
    memory = {one.untyped_storage().data_ptr() for one in (*results, x, w)}
    assert len(memory) == 6


def test_h35_a_region_that_calls_a_region_is_seen_through() -> None:
    x, w = torch.randn(6, 6), torch.randn(6, 6)
    inner = graph_around(traced(argument, x, w), x, w)
    graph = graph_around(inner.owning_module, x, w)
    expected = run(graph, x, w)
    name_results(graph)
    assert outputs_of(graph)[1] is graph.find_nodes(op="placeholder")[0]
    assert all(map(torch.equal, run(graph, x, w), expected))


def pair_around(graph: Graph, others: Sequence[str] = ()) -> Graph:
    """A backward that adds up all but the first output of ``graph``."""
    backward = Graph()
    inputs = []
    for node in outputs_of(graph)[1:]:
        inputs.append(backward.placeholder(node.name))
        inputs[-1].meta["val"] = node.meta["val"]
    made = [backward.create_node("call_function", torch.sin, (inputs[0],), name=name) for name in others]
    backward.output((*inputs, *made))
    return backward


def test_h35_what_is_saved_has_one_name_in_both_graphs_and_is_saved_once() -> None:
    def function(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        return x @ w, x, x, w.t()

    x, w = torch.randn(6, 6), torch.randn(6, 6)
    forward = graph_around(traced(function, x, w), x, w)
    backward = pair_around(forward)
    name_results_of_pair(forward, backward, 1)
    saved = [node.name for node in outputs_of(forward)[1:] if isinstance(node, Node)]
    assert saved == [node.name for node in backward.find_nodes(op="placeholder")]
    assert saved[0] == "primals_0"
    assert len(saved) == 2
    assert len(outputs_of(backward)) == 3
    backward.lint()


def test_h35_a_name_that_backward_has_given_to_another_value_is_not_taken() -> None:
    x, w = torch.randn(6, 6), torch.randn(6, 6)
    forward = graph_around(traced(view_of_an_argument, x, w), x, w)
    backward = pair_around(forward, others=("slice_tensor", "slice_1", "slice_2"))
    name_results_of_pair(forward, backward, 1)
    (saved,) = [node.name for node in outputs_of(forward)[1:] if isinstance(node, Node)]
    assert saved == backward.find_nodes(op="placeholder")[0].name
    assert len({node.name for node in backward.nodes}) == len(backward.nodes)


def test_h35_a_region_hands_back_what_its_caller_may_need() -> None:
    x, w = torch.randn(6, 6), torch.randn(6, 6)
    graph = graph_around(traced(argument, x, w), x, w, calls=2)
    expected = run(graph, x, w)
    keep_operands(graph)
    region = graph.owning_module.region.graph
    assert set(region.find_nodes(op="placeholder")) <= set(outputs_of(region))
    assert len(outputs_of(region)) == 3
    assert all(map(torch.equal, run(graph, x, w), expected))
