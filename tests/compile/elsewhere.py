"""A program for a process of its own: the passes on graphs that were traced for a device that is not the CPU.

There is no such device: tensors on it are fake ones, which say where they would be. Prints what it found as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from eager_offload.compile import boundary_of, insert_asynchronous, ops, sink_waits
from eager_offload.compile.insert import EXACT
from tests.compile.split import PARTITIONERS, Split, config_of, split, with_transfers
from tests.compile.test_insert import Attention

DEVICE = "elsewhere"


class Checked(Interpreter):
    """Runs a graph on fake tensors and compares each value with the one that its node is said to have."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(GraphModule(nn.Module(), graph))
        self.wrong: list[str] = []

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        said = n.meta.get("val")
        if isinstance(result, Tensor) and isinstance(said, Tensor):
            for name, ours, theirs in (
                ("device", said.device, result.device),
                ("size", said.size(), result.size()),
                ("stride", said.stride(), result.stride()),
                ("dtype", said.dtype, result.dtype),
            ):
                if ours != theirs:
                    self.wrong.append(f"{n}: {name} {theirs}, not {ours}")
        return result


def devices_of(*graphs: Graph) -> dict[str, list[str]]:
    """Where the results of our operations, and of everything else, are."""
    found: dict[str, set[str]] = {"offload": set(), "reload": set(), "others": set()}
    for graph in graphs:
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                kind = "offload" if EXACT in node.meta else "reload" if node.target is ops.reload else "others"
                found[kind].add(value.device.type)
    return {kind: sorted(types) for kind, types in found.items()}


def pairs(fake: AbstractContextManager[object]) -> dict[str, Any]:
    """What AOTAutograd traces, split in two."""
    report: dict[str, Any] = {}
    for partition in PARTITIONERS:
        for waits in (True, False):
            counts: list[int] = []

            def change(one: Split, waits: bool = waits, counts: list[int] = counts) -> None:
                choice = one.insert(config_of(tier="host"))
                counts.append(len(choice.groups))
                if not waits:
                    one.take(
                        sink_waits(insert_asynchronous(one.forward.graph), 1 << 20),
                        insert_asynchronous(one.backward.graph),
                    )

            with fake:
                model, x = on_device(Attention), on_device(lambda: torch.randn(2, 8, 16, requires_grad=True))
                one, run = split(model, x, change=change, partition=partition)
                run(x).square().sum().backward()
            report[f"{partition}, {'waits' if waits else 'asynchronous'}"] = {
                "groups": counts[0],
                "devices": devices_of(one.forward.graph, one.backward.graph),
                "gradients": sorted({p.grad.device.type for p in (x, *model.parameters()) if p.grad is not None}),
            }
    return report


def joint(fake: AbstractContextManager[object]) -> dict[str, Any]:
    """One graph of forward and backward, run node by node."""
    with fake:
        model, x = on_device(Attention), on_device(lambda: torch.randn(2, 8, 16, requires_grad=True))
        names = [name for name, _ in model.named_parameters()]
        seed = torch.ones(16)  # the host's own

        def step(x: Tensor, seed: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
            scale = seed * 2
            y = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))
            loss = (y * scale.to(DEVICE)).square().mean() + (scale.exp() * scale.sigmoid()).sum().to(DEVICE)
            return (loss, *torch.autograd.grad(loss, (x, seed, *parameters)))

        given = (x, seed.requires_grad_(), *model.parameters())
        module = make_fx(step, tracing_mode="fake")(*given)
        boundary = boundary_of(module.graph, num_outputs=1)
        moved, choice = with_transfers(module, boundary, config_of(tier="host"))
        checked = Checked(moved.graph)
        results = checked.run(*[torch.empty_like(one) for one in given], enable_io_processing=False)
    return {
        "groups": len(choice.groups),
        "devices": devices_of(moved.graph),
        "wrong": checked.wrong,
        "results": [one.device.type for one in results],
        "kept": sorted({reason.value for node, reason in choice.kept.items() if node.meta["val"].device.type == "cpu"}),
    }


def on_device(make: Callable[[], Any]) -> Any:
    with torch.device(DEVICE):
        return make()


def main() -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.autograd.set_multithreading_enabled(False):  # modes are those of a thread
        print(json.dumps({"pairs": pairs(fake), "joint": joint(fake)}))


if __name__ == "__main__":
    main()
