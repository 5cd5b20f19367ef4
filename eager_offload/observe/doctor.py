"""Examines a machine: what it offers to offloading, whether offloading pays there, and with which settings.

``--json`` prints a :class:`Diagnosis`, whose fields docs/doctor_and_report.md describes. Sizes are bytes, times
seconds, speeds bytes a second; what could not be measured is ``None``.

[Note: when it pays]
What a layer saves is hidden if it has left by the time that forward is over, and has come back by the time that
backward is, which takes twice as long (DESIGN: the floor of a step). So of a device that does F operations a second,
whose tier takes W bytes a second and gives R, a saved byte is hidden behind F * max(1 / W, 1 / (2 R)) operations of
forward. A transformer block of width d without dropout does 24 d^2 operations for a token (Kaplan et al., attention
left out) and saves the inputs of its products, activation and norms: 16 d numbers. A checkpointed one saves its d
inputs.
"""

from __future__ import annotations

import contextlib
import pkgutil
import platform
import shutil
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from eager_offload import _torch
from eager_offload.config import OffloadConfig, rate_text, size_text
from eager_offload.errors import ConfigError
from eager_offload.machine import Measurement, measure, name_of
from eager_offload.offload import Offload
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.accelerator_api import AcceleratorApi
from eager_offload.runtime.base import Direction
from eager_offload.tiers.directories import filesystem_of, usual_directories
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.limits import disk_budget, host_budget, host_headroom
from eager_offload.tiers.memory import node_of_device
from eager_offload.tiers.ranks import local_ranks
from eager_offload.version import VERSION

_T = TypeVar("_T")

#: The version of the keys. New keys leave it as it is; a key that goes or changes its meaning adds one.
FORMAT = 2
#: Seconds for one probe, and for all of them; those that would begin later are left out.
_ONE_PROBE, _ALL_PROBES = 8.0, 16.0
#: Accelerators of one machine that are looked at.
_MOST_DEVICES = 4
#: Bytes that are pinned to see how long it takes.
_PINNED_BYTES = 256 << 20
#: Bytes that have to fit on a disk to measure it, those that are enough, and the part of what is free that it may take.
_LEAST_ON_DISK, _MOST_ON_DISK, _PART_OF_FREE = 16 << 20, 64 << 20, 16
#: Columns of the text.
WIDTH = 80


@dataclass(frozen=True)
class Speed:
    """Bytes a second, each way."""

    out: float
    back: float


@dataclass(frozen=True)
class Device:
    """Something that trains: a CPU in numbers of 32 bits, an accelerator in numbers of 16."""

    name: str
    model: str
    memory_bytes: int | None = None
    flops: float | None = None
    itemsize: int = 2
    memory_speed: float | None = None
    spread: float | None = None
    link: Speed | None = None
    numa_node: int | None = None
    pin_seconds: float | None = None


@dataclass(frozen=True)
class Memory:
    """Host memory."""

    total_bytes: int
    headroom_bytes: int
    budget_bytes: int
    ranks: int
    bound_by: str
    remedy: str


@dataclass(frozen=True)
class Disk:
    """A directory that a spill file could be in."""

    path: str
    filesystem: str = ""
    device: int = 0
    free_bytes: int = 0
    budget_bytes: int = 0
    direct_io: bool = False
    speed: Speed | None = None
    refused: str = ""


@dataclass(frozen=True)
class SelfTest:
    """Four small layers, trained for a step with everything offloaded, and again without."""

    device: str
    equal: bool
    moved_bytes: int


