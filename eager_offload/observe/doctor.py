"""Examines a machine: its resources for offloading, whether offloading pays there, and with which settings.

``--json`` prints a :class:`Diagnosis`. Sizes are bytes, times seconds, speeds bytes a second; an unmeasured quantity
is ``None`` or 0.

[Note: when it pays]
The saves of a layer are hidden if they have left when forward is over, and are back when backward is, which takes twice
as long. So on a device with F operations a second, whose tier takes W bytes a second and gives R, a saved byte is
hidden behind F * max(1 / W, 1 / (2 R)) operations of forward. A transformer block of width d without dropout does
24 d^2 operations for a token (Kaplan et al., attention left out) and saves the inputs of its products, activation and
norms: 16 d numbers. A checkpointed one saves its d inputs. A CPU computes with numbers of 32 bits, an accelerator with
numbers of 16.
"""

from __future__ import annotations

import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from eager_offload import torch_private
from eager_offload.config import OffloadConfig, rate_text, size_text
from eager_offload.errors import ConfigError
from eager_offload.offload import Offload
from eager_offload.planning.machine import Machine
from eager_offload.planning.measuring import measure
from eager_offload.runtime.pinned import Pinned, measure_pinning
from eager_offload.tiers.disk import DiskTier, filesystem_of, usual_directories
from eager_offload.tiers.limits import PAGEABLE_COST, disk_budget, host_budget, host_headroom, ranks_here
from eager_offload.torch_private import inductor
from eager_offload.version import VERSION

_T = TypeVar("_T")

#: The version of the keys. It grows when a key goes or changes its meaning, and not for a new key.
FORMAT = 3
#: Seconds for one probe.
_ONE_PROBE = 10.0
#: Bytes that a disk measurement needs, the most that it takes, and the divisor of the free bytes that it may take.
_LEAST_ON_DISK, _MOST_ON_DISK, _PART_OF_FREE = 16 << 20, 64 << 20, 16
#: Linux's list of memory nodes: one node is "0", several are "0-1" or "0,2".
NODES = Path("/sys/devices/system/node/online")


@dataclass(frozen=True)
class Memory:
    total_bytes: int
    headroom_bytes: int
    budget_bytes: int
    """``host_budget="auto"`` of the whole node."""
    ranks: int
    bound_by: str
    """The limit that ``headroom_bytes`` comes from; ``remedy`` raises it."""
    remedy: str


@dataclass(frozen=True)
class Disk:
    """A directory for a spill file."""

    path: str
    filesystem: str = ""
    device: int = 0
    """Equal for directories of one disk."""
    free_bytes: int = 0
    budget_bytes: int = 0
    """``disk_budget="auto"``."""
    direct_io: bool = False
    out: float = 0.0
    back: float = 0.0
    refused: str = ""
    """Why no spill file can be made there, or nothing."""


@dataclass(frozen=True)
class SelfTest:
    """Four small layers, trained for a step with everything offloaded, and again without."""

    device: str
    equal: bool
    moved_bytes: int


@dataclass(frozen=True)
class Verdict:
    works: bool
    summary: str
    flop_per_byte: dict[str, float] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    python: str = ""
    """The settings, to paste."""


@dataclass(frozen=True)
class Diagnosis:
    format: int
    seconds: float
    software: dict[str, str]
    devices: dict[str, Machine | None]
    """The devices that train, as measured; the link of the CPU is that of the best disk."""
    memory: Memory | None
    pinned: Pinned | None
    """``None`` without an accelerator: nothing is pinned there."""
    disks: list[Disk]
    self_tests: list[SelfTest]
    failures: list[str]
    """Probes that failed or hung, and the first compiler name that this torch lacks."""
    verdict: Verdict


def examine(paths: Sequence[Path] | None = None) -> Diagnosis:
    """Examines this machine for about 10 seconds. A probe that fails does not raise; it adds a line to ``failures``.

    Args:
        paths: directories for a spill file. ``None``: the directories that ``disk_path=None`` tries.
    """
    started, run = time.perf_counter(), _Probes()
    memory: Memory | None = run("host memory", _memory, None)
    accelerators = run("accelerators", _accelerators, list[str]())
    devices: dict[str, Machine | None] = {
        name: run(f"speed of {name}", partial(measure, torch.device(name)), None) for name in ["cpu", *accelerators]
    }
    pinned: Pinned | None = run("pinned memory", measure_pinning, None) if accelerators else None
    disks: list[Disk] = []
    for path in usual_directories() if paths is None else paths:
        disks += run(f"directory {path}", partial(_disk, path, tuple(disks)), list[Disk]())
    best, cpu = _best_disk(disks), devices["cpu"]
    if best is not None and cpu is not None:
        devices["cpu"] = replace(cpu, out=best.out, back=best.back)
    settings = recommended(devices, memory, disks)
    # Beside an accelerator the CPU does not train, and tensors saved there stay.
    trains = accelerators or ["cpu"]
    results = [run(f"self test on {name}", partial(_self_test, name, settings), None) for name in trains]
    tests = [test for test in results if test is not None]
    # Last, because the modules that it imports take long without cached byte code.
    run("the compiler", partial(torch_private.require_torch, names=inductor.NAMES_OF_COMPILER.values()), None)
    end = verdict(devices, tests, settings, pinned)
    seconds = time.perf_counter() - started
    return Diagnosis(FORMAT, seconds, _software(), devices, memory, pinned, disks, tests, run.failures, end)


