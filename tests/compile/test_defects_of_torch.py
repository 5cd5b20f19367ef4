"""The same ways of going wrong as in ``test_defects.py``, seen in the pass that torch has of its own.

On its graphs, since a graph that it has changed needs an accelerator to run. When one of these tests fails, torch has
mended something, and what is said of it here and in the docs is to be looked at again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.compile.compiled import deep, fresh_compiler
from tests.compiler_caches import give_machine_code, take_machine_code
from tests.hazards.programs import leaf

activation_offloading = pytest.importorskip(
    "torch._functorch._activation_offloading.activation_offloading", reason="this torch has no pass of its own"
)
offload_ops = pytest.importorskip(
    "torch._functorch._activation_offloading.offload_ops", reason="this torch has no operations of its own"
)


def graphs_of_torch(
    function: Callable[..., Any],
    *inputs: Tensor,
    partitioner: Callable[..., Any] = default_partition,
    marked: Callable[[Node], bool] = lambda node: True,
    dynamic: bool | None = None,
    **config: Any,
) -> tuple[Graph, Graph]:
    """The forward and the backward that torch's own pass makes, with transfers on a stream of their own.

    Args:
        marked: which nodes are to be offloaded, as a user of that pass would mark them.
        **config: more of the pass's own settings.
    """
    made: list[Graph] = []

    def partition(joint: GraphModule, joint_inputs: Any, **named: Any) -> tuple[GraphModule, GraphModule]:
        for node in joint.graph.nodes:
            if node.op == "call_function" and marked(node):
                node.meta["should_offload"] = True
        settings = {"enable_activation_offloading": True, "activation_offload_separate_stream": True, **config}
        with functorch_config.patch(settings):
            forward, backward = partitioner(joint, joint_inputs, **named)
        made.extend((forward.graph, backward.graph))
        return forward, backward

    class Seen(Exception):
        pass

    def stop(module: GraphModule, inputs: Any) -> Any:
        raise Seen

    backend = aot_autograd(fw_compiler=stop, bw_compiler=stop, partition_fn=partition)
    with fresh_compiler(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Seen"):
        torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    forward, backward = made
    return forward, backward


def calls(graph: Graph, name: str) -> list[Node]:
    """The calls of one of torch's operations for offloading, in their order."""
    target = getattr(torch.ops.ao, name).default
    return [node for node in graph.nodes if node.op == "call_function" and node.target is target]


def offloaded(graph: Graph) -> set[str]:
    """The names of what leaves the device."""
    return {node.all_input_nodes[0].name for node in calls(graph, "offload")}


def two_leaves() -> tuple[Tensor, Tensor]:
    return leaf(8, 8, seed=1), leaf(8, 8, seed=2)


class _Nothing:
    """Stands for a stream and for an event of an accelerator that is not here."""

    def wait_event(self, event: object) -> None:
        pass


def test_1_a_wait_takes_the_bytes_of_what_inductor_may_use_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.ones(8)
    result = source.clone()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: _Nothing())
    monkeypatch.setitem(offload_ops._wait_registry, result.data_ptr(), (_Nothing(), torch.device("cpu")))
    torch.ops.ao.wait_tensor(result, source)
    assert source.untyped_storage().size() == 0
    # The declaration, which is all that Inductor knows, says that nothing happens to it.
    assert torch.ops.ao.wait_tensor.default._schema.arguments[1].alias_info is None


def test_2_a_source_is_let_go_before_a_part_of_it_is_used() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        one, two = (x @ weight).chunk(2, -1)
        return (one.sin() * two.cos()) @ weight[:4]

    forward, _ = graphs_of_torch(
        function,
        *two_leaves(),
        partitioner=min_cut_rematerialization_partition,
        marked=lambda node: node.name == "mm",
    )
    order = {node: number for number, node in enumerate(forward.nodes)}
    (wait,) = calls(forward, "wait_tensor")
    source = wait.args[1]
    parts = [part for split in source.users for part in split.users if "getitem" in part.name]
    assert len(parts) == 2
    assert any(order[user] > order[wait] for part in parts for user in part.users)


