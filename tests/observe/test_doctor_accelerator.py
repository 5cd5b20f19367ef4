"""What the doctor measures of an accelerator: its report, and (``gpu``) the examination of the one of this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from eager_offload.observe.doctor import probes
from eager_offload.observe.doctor.diagnosis import (
    FORMAT,
    Device,
    Diagnosis,
    Disk,
    Memory,
    SelfTest,
    Software,
    Speed,
    recommended,
    verdict,
)
from eager_offload.observe.doctor.examination import WIDTH, examine, to_text

GIB = 1 << 30


def text_of(
    devices: list[Device], memory: Memory | None, disks: list[Disk], tests: list[SelfTest], settings: dict[str, Any]
) -> str:
    software = Software("0.1.0", "2.13.0+cu130", "3.12.0", "Linux", "CUDA 13.0")
    end = verdict(devices, disks, tests, settings)
    return to_text(Diagnosis(FORMAT, 9.5, software, devices, memory, disks, [], tests, [], end))


def test_the_text_of_a_machine_with_an_accelerator() -> None:
    cpu = Device("cpu", "a processor, 16 threads", 128 * GIB, flops=1e12, dtype="float32", link=Speed(1e10, 1e10))
    gpu = Device("cuda:0", "NVIDIA H200", 140 * GIB, 6e14, "bfloat16", Speed(52e9, 51e9), Speed(43e9, 42e9), 1, 0.2)
    memory = Memory(128 * GIB, 60 * GIB, 30 * GIB, 4, "the control group may use 64 GiB", "give it more")
    disk = Disk("/mnt/nvme", "xfs", 7, 900 * GIB, direct=Speed(6e9, 7e9), buffered=Speed(2e9, 3e9))
    tests = [SelfTest("cpu", True, 36 << 20), SelfTest("cuda:0", True, 36 << 20)]
    text = text_of([cpu, gpu], memory, [disk], tests, recommended([cpu, gpu], memory, [disk]))
    for line in (
        "  cuda:0         NVIDIA H200, 140.0 GiB, node 1",
        "    compute      600.0 TFLOP/s (bfloat16 product)",
        "    link         52.00 GB/s out, 51.00 GB/s back",
        "    both at once 43.00 GB/s out, 42.00 GB/s back",
        "    pinning      200 ms a GiB",
        '  host_budget    "auto" is 30.0 GiB for this process, one of 4 ranks here',
        "  Offloading works here: cuda:0 to host memory, then to /mnt/nvme.",
        "    eo.OffloadConfig(disk_path='/mnt/nvme')",
    ):
        assert line in text.splitlines(), (line, text)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "release_freed_memory" not in text


def test_several_directories_without_a_speed_are_each_a_line() -> None:
    refused = Disk("/proc", "proc", 3, 0, refused="it is not writable")
    unmeasured = dataclasses.replace(refused, path="/slow", refused="")
    reported = text_of([], None, [refused, unmeasured], [], {})
    assert "/proc: cannot serve: it is not writable" in reported
    assert reported.count("refused or not measured") == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator on this machine")
def test_an_accelerator_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = torch.accelerator.current_accelerator(check_available=True).type == "virtual"
    if virtual:
        monkeypatch.setattr(probes, "_SIZE", 512)  # it computes on the CPU
    found = examine([tmp_path])
    device = next(one for one in found.devices if one.name != "cpu")
    assert device.flops is not None
    assert device.link is not None
    assert device.duplex is not None
    assert min(device.link.out, device.link.back, device.duplex.out, device.duplex.back) > (0 if virtual else 1e9)
    assert device.pin_seconds is not None
    assert [test for test in found.self_tests if test.device == device.name and test.equal and test.moved_bytes]
    assert found.verdict.works
    assert found.verdict.flop_per_byte[device.name] > (0 if virtual else 1)
