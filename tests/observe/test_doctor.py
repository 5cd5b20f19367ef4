"""What the doctor finds on this machine, and that whatever fails is a line."""

from __future__ import annotations

import dataclasses
import json
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import eager_offload as eo
from eager_offload.doctor import main
from eager_offload.observe.doctor import examination, probes
from eager_offload.observe.doctor.diagnosis import Diagnosis, Feature, Speed
from eager_offload.observe.doctor.examination import WIDTH, examine, to_text
from eager_offload.tiers import disk
from eager_offload.tiers.directories import filesystem_of
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.rawfile import RawFile
from tests.processes import ROOT, printed_by

pytestmark = pytest.mark.xdist_group("doctor")

DOCS = ROOT / "docs" / "doctor_and_report.md"
MIB = 1 << 20


#: ``python -m eager_offload.doctor``, without the limits of time that a busy machine may not keep.
_PATIENT_COMMAND = """
import runpy
from eager_offload.observe.doctor import examination
examination._ONE_PROBE = examination._ALL_PROBES = 600.0
runpy.run_module("eager_offload.doctor", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spill")


@pytest.fixture(scope="module")
def diagnosis(directory: Path) -> Diagnosis:
    """Of this machine, with one directory and another one on the same disk."""
    second = directory / "second"
    second.mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patiently(patched)
        return examine([directory, second, directory / "missing"])


def test_the_cpu_and_its_speeds_are_found(diagnosis: Diagnosis) -> None:
    cpu = diagnosis.devices[0]
    assert cpu.name == "cpu"
    assert cpu.flops is not None
    assert cpu.flops > 1e8
    assert cpu.link is not None
    assert min(cpu.link.out, cpu.link.back) > 1e7
    assert diagnosis.software.torch == torch.__version__
    assert diagnosis.memory is not None
    assert diagnosis.memory.bound_by == diagnosis.memory.limits[0].reason
    assert 0 < diagnosis.memory.budget_bytes <= diagnosis.memory.headroom_bytes <= diagnosis.memory.total_bytes


def test_a_step_with_everything_offloaded_is_compared(diagnosis: Diagnosis) -> None:
    cpu = diagnosis.self_tests[0]
    assert (cpu.device, cpu.equal) == ("cpu", True)
    assert 16 * MIB <= cpu.moved_bytes <= 64 * MIB  # the docs name the most
    assert diagnosis.verdict.works
    assert diagnosis.verdict.flop_per_byte["cpu"] > 0


def test_each_disk_is_measured_once_and_nothing_stays_there(diagnosis: Diagnosis, directory: Path) -> None:
    first, second, missing = diagnosis.disks
    assert first.speed is not None
    assert first.buffered is not None
    assert min(first.speed.out, first.speed.back, first.buffered.out, first.buffered.back) > 1e5
    assert (second.direct, second.buffered) == (first.direct, first.buffered)
    assert missing.speed is None
    assert missing.refused == "No such file or directory"
    assert [path.name for path in directory.iterdir()] == ["second"]


def test_direct_io_is_measured_exactly_where_the_tier_does_it(diagnosis: Diagnosis, directory: Path) -> None:
    tier = DiskTier([directory], 64 * MIB)
    try:
        assert (diagnosis.disks[0].direct is not None) == tier.direct_io
    finally:
        tier.close()


def test_the_settings_can_be_pasted(diagnosis: Diagnosis, directory: Path) -> None:
    verdict = diagnosis.verdict
    config = eval(verdict.python, {"eo": eo})
    assert config == eo.OffloadConfig.from_fields(verdict.settings)
    assert config.tier == "disk"
    assert config.disk_paths == (directory,)
    assert eo.OffloadConfig.from_env(dict(part.split("=", 1) for part in shlex.split(verdict.environment))) == config


def test_the_json_has_every_field_and_the_docs_have_every_key(diagnosis: Diagnosis) -> None:
    given = json.loads(json.dumps(dataclasses.asdict(diagnosis)))
    assert given["format"] == 1
    documented = DOCS.read_text()
    for key in keys(given):
        assert f"`{key}`" in documented, key


def keys(value: object) -> Iterator[str]:
    """Every key; what is under ``settings`` and ``flop_per_byte`` is named by others."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key not in ("settings", "flop_per_byte"):
                yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def test_the_text_has_80_columns_and_no_colours(diagnosis: Diagnosis) -> None:
    text = to_text(diagnosis)
    # What is copied stays whole, however long a path is.
    copied = {diagnosis.verdict.python, diagnosis.verdict.environment}
    for line in text.splitlines():
        assert len(line) <= WIDTH or line.strip() in copied or "/" in line, line
        assert line.isprintable(), line
    assert text.index("Software") < text.index("Directories") < text.index("Verdict") < text.index("Recommended")
    assert diagnosis.verdict.python in text


