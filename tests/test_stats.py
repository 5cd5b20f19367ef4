"""What is counted, and how the report of it reads."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import eager_offload as eo
from eager_offload.stats import KeepReason
from tests.hazards.backends import DiskBackend
from tests.programs import leaf

MIB = 1 << 20


def test_the_fields_are_those_of_the_contract_and_of_nothing_they_are_none() -> None:
    names = {field.name for field in dataclasses.fields(eo.OffloadStats)}
    assert names >= {
        *("saved_tensors", "saved_bytes", "offloaded_tensors", "offloaded_bytes", "shared_bytes", "kept_bytes"),
        *("reloaded_bytes", "forwarded_bytes", "released_bytes", "bytes_out", "bytes_in", "stall_seconds"),
        *("host_wait_seconds", "inflight_bytes_peak", "resident_bytes_peak", "host_bytes_peak", "disk_bytes_peak"),
        *("fallbacks", "compiled_regions"),
    }
    assert {reason.value for reason in KeepReason} == {
        *("small", "parameter", "device", "layout", "marked", "region", "newest", "alive", "budget", "failed"),
    }
    assert eo.Offload().stats() == eo.OffloadStats()


def test_a_snapshot_does_not_change_afterwards_and_cannot_be_changed(disk: DiskBackend) -> None:
    offload = disk.offload(min_bytes=1024, disk_budget=1)

    def step() -> eo.OffloadStats:
        with offload:
            loss = leaf(16, 16).exp().sum() + leaf(2).exp().sum()
        loss.backward()
        return offload.stats(synchronize=True)

    with pytest.warns(RuntimeWarning, match="no room"):
        before = step()
    shown = before.to_dict()
    after = step()
    assert before.to_dict() == shown
    assert after.kept_bytes == {"small": 16, "budget": 2048}
    assert after.fallbacks["budget"] > before.fallbacks["budget"] > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.saved_bytes = 0  # type: ignore[misc]


REPORT = """\
peak saved-tensor memory 304 MiB (743 MiB without offload, -59 %); stalled 1.2 % of step time, copies 4.5 % of a core
                  a step        4 steps
saved          128.0 MiB      512.0 MiB  1,234 tensors
offloaded       96.1 MiB      384.5 MiB  56 tensors, and 1.0 GiB on the same storages
kept            31.9 MiB      127.5 MiB  parameter 100.0 MiB, newest 27.5 MiB
moved out        4.0 MiB       16.0 MiB
moved in         250 B          999 B    84.0 MiB still resident, 512.0 KiB never unpacked
stalled          0.312 s        1.250 s  of 100.0 s
host waited      2.000 s        8.000 s
processor        1.125 s        4.500 s  of a core, for copies; compute may have lacked it
peaks      64.0 MiB in flight, 96.0 MiB resident, 0 B host, 2,048.0 TiB disk
fallbacks  write_failed 1
written    2.3 GiB to disk, 2.2 TB a day if it goes on
compiled   1 graph, 3 runs
advice     Memory fell: at most 304.0 MiB of saved tensors on the device, 743.0 MiB without offload
           (-59 %).
"""
REPORTED = eo.OffloadStats(
    steps=4,
    saved_tensors=1234,
    offloaded_tensors=56,
    compiled_regions=3,
    compiled_graphs=1,
    saved_bytes=512 * MIB,
    offloaded_bytes=384 * MIB + MIB // 2,
    shared_bytes=1024 * MIB,
    reloaded_bytes=300 * MIB,
    forwarded_bytes=84 * MIB,
    released_bytes=MIB // 2,
    bytes_out=16 * MIB,
    bytes_in=999,
    disk_bytes_written=2_500_000_000,
    disk_bytes_peak=1 << 51,
    seconds=100.0,
    stall_seconds=1.25,
    host_wait_seconds=8.0,
    processor_seconds=4.5,
    inflight_bytes_peak=64 * MIB,
    resident_bytes_peak=96 * MIB,
    device_bytes_peak=304 * MIB,
    without_offload_bytes_peak=743 * MIB,
    kept_bytes={"newest": 27 * MIB + MIB // 2, "parameter": 100 * MIB},
    fallbacks={"write_failed": 1},
)


def test_the_report_fits_a_screen_and_names_every_part() -> None:
    assert str(REPORTED).startswith(REPORT)
    headline, *lines = str(REPORTED).splitlines()
    assert len(headline) <= 120
    assert all(len(line) <= 100 for line in lines)
    assert eo.OffloadStats(**json.loads(json.dumps(REPORTED.to_dict()))) == REPORTED
    assert str(eo.OffloadStats(disk_bytes_written=1)), "no time has passed"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"device_bytes_peak": 743 * MIB}, "743 MiB (743 MiB without offload, 0 %); "),
        ({"bytes_out": 3 << 39}, "more than offloaded: a view moves with all that it spans"),
        ({"bytes_in": 5 << 39}, "more than went out: unpacked several times; 84.0 MiB still resident"),
        ({"offloaded_bytes": 0}, "nothing moved\n"),
        ({"steps": 1}, "        1 step\n"),
        ({"processor_seconds": 0.0}, "stalled 1.2 % of step time\n"),
    ],
)
def test_what_else_the_report_says(changed: dict[str, Any], line: str) -> None:
    assert line in str(dataclasses.replace(REPORTED, **changed))
