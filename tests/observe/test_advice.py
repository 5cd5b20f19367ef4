"""What is said of a run, rule by rule: when, with which value for which knob, and when not."""

from __future__ import annotations

from typing import Any

import pytest

import eager_offload as eo
from eager_offload.observe import advice
from eager_offload.observe.advice import RULES, advise

MIB = 1 << 20
GIB = 1 << 30
#: A run with nothing to be said about.
FINE: dict[str, Any] = {
    "saved_tensors": 100,
    "saved_bytes": 10 * GIB,
    "offloaded_tensors": 80,
    "offloaded_bytes": 8 * GIB,
    "kept_bytes": {"parameter": 2 * GIB},
    "reloaded_bytes": 8 * GIB,
    "bytes_out": 8 * GIB,
    "bytes_in": 8 * GIB,
    "seconds": 100.0,
    "stall_seconds": 1.0,
    "out_seconds": 8.0,
    "in_seconds": 4.0,
}


def stats(**fields: Any) -> eo.OffloadStats:
    return eo.OffloadStats(**{**FINE, **fields})


def config(**fields: Any) -> eo.OffloadConfig:
    return eo.OffloadConfig(**fields)


def kept(reason: str, nbytes: int, **others: Any) -> eo.OffloadStats:
    return stats(kept_bytes={"parameter": 2 * GIB, reason: nbytes}, **others)


def test_a_run_that_is_fine_hears_so_and_nothing_else() -> None:
    assert advise(stats(), config()) == ("Nothing held this run up: compute waited 1.0 % of the time.",)
    assert advise(stats(stall_seconds=0.0, seconds=0.0), config()) == (
        "Nothing held this run up: compute waited 0.0 % of the time.",
    )


def test_a_run_that_moved_nothing_hears_that() -> None:
    only_parameters = stats(offloaded_tensors=0, offloaded_bytes=0)
    assert advise(only_parameters, config()) == ("Nothing has left yet: all that was saved is among what has to stay.",)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_silent_about_a_run_that_is_fine(rule: advice.Rule) -> None:
    assert rule(stats(), config()) is None


def test_no_saved_tensor() -> None:
    said = advice.nothing_was_saved(eo.OffloadStats(), config())
    assert said == "No saved tensor was seen. Put `with offload:` around the forward, under grad mode."
    assert advice.nothing_was_saved(eo.OffloadStats(empty_forwards=1), config()) is None, "that has a rule of its own"


@pytest.mark.parametrize("fields", [{"foreign_hooks": 1}, {"empty_forwards": 1, "saved_tensors": 0}])
def test_hooks_of_others(fields: dict[str, int]) -> None:
    said = advice.hidden_by_others(stats(**fields), config())
    assert said is not None
    assert "Enter `with offload:` inside theirs" in said


def test_an_empty_forward_among_many_is_nothing_to_speak_of() -> None:
    assert advice.hidden_by_others(stats(empty_forwards=1), config()) is None


@pytest.mark.parametrize(("count", "times"), [(1, "Once a write"), (1234, "1,234 times a write")])
def test_failed_writes(count: int, times: str) -> None:
    said = advice.failed_writes(stats(demotions={"write_failed": count}), config())
    assert said is not None
    assert said.startswith(times)
    assert "disk_path" in said


@pytest.mark.parametrize(
    ("fields", "peaks", "knob"),
    [
        ({"tier": "disk"}, {"disk_bytes_peak": 3 * GIB}, "Raise disk_budget above the 3.0 GiB of the peak"),
        ({"tier": "disk"}, {}, "the first warning tells why. Look after the disk"),
        ({}, {"host_bytes_peak": 5 * GIB}, "Raise host_budget above 5.0 GiB, or give a disk_path to spill to"),
        ({"tier": "host"}, {"host_bytes_peak": 5 * GIB}, "Raise host_budget above 5.0 GiB."),
    ],
)
def test_a_budget_that_is_used_up(fields: dict[str, Any], peaks: dict[str, int], knob: str) -> None:
    full = stats(demotions={"budget": 2}, kept_bytes={"budget": GIB}, **peaks)
    said = advice.no_room(full, config(**fields))
    assert said is not None
    assert said.startswith("2 times no tier had room, and 1.0 GiB stayed")
    assert knob in said