def test_a_probe_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("the driver is gone\nand here is a long story")

    monkeypatch.setattr(probes, "matmul_flops", broken)
    monkeypatch.setattr(probes, "memory", broken)
    quickly(monkeypatch)
    found = examine([directory])
    assert "compute of cpu: RuntimeError: the driver is gone" in found.failures
    assert "host memory: RuntimeError: the driver is gone" in found.failures
    assert found.memory is None
    assert found.devices[0].flops is None
    assert found.verdict.works
    assert "the driver is gone" in to_text(found)


def test_an_interrupt_ends_it_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(examination, "examine", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().out == ""


def test_a_probe_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    answered = threading.Event()
    monkeypatch.setattr(probes, "directory", lambda path: answered.wait())
    quickly(monkeypatch)
    monkeypatch.setattr(examination, "_ONE_PROBE", 0.3)
    try:
        found = examine([directory])
    finally:
        answered.set()
    assert any(line.startswith(f"directory {directory}: no answer within") for line in found.failures)


def test_when_the_time_is_over_the_rest_is_left_out(directory: Path) -> None:
    found = examine([directory], seconds=0)
    assert found.failures
    assert all("left out" in line for line in found.failures)
    assert not found.verdict.works
    assert to_text(found)


def test_nothing_can_work_where_no_directory_serves(
    monkeypatch: pytest.MonkeyPatch, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quickly(monkeypatch)
    assert main(["--disk-path", str(directory / "missing")]) == 1
    reported = " ".join(capsys.readouterr().out.split())
    assert "No such file or directory" in reported
    assert "cannot work here" in reported
    assert "Recommended" not in reported


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert probes.directory(tmp_path / "file").refused == "it is no directory"
    assert probes.directory(tmp_path).refused == ""


def test_h27_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/dev/shm")
    if not path.is_dir() or filesystem_of(path) != "tmpfs":
        pytest.skip("this system has no /dev/shm")
    quickly(monkeypatch)
    assert probes.directory(path).refused == "it is on tmpfs, which is memory itself"  # whatever its size is
    (disk,) = examine([path]).disks
    assert disk.refused == "it is on tmpfs, which is memory itself"
    assert disk.speed is None


def test_h27_where_direct_io_is_refused_only_the_page_cache_is_measured(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    def refuse(self: RawFile, direct: bool) -> None:
        if direct:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(RawFile, "set_direct", refuse)
    assert probes.disk_speed(directory, 1 << 40, direct=True) is None
    assert isinstance(probes.disk_speed(directory, 1 << 40, direct=False), Speed)


def test_a_disk_that_is_nearly_full_is_left_alone(directory: Path) -> None:
    assert probes.disk_speed(directory, 100 * MIB, direct=True) == f"only {100 * MIB} bytes are free there"


def test_every_private_name_is_looked_for() -> None:
    names = probes.private_names()
    assert len({one.name for one in names}) == len(names) > 30
    assert Feature("torch.fx.Graph._codegen", True, "copies of graphs take their inputs flat") in names
    absent = {one.name for one in names if not one.there}
    if torch.__version__.startswith("2.13"):
        assert absent == set()
    assert all(one.without and "below" not in one.without for one in names)


@pytest.mark.parametrize("name", ["torch.no_such_name", "torch._no_such_module.name", "torch.Tensor._no.name"])
def test_a_name_that_is_not_there_is_found_out(name: str) -> None:
    assert not probes._resolves(name)


def test_the_command_prints_json_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGER_OFFLOAD", "0")  # which is of programs, and not of the machine
    quickly(monkeypatch)
    assert main(["--json", "--disk-path", str(directory)]) == 0
    given = json.loads(capsys.readouterr().out)
    assert given["verdict"]["works"] is True
    assert [disk["path"] for disk in given["disks"]] == [str(directory)]


@pytest.mark.long  # Python compiles torch once more for it
def test_the_command_works_without_docstrings_and_assertions(directory: Path) -> None:
    assert "usage: python -m eager_offload.doctor" in printed_by("-OO", "-m", "eager_offload.doctor", "--help")
    given = json.loads(printed_by("-OO", "-c", _PATIENT_COMMAND, "--json", "--disk-path", directory))
    assert given["verdict"]["works"] is True
    assert given["failures"] == []
    assert sum(feature["name"].startswith("torch.") for feature in given["features"]) > 30


def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what takes long and what the test at hand is not about."""
    monkeypatch.setattr(probes, "features", list)
    monkeypatch.setattr(probes, "_MEASURING", 0.02)
    monkeypatch.setattr(disk, "_MEASURING_SECONDS", 0.04)
    patiently(monkeypatch)


def patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe fails since the machine is busy."""
    monkeypatch.setattr(examination, "_ONE_PROBE", 600.0)
    monkeypatch.setattr(examination, "_ALL_PROBES", 600.0)
