"""Traces of compiled code, and profiles of torch's own: what is seen of them, and that looking changes nothing."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import eager_offload as eo
from eager_offload.observe.timeline import SliceKind
from eager_offload.observe.trace import Trace, read_trace
from tests.compile.compiled import fresh_compiler
from tests.hazards.backends import DiskBackend
from tests.observe.steps import DEPTH, NBYTES, Net, assert_sound, inputs, of, step


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """One that knows nothing, and of which nothing is known afterwards."""
    with fresh_compiler():
        yield
    counters.clear()


def compiled(net: Net) -> torch.nn.Module:
    found: torch.nn.Module = torch.compile(net, backend="aot_eager", fullgraph=True)
    return found


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def assert_shows_graphs(trace: Trace) -> None:
    assert_sound(trace)
    assert min(trace.stats["bytes_out"], trace.stats["bytes_in"]) > 0
    assert {one.tier for one in of(trace, SliceKind.OFFLOAD, SliceKind.RELOAD, SliceKind.PREFETCH)} == {"disk"}
    groups = [group for group in trace.saved if group.operation == "compiled graph"]
    assert sum(g.nbytes for g in groups if g.outcome == "offloaded") == trace.stats["offloaded_bytes"]
    assert {group.module for group in groups} == {"OptimizedModule"}
    assert max(one.without_offload for one in trace.memory) >= 2 * DEPTH * NBYTES
    assert next(one.name for one in trace.slices if one.track == "compute forward") == "OptimizedModule"
    assert "CompiledFunctionBackward" in {one.operation for one in trace.slices if one.track == "compute backward"}


@pytest.mark.filterwarnings("ignore:eager_offload. compiled code waits:RuntimeWarning")
@pytest.mark.parametrize("compiled_inside", [False, True])
def test_what_graphs_move_is_shown_and_nothing_is_compiled_for_it(
    compiled_inside: bool, path: Path, net: Net, disk: DiskBackend
) -> None:
    """What is compiled inside a trace holds nothing of it: once more at most, when the trace's hooks are gone."""
    offload, model, found = disk.offload(min_bytes=NBYTES), compiled(net), list[list[Tensor]]()
    if not compiled_inside:
        found.append(step(model, offload))
        offload.stats(synchronize=True)
    with warnings.catch_warnings(record=True, action="always") as reported:
        for _ in range(2):
            with offload.trace(path):
                found.append(step(model, offload))
            assert_shows_graphs(read_trace(path))
            found.append(step(model, offload))
    assert not [one for one in reported if "global hooks" in str(one.message)], "torch says nothing about its hooks"
    assert graphs() <= 1 + compiled_inside
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))


@pytest.mark.filterwarnings("ignore:eager_offload. compiled code waits:RuntimeWarning")
def test_a_graph_whose_tier_is_full_tells_what_stays(path: Path, net: Net, disk: DiskBackend) -> None:
    offload = disk.offload(min_bytes=NBYTES, disk_budget=1)
    with pytest.warns(RuntimeWarning, match="no room"), offload.trace(path):
        step(compiled(net), offload)
    trace = read_trace(path)
    assert sum(g.nbytes for g in trace.saved if g.reason == "budget") == trace.stats["kept_bytes"]["budget"] > 0
    assert trace.stats["fallbacks"]["budget"] > 0


# -- profiles of torch's own ----------------------------------------------------------------------------------------


def profile(offload: eo.Offload, net: Net) -> dict[str, int]:
    """How often each range of the library comes in a profile of a step; early and late reloads count together."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with offload:
            loss = net(inputs())
        offload.stats(synchronize=True)  # all has left, and nothing is served on its way
        loss.backward()
    names = [one.name for one in profiler.events() if one.name.startswith("eager_offload::")]
    return dict(Counter(name.replace("::prefetch", "::reload") for name in names))


def test_a_profile_has_ranges_of_the_library_and_without_one_none_is_made(
    path: Path, net: Net, disk: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = disk.offload(min_bytes=NBYTES, prefetch_bytes=2 * NBYTES)
    found, stats = profile(offload, net), offload.stats(synchronize=True)
    names = {f"eager_offload::{name}" for name in ("pack", "unpack", "offload", "reload")}
    assert found.keys() == names
    assert found["eager_offload::pack"] == stats.saved_tensors
    assert found["eager_offload::offload"] == stats.offloaded_tensors > 0
    assert found["eager_offload::reload"] == stats.bytes_in // NBYTES > 0
    with offload.trace(path):
        assert profile(offload, net).keys() == names, "a trace and a profile go together"
    monkeypatch.setattr(torch.autograd.profiler, "record_function", None)
    with offload.trace(path):
        step(net, offload)
    step(net, offload)
    assert offload.stats(synchronize=True).bytes_in > stats.bytes_in
