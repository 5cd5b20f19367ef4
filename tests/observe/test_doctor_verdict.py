"""What follows from what was measured: pure, so that every machine can be tried."""

from __future__ import annotations

import dataclasses

import pytest

from eager_offload.observe.doctor.diagnosis import (
    Device,
    Disk,
    Memory,
    SelfTest,
    Speed,
    hidden_from_width,
    recommended,
    verdict,
)

GIB = 1 << 30
CPU = Device("cpu", "a processor", 32 * GIB, flops=1e11, dtype="float32", link=Speed(1e10, 1e10))
GPU = Device(
    "cuda:0", "H200", 140 * GIB, flops=6e14, dtype="bfloat16", link=Speed(52e9, 52e9), duplex=Speed(4e10, 4e10)
)
GPU = dataclasses.replace(GPU, pin_seconds=0.2)
LARGE = Memory(512 * GIB, 500 * GIB, 250 * GIB, 1, "500 GiB are available", "take more")
SLOW, FAST = Disk("/slow", "ext4", 1, GIB, direct=Speed(1e8, 1e8)), Disk("/fast", "xfs", 2, GIB, direct=Speed(2e9, 3e9))


def passed(*devices: Device) -> list[SelfTest]:
    return [SelfTest(one.name, True, 1) for one in devices]


def test_a_cpu_offloads_to_the_fastest_disk() -> None:
    settings = recommended([CPU], LARGE, [SLOW, FAST])
    assert settings == {"tier": "disk", "disk_path": "/fast"}
    found = verdict([CPU], [SLOW, FAST], passed(CPU), settings)
    assert found.works
    assert found.flop_per_byte == {"cpu": 1e11 / 2e9}
    assert found.summary == "Offloading works here: cpu to /fast."


def test_reading_counts_half_since_backward_takes_twice_as_long() -> None:
    slow_to_read = Disk("/back", "ext4", 3, GIB, direct=Speed(2e9, 0.5e9))
    assert verdict([CPU], [slow_to_read], passed(CPU), {}).flop_per_byte == {"cpu": 1e11 / 1e9}


def test_a_disk_that_refuses_direct_io_may_still_be_the_best() -> None:
    buffered = Disk("/buffered", "btrfs", 4, GIB, buffered=Speed(3e9, 3e9))
    assert recommended([CPU], LARGE, [FAST, buffered])["disk_path"] == "/buffered"


def test_an_accelerator_needs_no_settings_on_a_machine_with_memory_to_spare() -> None:
    settings = recommended([CPU, GPU], LARGE, [FAST])
    assert settings == {}
    found = verdict([CPU, GPU], [FAST], passed(CPU, GPU), settings)
    assert found.flop_per_byte["cuda:0"] == pytest.approx(11_538, rel=1e-3)
    assert found.summary == "Offloading works here: cuda:0 to host memory."
    assert found.python == "eo.OffloadConfig()"
    assert found.environment == ""


def test_an_accelerator_with_more_memory_than_the_host_spills_to_disk() -> None:
    small = Memory(64 * GIB, 60 * GIB, 30 * GIB, 1, "the control group has 64 GiB", "give it more")
    settings = recommended([CPU, GPU], small, [SLOW, FAST])
    assert settings == {"disk_path": "/fast"}
    reported = verdict([CPU, GPU], [SLOW, FAST], passed(CPU, GPU), settings).summary
    assert reported == "Offloading works here: cuda:0 to host memory, then to /fast."


def test_where_pinning_fails_it_is_not_tried_again() -> None:
    unpinned = dataclasses.replace(GPU, pin_seconds=None)
    assert recommended([CPU, unpinned], LARGE, []) == {"pin_memory": False}


def test_nothing_works_without_a_self_test_that_passed() -> None:
    assert not verdict([CPU], [FAST], [], {}).works
    assert not verdict([CPU], [FAST], [SelfTest("cpu", True, 0)], {}).works
    wrong = verdict([CPU, GPU], [FAST], [SelfTest("cpu", True, 1), SelfTest("cuda:0", False, 1)], {})
    assert not wrong.works
    assert "wrong on cuda:0" in wrong.summary


def test_the_width_from_which_a_block_is_hidden() -> None:
    """24 d^2 operations against 16 d numbers of two bytes, or d numbers of a checkpointed block."""
    width, flop_per_byte = 4096, 24 * 4096**2 / (16 * 4096 * 2)
    assert hidden_from_width(flop_per_byte, 2) == width
    assert hidden_from_width(flop_per_byte * 16, 2, checkpointed=True) == width


def test_advice_tells_wide_machines_from_narrow_links() -> None:
    (reported, malloc) = verdict([CPU], [FAST], passed(CPU), {}).advice
    assert "from a width of 133 on: compute hardly waits for it, and copies take a part of the processor." in reported
    assert "release_freed_memory" in malloc
    reported = verdict([CPU, GPU], [FAST], passed(CPU, GPU), {}).advice[-1]
    assert "from a width of 15,385 on" in reported
    assert "what a checkpointed block saves is hidden from a width of 962 on" in reported
