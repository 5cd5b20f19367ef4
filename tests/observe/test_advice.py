"""What is said of a run: when, with which value for which knob, and when not."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import eager_offload as eo
from eager_offload.observe.advice import advise
from eager_offload.stats import PlanOutcome, Relief

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


NOTHING = "Nothing held this run up: compute waited 1.0 % of the time."
FULL = {"fallbacks": {"budget": 2}, **kept("budget", GIB)}
FULL_HOST = {**FULL, "host_bytes_peak": 5 * GIB}
BUSY = {"stall_seconds": 20.0, "out_seconds": 50.0, "in_seconds": 30.0}
WAITS = {"stall_seconds": 5.0, "window_stall_seconds": 1.0}
IN_FORWARD = {"stall_seconds": 5.0, "window_stall_seconds": 4.0}
UNTIMED = {"out_seconds": 0.0, "in_seconds": 0.0}
VAIN = {"forwarded_bytes": 4 * GIB}
WRITES = {"disk_bytes_written": 20 * 10**9}
OVER = {"fallbacks": {"over_budget": 3}}
BUDGET = {"device_budget": "20GiB"}
PLAN = PlanOutcome(3 * GIB, 0.5)
PLANNED = {"plan": PLAN}
PEAK, TOOK = replace(PLAN, peak_bytes=4 * GIB), replace(PLAN, step_seconds=0.75)
MISSES = {"table_misses": {"size": 2, "order": 1}, "table_forwards": 20}
#: What is to be said of a run, in its parts, of which the first begins it; nothing else is said.
SAYS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, NOTHING),
    ({"foreign_hooks": 1}, {}, "Other saved-tensor hooks|Enter `with offload:` inside theirs"),
    ({"empty_forwards": 1, "saved_tensors": 0}, {}, "Other saved-tensor hooks"),
    ({"empty_forwards": 1}, {}, NOTHING),
    ({"saved_tensors": 0}, {}, "No saved tensor was seen. Put `with offload:` around the forward, under grad mode."),
    ({"failed_forwards": 2}, {}, "2 times a forward ended in an error|offload.reset_stats()"),
    ({"failed_forwards": 1, "failed_bytes": 3 * GIB, "released_bytes": 4 * GIB}, {}, "Once a forward ended in an"),
    # tiers
    ({"fallbacks": {"write_failed": 1}}, {}, "Once a write to a tier failed|disk_path"),
    ({"fallbacks": {"pageable": 3}}, {}, "3 times host memory could not be pinned|1.2 to 2.6 times as long|doctor"),
    ({**FULL, "disk_bytes_peak": 3 * GIB}, {}, "2 times no tier had room, and 1.0 GiB|disk_budget above the 3.0 GiB"),
    (FULL, {"tier": "disk"}, "2 times no tier|the first warning tells why. Look after the disk"),
    (FULL_HOST, {}, "2 times no tier|Raise host_budget above the 5.0 GiB of the peak, or give a disk_path to spill to"),
    (FULL_HOST, {"tier": "host"}, "2 times no tier|Raise host_budget above the 5.0 GiB of the peak."),
    (FULL, {"disk_budget": "4MiB"}, "2 times no tier|Raise disk_budget above 4MiB."),
    (FULL_HOST, {"tier": "host", "host_budget": "5GiB"}, "2 times no tier|Raise host_budget above 5GiB."),
    (
        {**FULL_HOST, "disk_bytes_peak": GIB},
        {"host_budget": "6GiB", "disk_budget": GIB},
        "2 times no tier|Raise host_budget above 6GiB or disk_budget above 1.0 GiB, or free",
    ),
    (
        {"fallbacks": {"host_to_disk": 3}, "host_bytes_peak": GIB},
        {},
        "3 times host|raise host_budget above the 1.0 GiB of the peak",
    ),
    ({"fallbacks": {"unpinned": 1}}, {}, "Compiled code waits|offload.compile(model, ...)"),
    (OVER, BUDGET, "3 forwards had a peak above device_budget"),
    ({**OVER, "keep_last_bytes": 9}, BUDGET, NOTHING),  # it has come down since
    # waits
    (
        BUSY,
        {},
        'Bandwidth is the limit: compute waited 20 %|50 % of the time at 163.8 |To move less, set policy="free"',
    ),
    (BUSY, {"policy": "free"}, "Bandwidth is the limit|To move less, checkpoint a part of the model"),
    (IN_FORWARD, {"max_inflight_bytes": "64MiB"}, 'Compute waited 5.0 %|raise max_inflight_bytes|64.0 MiB to "128MiB"'),
    (WAITS, {"prefetch_bytes": "100MiB"}, 'Compute waited|raise prefetch_bytes from 100.0 MiB to "200MiB"'),
    ({**WAITS, **UNTIMED}, {}, "Compute waited|mostly in backward|If that changes little, bandwidth is the limit"),
    (
        {**WAITS, "steps": 100},
        {},
        "Compute waited|windows hold most of the bytes that a step offloads",
    ),  # which is 80 MiB
    # what stays, and what moves in vain
    (kept("alive", 4 * GIB), {}, "409.6 MiB a step (40 % of the saved bytes) are of tensors that something else keeps"),
    (kept("device", GIB), {}, "102.4 MiB|accelerator"),
    (kept("layout", GIB), {}, "102.4 MiB|because of their layout"),
    (kept("newest", 4 * GIB), BUDGET, NOTHING),  # as many as it has room for
    ({"released_bytes": 4 * GIB}, {}, "4.0 GiB (50 % of the offloaded bytes) were never unpacked|torch.no_grad()"),
    (VAIN, {}, '4.0 GiB (50 %|keep_last_bytes="512MiB"'),
    (VAIN, BUDGET, "4.0 GiB|A larger device_budget keeps them"),
    (VAIN, {"keep_last_bytes": 0}, '4.0 GiB|keep_last_bytes="auto" finds'),
    (WRITES, {}, "17 TB a day would be written to disk, which wears it: compare this with the disk's rating."),
    ({**WRITES, "host_bytes_peak": GIB}, {}, "17 TB a day|host_budget keeps more"),
    ({**WRITES, "seconds": 59.0}, {}, "Nothing held"),  # too short to say
    ({"keeps_freed_memory": True}, {}, "Freed memory of the CPU stays|eo.release_freed_memory()"),
    # in the terms of a plan
    (PLANNED | {"fallbacks": {"over_budget": 1}}, {}, "Once the peak was found above|predicts 3.0 GiB. Name"),
    ({"plan": PEAK, **OVER}, {}, "3 times the peak|predicts 3.0 GiB, 4.0 GiB were measured"),
    (PLANNED | MISSES, {}, "3 of 20 forwards differed from those that they began like (order 1, size 2)"),
    (PLANNED | BUSY, {}, "Compute waited 20 %|a step of 0.5 s: plan for a larger device_budget"),
    ({"plan": TOOK, **WAITS}, {}, "Compute waited|a step of 0.5 s, and 0.75 s were measured"),
    (PLANNED | VAIN, {}, "4.0 GiB (50 %|A plan for a larger device_budget keeps"),
]


@pytest.mark.parametrize(("stats", "config", "says"), SAYS, ids=[" ".join(says.split()[:6]) for *_, says in SAYS])
def test_one_thing_is_said(stats: dict[str, Any], config: dict[str, Any], says: str) -> None:
    (sentence,) = said(stats, config)
    assert_says(sentence, says)
    for knob, value in re.findall(r'(\w+)(?:=| from [\d.]+ \w+ to )"(\w+)"', sentence):
        eo.OffloadConfig(**{knob: value})  # such as a config takes


def assert_says(sentence: str, says: str) -> None:
    begins, *parts = says.split("|")
    assert sentence.startswith(begins)
    assert [part for part in parts if part not in sentence] == []


def test_a_plan_is_asked_which_budget_waits_less() -> None:
    stats = eo.OffloadStats(**{**FINE, **PLANNED, "stall_seconds": 53.0})
    planned: Any = SimpleNamespace(policy="max", relief=Relief(38 * GIB, 0.042))
    stats._know(eo.OffloadConfig(), planned)
    relief = 'plan with policy="least" and device_budget="38GiB", and it waits for about 4.2 % of it by the same'
    assert_says(stats.advice[1], f"Compute waited 53 % of the time. The plan predicted a step of 0.5 s: {relief}")


def test_of_a_run_that_was_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [eo.Offload(enabled=False).stats()]
    monkeypatch.setenv("EAGER_OFFLOAD", "0")
    for stats in (*found, eo.Offload().stats()):
        assert [sentence.split(",")[0] for sentence in stats.advice] == ["Offload is switched off"]
        assert str(stats).startswith("switched off\n")


def test_what_matters_most_is_said_first() -> None:
    failed = {"fallbacks": {"write_failed": 1234}, "kept_bytes": {"alive": 2 * GIB, "failed": GIB}}
    found = said({**BUSY, **failed, "device_bytes_peak": 8 * GIB}, {})
    assert [sentence.split()[0] for sentence in found] == ["Memory", "1,234", "Bandwidth"]
    assert "204.8 MiB are of tensors that something else keeps" in found[0], "the reason with most bytes"


# -- memory -----------------------------------------------------------------------------------------------------------


MOVED = {"offloaded_bytes": 96 * MIB, "device_bytes_peak": 100 * MIB, "without_offload_bytes_peak": 100 * MIB}
STAYS = {**MOVED, "kept_bytes": {"newest": 99 * MIB}}
LOWER = {**MOVED, "device_bytes_peak": 24 * MIB}
NO_ROOM = {**MOVED, "device_bytes_peak": 92 * MIB, "kept_bytes": {"budget": 60 * MIB}, "fallbacks": {"budget": 15}}
IN_VAIN = {**LOWER, "released_bytes": 96 * MIB}
FREE = {"kept_bytes": {"newest": 100 * MIB}, "keep_last_bytes": GIB}
SMALL, REGION = {"kept_bytes": {"small": MIB}}, {"kept_bytes": {"region": MIB}}
#: The stats of a step and its config; what the first line says, in its parts.
OF_MEMORY: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LOWER, {}, "Memory fell: at most 24.0 MiB|100.0 MiB without offload (-76 %)."),
    (STAYS, {"keep_last_bytes": "1GiB"}, "Memory hardly fell: at most 100.0 MiB|(0 %), since |keep_last_bytes is 1GiB"),
    (NO_ROOM, {}, "Memory hardly fell|found no room in any tier"),
    (MOVED | {"compiled_regions": 3}, {}, "Memory hardly fell|since windows of"),
    (SMALL, {}, "Memory did not fall: nothing moved, because of the 100.0 MiB|min_bytes, which is 1.0 MiB"),
    (FREE, {"policy": "free"}, 'Memory did not fall|policy="free" has not found'),
    (REGION, {"skip": ["*"]}, "Memory did not fall|in a place that is exempt: in modules that skip names"),
    (LOWER | {"copies_within_host": True}, {"tier": "host"}, 'Memory did not fall|within host|tier="auto"'),
    (IN_VAIN, {}, "Memory was moved in vain: no backward"),
    (IN_VAIN | {"failed_forwards": 1, "failed_bytes": 96 * MIB}, {}, "Memory fell"),
]


@pytest.mark.parametrize(("counted", "config", "says"), OF_MEMORY)
def test_the_first_line_says_what_became_of_memory(counted: dict[str, Any], config: dict[str, Any], says: str) -> None:
    saved = {"saved_tensors": 25, "saved_bytes": 100 * MIB, "steps": 1, "seconds": 100.0}
    stats = eo.OffloadStats(**{**saved, **counted})
    stats._know(eo.OffloadConfig(**config), None)
    first, *others = stats.advice
    assert_says(first, says)
    assert first.startswith("Memory fell") or not any("Nothing held" in one for one in others)
