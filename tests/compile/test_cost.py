"""How long operators are taken to need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

import eager_offload as eo
from eager_offload.compile import ops
from eager_offload.compile.decide import bandwidth_of, flops_of, traffic_of
from eager_offload.planning.machine import UNKNOWN_BANDWIDTH
from eager_offload.runtime.base import Direction
from tests.simulation.simulated import SimulatedRuntime

CPU = torch.device("cpu")


def nodes_of(function: object, *inputs: Tensor, mode: str = "fake") -> dict[str, Node]:
    """The nodes of a traced function by the names of their operators."""
    graph = make_fx(function, tracing_mode=mode)(*inputs).graph
    return {str(node.target): node for node in graph.nodes}


def attention(is_causal: bool) -> Callable[[Tensor], Tensor]:
    return lambda query: F.scaled_dot_product_attention(query, query + 1, query + 2, is_causal=is_causal)


#: A function, its inputs, a part of the name of its operator, and the operations and bytes of that.
CASES: dict[str, tuple[Callable[..., object], list[Tensor], str, int, int | None]] = {
    "a product": (torch.mm, [torch.ones(8, 16), torch.ones(16, 4)], "mm", 2 * 8 * 16 * 4, 4 * (128 + 64 + 32)),
    "a sine": (torch.sin, [torch.ones(8, 4)], "sin", 0, 4 * 2 * 8 * 4),
    "a view": (torch.t, [torch.ones(8, 4)], "t.default", 0, 0),
    "an output": (torch.sin, [torch.ones(8, 4)], "output", 0, 0),
    "a convolution": (
        *(torch.conv2d, [torch.ones(1, 2, 6, 6), torch.ones(3, 2, 3, 3)], "convolution"),
        *(2 * (4 * 4) * 3 * 2 * 3 * 3, None),
    ),
    "an attention": (attention(False), [torch.ones(2, 3, 16, 8)], "attention", 2 * (2 * 2 * 3 * 16 * 16 * 8), None),
    "a causal one": (attention(True), [torch.ones(2, 3, 16, 8)], "attention", 2 * 2 * 3 * 16 * 16 * 8, None),
    "memory that is not filled": (torch.empty_like, [torch.ones(64)], "empty", 0, 0),
    "an offload": (lambda x: ops.reload(ops.offload(x), CPU), [torch.ones(64)], "offload.offload", 0, 0),
    "a reload": (lambda x: ops.reload(ops.offload(x), CPU), [torch.ones(64)], "offload.reload", 0, 0),
}


@pytest.mark.parametrize(("function", "inputs", "name", "flops", "traffic"), CASES.values(), ids=CASES.keys())
def test_an_operator_counts_its_operations_and_its_bytes(
    function: Callable[..., object], inputs: list[Tensor], name: str, flops: int, traffic: int | None
) -> None:
    (node,) = (node for target, node in nodes_of(function, *inputs).items() if name in target)
    assert flops_of(node) == flops
    assert traffic is None or traffic_of(node) == traffic


def test_the_bandwidth_is_that_of_the_offload_that_is_active() -> None:
    runtime = SimulatedRuntime(out_bandwidth=7.0, in_bandwidth=9.0)
    offload = eo.Offload(runtime=runtime, tier="host")
    with offload:
        assert bandwidth_of(CPU, Direction.OUT, offload.config_key) == 7.0
        assert bandwidth_of(CPU, Direction.IN, offload.config_key) == 9.0
    offload.close()


def test_a_disk_is_measured_while_a_compiler_traces_and_counted_nowhere(tmp_path: Path) -> None:
    offload = eo.Offload(tier="disk", disk_path=tmp_path, min_bytes=5)
    with FakeTensorMode(), offload:
        assert bandwidth_of(CPU, Direction.OUT, offload.config_key) != UNKNOWN_BANDWIDTH
        back = bandwidth_of(CPU, Direction.IN, offload.config_key)
        assert back == bandwidth_of(CPU, Direction.IN, offload.config_key) > 1e4
    assert offload.stats().disk_bytes_peak == 0
    offload.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_a_link_that_cannot_be_measured_has_a_bandwidth_all_the_same(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> float:
        raise torch.OutOfMemoryError("no room")

    runtime = SimulatedRuntime()
    monkeypatch.setattr(runtime, "measure_link", full)
    offload = eo.Offload(runtime=runtime, tier="host", min_bytes=3)
    with offload:
        assert bandwidth_of(CPU, direction, offload.config_key) > 0
        assert bandwidth_of(torch.device("meta"), direction, "") > 0, "nothing serves it"
    offload.close()