def test_bytes_that_went_on_to_disk() -> None:
    said = advice.spilled(stats(demotions={"host_to_disk": 3}, host_bytes_peak=GIB), config())
    assert said is not None
    assert "raise host_budget above 1.0 GiB" in said


@pytest.mark.parametrize("kind", ["unpinned", "uncompiled"])
def test_compiled_code_without_an_order(kind: str) -> None:
    said = advice.unpinned(stats(demotions={kind: 1}), config())
    assert said is not None
    assert "offload.compile(model, ...)" in said


def test_bandwidth_is_the_limit_where_transfers_never_rest() -> None:
    slow = stats(stall_seconds=20.0, window_stall_seconds=15.0, out_seconds=50.0, in_seconds=30.0)
    (said,) = advise(slow, config())
    assert said.startswith(
        "Bandwidth is the limit: compute waited 20 % of the time, while transfers ran 50 % of the time at 164 MiB/s. "
    )
    assert 'min_bytes="4MiB"' in said
    assert "disk_path" not in said
    (said,) = advise(stats(stall_seconds=20.0, in_seconds=60.0, disk_bytes_peak=GIB), config(min_bytes=0))
    assert "A list of paths on several disks as disk_path" in said
    assert 'min_bytes="1MiB"' in said


def test_a_full_window_where_the_link_has_time() -> None:
    full = stats(stall_seconds=5.0, window_stall_seconds=4.0)
    assert advise(full, config(max_inflight_bytes="64MiB")) == (
        "Compute waited 5.0 % of the time, mostly in forward for room in the in-flight window. Where memory allows, "
        'raise max_inflight_bytes from 64 MiB to "128MiB".',
    )


def test_reloads_that_come_late_where_the_link_has_time() -> None:
    late = stats(stall_seconds=5.0, window_stall_seconds=1.0)
    (said,) = advise(late, config(prefetch_bytes="100MiB"))
    assert 'raise prefetch_bytes from 100 MiB to "200MiB"' in said
    (said,) = advise(late, config(prefetch_bytes=0))
    assert 'from 0 B to "64MiB"' in said


def test_where_nobody_timed_the_link_it_may_be_the_limit_all_the_same() -> None:
    for window in (5.0, 0.0):
        (said,) = advise(
            stats(stall_seconds=5.0, window_stall_seconds=window, out_seconds=0.0, in_seconds=0.0), config()
        )
        assert said.endswith("If that changes little, bandwidth is the limit: checkpoint a part of the model.")