class _Probes:
    """Runs probes, each on a thread that may hang: a network disk that is gone answers no call."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def __call__(self, what: str, probe: Callable[[], _T], otherwise: _T) -> _T:
        """Returns the result of ``probe``, or ``otherwise`` and a line of ``failures`` if it fails or takes too
        long."""
        results, errors = list[_T](), list[str]()

        def work() -> None:
            try:
                results.append(probe())
            except BaseException as error:
                first, *_ = str(error).strip().split("\n")
                errors.append(f"{type(error).__name__}: {first}")

        thread = threading.Thread(target=work, name=f"eager_offload doctor: {what}", daemon=True)
        thread.start()
        thread.join(_ONE_PROBE)
        if results:
            return results[0]
        said = errors[0] if errors else f"no answer within {_ONE_PROBE:.0f} s"
        self.failures.append(f"{what}: {said}")
        return otherwise


# -- probes ---------------------------------------------------------------------------------------------------------


def _software() -> dict[str, str]:
    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    return {
        "eager_offload": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.platform(),
        "threads": str(torch.get_num_threads()),
        "accelerator": ", ".join(f"{kind} {version}" for kind, version in kinds.items() if version),
    }


def _accelerators() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    return [f"{accelerator}:{index}" for index in range(count)]


def _memory() -> Memory:
    headroom = host_headroom()
    limit, total = headroom.binding, psutil.virtual_memory().total
    return Memory(total, headroom.nbytes, host_budget(), ranks_here().number, limit.reason, limit.remedy)


def _disk(path: Path, others: Sequence[Disk]) -> list[Disk]:
    """Examines ``path`` for the disk tier. The speed is that of one transfer at a time, measured once for each disk."""
    try:
        free = shutil.disk_usage(path).free
        disk = Disk(str(path), filesystem_of(path), path.stat().st_dev, free, disk_budget(path))
        tier = DiskTier(path, min(_MOST_ON_DISK, free // _PART_OF_FREE))
    except (OSError, ConfigError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error.__cause__ or error)
        return [Disk(str(path), refused=said or str(error))]
    try:
        if free // _PART_OF_FREE < _LEAST_ON_DISK:
            return [replace(disk, refused=f"only {size_text(free)} are free there")]
        for one in others:
            if one.device == disk.device and one.out:
                return [replace(disk, direct_io=tier.direct_io, out=one.out, back=one.back)]
        link = tier.measure()
        return [replace(disk, direct_io=tier.direct_io, out=link.out.median, back=link.back.median)]
    finally:
        tier.close()


def _self_test(device_name: str, settings: Mapping[str, Any]) -> SelfTest:
    """Trains four layers for a step with everything offloaded, in small windows, and compares the gradients."""
    small = {"max_inflight_bytes": 8 << 20, "prefetch_bytes": 8 << 20, "keep_last_bytes": 0, "min_bytes": 1 << 20}
    device = torch.device(device_name)
    generator = torch.Generator(device)  # leaves the random numbers of the user's training alone
    random = partial(torch.randn, device=device, generator=generator)
    weights = [(random(256, 256) / 16).requires_grad_() for _ in range(4)]
    rows = random(4096, 256)
    offload = Offload(OffloadConfig.from_dict({**settings, **small}))
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


# -- the verdict ----------------------------------------------------------------------------------------------------


def recommended(devices: Mapping[str, Machine | None], memory: Memory | None, disks: Sequence[Disk]) -> dict[str, Any]:
    """Returns the fields of ``OffloadConfig`` that should differ from their defaults on this machine."""
    accelerators = [machine for name, machine in devices.items() if name != "cpu"]
    best = _best_disk(disks)
    if not accelerators:
        # A refused directory is recommended too: the self test shows its problem.
        return {"tier": "disk"} | ({"disk_path": (best or disks[0]).path} if disks else {})
    room = min((one.memory_bytes for one in accelerators if one and one.memory_bytes), default=0)
    return {"disk_path": best.path} if best and memory is not None and memory.budget_bytes < room else {}


def _best_disk(disks: Sequence[Disk]) -> Disk | None:
    """Returns the disk that hides the most; of several directories on one disk, the first."""
    return min((one for one in disks if one.out), key=lambda one: _seconds_a_byte(one.out, one.back), default=None)


def _seconds_a_byte(out: float, back: float) -> float:
    """Returns the seconds of forward that hide a saved byte: [Note: when it pays]."""
    return max(1 / out, 1 / (2 * back))


def hidden_from_width(flop_per_byte: float, itemsize: int, *, checkpointed: bool = False) -> int:
    """Returns the width from which on all saves of a transformer block are hidden: [Note: when it pays]."""
    return round(flop_per_byte * itemsize / (24 if checkpointed else 24 / 16))


def verdict(
    devices: Mapping[str, Machine | None],
    tests: Sequence[SelfTest],
    settings: Mapping[str, Any],
    pinned: Pinned | None = None,
) -> Verdict:
    passed = [test.device for test in tests if test.equal and test.moved_bytes]
    wrong = [test.device for test in tests if not test.equal]
    ratios, advice = {}, []
    for name in passed:
        if (machine := devices[name]) is not None:
            flops = machine.single_flops if name == "cpu" else machine.flops
            ratios[name] = flops * _seconds_a_byte(machine.out, machine.back)
            advice.append(_when_it_pays(name, ratios[name]))
    nodes = NODES.read_text().strip() if NODES.exists() else ""
    if passed and passed != ["cpu"] and not nodes.isdecimal() and nodes:
        advice.append(
            f"This machine has several nodes of memory ({nodes}): torchrun --numa-binding=node takes the host memory "
            "of each process from the node next to its device."
        )
    if pinned is not None and pinned.refused:
        advice.append(
            f"At most {size_text(pinned.pinned_bytes)} of host memory can be pinned ({pinned.bound_by}). Copies of "
            f"more {PAGEABLE_COST}. To change that, {pinned.remedy}."
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


def _when_it_pays(name: str, flop_per_byte: float) -> str:
    itemsize = 4 if name == "cpu" else 2
    width = hidden_from_width(flop_per_byte, itemsize)
    text = (
        f"{name} does {flop_per_byte:,.0f} FLOP in the time that a saved byte takes. The transfers of a transformer "
        f"block are hidden from a width of {width:,} on"
    )
    if width < 768:  # blocks that are worth offloading are at least this wide
        # On a CPU, threads copy on the cores that compute, a cost that no link's speed tells.
        return text + (", and copies take a part of the processor." if name == "cpu" else ".")
    return text + (
        f", and half of them from {width // 2:,}. Narrower blocks do better with gradient checkpointing, alone or with "
        "offloading: the transfers of a checkpointed block are hidden from a width of "
        f"{hidden_from_width(flop_per_byte, itemsize, checkpointed=True):,} on."
    )


# -- the text -------------------------------------------------------------------------------------------------------


def to_text(diagnosis: Diagnosis) -> str:
    """Returns the diagnosis as text, by the keys of ``--json``; it ends in the verdict."""
    lines, end = [f"eager_offload doctor, in {diagnosis.seconds:.1f} seconds"], diagnosis.verdict
    for name, section in vars(diagnosis).items():
        if name == "pinned" and not {*diagnosis.devices} - {"cpu"}:
            section = ["nothing: torch finds no accelerator here, and host memory is pinned for one alone"]
        if section and name not in ("format", "seconds", "verdict"):
            lines += ["", name, *(f"  {row}" for row in _rows(section))]
    lines += ["", "verdict", f"  {end.summary}", *(f"  - {sentence}" for sentence in end.advice)]
    if end.works:
        lines.append(f"  Recommended: {end.python}" if end.settings else "  The defaults fit.")
    return "\n".join(lines)


def _rows(section: object) -> Iterator[str]:
    """Yields the rows of a section, without unknown quantities."""
    if isinstance(section, dict):
        yield from (f"{name}: {value}" for name, value in section.items() if value)
    elif isinstance(section, list):
        yield from (row for one in section for row in _rows(one))
    elif is_dataclass(section):
        known = {name: value for name, value in vars(section).items() if value or isinstance(value, bool)}
        known |= {name: size_text(value) for name, value in known.items() if name.endswith("_bytes")}
        known |= {name: rate_text(value) for name, value in known.items() if isinstance(value, float)}
        yield ", ".join(f"{name} {value}" for name, value in known.items())
    else:
        yield str(section)
