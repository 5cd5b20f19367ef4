"""The order of an examination, and what keeps one probe's failure from the others."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from eager_offload.observe.doctor import features, machine, speeds, trial
from eager_offload.observe.doctor.findings import FORMAT, Device, Diagnosis, Disk, Feature, Memory
from eager_offload.observe.doctor.verdict import recommended, verdict
from eager_offload.tiers.directories import usual_directories

__all__ = ["examine"]

_T = TypeVar("_T")

#: Seconds for one probe, and for all of them; those that would begin later are left out.
_ONE_PROBE, _ALL_PROBES = 8.0, 16.0


def examine(paths: Sequence[Path] | None = None, *, seconds: float | None = None) -> Diagnosis:
    """Looks at this machine. Nothing that fails raises; it becomes a line of ``failures``.

    Measuring writes at most 256 MiB into each directory, and at most an eighth of what is free, to files without name;
    the self test adds at most 64 MiB for each device, where the recommended settings take a disk.

    Args:
        paths: directories for a spill file. ``None``: those that are tried where nobody names one.
        seconds: after that long no further probe begins. ``None``: 16.
    """
    probes = _Probes(_ALL_PROBES if seconds is None else seconds)
    software = machine.software()
    memory: Memory | None = probes.run("host memory", machine.memory, None)
    found = [probes.run("processor", machine.processor, Device("cpu", "unknown"))]
    found += probes.run("accelerators", machine.accelerators, list[Device]())
    devices = [_device(probes, one) for one in found]
    disks = _disks(probes, paths)
    settings = recommended(devices, memory, disks)
    tests = [
        test
        for device in devices
        if (test := probes.run(f"self test on {device.name}", partial(trial.self_test, device.name, settings), None))
    ]
    # Last, since where no byte code is cached the modules that it looks into take long to import.
    there = probes.run("features", features.features, list[Feature]())
    return Diagnosis(
        FORMAT,
        probes.elapsed,
        software,
        devices,
        memory,
        disks,
        there,
        tests,
        probes.failures,
        verdict(devices, disks, tests, settings),
    )


def _device(probes: _Probes, device: Device) -> Device:
    at, name = torch.device(device.name), device.name
    dtype = torch.float32 if at.type == "cpu" else torch.bfloat16
    device = replace(
        device,
        flops=probes.run(f"compute of {name}", partial(speeds.matmul_flops, at, dtype), None),
        dtype=str(dtype).removeprefix("torch."),
        link=probes.run(f"link of {name}", partial(speeds.link, at), None),
    )
    if at.type == "cpu":
        return device
    return replace(
        device,
        duplex=probes.run(f"link of {name}, both ways at once", partial(speeds.duplex_link, at), None),
        pin_seconds=probes.run(f"pinning for {name}", speeds.pin_seconds, None),
    )


def _disks(probes: _Probes, paths: Sequence[Path] | None) -> list[Disk]:
    """Every directory, each disk measured once."""
    found: list[Disk] = []
    for path in usual_directories() if paths is None else paths:
        disk = probes.run(f"directory {path}", partial(machine.disk, path), None)
        if disk is None:
            continue
        same = next((one for one in found if one.device == disk.device and one.speed), None)
        if same is not None and not disk.refused:
            disk = replace(disk, direct=same.direct, buffered=same.buffered)
        elif not disk.refused:
            disk = _measured(probes, path, disk)
        found.append(disk)
    return found


def _measured(probes: _Probes, path: Path, disk: Disk) -> Disk:
    measure, nothing = partial(speeds.disk, path, disk.free_bytes), speeds.Measured()
    direct = probes.run(f"disk of {path} with O_DIRECT", partial(measure, direct=True), nothing)
    buffered = probes.run(f"disk of {path} without O_DIRECT", partial(measure, direct=False), nothing)
    return replace(disk, direct=direct.speed, buffered=buffered.speed, refused=direct.refused or buffered.refused)


class _Probes:
    """Runs probes, each on a thread that may hang: a dead network disk answers nobody."""

    def __init__(self, seconds: float) -> None:
        self.failures: list[str] = []
        self._started = time.perf_counter()
        self._seconds = seconds

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    def run(self, what: str, probe: Callable[[], _T], otherwise: _T) -> _T:
        """What ``probe`` returns, or ``otherwise`` where it fails or takes too long, with a line that says so."""
        left = min(_ONE_PROBE, self._seconds - self.elapsed)
        if left <= 0:
            self.failures.append(f"{what}: left out, since the {self._seconds:.0f} seconds for all probes were over")
            return otherwise
        results: list[_T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(probe())
            except BaseException as error:  # whatever a driver or a filesystem comes up with
                errors.append(error)

        with warnings.catch_warnings(record=True) as told:
            # Not those that are for developers.
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RuntimeWarning)
            warnings.simplefilter("always", UserWarning)
            thread = threading.Thread(target=work, name=f"eager_offload doctor: {what}", daemon=True)
            thread.start()
            thread.join(left)
        self.failures += [f"{what}: {_first_line(one.message)}" for one in told]
        if results:
            return results[0]
        if errors:
            self.failures.append(f"{what}: {type(errors[0]).__name__}: {_first_line(errors[0])}")
        else:
            self.failures.append(f"{what}: no answer within {left:.0f} seconds")
        return otherwise


def _first_line(message: object) -> str:
    return str(message).strip().partition("\n")[0]
