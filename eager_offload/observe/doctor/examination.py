"""The examination, and its text of 80 columns."""

from __future__ import annotations

import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch

from eager_offload.config import rate_text, size_text
from eager_offload.observe.doctor import probes
from eager_offload.observe.doctor.diagnosis import (
    FORMAT,
    Device,
    Diagnosis,
    Disk,
    Feature,
    Memory,
    SelfTest,
    Speed,
    Verdict,
    recommended,
    verdict,
)
from eager_offload.tiers.directories import usual_directories

_T = TypeVar("_T")

#: Seconds for one probe, and for all of them; those that would begin later are left out.
_ONE_PROBE, _ALL_PROBES = 8.0, 16.0
#: Columns of the text, and where what is said of something begins.
WIDTH, _COLUMN = 80, 17


# -- the examination ------------------------------------------------------------------------------------------------


def examine(paths: Sequence[Path] | None = None, *, seconds: float | None = None) -> Diagnosis:
    """Looks at this machine. Nothing that fails raises; it becomes a line of ``failures``.

    Measuring writes at most 128 MiB into each directory, and at most an eighth of what is free, to files without name;
    the self test adds at most 64 MiB for each device, where the recommended settings take a disk.

    Args:
        paths: directories for a spill file. ``None``: those that are tried where ``disk_path`` is ``None``.
        seconds: after that long no further probe begins. ``None``: 16.
    """
    run = _Probes(_ALL_PROBES if seconds is None else seconds)
    software = probes.software()
    memory: Memory | None = run("host memory", probes.memory, None)
    found = [run("processor", probes.processor, Device("cpu", "unknown"))]
    found += run("accelerators", probes.accelerators, list[Device]())
    devices = [_device(run, one) for one in found]
    disks = _disks(run, usual_directories() if paths is None else paths)
    settings = recommended(devices, memory, disks)
    tests = [
        test
        for device in devices
        # Beside an accelerator the CPU is not what trains, and what is saved there stays.
        if (device.name != "cpu" or len(devices) == 1)
        and (test := run(f"self test on {device.name}", partial(probes.self_test, device.name, settings), None))
    ]
    return Diagnosis(
        format=FORMAT,
        software=software,
        devices=devices,
        memory=memory,
        disks=disks,
        # Last, since where no byte code is cached the modules that it looks into take long to import.
        features=run("features", probes.features, list[Feature]()),
        self_tests=tests,
        failures=run.failures,
        verdict=verdict(devices, disks, tests, settings),
        seconds=run.elapsed,
    )


def _device(run: _Probes, device: Device) -> Device:
    at, name = torch.device(device.name), device.name
    dtype = torch.float32 if at.type == "cpu" else torch.bfloat16
    device = replace(
        device,
        flops=run(f"compute of {name}", partial(probes.matmul_flops, at, dtype), None),
        dtype=str(dtype).removeprefix("torch."),
        link=run(f"link of {name}", partial(probes.link, at), None),
    )
    if at.type == "cpu":
        return device
    return replace(
        device,
        duplex=run(f"link of {name}, both ways at once", partial(probes.duplex_link, at), None),
        pin_seconds=run(f"pinning for {name}", probes.pin_seconds, None),
    )


def _disks(run: _Probes, paths: Sequence[Path]) -> list[Disk]:
    """Every directory, each disk measured once."""
    found: list[Disk] = []
    for path in paths:
        disk = run(f"directory {path}", partial(probes.directory, path), None)
        if disk is None:
            continue
        same = next((one for one in found if one.device == disk.device and one.speed), None)
        if same is not None and not disk.refused:
            disk = replace(disk, direct=same.direct, buffered=same.buffered)
        elif not disk.refused:
            measure = partial(probes.disk_speed, path, disk.free_bytes)
            direct = run(f"disk of {path} with O_DIRECT", partial(measure, direct=True), None)
            buffered = run(f"disk of {path} without O_DIRECT", partial(measure, direct=False), None)
            disk = replace(
                disk,
                direct=direct if isinstance(direct, Speed) else None,
                buffered=buffered if isinstance(buffered, Speed) else None,
                refused=next((one for one in (direct, buffered) if isinstance(one, str)), ""),
            )
        found.append(disk)
    return found


class _Probes:
    """Runs probes, each on a thread that may hang: a network disk that is gone answers no call."""

    def __init__(self, seconds: float) -> None:
        self.failures: list[str] = []
        self._started = time.perf_counter()
        self._seconds = seconds

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    def __call__(self, what: str, probe: Callable[[], _T], otherwise: _T) -> _T:
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

        with warnings.catch_warnings(record=True) as warned:
            # Not those that are for developers.
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RuntimeWarning)
            warnings.simplefilter("always", UserWarning)
            thread = threading.Thread(target=work, name=f"eager_offload doctor: {what}", daemon=True)
            thread.start()
            thread.join(left)
        self.failures += [f"{what}: {_first_line(one.message)}" for one in warned]
        if results:
            return results[0]
        if errors:
            self.failures.append(f"{what}: {type(errors[0]).__name__}: {_first_line(errors[0])}")
        else:
            self.failures.append(f"{what}: no answer within {left:.0f} seconds")
        return otherwise


