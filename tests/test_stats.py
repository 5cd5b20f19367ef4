"""What is counted, and how the report of it reads."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os

import pytest

import eager_offload as eo
from eager_offload import stats as module
from eager_offload.stats import Accounts, KeepReason, Tally

MIB = 1 << 20


def adds_up(stats: eo.OffloadStats) -> bool:
    return stats.saved_bytes == stats.offloaded_bytes + stats.shared_bytes + sum(stats.kept_bytes.values())


def test_the_fields_are_those_of_the_contract() -> None:
    names = {field.name for field in dataclasses.fields(eo.OffloadStats)}
    assert names >= {
        *("saved_tensors", "saved_bytes", "offloaded_tensors", "offloaded_bytes", "shared_bytes", "kept_bytes"),
        *("reloaded_bytes", "forwarded_bytes", "released_bytes", "bytes_out", "bytes_in", "stall_seconds"),
        *("inflight_bytes_peak", "resident_bytes_peak", "host_bytes_peak", "disk_bytes_peak", "demotions"),
    }
    assert {reason.value for reason in KeepReason} == {
        *("small", "parameter", "device", "layout", "marked", "region", "newest", "alive", "budget", "failed"),
    }


def test_every_field_says_what_it_counts() -> None:
    """A text right below each field, which a dataclass does not keep but every reader and tool finds."""
    (body,) = ast.parse(inspect.getsource(eo.OffloadStats)).body
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), ast.unparse(field)
            assert isinstance(text.value, ast.Constant), ast.unparse(field)


def test_a_new_tally_is_the_stats_of_nothing() -> None:
    assert Tally().snapshot() == eo.OffloadStats()


def test_a_snapshot_does_not_change_afterwards_and_cannot_be_changed() -> None:
    tally = Tally()
    tally.kept(KeepReason.SMALL, 5)
    tally.demote("budget")
    before = tally.snapshot()
    tally.kept(KeepReason.SMALL, 5)
    tally.demote("budget")
    assert before.kept_bytes == {"small": 5}
    assert before.demotions == {"budget": 1}
    assert tally.snapshot().kept_bytes == {"small": 10}
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.saved_bytes = 0  # type: ignore[misc]


def test_every_save_is_counted_once_whatever_becomes_of_it() -> None:
    tally = Tally()
    for reason in KeepReason:
        tally.kept(reason, 10)
    tally.shared(3)
    tally.kept(KeepReason.NEWEST, 7)
    assert adds_up(tally.snapshot())
    tally.reclassify(7, KeepReason.NEWEST, None)
    offloaded = tally.snapshot()
    assert adds_up(offloaded)
    assert (offloaded.offloaded_tensors, offloaded.offloaded_bytes) == (1, 7)
    tally.reclassify(7, None, KeepReason.FAILED)
    failed = tally.snapshot()
    assert adds_up(failed)
    assert (failed.offloaded_tensors, failed.offloaded_bytes) == (0, 0)
    assert failed.kept_bytes == {**{reason.value: 10 for reason in KeepReason}, "failed": 17}
    assert (failed.saved_tensors, failed.saved_bytes) == (12, 110)


def test_a_demotion_is_told_the_first_time_of_its_kind() -> None:
    tally = Tally()
    assert [tally.demote(kind) for kind in ("budget", "budget", "write_failed", "budget")] == [True, False, True, False]
    assert tally.snapshot().demotions == {"budget": 3, "write_failed": 1}


REPORT = """\
saved         1,234 tensors     512.0 MiB
offloaded        56 tensors     384.5 MiB  (+ 1.0 GiB shared with them)
kept                            127.5 MiB  (parameter 100.0 MiB, newest 27.5 MiB)
back       300.0 MiB reloaded, 84.0 MiB still resident, 512.0 KiB never asked for
moved      1.5 TiB out, 999 B in, compute stalled 1.250 s of 100.0 s
peaks      64.0 MiB in flight, 96.0 MiB resident, 0 B host, 2048.0 TiB disk
demotions  write_failed 1
written    2.3 GiB to disk, 2.2 TB a day if it goes on
compiled   2 forward graphs that moved something
advice     Once a write to a tier failed, and the bytes stayed: the first warning tells why. Look
           after the disk, or name another as disk_path."""


def test_the_report_fits_a_screen_and_names_every_part() -> None:
    stats = eo.OffloadStats(
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
        inflight_bytes_peak=64 * MIB,
        resident_bytes_peak=96 * MIB,
        disk_bytes_peak=1 << 51,
        demotions={"write_failed": 1},
        disk_bytes_written=2_500_000_000,
        compiled_regions=2,
        seconds=100.0,
    )
    assert str(stats) == REPORT
    assert all(len(line) <= 100 for line in str(stats).splitlines())


def test_the_report_of_nothing_has_no_empty_brackets() -> None:
    report = str(eo.OffloadStats())
    assert "()" not in report
    assert "demotions" not in report
    assert all(line == line.rstrip() for line in report.splitlines())
    assert report.splitlines()[-1].startswith("advice     No saved tensor was seen")


def test_the_report_gives_advice_for_the_configuration_that_ran() -> None:
    tally = Tally()
    tally.kept(KeepReason.SMALL, 100)
    assert 'min_bytes="64KiB"' in str(tally.snapshot(eo.OffloadConfig(min_bytes="256KiB")))
    (said,) = tally.snapshot(eo.OffloadConfig(min_bytes="512KiB")).advice
    assert 'min_bytes="128KiB"' in said
    assert tally.snapshot() == tally.snapshot(eo.OffloadConfig(min_bytes=7)), "what ran with is not what was counted"


def test_time_is_counted_from_the_first_context() -> None:
    tally = Tally()
    assert tally.snapshot().seconds == 0
    tally.begin()
    first = tally.snapshot().seconds
    tally.begin()
    assert tally.snapshot().seconds >= first > 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (MIB - 1, "1024.0 KiB"),
        (MIB, "1.0 MiB"),
        (1 << 40, "1.0 TiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_unit_that_it_fills(nbytes: int, text: str) -> None:
    assert module._size(nbytes).strip() == text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_h28_a_lock_that_was_held_during_a_fork_is_free_in_the_child() -> None:
    accounts = Accounts()
    held = accounts.lock
    with held:
        accounts.after_fork()
        assert accounts.lock is not held
        assert accounts.lock.acquire(blocking=False)
        accounts.lock.release()