def test_originals_that_someone_keeps_alive() -> None:
    said = advice.originals_alive(kept("alive", 4 * GIB), config())
    assert said is not None
    assert said.startswith("4.0 GiB (40 % of what is saved) stayed since something else keeps the originals alive")
    assert advice.originals_alive(kept("alive", GIB // 2), config()) is None


@pytest.mark.parametrize(("least", "knob"), [("1MiB", "256KiB"), ("10MiB", "2560KiB"), (6, "1B")])
def test_many_small_tensors(least: str | int, knob: str) -> None:
    said = advice.small_tensors(kept("small", GIB), config(min_bytes=least))
    assert said is not None
    assert f'Try min_bytes="{knob}"' in said
    assert advice.small_tensors(kept("small", GIB), config(min_bytes=1)) is None, "there is nothing smaller"


def test_newest_bytes_that_could_leave() -> None:
    many = kept("newest", 4 * GIB)
    said = advice.newest_bytes(many, config())
    assert said is not None
    assert 'keep_last_bytes="64MiB"' in said
    assert advice.newest_bytes(many, config(keep_last_bytes="1MiB")) is None, "there is hardly anything less"
    little = kept("newest", 16 * MIB, saved_bytes=2 * GIB + 20 * MIB, resident_bytes_peak=16 * MIB)
    assert 'keep_last_bytes="4MiB"' in (advice.newest_bytes(little, config()) or ""), "64 MiB would change nothing"
    waiting = stats(kept_bytes={"newest": 4 * GIB}, stall_seconds=10.0)
    assert advice.newest_bytes(waiting, config()) is None, "compute waits already"


def test_other_devices_and_layouts() -> None:
    assert "accelerator" in (advice.other_devices(kept("device", GIB), config()) or "")
    assert "sparse" in (advice.layouts(kept("layout", GIB), config()) or "")


def test_what_is_never_asked_for() -> None:
    said = advice.never_asked_for(stats(released_bytes=4 * GIB), config())
    assert said is not None
    assert said.startswith("4.0 GiB (50 % of what was offloaded) were never asked for")
    assert "torch.no_grad()" in said


def test_what_is_asked_for_before_it_has_left() -> None:
    soon = stats(forwarded_bytes=4 * GIB)
    assert 'keep_last_bytes="512MiB"' in (advice.asked_too_soon(soon, config()) or "")
    assert 'keep_last_bytes="auto" learns' in (advice.asked_too_soon(soon, config(keep_last_bytes=0)) or "")


def test_a_disk_that_wears() -> None:
    worn = stats(disk_bytes_written=20 * 10**9, seconds=100.0)
    assert advice.terabytes_a_day(worn) == pytest.approx(17.28)
    assert (advice.wear(worn, config()) or "").startswith("17 TB a day would be written to disk, which wears it: ")
    spilling = stats(disk_bytes_written=20 * 10**9, host_bytes_peak=GIB)
    assert "host_budget" in (advice.wear(spilling, config()) or "")
    assert advice.terabytes_a_day(eo.OffloadStats(disk_bytes_written=1)) == 0


def test_what_matters_most_is_said_first() -> None:
    bad = stats(
        stall_seconds=20.0,
        out_seconds=60.0,
        demotions={"write_failed": 1},
        kept_bytes={"small": 2 * GIB, "failed": GIB},
    )
    said = advise(bad, config())
    assert [sentence.split()[0] for sentence in said] == ["Once", "Bandwidth", "2.0"]


def test_every_knob_that_is_named_is_one() -> None:
    """Values are such as a config takes."""
    every = [
        stats(stall_seconds=20.0, out_seconds=60.0),
        *(stats(stall_seconds=20.0, window_stall_seconds=window) for window in (0.0, 20.0)),
        *(kept(reason, 5 * GIB) for reason in ("small", "newest")),
        stats(forwarded_bytes=8 * GIB),
    ]
    named = 0
    for one in every:
        for sentence in advise(one, config()):
            for part in sentence.split('"')[::2][:-1]:
                knob = part.split()[-1].rstrip("=") if part.endswith("=") else part.split()[-5]
                value = sentence.split('"')[1]
                eo.OffloadConfig(**{knob: value})
                named += 1
    assert named == 6


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (5, "5 B"), (1536, "1.5 KiB"), (64 * MIB, "64 MiB"), (1 << 50, "1,024.0 TiB")]
)
def test_sizes_are_short(nbytes: int, text: str) -> None:
    assert advice._size(nbytes) == text


@pytest.mark.parametrize(("nbytes", "text"), [(GIB, "1GiB"), (3 * MIB, "3MiB"), (1025, "1025B"), (5 << 10, "5KiB")])
def test_knobs_are_exact(nbytes: int, text: str) -> None:
    assert advice._knob(nbytes) == text
    assert eo.OffloadConfig(min_bytes=text).min_bytes == nbytes