@dataclass(frozen=True)
class Verdict:
    """What follows from all that."""

    works: bool
    summary: str
    flop_per_byte: dict[str, float] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    python: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All of it."""

    format: int
    seconds: float
    software: dict[str, str]
    devices: list[Device]
    memory: Memory | None
    disks: list[Disk]
    missing: dict[str, str]
    self_tests: list[SelfTest]
    failures: list[str]
    verdict: Verdict


def examine(paths: Sequence[Path] | None = None) -> Diagnosis:
    """Examines this machine for about 10 seconds. Nothing that fails raises; it becomes a line of ``failures``.

    Args:
        paths: directories for a spill file. ``None``: those that are tried where ``disk_path`` is ``None``.
    """
    run = _Probes()
    memory: Memory | None = run("host memory", _memory, None)
    found = [Device("cpu", _processor(), psutil.virtual_memory().total, itemsize=4)]
    found += run("accelerators", _accelerators, list[Device]())
    devices = [_measured(run, one) for one in found]
    disks: list[Disk] = []
    for path in usual_directories() if paths is None else paths:
        disks += run(f"directory {path}", partial(_disk, path, tuple(disks)), list[Disk]())
    settings = recommended(devices, memory, disks)
    # Beside an accelerator the CPU does not train, and what is saved there stays.
    trains = [device.name for device in devices if device.name != "cpu"] or ["cpu"]
    results = [run(f"self test on {name}", partial(_self_test, name, settings), None) for name in trains]
    tests = [test for test in results if test is not None]
    # After the rest: where no byte code is cached, the modules that it looks into take long to import.
    missing = run("private names of torch", _missing, dict[str, str]())
    end = verdict(devices, disks, tests, settings)
    return Diagnosis(FORMAT, run.elapsed, _software(), devices, memory, disks, missing, tests, run.failures, end)


class _Probes:
    """Runs probes, each on a thread that may hang: a network disk that is gone answers no call."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._started = time.perf_counter()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    def __call__(self, what: str, probe: Callable[[], _T], otherwise: _T) -> _T:
        """Returns what ``probe`` does, or ``otherwise`` if it fails or takes too long, with a line that says so."""
        left = min(_ONE_PROBE, _ALL_PROBES - self.elapsed)
        if left <= 0:
            self.failures.append(f"{what}: left out, since the {_ALL_PROBES:.0f} seconds for all probes were over")
            return otherwise
        results: list[_T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(probe())
            except BaseException as error:  # whatever a driver or a filesystem comes up with
                errors.append(error)

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("ignore")  # those for developers
            warnings.simplefilter("always", RuntimeWarning)
            warnings.simplefilter("always", UserWarning)
            thread = threading.Thread(target=work, name=f"eager_offload doctor: {what}", daemon=True)
            thread.start()
            thread.join(left)
        self.failures += [f"{what}: {_first_line(one.message)}" for one in warned]
        if results:
            return results[0]
        said = f"{type(errors[0]).__name__}: {_first_line(errors[0])}" if errors else f"no answer within {left:.0f} s"
        self.failures.append(f"{what}: {said}")
        return otherwise


def _first_line(message: object) -> str:
    return str(message).strip().partition("\n")[0]


# -- probes ---------------------------------------------------------------------------------------------------------


def _software() -> dict[str, str]:
    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    return {
        "eager_offload": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
        "accelerator": ", ".join(f"{kind} {version}" for kind, version in kinds.items() if version),
    }


def _processor() -> str:
    """The CPU, and how many threads torch uses of it."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(errors="replace").splitlines() if table.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(named or [platform.processor() or platform.machine()])[0]}, {torch.get_num_threads()} threads"


def _accelerators() -> list[Device]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    api, count = AcceleratorApi(), min(torch.accelerator.device_count(), _MOST_DEVICES)
    devices = [torch.device(accelerator.type, index) for index in range(count)]
    return [
        Device(str(one), name_of(one), api.total_memory(one), numa_node=node_of_device(api.pci_address(one.index)))
        for one in devices
    ]


def _measured(run: _Probes, device: Device) -> Device:
    at, name = torch.device(device.name), device.name
    measured: Measurement | None = run(f"compute of {name}", partial(measure, at), None)
    if measured is not None:
        rates = measured.machine
        flops = rates.single_flops if at.type == "cpu" else rates.flops
        device = replace(device, flops=flops, memory_speed=rates.memory, spread=measured.spread)
    if at.type == "cpu":
        return device
    link: Speed | None = run(f"link of {name}", partial(_link, at), None)
    return replace(device, link=link, pin_seconds=run(f"pinning for {name}", _pin_seconds, None))


def _link(device: torch.device) -> Speed:
    runtime = accelerator_runtime()
    return Speed(runtime.bandwidth(device, Direction.OUT), runtime.bandwidth(device, Direction.IN))


def _pin_seconds() -> float:
    """Seconds to pin one GiB as offloading does it, in a slab of a quarter of that."""
    runtime = accelerator_runtime()
    runtime.slab_sizes()  # finds out how to pin
    started = time.perf_counter()
    slab = runtime.host_buffer(_PINNED_BYTES)
    seconds = time.perf_counter() - started
    if not slab.is_pinned():
        raise RuntimeError("the memory that came is pageable")
    return seconds * (1 << 30) / _PINNED_BYTES


def _memory() -> Memory:
    headroom = host_headroom()
    limit, total = headroom.binding, psutil.virtual_memory().total
    return Memory(total, headroom.nbytes, host_budget(), local_ranks(), limit.reason, limit.remedy)


def _disk(path: Path, others: Sequence[Disk]) -> list[Disk]:
    """``path`` as the disk tier finds it; its speed is that of one transfer at a time, measured once for each disk."""
    try:
        free = shutil.disk_usage(path).free
        disk = Disk(str(path), filesystem_of(path), path.stat().st_dev, free, disk_budget(path))
        tier = DiskTier([path], min(_MOST_ON_DISK, free // _PART_OF_FREE))
    except (OSError, ConfigError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error.__cause__ or error)
        return [Disk(str(path), refused=said or str(error))]
    try:
        if free // _PART_OF_FREE < _LEAST_ON_DISK:
            return [replace(disk, refused=f"only {size_text(free)} are free there")]
        same = next((one.speed for one in others if one.device == disk.device and one.speed), None)
        return [replace(disk, direct_io=tier.direct_io, speed=same or Speed(*tier.measure()))]
    finally:
        tier.close()


def _missing() -> dict[str, str]:
    """Names of torch that the library uses and this torch has not, each with what happens without it."""
    return {
        name: without
        for without, names in (*_torch.PRIVATE_NAMES.items(), *_torch.PUBLIC_NAMES.items())
        for name in names
        if "()" not in name and name not in _torch.IMPORTED_BY_USERS
        if name not in _torch.OF_CUDA or torch.version.cuda
        if not _resolves(name)
    }


def _resolves(dotted: str) -> bool:
    """Whether ``package.module.name.attribute`` is there, on the class or on an instance of it."""
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name(dotted)
        return True
    owner, _, name = dotted.rpartition(".")
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        return hasattr(pkgutil.resolve_name(owner)(), name)
    return False


def _self_test(device_name: str, settings: Mapping[str, Any]) -> SelfTest:
    """Trains four layers for a step with everything offloaded, in small windows, and compares the gradients."""
    small = {"max_inflight_bytes": 8 << 20, "prefetch_bytes": 8 << 20, "keep_last_bytes": 0, "min_bytes": 1 << 20}
    device = torch.device(device_name)
    generator = torch.Generator(device)  # not torch's own, whose numbers belong to the user's training
    random = partial(torch.randn, device=device, generator=generator)
    weights = [(random(256, 256) / 16).requires_grad_() for _ in range(4)]
    rows = random(4096, 256)
    offload = Offload(OffloadConfig.from_fields({**settings, **small}))
    try:
        with torch.inference_mode(False), torch.enable_grad():
            expected = torch.autograd.grad(_loss(rows, weights), weights)
            with offload:
                loss = _loss(rows, weights)
            given = torch.autograd.grad(loss, weights)
        equal = all(map(torch.equal, given, expected))
        return SelfTest(device_name, equal, offload.stats().bytes_out)
    finally:
        offload.close()


def _loss(rows: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        rows = F.gelu(rows @ weight)
    return rows.square().sum()


# -- what follows ---------------------------------------------------------------------------------------------------


def recommended(devices: Sequence[Device], memory: Memory | None, disks: Sequence[Disk]) -> dict[str, Any]:
    """Returns the fields of ``OffloadConfig`` that should differ from their defaults on this machine."""
    accelerators = [one for one in devices if one.name != "cpu"]
    best = _best_disk(disks)
    if not accelerators:
        # A directory that was refused too: the self test shows what is wrong with it.
        return {"tier": "disk"} | ({"disk_path": (best or disks[0]).path} if disks else {})
    room = min((one.memory_bytes for one in accelerators if one.memory_bytes), default=0)
    spills = best is not None and memory is not None and memory.budget_bytes < room
    pins = any(one.pin_seconds is not None for one in accelerators)
    return ({"disk_path": best.path} if best and spills else {}) | ({} if pins else {"pin_memory": False})


def _best_disk(disks: Sequence[Disk]) -> Disk | None:
    """The disk that hides the most; of several directories on one disk, the first."""
    return min((one for one in disks if one.speed), key=lambda one: _seconds_a_byte(one.speed), default=None)


def _seconds_a_byte(speed: Speed | None) -> float:
    """Seconds of forward that a saved byte takes to be hidden: [Note: when it pays]."""
    assert speed is not None
    return max(1 / speed.out, 1 / (2 * speed.back))


def hidden_from_width(flop_per_byte: float, itemsize: int, *, checkpointed: bool = False) -> int:
    """Returns the width of a transformer block from which everything that it saves is hidden: [Note: when it pays]."""
    return round(flop_per_byte * itemsize / (24 if checkpointed else 24 / 16))


def verdict(
    devices: Sequence[Device], disks: Sequence[Disk], tests: Sequence[SelfTest], settings: Mapping[str, Any]
) -> Verdict:
    """Returns what follows from an examination."""
    passed = [test.device for test in tests if test.equal and test.moved_bytes]
    wrong = [test.device for test in tests if not test.equal]
    best = _best_disk(disks)
    ratios, advice = {}, []
    for device in devices:
        speed = device.link if device.name != "cpu" else (best.speed if best else None)
        if speed is not None and device.flops is not None and device.name in passed:
            ratios[device.name] = device.flops * _seconds_a_byte(speed)
            advice.append(_when_it_pays(device, ratios[device.name]))
    if passed == ["cpu"]:
        advice.append(
            "On a CPU, call eager_offload.release_freed_memory() before the model is built and set "
            "THP_MEM_ALLOC_ENABLE=1 before Python starts, or freed memory stays with the process."
        )
    if wrong:
        summary = f"Gradients came out wrong on {', '.join(wrong)}: do not use it here, and please report this."
    elif not passed:
        summary = "Offloading cannot work here: no device passed its self test. The lines above say why."
    else:
        places = [] if passed == ["cpu"] else ["host memory"]
        places += [str(settings["disk_path"])] if "disk_path" in settings else []
        summary = f"Offloading works here: {', '.join(passed)} to {', then to '.join(places or ['disk'])}."
    python = f"eo.OffloadConfig({', '.join(f'{name}={value!r}' for name, value in settings.items())})"
    return Verdict(bool(passed) and not wrong, summary, ratios, advice, dict(settings), python)


def _when_it_pays(device: Device, flop_per_byte: float) -> str:
    width = hidden_from_width(flop_per_byte, device.itemsize)
    text = (
        f"{device.name} does {flop_per_byte:,.0f} FLOP in the time that a saved byte takes. All that a transformer "
        f"block saves is hidden from a width of {width:,} on"
    )
    if width < 768:  # blocks that are worth offloading are at least this wide
        # Threads copy what a CPU computes, on cores that it computes with: no link's speed tells what that takes.
        return text + (", and copies take a part of the processor." if device.name == "cpu" else ".")
    checkpointed = hidden_from_width(flop_per_byte, device.itemsize, checkpointed=True)
    return text + (
        f", and half of it from {width // 2:,}. Narrower ones do better with gradient checkpointing, alone or with "
        f"offloading: what a checkpointed block saves is hidden from a width of {checkpointed:,} on."
    )


# -- the text -------------------------------------------------------------------------------------------------------


def to_text(diagnosis: Diagnosis) -> str:
    """Returns the whole report, in lines of 80 columns; it ends in the verdict."""
    end, memory = diagnosis.verdict, diagnosis.memory
    sections: dict[str, list[tuple[str, str]]] = {
        "Software": [*diagnosis.software.items()],
        "Devices": [row for device in diagnosis.devices for row in _device_rows(device)],
        "Host memory": []
        if memory is None
        else [
            ("headroom", f"{size_text(memory.headroom_bytes)} of {size_text(memory.total_bytes)}"),
            ("bound by", memory.bound_by),
            ("to raise it", memory.remedy),
            ("host_budget", f'"auto" is {size_text(memory.budget_bytes)} for this process, one of {memory.ranks} here'),
        ],
        "Directories for a spill file": [("-", _disk_text(disk)) for disk in diagnosis.disks],
        "Not in this torch": [("-", f"{name}. Without it: {text}") for name, text in diagnosis.missing.items()],
        "Self test": [
            (test.device, f"gradients {'equal' if test.equal else 'DIFFER'}; {size_text(test.moved_bytes)} moved")
            for test in diagnosis.self_tests
        ],
        "What failed": [("-", failure) for failure in diagnosis.failures],
        "Verdict": [("", end.summary), *(("-", one) for one in end.advice)],
    }
    if end.works:
        sections["Verdict"] += [("", "Recommended:"), ("", end.python)] if end.settings else [("", "The defaults fit.")]
    parts = ["\n".join([title, *map(_wrapped, rows)]) for title, rows in sections.items() if rows]
    return "\n\n".join(["eager_offload doctor", *parts, f"({diagnosis.seconds:.1f} seconds)"])


def _wrapped(row: tuple[str, str]) -> str:
    """A row of a name and what is said of it, an item of a list (``-``), or a paragraph without a name."""
    name, text = row
    if text.startswith("eo."):
        return f"    {text}"  # to be copied
    first = {"": "  ", "-": "  - "}.get(name, f"  {name:<14} ")
    wrapper = textwrap.TextWrapper(WIDTH, first, " " * len(first), break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)


def _device_rows(device: Device) -> Iterator[tuple[str, str]]:
    memory = f", {size_text(device.memory_bytes)}" if device.memory_bytes else ""
    node = f", node {device.numa_node}" if device.numa_node is not None else ""
    yield device.name, device.model + memory + node
    if device.flops is not None and device.memory_speed is not None:
        flops = f"{device.flops / 1e12:,.1f} T" if device.flops >= 1e12 else f"{device.flops / 1e9:,.0f} G"
        product = f"{flops}FLOP/s in products of {8 * device.itemsize} bits"
        yield "  compute", f"{product}, {rate_text(device.memory_speed)} of memory (spread {device.spread:.0%})"
    if device.link is not None:
        yield "  link", f"{rate_text(device.link.out)} out, {rate_text(device.link.back)} back"
    if device.pin_seconds is not None:
        yield "  pinning", f"{device.pin_seconds * 1e3:,.0f} ms a GiB"


def _disk_text(disk: Disk) -> str:
    if disk.refused or disk.speed is None:
        return f"{disk.path}: cannot serve: {disk.refused}"
    how = "around the page cache" if disk.direct_io else "through the page cache"
    return (
        f"{disk.path}: {disk.filesystem or 'unknown filesystem'}, {size_text(disk.free_bytes)} free, "
        f'{size_text(disk.budget_bytes)} of it for disk_budget="auto"; '
        f"{rate_text(disk.speed.out)} write, {rate_text(disk.speed.back)} read, {how}"
    )
