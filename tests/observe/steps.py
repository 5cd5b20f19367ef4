"""A model with known saves, a step of it, and what has to hold for every trace of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.modules.module as hooked
from torch import Tensor, nn

import eager_offload as eo
from eager_offload.observe.timeline import Slice, SliceKind
from eager_offload.observe.trace import Trace, read_trace

DEPTH = 4
WIDTH = 64
#: Bytes of one activation.
NBYTES = WIDTH * WIDTH * 4
#: What a step saves: the input, and two results in each layer, of which one is the next layer's input.
SAVED = (1 + 2 * DEPTH) * NBYTES
FIELDS = {"min_bytes": NBYTES, "max_inflight_bytes": 2 * NBYTES, "prefetch_bytes": 2 * NBYTES}


class Layer(nn.Module):
    """Saves its input, ``tanh``'s result and ``exp``'s, and its weight, which is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh().exp()


class Net(nn.Module):
    """Layers, and a sum of squares outside of all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer() for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def inputs() -> Tensor:
    return torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)


def step(net: nn.Module, around: AbstractContextManager[object]) -> list[Tensor]:
    """Forward and backward; the gradients."""
    net.zero_grad()
    with around:
        loss = net(inputs())
    loss.backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def traced(offload: eo.Offload, path: Path, work: Callable[[], object]) -> Trace:
    with offload.trace(path):
        work()
    assert nothing_is_left(offload)
    trace = read_trace(path)
    assert trace.config == offload.config.to_dict()
    return trace


def traced_step(offload: eo.Offload, path: Path, net: nn.Module) -> Trace:
    """Of a step, which is the same one as without."""
    expected, found = step(net, nullcontext()), list[Tensor]()
    trace = traced(offload, path, lambda: found.extend(step(net, offload)))
    assert all(map(torch.equal, expected, found))
    return trace


def nothing_is_left(offload: eo.Offload) -> bool:
    return (
        not hooked._has_any_global_hook()
        and offload._offloaders.transfer_log.on_entry is None
        and offload.pack == offload._hooks.pack
        and not any("global hooks" in str(entry[1]) for entry in warnings.filters)
    )


def of(trace: Trace, *kinds: SliceKind) -> list[Slice]:
    return [one for one in trace.slices if one.kind in kinds]


def saved(trace: Trace, outcome: str, reason: str = "") -> int:
    return sum(group.nbytes for group in trace.saved if (group.outcome, group.reason) == (outcome, reason))


def assert_sound(trace: Trace) -> None:
    """What holds for every trace whose graphs are gone."""
    for track in {(one.device, one.track) for one in trace.slices}:
        assert_nested([one for one in trace.slices if (one.device, one.track) == track])
    assert all(-1e-6 <= one.start <= one.stop <= trace.seconds + 1e-6 for one in trace.slices)
    stats = trace.stats
    assert sum(one.nbytes for one in of(trace, SliceKind.OFFLOAD)) == stats["bytes_out"]
    assert sum(one.nbytes for one in of(trace, SliceKind.RELOAD, SliceKind.PREFETCH)) == stats["bytes_in"]
    assert saved(trace, "offloaded") == stats["offloaded_bytes"]
    assert saved(trace, "shared") == stats["shared_bytes"]
    assert {g.reason for g in trace.saved if g.nbytes} - {""} == set(stats["kept_bytes"])
    assert all(saved(trace, "kept", reason) == nbytes for reason, nbytes in stats["kept_bytes"].items())
    times = [one.seconds for one in trace.memory]
    assert times == sorted(times)
    assert trace.memory[-1][1:] == (0, 0, 0, 0), "the graphs are gone"
    assert trace.dropped == 0


def assert_nested(slices: list[Slice]) -> None:
    """Of any two slices of a track one is over before the other begins, or contains it."""
    ends: list[float] = []
    for one in sorted(slices, key=lambda one: (one.start, -one.seconds)):
        while ends and ends[-1] <= one.start + 2e-9:
            ends.pop()
        assert not ends or one.stop <= ends[-1] + 2e-9, f"{one} is cut"
        ends.append(one.stop)