def test_3_what_aliases_an_output_is_taken() -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = (x @ weight).exp()
        return hidden.detach(), (hidden * hidden).sin() @ weight

    forward, _ = graphs_of_torch(function, *two_leaves())
    (outputs,) = forward.output_node().args
    returned = {one.name for one in outputs[:2]}
    sources = {node.all_input_nodes[0].name for node in forward.nodes if node.name in returned}
    assert offloaded(forward) & sources


def test_4_backward_asks_for_sizes_that_it_does_not_have() -> None:
    _, backward = graphs_of_torch(deep, *two_leaves(), dynamic=True)
    (size,) = {tuple(map(type, reload.args[2])) for reload in calls(backward, "reload")}
    # A number of the trace in place of a node of the graph: what is made of it names what is not defined.
    assert torch.SymInt in size


def test_5_views_and_parts_stay() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (x @ weight).split(8, -1)
        return ((q @ k.t()).softmax(-1) @ v).tanh()

    forward, _ = graphs_of_torch(function, leaf(8, 8, seed=1), leaf(8, 24, seed=2))
    (outputs,) = forward.output_node().args
    saved = {one.name for one in outputs[1:]}
    assert any("getitem" in name or "permute" in name or "transpose" in name for name in saved), saved
    assert not any("getitem" in name or "permute" in name for name in offloaded(forward))


def test_6_everything_comes_back_at_once_where_compute_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would run each product on the device while it compiles, to see how long that takes.
    monkeypatch.setattr(activation_offloading, "benchmark_node", lambda node: 0.0)
    _, backward = graphs_of_torch(deep, *two_leaves(), activation_reload_prefetch=True)
    order = {node: number for number, node in enumerate(backward.nodes)}
    reloads, waits = calls(backward, "reload"), calls(backward, "wait_tensor")
    assert len(reloads) > 4
    assert max(order[reload] for reload in reloads) < min(order[wait] for wait in waits)


def test_7_every_empty_value_is_the_same_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_ops, "_wait_registry", {})
    monkeypatch.setattr(torch, "Event", _Nothing)
    for _ in range(2):
        offload_ops._register_wait(torch.empty(0), torch.device("cpu"))
    assert len(offload_ops._wait_registry) == 1


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])
def test_8_a_policy_that_says_cpu_moves_nothing(policy: CheckpointPolicy) -> None:
    def decide(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return policy if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, decide)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(deep, x, weight, use_reentrant=False, context_fn=contexts)

    forward, _ = graphs_of_torch(
        function, *two_leaves(), partitioner=min_cut_rematerialization_partition, marked=lambda node: False
    )
    assert offloaded(forward) == set()


_PROGRAM = """
import json, sys
import torch
import torch._functorch.config as config
from torch._dynamo.utils import counters

config.enable_autograd_cache, marked = True, []

def mark(graph, inputs):
    marked.append(graph)
    return graph

torch.manual_seed(0)
with config.patch(joint_custom_pass=mark if sys.argv[1] == "with" else None):
    run = torch.compile(lambda x: (x @ x).sin().exp(), backend="inductor")
    run(torch.randn(8, 8, requires_grad=True)).sum().backward()
print(json.dumps({"hits": counters["aot_autograd"]["autograd_cache_hit"], "marked": len(marked)}))
"""


@pytest.mark.long
def test_9_a_cache_serves_what_was_compiled_without_the_marks(tmp_path: Path) -> None:
    def run(which: str, environment: dict[str, str]) -> dict[str, int]:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, which],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    environment = give_machine_code(tmp_path)
    assert run("without", environment) == {"hits": 0, "marked": 0}
    assert run("with", environment) == {"hits": 1, "marked": 0}
    take_machine_code(tmp_path)
