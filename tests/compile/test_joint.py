"""One graph of forward and backward, traced as a whole: where backward begins, what moves, and that it is exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import eager_offload as eo
from eager_offload.compile import boundary_of, insert
from tests.compile.compiled import fresh_compiler
from tests.compile.split import config_of, moving, reasons, stats_of, with_transfers
from tests.compile.test_insert import Attention, tokens
from tests.hazards.backends import assert_settled
from tests.proof.bits import same_bits


def training(model: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """A step as one function: its loss, then its gradients."""
    names = [name for name, _ in model.named_parameters()]

    def step(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        loss = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,)).square().mean()
        return (loss, *torch.autograd.grad(loss, (x, *parameters)))

    return step


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), nn.GELU(), Attention())


def traced(model: nn.Module, x: Tensor, mode: str = "fake") -> GraphModule:
    return make_fx(training(model), tracing_mode=mode)(x, *model.parameters())


@pytest.mark.parametrize(("mode", "waits"), [("fake", True), ("fake", False), ("symbolic", False)])
def test_a_joint_graph_is_exact(model: nn.Module, mode: str, waits: bool) -> None:
    config = config_of()
    module = traced(model, tokens(2, 8), mode)
    before = str(module.graph)
    moved, choice = with_transfers(module, boundary_of(module.graph, num_outputs=1), config, waits=waits)
    assert str(module.graph) == before
    assert len(choice.groups) > 10
    own = {node.name for node in module.graph.find_nodes(op="placeholder")}
    assert not moving(choice) & own
    assert {name for name, reason in reasons(choice).items() if reason == "parameter"} <= own
    assert set(reasons(choice).values()) <= {"parameter", "alive", "small"}
    for x in [tokens(2, 8)] + ([tokens(3, 5), tokens(2, 9)] if mode == "symbolic" else []):
        inputs = [x, *model.parameters()]
        earlier = stats_of(config)
        expected = training(model)(*inputs)
        with torch.no_grad():
            ours, theirs = moved(*inputs), module(*inputs)
        later = stats_of(config)
        assert all(map(same_bits, ours, theirs))
        assert all(map(same_bits, ours, expected))
        assert later.bytes_out > earlier.bytes_out
        assert later.bytes_in - earlier.bytes_in == later.bytes_out - earlier.bytes_out
        if mode == "fake":
            assert later.bytes_out - earlier.bytes_out == sum(group.nbytes for group in choice.groups)


def test_a_graph_without_a_backward_is_refused(model: nn.Module) -> None:
    module = traced(model, tokens(2, 8))
    with pytest.raises(eo.OffloadError, match="num_outputs=1"):
        boundary_of(module.graph, num_outputs=99)


def test_a_joint_graph_that_is_exported_and_compiled_for_an_offload_is_served_by_it(offload: eo.Offload) -> None:
    def run(around: AbstractContextManager[object]) -> list[Tensor | None]:
        torch.manual_seed(0)
        model, x = Attention(), tokens(2, 8)
        with ExitStack() as stack, around:
            compiled = aot_compile_joint_with_descriptors(aot_export_joint_with_descriptors(stack, model, (x,)))
        with offload:
            (result,) = tree_leaves(compiled(*model.parameters(), x))
        result.exp().sum().backward()
        return [result.detach(), x.grad, *(weight.grad for weight in model.parameters())]

    with fresh_compiler():
        expected = run(nullcontext())
        assert offload.stats().compiled_regions == 0
        assert all(map(same_bits, run(insert.compiling_for(offload.config_key)), expected))
    stats = assert_settled(offload)
    assert stats.compiled_regions == 1
    assert stats.bytes_in > 0
