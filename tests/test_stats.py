"""What is counted, and how the report of it reads."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import eager_offload as eo
from eager_offload.engine.transfer import BytesRecord
from eager_offload.stats import Counters, KeepReason, PlanOutcome, SavedRow
from tests.hazards.backends import assert_balanced

MIB = 1 << 20


def test_the_fields_are_those_of_the_contract_and_of_nothing_they_are_none() -> None:
    names = {field.name for field in dataclasses.fields(eo.OffloadStats)}
    assert names >= {
        *("saved_tensors", "saved_bytes", "offloaded_tensors", "offloaded_bytes", "shared_bytes", "kept_bytes"),
        *("reloaded_bytes", "forwarded_bytes", "released_bytes", "bytes_out", "bytes_in", "stall_seconds"),
        *("host_wait_seconds", "inflight_bytes_peak", "resident_bytes_peak", "host_bytes_peak", "disk_bytes_peak"),
        *("demotions", "compiled_regions"),
    }
    assert {reason.value for reason in KeepReason} == {
        *("small", "parameter", "device", "layout", "marked", "region", "newest", "alive", "budget", "failed"),
    }
    assert Counters().snapshot() == eo.OffloadStats()


def test_a_snapshot_does_not_change_afterwards_and_cannot_be_changed() -> None:
    counters = Counters()
    counters.kept(KeepReason.SMALL, 5)
    counters.demote("budget")
    before = counters.snapshot()
    counters.kept(KeepReason.SMALL, 5)
    counters.demote("budget")
    assert before.kept_bytes == {"small": 5}
    assert before.demotions == {"budget": 1}
    assert counters.snapshot().kept_bytes == {"small": 10}
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.saved_bytes = 0  # type: ignore[misc]


def test_every_save_is_counted_once_whatever_becomes_of_it() -> None:
    counters = Counters()
    for reason in KeepReason:
        counters.kept(reason, 10)
    counters.shared(3)
    record = BytesRecord(counters)
    record.save(counters, 7, KeepReason.NEWEST)
    assert_balanced(counters.snapshot())
    record.leave()
    offloaded = counters.snapshot()
    assert_balanced(offloaded)
    assert (offloaded.offloaded_tensors, offloaded.offloaded_bytes) == (1, 7)
    record.ask(resident=True)
    record.stay(KeepReason.FAILED)
    failed = counters.snapshot()
    assert_balanced(failed)
    assert (failed.offloaded_tensors, failed.offloaded_bytes, failed.forwarded_bytes) == (0, 0, 0)
    assert failed.kept_bytes == {**{reason.value: 10 for reason in KeepReason}, "failed": 17}
    assert (failed.saved_tensors, failed.saved_bytes) == (12, 110)


REPORT = """\
peak saved-tensor memory 304 MiB (743 MiB without offload, -59 %); stalled 1.2 % of step time, copies 4.5 % of a core
                  a step        4 steps
saved          128.0 MiB      512.0 MiB  1,234 tensors
offloaded       96.1 MiB      384.5 MiB  56 tensors, and 1.0 GiB on the same storages
kept            31.9 MiB      127.5 MiB  parameter 100.0 MiB, newest 27.5 MiB
moved out      384.0 GiB        1.5 TiB  more than offloaded: of a view, all that it spans travels
moved in         250 B          999 B    84.0 MiB still resident, 512.0 KiB never asked for
stalled          0.312 s        1.250 s  of 100.0 s
host waited      2.000 s        8.000 s
processor        1.125 s        4.500 s  of a core, for copies; compute may have lacked it
peaks      64.0 MiB in flight, 96.0 MiB resident, 0 B host, 2,048.0 TiB disk
fallbacks  write_failed 1
written    2.3 GiB to disk, 2.2 TB a day if it goes on
compiled   1 graph, 3 runs
advice     Memory fell: at most 304.0 MiB of saved tensors on the device, 743.0 MiB without offload
           (-59 %).
advice     Once a write to a tier failed, and the bytes stayed: the first warning tells why. Look
           after the disk, or name another as disk_path."""
WHAT_IT_REPORTS = eo.OffloadStats(
    steps=4,
    saved_tensors=1234,
    saved_bytes=512 * MIB,
    offloaded_tensors=56,
    offloaded_bytes=384 * MIB + MIB // 2,
    shared_bytes=1024 * MIB,
    kept_bytes={"newest": 27 * MIB + MIB // 2, "parameter": 100 * MIB},
    reloaded_bytes=300 * MIB,
    forwarded_bytes=84 * MIB,
    released_bytes=MIB // 2,
    bytes_out=3 << 39,
    bytes_in=999,
    stall_seconds=1.25,
    host_wait_seconds=8.0,
    processor_seconds=4.5,
    inflight_bytes_peak=64 * MIB,
    resident_bytes_peak=96 * MIB,
    device_bytes_peak=304 * MIB,
    without_offload_bytes_peak=743 * MIB,
    disk_bytes_peak=1 << 51,
    demotions={"write_failed": 1},
    disk_bytes_written=2_500_000_000,
    compiled_regions=3,
    compiled_graphs=1,
    seconds=100.0,
)


def test_the_report_fits_a_screen_and_names_every_part() -> None:
    assert str(WHAT_IT_REPORTS) == REPORT
    headline, *lines = str(WHAT_IT_REPORTS).splitlines()
    assert len(headline) <= 120
    assert all(len(line) <= 100 for line in lines)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"device_bytes_peak": 743 * MIB}, "743 MiB (743 MiB without offload, 0 %); "),
        ({"bytes_in": 5 << 39}, "more than went out: asked for several times; 84.0 MiB still resident"),
        ({"offloaded_bytes": 0}, "nothing moved\n"),
        ({"steps": 1}, "        1 step\n"),
        ({"plan": PlanOutcome(MIB, 0.5, None, 0.75, 0.5)}, "of 100.0 s; a step took 0.75 s, and 0.5 s without offload"),
        ({"processor_seconds": 0.0}, "stalled 1.2 % of step time\n"),
    ],
)
def test_what_else_the_report_says(changed: dict[str, Any], line: str) -> None:
    assert line in str(dataclasses.replace(WHAT_IT_REPORTS, **changed))


def test_stats_go_through_json() -> None:
    assert eo.OffloadStats(**json.loads(json.dumps(WHAT_IT_REPORTS.to_dict()))) == WHAT_IT_REPORTS


def test_the_report_gives_advice_for_the_configuration_that_ran() -> None:
    counters, small = Counters(), 200 << 10
    for _ in range(64):
        counters.kept(KeepReason.SMALL, small)
    counters.step_of([SavedRow(small, small, KeepReason.SMALL, operator) for operator in range(64)])
    assert 'min_bytes="64KiB"' in str(counters.snapshot(eo.OffloadConfig(min_bytes="256KiB")))
    (said,) = counters.snapshot(eo.OffloadConfig(min_bytes="512KiB")).advice
    assert 'min_bytes="128KiB"' in said
    assert counters.snapshot() == counters.snapshot(eo.OffloadConfig(min_bytes=7)), "settings are not counted"
