"""What the doctor finds on this machine, what it makes of it, and that whatever fails is a line."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import eager_offload as eo
from eager_offload.__main__ import main
from eager_offload.observe import doctor
from eager_offload.observe.doctor import Disk, Memory, SelfTest, examine, recommended, to_text, verdict
from eager_offload.planning.machine import Machine
from eager_offload.runtime import pinned
from eager_offload.tiers import disk, limits
from eager_offload.tiers.disk import filesystem_of
from tests.tiers.machines import FakeMachine

pytestmark = pytest.mark.xdist_group("doctor")

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture(autouse=True)
def _patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe fails since the machine is busy."""
    monkeypatch.setattr(doctor, "_ONE_PROBE", 600.0)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what takes long and what the test at hand is not about."""
    found = Machine("cpu", 1e11, 1e11, 1e10, spread=1.1)
    monkeypatch.setattr(doctor, "measure", lambda device: found)
    monkeypatch.setattr("eager_offload.torch_private.inductor.NAMES_OF_COMPILER", {})
    monkeypatch.setattr(disk, "_MEASURING_SECONDS", 0.04)


def test_a_machine_is_examined(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    (tmp_path / "file").touch()
    found = examine([tmp_path, tmp_path / "second", tmp_path / "missing", tmp_path / "file"])
    cpu, *accelerators = found.devices
    assert cpu == "cpu"
    machine = found.devices[cpu]
    assert machine is not None
    assert min(machine.flops, machine.memory) > 1e7
    assert found.software["torch"] == torch.__version__
    assert found.memory is not None
    assert 0 < found.memory.budget_bytes <= found.memory.headroom_bytes <= found.memory.total_bytes
    first, second, missing, file = found.disks
    assert (machine.out, machine.back) == (first.out, first.back)
    assert (second.out, second.back) == (first.out, first.back), "a disk is measured once"
    assert (missing.refused, file.out) == ("No such file or directory", 0)
    assert "it is not a directory" in file.refused
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "second"], "nothing stays there"
    assert found.failures == []
    tests = [test for test in found.self_tests if test.equal and 16 * MIB <= test.moved_bytes <= 64 * MIB]
    assert [test.device for test in tests] == accelerators or ["cpu"]
    assert found.verdict.works
    if not accelerators:
        assert eval(found.verdict.python, {"eo": eo}) == eo.OffloadConfig(tier="disk", disk_path=tmp_path)
        assert found.pinned is None
    text = to_text(found)
    assert ("nothing: torch finds no accelerator here" in text) is (not accelerators)
    assert f"cpu: {machine}" in text
    assert text.index("software") < text.index("disks") < text.index("verdict") < text.index(found.verdict.python)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator on this machine")
def test_an_accelerator_is_examined(tmp_path: Path) -> None:
    found = examine([tmp_path])
    assert found.pinned is not None
    assert found.pinned.pinned_bytes > 0
    _cpu, *accelerators = found.devices.values()
    for device in accelerators:
        assert device is not None
        assert min(device.flops, device.memory, device.out, device.back) > 0
    assert accelerators


@pytest.mark.usefixtures("quickly")
def test_a_probe_that_fails_or_hangs_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("the driver is gone\nand here is a long story")

    answered, hung, join = threading.Event(), list[threading.Thread](), threading.Thread.join

    def hangs(*_: object) -> None:
        hung.append(threading.current_thread())
        answered.wait()

    def joined(thread: threading.Thread, left: float | None = None) -> None:  # however slow the others are
        while thread.is_alive() and thread not in hung:
            join(thread, 0.05)

    monkeypatch.setattr(doctor, "measure", broken)
    monkeypatch.setattr(doctor, "_memory", broken)
    monkeypatch.setattr(doctor, "_disk", hangs)
    monkeypatch.setattr(doctor, "_ONE_PROBE", 5.0)
    monkeypatch.setattr(threading.Thread, "join", joined)
    try:
        found = examine([tmp_path])
    finally:
        answered.set()
    assert {
        "speed of cpu: RuntimeError: the driver is gone",
        "host memory: RuntimeError: the driver is gone",
        f"directory {tmp_path}: no answer within 5 s",
    } <= {*found.failures}
    assert (found.memory, found.devices) == (None, {"cpu": None})
    assert "the driver is gone" in to_text(found)


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("kind", "said"),
    [("missing", "No such file"), ("full", "only 9.0 MiB are free"), ("tmpfs", "which is memory itself")],
)
def test_h27_nothing_works_where_no_directory_serves(
    kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = {"missing": tmp_path / "missing", "full": tmp_path, "tmpfs": Path("/dev/shm")}[kind]
    if kind == "tmpfs" and (not path.is_dir() or filesystem_of(path) != "tmpfs"):
        pytest.skip("this system has no /dev/shm")
    if kind == "full":
        usage = doctor.shutil.disk_usage(path)._replace(free=9 * MIB)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(doctor, "_self_test", lambda *_: None)
    assert main(["doctor", "--disk-path", str(path)]) == 1
    reported = " ".join(capsys.readouterr().out.split())
    assert said in reported
    assert "cannot work here" in reported
    assert "Recommended" not in reported


@pytest.mark.parametrize(("online", "several"), [("0-1", True), ("0,2", True), ("0", False), (None, False)])
def test_where_memory_has_nodes_beside_an_accelerator_the_verdict_names_torchruns_option(
    online: str | None, several: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "NODES", tmp_path / "online")
    if online is not None:
        (tmp_path / "online").write_text(f"{online}\n")
    for device in ("cuda:0", "cpu"):
        advice = doctor.verdict({device: None}, [doctor.SelfTest(device, True, 1)], {}).advice
        assert ("--numa-binding=node" in " ".join(advice)) == (several and device != "cpu")


@pytest.mark.usefixtures("quickly")
def test_a_name_of_the_compiler_that_is_gone_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "eager_offload.torch_private.inductor.NAMES_OF_COMPILER", {"V": "torch._inductor.virtualized:no_such_name"}
    )
    (said,) = examine([tmp_path]).failures
    assert said.startswith("the compiler: ImportError: eager_offload needs torch._inductor.virtualized.no_such_name")


@pytest.mark.usefixtures("quickly")
def test_the_command_prints_json_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD", "0")  # which is of programs, and not of the machine
    assert main(["doctor", "--json", "--disk-path", str(tmp_path)]) == 0
    given = json.loads(capsys.readouterr().out)
    assert given["verdict"]["works"] is True
    assert [disk["path"] for disk in given["disks"]] == [str(tmp_path)]


@pytest.mark.parametrize(
    ("most", "pins", "refused", "said"),
    [
        (GIB + GIB // 2, 99, False, "container: the control group"),
        (64 * GIB, 3, True, "WSL2: "),
        (64 * GIB, 99, False, "no more was tried"),
    ],
)
def test_memory_is_pinned_until_the_driver_refuses_or_half_of_the_container_is_taken(
    most: int, pins: int, refused: bool, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = FakeMachine(tmp_path)
    machine.write("proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2")
    machine.belongs_to("/job", version=2)
    machine.set_group_v2("/sys/fs/cgroup/job", most=most, used=0)
    left = [torch.empty(0)] * pins

    def pin(memory: object, nbytes: int) -> torch.Tensor:
        if not left:
            raise RuntimeError("cudaHostRegister failed with error 2")
        return left.pop()

    monkeypatch.setattr(pinned.PinnedMemory, "pin", pin)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", bool, raising=False)
    for name in ("host_budget", "host_headroom", "pinning_limit"):
        monkeypatch.setattr(pinned, name, partial(getattr(limits, name), system=machine.system))
    found = pinned.measure_pinning()
    assert (found.pinned_bytes, found.refused) == (min(pins * 256 * MIB, most // 2, 8 * GIB), refused)
    assert found.bound_by.startswith(said)
    assert (not found.remedy) is ("no more" in said)
    advice = verdict(GPU, [SelfTest("cuda:0", True, 1)], {}, found).advice
    assert ("At most 768.0 MiB of host memory can be pinned (WSL2" in " ".join(advice)) is refused


# -- what follows: pure, so that every machine can be tried -----------------------------------------------------------

CPU = {"cpu": Machine("cpu", 9e11, 1e11, 1e10, 2e9, 0.5e9, 32 * GIB)}
GPU = {"cuda:0": Machine("H200", 6e14, 1e13, 4e12, 52e9, 52e9, 140 * GIB)}
LARGE = Memory(512 * GIB, 500 * GIB, 250 * GIB, 1, "500 GiB are available", "take more")
SMALL = replace(LARGE, budget_bytes=30 * GIB)
#: Reading counts half, since backward takes twice as long.
DISKS = [Disk("/slow", out=1e8, back=1e8), Disk("/fast", out=2e9, back=0.5e9)]


@pytest.mark.parametrize(
    ("devices", "memory", "settings", "where", "ratio", "advice"),
    [
        (CPU, LARGE, {"tier": "disk", "disk_path": "/fast"}, "cpu to /fast", 100, "width of 267 on, and copies"),
        (CPU | GPU, LARGE, {}, "cuda:0 to host memory", 11_538, "width of 15,385 on, and half of them from 7,692"),
        (CPU | GPU, SMALL, {"disk_path": "/fast"}, "cuda:0 to host memory, then to /fast", 11_538, "of 962 on."),
        (GPU, None, {}, "cuda:0 to host memory", 11_538, "gradient checkpointing"),
    ],
)
def test_settings_and_a_verdict_follow_from_what_was_measured(
    devices: dict[str, Machine | None],
    memory: Memory | None,
    settings: dict[str, object],
    where: str,
    ratio: float,
    advice: str,
) -> None:
    *_, trains = devices
    assert recommended(devices, memory, DISKS) == settings
    found = verdict(devices, [SelfTest(trains, True, 1)], settings)
    assert found.works
    assert found.summary == f"Offloading works here: {where}."
    assert found.flop_per_byte == {trains: pytest.approx(ratio, rel=1e-3)}
    assert advice in found.advice[0]
    for moved, equal in ((0, True), (1, False)):
        assert not verdict(devices, [SelfTest(trains, equal, moved)], settings).works
