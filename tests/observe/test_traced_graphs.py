"""Traces of compiled code, and profiles of torch's own: what is seen of them, and that looking changes nothing."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.autograd.profiler
from torch import Tensor
from torch._dynamo.utils import counters

import eager_offload as eo
from eager_offload.trace_file import SliceKind, Trace, read_trace
from tests.compile.compiled import fresh_compiler
from tests.hazards.backends import DiskBackend
from tests.observe.steps import DEPTH, NBYTES, Net, inputs, nested, step


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """One that knows nothing, and of which nothing is known afterwards."""
    with fresh_compiler():
        yield
    counters.clear()


def compiled(offload: eo.Offload, net: Net) -> Any:
    return torch.compile(net, backend="aot_eager", fullgraph=True)


def traced(offload: eo.Offload, net: Any, path: Path) -> list[Tensor]:
    with offload.trace(path):
        return step(net, offload)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def assert_shows_graphs(trace: Trace) -> None:
    transfers = [one for one in trace.slices if one.kind in (SliceKind.OFFLOAD, SliceKind.RELOAD, SliceKind.PREFETCH)]
    out = sum(one.nbytes for one in transfers if one.kind is SliceKind.OFFLOAD)
    assert out == trace.stats["bytes_out"] > 0
    assert sum(one.nbytes for one in transfers) - out == trace.stats["bytes_in"] > 0
    assert {one.tier for one in transfers} == {"disk"}
    for track in {one.track for one in trace.slices}:
        assert nested([one for one in trace.slices if one.track == track])
    groups = [group for group in trace.saved if group.operation == "compiled graph"]
    assert sum(g.nbytes for g in groups if g.outcome == "offloaded") == trace.stats["offloaded_bytes"]
    assert sum(g.nbytes for g in trace.saved if g.outcome == "kept") == sum(trace.stats["kept_bytes"].values())
    assert {group.module for group in groups} == {"OptimizedModule"}
    assert max(one.without_offload for one in trace.memory) >= 2 * DEPTH * NBYTES
    assert trace.memory[-1].without_offload == trace.memory[-1].disk == 0
    assert next(one.name for one in trace.slices if one.track == "compute forward") == "OptimizedModule"
    assert "CompiledFunctionBackward" in {one.operation for one in trace.slices if one.track == "compute backward"}


def test_what_graphs_move_is_shown_and_nothing_is_compiled_for_it(path: Path, net: Net, disk: DiskBackend) -> None:
    offload = disk.offload(min_bytes=NBYTES)
    model = compiled(offload, net)
    expected, known = step(model, offload), graphs()
    offload.stats(synchronize=True)
    found = traced(offload, model, path)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert graphs() == known == 1, "looking has nothing compiled anew"
    step(model, offload)
    assert graphs() == known
    assert_shows_graphs(read_trace(path))


def test_what_is_compiled_first_inside_a_trace_holds_no_trace_of_it(path: Path, net: Net, disk: DiskBackend) -> None:
    offload = disk.offload(min_bytes=NBYTES)
    model = compiled(offload, net)
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        found = traced(offload, model, path)
    assert not [one for one in reported if "global hooks" in str(one.message)], "torch says nothing about its hooks"
    assert_shows_graphs(read_trace(path))
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(step(model, offload), found, strict=True))
    assert graphs() <= 2, "once more, when the hooks of the trace are gone"
    traced(offload, model, path)
    assert graphs() <= 2
    assert_shows_graphs(read_trace(path))


def test_a_graph_whose_tier_is_full_tells_what_stays(path: Path, disk: DiskBackend) -> None:
    offload = disk.offload(min_bytes=NBYTES, disk_budget=1)
    model = compiled(offload, Net())
    with pytest.warns(RuntimeWarning, match="no room"):
        traced(offload, model, path)
    trace = read_trace(path)
    assert sum(g.nbytes for g in trace.saved if g.reason == "budget") == trace.stats["kept_bytes"]["budget"] > 0
    assert trace.stats["demotions"]["budget"] > 0


# -- profiles of torch's own ----------------------------------------------------------------------------------------

RANGES = {f"eager_offload::{name}" for name in ("pack", "unpack", "offload", "prefetch", "reload")}


def profile(offload: eo.Offload, net: Net) -> dict[str, int]:
    """How often each range of the library comes in a profile of a step; early and late reloads count together."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with offload:
            loss = net(inputs())
        offload.stats(synchronize=True)  # all has left, and nothing is served on its way
        loss.backward()
    names = [one.name for one in profiler.events() if one.name.startswith("eager_offload::")]
    assert set(names) <= RANGES
    return dict(Counter(name.replace("::prefetch", "::reload") for name in names))


def test_a_profile_has_ranges_of_the_library(tmp_path: Path, net: Net, disk: DiskBackend) -> None:
    offload = disk.offload(min_bytes=NBYTES, prefetch_bytes=2 * NBYTES)
    found = profile(offload, net)
    stats = offload.stats(synchronize=True)
    assert found["eager_offload::pack"] == stats.saved_tensors
    assert found["eager_offload::offload"] == stats.offloaded_tensors > 0
    assert found["eager_offload::reload"] == stats.bytes_in // NBYTES > 0
    with offload.trace(tmp_path / "step.json"):
        assert set(profile(offload, net)) == set(found), "a trace and a profile go together"


def test_without_a_profiler_no_range_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, net: Net, disk: DiskBackend
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("a range costs time")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", never)
    offload = disk.offload(min_bytes=NBYTES, max_inflight_bytes=NBYTES)
    step(net, offload)
    with offload.trace(tmp_path / "step.json"):
        step(net, offload)
    assert offload.stats(synchronize=True).bytes_in > 0
