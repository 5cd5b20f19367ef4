"""What is said of a run: when, with which value for which knob, and when not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import eager_offload as eo
from eager_offload.config import size_literal
from eager_offload.observe.advice import advise
from eager_offload.stats import Counters, PlanOutcome, Relief

MIB, GIB = 1 << 20, 1 << 30
#: A run with nothing to be said about.
FINE: dict[str, Any] = {
    "steps": 10,
    "saved_tensors": 100,
    "saved_bytes": 10 * GIB,
    "offloaded_tensors": 80,
    "offloaded_bytes": 8 * GIB,
    "kept_bytes": {"parameter": 2 * GIB},
    "reloaded_bytes": 8 * GIB,
    "bytes_out": 8 * GIB,
    "bytes_in": 8 * GIB,
    "device_bytes_peak": 2 * GIB,
    "without_offload_bytes_peak": 8 * GIB,
    "seconds": 100.0,
    "stall_seconds": 1.0,
    "out_seconds": 8.0,
    "in_seconds": 4.0,
}


FELL = "Memory fell: at most 2.0 GiB of saved tensors on the device, 8.0 GiB without offload (-75 %)."


def said(stats: dict[str, Any], config: dict[str, Any]) -> tuple[str, ...]:
    """Of a run that is fine but for these fields of the stats; what ``"auto"`` came to are windows of 256 MiB.

    What is said of memory, of which there is a table of its own, is left out where it has fallen.
    """
    given = eo.OffloadConfig(**config)
    sizes = {field: getattr(given, field) for field in ("max_inflight_bytes", "prefetch_bytes")}
    in_force = {field: 256 * MIB if size == "auto" else size for field, size in sizes.items()}
    first, *others = advise(eo.OffloadStats(**{**FINE, **in_force, **stats}), given)
    return tuple(others) if first == FELL else (first, *others)


def kept(reason: str, nbytes: int) -> dict[str, Any]:
    return {"kept_bytes": {"parameter": 2 * GIB, reason: nbytes}}


FULL = {"demotions": {"budget": 2}, **kept("budget", GIB)}
PLAN = PlanOutcome(3 * GIB, 0.5)
WAITS = {"stall_seconds": 5.0, "window_stall_seconds": 1.0}
#: What is to be said of a run, and how it begins and goes on; nothing else is said of it.
SAYS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {}, ["Nothing held this run up: compute waited 1.0 % of the time."]),
    ({"stall_seconds": 0.0, "seconds": 0.0}, {}, ["Nothing held this run up: compute waited 0.0 % of the time."]),
    ({"foreign_hooks": 1}, {}, ["Other saved-tensor hooks", "Enter `with offload:` inside theirs"]),
    ({"empty_forwards": 1, "saved_tensors": 0}, {}, ["Other saved-tensor hooks"]),
    ({"empty_forwards": 1}, {}, ["Nothing held this run up"]),
    ({"demotions": {"write_failed": 1}}, {}, ["Once a write to a tier failed", "disk_path"]),
    ({"demotions": {"write_failed": 1234}}, {}, ["1,234 times a write"]),
    (
        {**FULL, "disk_bytes_peak": 3 * GIB},
        {"tier": "disk"},
        ["2 times no tier had room, and 1.0 GiB stayed", "Raise disk_budget above the 3.0 GiB of the peak"],
    ),
    (FULL, {"tier": "disk"}, ["2 times no tier", "the first warning tells why. Look after the disk"]),
    (
        {**FULL, "host_bytes_peak": 5 * GIB},
        {},
        ["2 times no tier", "Raise host_budget above 5.0 GiB, or give a disk_path to spill to"],
    ),
    ({**FULL, "host_bytes_peak": 5 * GIB}, {"tier": "host"}, ["2 times no tier", "Raise host_budget above 5.0 GiB."]),
    (
        {"demotions": {"host_to_disk": 3}, "host_bytes_peak": GIB},
        {},
        ["3 times host memory was full", "raise host_budget above 1.0 GiB"],
    ),
    ({"demotions": {"unpinned": 1}}, {}, ["Compiled code waits", "offload.compile(model, ...)"]),
    ({"demotions": {"uncompiled": 1}}, {}, ["Compiled code waits"]),
    (
        {"stall_seconds": 20.0, "window_stall_seconds": 15.0, "out_seconds": 50.0, "in_seconds": 30.0},
        {},
        [
            "Bandwidth is the limit: compute waited 20 % of the time, while transfers ran 50 % of the time at 163.8 ",
            'To move less, policy="free" moves what the link hides and no more; or checkpoint a part of the model, or '
            "put `with eo.no_offload():` around modules that compute little.",
        ],
    ),
    (
        {"stall_seconds": 20.0, "in_seconds": 60.0, "disk_bytes_peak": GIB},
        {"min_bytes": 0},
        ["Bandwidth is the limit", "A list of paths on several disks as disk_path"],
    ),
    (
        {"stall_seconds": 5.0, "window_stall_seconds": 4.0},
        {"max_inflight_bytes": "64MiB"},
        [
            "Compute waited 5.0 % of the time, mostly in forward for room in the in-flight window.",
            'Where memory allows, raise max_inflight_bytes from 64.0 MiB to "128MiB".',
        ],
    ),
    (WAITS, {"prefetch_bytes": "100MiB"}, ["Compute waited", 'raise prefetch_bytes from 100.0 MiB to "200MiB"']),
    (WAITS, {"prefetch_bytes": 0}, ["Compute waited", 'from 0 B to "64MiB"']),
    *(
        (
            {"stall_seconds": 5.0, "window_stall_seconds": window, "out_seconds": 0.0, "in_seconds": 0.0},
            {},
            ["Compute waited", "If that changes little, bandwidth is the limit: checkpoint a part of the model."],
        )
        for window in (5.0, 0.0)
    ),
    (
        kept("alive", 4 * GIB),
        {},
        ["409.6 MiB a step (40 % of what is saved) are of tensors that something else keeps alive"],
    ),
    (kept("alive", GIB // 2), {}, ["Nothing held"]),
    ({"demotions": {"over_budget": 3}}, {"device_budget": "20GiB"}, ["3 forwards had a peak above device_budget"]),
    ({"demotions": {"over_budget": 3}, "keep_last_bytes": 9}, {"device_budget": "20GiB"}, ["Nothing held"]),
    (kept("newest", 4 * GIB), {"device_budget": "20GiB"}, ["Nothing held"]),  # as many as it has room for
    (kept("newest", 4 * GIB), {"policy": "free"}, ["Nothing held"]),  # as many as it takes
    (kept("small", GIB), {}, ["Nothing held"]),  # memory is what says it
    ({"failed_forwards": 2}, {}, ["2 times a forward ended in an error", "offload.reset_stats()"]),
    ({"failed_forwards": 1, "failed_bytes": 3 * GIB, "released_bytes": 4 * GIB}, {}, ["Once a forward ended in an"]),
    ({**kept("newest", 4 * GIB), "stall_seconds": 10.0}, {}, ["Compute waited"]),
    (kept("device", GIB), {}, ["102.4 MiB", "accelerator"]),
    (kept("layout", GIB), {}, ["102.4 MiB", "for their layout"]),
    (
        {"released_bytes": 4 * GIB},
        {},
        ["4.0 GiB (50 % of what was offloaded) were never asked for", "torch.no_grad()"],
    ),
    ({"forwarded_bytes": 4 * GIB}, {}, ["4.0 GiB (50 %", 'keep_last_bytes="512MiB"']),
    ({"forwarded_bytes": 4 * GIB}, {"device_budget": "20GiB"}, ["4.0 GiB", "A larger device_budget leaves them"]),
    ({"forwarded_bytes": 4 * GIB}, {"max_slowdown": 0.1}, ["Nothing held"]),
    (
        {"stall_seconds": 20.0, "out_seconds": 50.0, "in_seconds": 30.0},
        {"policy": "free"},
        ["Bandwidth is the limit", "To move less, checkpoint a part of the model"],
    ),
    ({"forwarded_bytes": 4 * GIB}, {"keep_last_bytes": 0}, ["4.0 GiB", 'keep_last_bytes="auto" learns']),
    (
        {"disk_bytes_written": 20 * 10**9},
        {},
        ["17 TB a day would be written to disk, which wears it: compare with what the disk is rated for."],
    ),
    ({"disk_bytes_written": 20 * 10**9, "host_bytes_peak": GIB}, {}, ["17 TB a day", "host_budget keeps more"]),
    ({"disk_bytes_written": 20 * 10**9, "seconds": 59.0}, {}, ["Nothing held"]),  # too short to say
    # 80 MiB a step: no window is too small for it
    ({**WAITS, "steps": 100}, {}, ["Compute waited", "windows hold most of what a step offloads"]),
    ({**WAITS, "window_stall_seconds": 5.0, "steps": 100}, {}, ["Compute waited", "windows hold most of what a step"]),
    ({"keeps_freed_memory": True}, {}, ["Freed memory of the CPU stays", "eo.release_freed_memory()"]),
    ({"keeps_freed_memory": True, "steps": 1000}, {}, ["Nothing held"]),
    # in the terms of a plan
    ({"plan": PLAN}, {}, ["Nothing held"]),
    ({"plan": PLAN, "demotions": {"over_budget": 1}}, {}, ["Once the peak was found above", "predicts 3.0 GiB. Name"]),
    (
        {"plan": replace(PLAN, peak_bytes=4 * GIB), "demotions": {"over_budget": 2}},
        {},
        ["2 times the peak was found", "predicts 3.0 GiB, 4.0 GiB were measured of it. Name what else is on the"],
    ),
    (
        {"plan": PLAN, "plan_misses": {"size": 2, "order": 1}, "followed_forwards": 20},
        {},
        ["3 forwards differed from what was planned (order 1, size 2), where 20 began to follow it: plan with the"],
    ),
    ({"plan": PLAN, "plan_misses": {"size": 1}, "followed_forwards": 20}, {}, ["Nothing held"]),  # the last batch
    ({"plan_misses": {"size": 3}, "followed_forwards": 1}, {}, ["Nothing held"]),  # of plans that were recorded
    (
        {"plan": PLAN, "stall_seconds": 20.0, "out_seconds": 50.0, "in_seconds": 30.0},
        {},
        ["Compute waited 20 % of the time. The plan predicted a step of 0.5 s: plan for a larger device_budget"],
    ),
    (
        {"plan": replace(PLAN, step_seconds=0.75), **WAITS},
        {},
        ["Compute waited 5.0 % of the time.", "a step of 0.5 s, and 0.75 s were measured: plan for a larger"],
    ),
    ({"plan": PLAN, **kept("newest", 4 * GIB)}, {}, ["Nothing held"]),  # as it says
    ({"plan": PLAN, **kept("small", GIB)}, {"min_bytes": "4MiB"}, ["Nothing held"]),
    ({"plan": PLAN, "forwarded_bytes": 4 * GIB}, {}, ["4.0 GiB (50 %", "A plan for a larger device_budget leaves"]),
]


@pytest.mark.parametrize(("how", "also"), [("least", ""), ("max", 'policy="least" and ')])
def test_a_plan_is_asked_which_budget_waits_less(how: str, also: str) -> None:
    class Planned:
        policy, relief = how, Relief(38 * GIB, 0.042)
        peak_bytes, step_seconds = PLAN.predicted_peak_bytes, PLAN.predicted_step_seconds
        without_offload_seconds = None

    counters = Counters()
    counters.expect(Planned())
    stats = counters.snapshot(eo.OffloadConfig())
    for name, value in {**FINE, "stall_seconds": 53.0}.items():
        object.__setattr__(stats, name, value)
    first, advice = stats.advice
    assert first == FELL
    assert advice.startswith("Compute waited 53 % of the time. The plan predicted a step of 0.5 s: plan with " + also)
    assert advice.endswith('device_budget="38GiB", and it waits for about 4.2 % of it by the same prediction.')
    assert "planned" not in stats.to_dict()


@pytest.mark.parametrize(
    ("stats", "config", "parts"), SAYS, ids=[" ".join(parts[-1].split()[:6]) for *_, parts in SAYS]
)
def test_one_thing_is_said(stats: dict[str, Any], config: dict[str, Any], parts: list[str]) -> None:
    (sentence,) = said(stats, config)
    assert sentence.startswith(parts[0])
    assert all(part in sentence for part in parts)
    for knob, value in re.findall(r'(\w+)(?:=| from [\d.]+ \w+ to )"(\w+)"', sentence):
        eo.OffloadConfig(**{knob: value})  # such as a config takes


@pytest.mark.parametrize(("fields", "variable"), [({"enabled": False}, None), ({}, "0")])
def test_of_a_run_that_was_switched_off(
    fields: dict[str, Any], variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("EAGER_OFFLOAD", variable)
    offload, x = eo.Offload(**fields), torch.randn(4, requires_grad=True)
    with offload:
        x.exp().sum().backward()
    stats = offload.stats()
    assert [sentence.split(",")[0] for sentence in stats.advice] == ["Offload is switched off"]
    assert str(stats).startswith("switched off\n")


def test_of_no_run_at_all() -> None:
    (sentence,) = advise(eo.OffloadStats(), eo.OffloadConfig())
    assert sentence == "No saved tensor was seen. Put `with offload:` around the forward, under grad mode."
    assert eo.OffloadStats(disk_bytes_written=1).terabytes_a_day == 0


def test_what_matters_most_is_said_first() -> None:
    bad = {
        "stall_seconds": 20.0,
        "out_seconds": 60.0,
        "demotions": {"write_failed": 1},
        "kept_bytes": {"alive": 2 * GIB, "failed": GIB},
        "device_bytes_peak": 8 * GIB,
    }
    assert [sentence.split()[0] for sentence in said(bad, {})] == ["Memory", "Once", "Bandwidth", "204.8"]


@pytest.mark.parametrize(("nbytes", "text"), [(GIB, "1GiB"), (3 * MIB, "3MiB"), (1025, "1025B"), (5 << 10, "5KiB")])
def test_knobs_are_exact(nbytes: int, text: str) -> None:
    assert size_literal(nbytes) == text
    assert eo.OffloadConfig(min_bytes=text).min_bytes == nbytes