def _first_line(message: object) -> str:
    return str(message).strip().partition("\n")[0]


# -- the text -------------------------------------------------------------------------------------------------------

#: A name and what is said of it; an item of a list (``-``); a paragraph, without a name; a line to copy (``=``).
_Row: TypeAlias = tuple[str, str]


def to_text(diagnosis: Diagnosis) -> str:
    """The whole report; ends in the verdict."""
    software, there = diagnosis.software, [feature for feature in diagnosis.features if feature.there]
    built = f" ({software.accelerator})" if software.accelerator else ""
    sections: dict[str, list[_Row]] = {
        "Software": [
            *(("eager_offload", software.eager_offload), ("torch", software.torch + built)),
            *(("python", software.python), ("system", software.system)),
        ],
        "Devices": [row for device in diagnosis.devices for row in _device_rows(device)],
        "Host memory": [*_memory_rows(diagnosis.memory)] if diagnosis.memory else [],
        "Directories for a spill file": [*_disk_rows(diagnosis.disks)],
        "Features": [
            *([("there", f"{len(there)} of {len(diagnosis.features)} that are probed")] if diagnosis.features else []),
            *(
                ("-", f"not there: {one.name}. Without it: {one.without}")
                for one in diagnosis.features
                if not one.there
            ),
        ],
        "Self test": [(test.device, _outcome(test)) for test in diagnosis.self_tests],
        "What failed": [("-", failure) for failure in diagnosis.failures],
        "Verdict": [*_verdict_rows(diagnosis.verdict)],
    }
    parts = ["\n".join([title, *map(_wrapped, rows)]) for title, rows in sections.items() if rows]
    return "\n\n".join(["eager_offload doctor", *parts, f"({diagnosis.seconds:.1f} seconds)"])


def _wrapped(row: _Row) -> str:
    name, text = row
    if name == "=":
        return f"    {text}".rstrip()
    first = {"": "  ", "-": "  - "}.get(name, f"  {name:<{_COLUMN - 3}} ")
    # Paths and settings stay whole: they are copied.
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _device_rows(device: Device) -> Iterator[_Row]:
    memory = f", {size_text(device.memory_bytes)}" if device.memory_bytes else ""
    node = f", node {device.numa_node}" if device.numa_node is not None else ""
    yield device.name, device.model + memory + node
    if device.flops is not None:
        yield "  compute", f"{_flops(device.flops)} ({device.dtype} product)"
    if device.link is not None and device.name == "cpu":
        yield "  copy", f"{rate_text(device.link.out)} within host memory"
    elif device.link is not None:
        yield "  link", _both(device.link, "out", "back")
    if device.duplex is not None:
        yield "  both at once", _both(device.duplex, "out", "back")
    if device.pin_seconds is not None:
        yield "  pinning", f"{device.pin_seconds * 1e3:,.0f} ms a GiB"


def _memory_rows(memory: Memory) -> Iterator[_Row]:
    yield "headroom", f"{size_text(memory.headroom_bytes)} of {size_text(memory.total_bytes)}"
    yield "bound by", memory.bound_by
    if memory.limits and memory.limits[0].kind != "memory":
        yield "to raise it", memory.remedy
    ranks = f", one of {memory.ranks} ranks here" if memory.ranks > 1 else ""
    yield "host_budget", f'"auto" is {size_text(memory.budget_bytes)} for this process{ranks}'


def _disk_rows(disks: list[Disk]) -> Iterator[_Row]:
    for disk in disks:
        if disk.refused:
            yield "-", f"{disk.path}: cannot serve: {disk.refused}"
            continue
        same = next(one for one in disks if one.device == disk.device and not one.refused)
        if same is not disk:
            yield "-", f"{disk.path}: on the same disk as {same.path}"
            continue
        yield "-", f"{disk.path}: {disk.filesystem or 'unknown filesystem'}, {size_text(disk.free_bytes)} free"
        for name, speed in (("O_DIRECT", disk.direct), ("page cache", disk.buffered)):
            yield f"  {name}", _both(speed, "write", "read") if speed else "refused or not measured"


def _outcome(test: SelfTest) -> str:
    if not test.equal:
        return "GRADIENTS DIFFER from those without offload"
    if not test.moved_bytes:
        return "nothing was moved"
    return f"moved {size_text(test.moved_bytes)}; gradients are equal, bit for bit"


def _verdict_rows(verdict: Verdict) -> Iterator[_Row]:
    yield "", verdict.summary
    yield from (("-", one) for one in verdict.advice)
    if verdict.works and not verdict.settings:
        yield "", "The defaults fit this machine."
    elif verdict.works:
        yield from (("=", ""), ("", "Recommended:"), ("=", verdict.python))
        yield from (("", "or, for OffloadConfig.from_env(), in the environment:"), ("=", verdict.environment))


def _both(speed: Speed, out: str, back: str) -> str:
    return f"{rate_text(speed.out)} {out}, {rate_text(speed.back)} {back}"


def _flops(value: float) -> str:
    return f"{value / 1e12:,.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.0f} GFLOP/s"
