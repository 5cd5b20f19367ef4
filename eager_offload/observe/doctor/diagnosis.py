"""What an examination finds, and what follows: whether offloading pays, and with which settings.

``--json`` prints a ``Diagnosis``: the fields below are its keys, and docs/doctor_and_report.md says what each of them
holds. Sizes are bytes, times seconds, speeds bytes a second; what could not be measured is ``None``.

[Note: when it pays]
What a layer saves is hidden if it has left by the time that forward is over, and has come back by the time that
backward is, which takes twice as long (DESIGN: the floor of a step). So of a device that does F operations a second,
whose tier takes W bytes a second and gives R, a saved byte is hidden behind F * max(1 / W, 1 / (2 R)) operations of
forward. A transformer block of width d without dropout does 24 d^2 operations for a token (Kaplan et al., attention
left out) and saves the inputs of its products, activation and norms: 16 d numbers. A checkpointed one saves its d
inputs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eager_offload.config import variable_of
from eager_offload.tiers.limits import Limit

#: The version of the keys. New keys leave it as it is; a key that goes or changes its meaning adds one.
FORMAT = 1


@dataclass(frozen=True)
class Software:
    """Versions."""

    eager_offload: str
    torch: str
    python: str
    system: str
    accelerator: str


@dataclass(frozen=True)
class Speed:
    """Bytes a second, each way."""

    out: float
    back: float


@dataclass(frozen=True)
class Device:
    """Something that trains."""

    name: str
    model: str
    memory_bytes: int | None = None
    flops: float | None = None
    dtype: str = ""
    link: Speed | None = None
    duplex: Speed | None = None
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
    limits: list[Limit] = field(default_factory=list)
    pinning_limit_bytes: int | None = None


@dataclass(frozen=True)
class Disk:
    """A directory that a spill file could be in."""

    path: str
    filesystem: str
    device: int
    free_bytes: int
    direct: Speed | None = None
    buffered: Speed | None = None
    refused: str = ""

    @property
    def speed(self) -> Speed | None:
        """What offloading would reach there."""
        return self.direct or self.buffered


@dataclass(frozen=True)
class Feature:
    """Something that torch or the system may lack."""

    name: str
    there: bool
    without: str


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
    environment: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All of it."""

    format: int
    seconds: float
    software: Software
    devices: list[Device]
    memory: Memory | None
    disks: list[Disk]
    features: list[Feature]
    self_tests: list[SelfTest]
    failures: list[str]
    verdict: Verdict


# -- what follows ---------------------------------------------------------------------------------------------------

#: Operations of forward for each number that is saved, by width: of a block, and of one that is checkpointed.
_BLOCK, _CHECKPOINTED = 24 / 16, 24.0
#: Blocks that are worth offloading are at least this wide.
_NARROW = 768


def recommended(devices: Sequence[Device], memory: Memory | None, disks: Sequence[Disk]) -> dict[str, Any]:
    """Fields of ``OffloadConfig`` that should differ from their defaults on this machine."""
    settings: dict[str, Any] = {}
    accelerators = [one for one in devices if one.name != "cpu"]
    best = _best_disk(disks)
    if not accelerators:
        settings["tier"] = "disk"
        if disks:
            settings["disk_path"] = (best or disks[0]).path  # or the self test shows what is wrong with it
    else:
        room = min((one.memory_bytes for one in accelerators if one.memory_bytes), default=None)
        if best is not None and memory is not None and room is not None and memory.budget_bytes < room:
            settings["disk_path"] = best.path  # what is saved can be more than the host has room for
        if all(one.pin_seconds is None for one in accelerators):
            settings["pin_memory"] = False
    return settings


def _best_disk(disks: Sequence[Disk]) -> Disk | None:
    """The one that hides the most; of several on one disk, the first."""
    usable = [one for one in disks if one.speed is not None]
    return min(usable, key=lambda one: _seconds_a_byte(one.speed), default=None)


def _seconds_a_byte(speed: Speed | None) -> float:
    """Seconds of forward that a saved byte takes to be hidden: [Note: when it pays]."""
    assert speed is not None
    return max(1 / speed.out, 1 / (2 * speed.back))


def hidden_from_width(flop_per_byte: float, itemsize: int, *, checkpointed: bool = False) -> int:
    """The width of a transformer block from which everything that it saves is hidden."""
    return round(flop_per_byte * itemsize / (_CHECKPOINTED if checkpointed else _BLOCK))


def verdict(
    devices: Sequence[Device], disks: Sequence[Disk], tests: Sequence[SelfTest], settings: Mapping[str, Any]
) -> Verdict:
    """The end of an examination."""
    passed = [test.device for test in tests if test.equal and test.moved_bytes]
    wrong = [test.device for test in tests if not test.equal]
    best = _best_disk(disks)
    ratios, advice = {}, []
    for device in devices:
        speed = device.link if device.name != "cpu" else (best.speed if best else None)
        if speed is None or device.flops is None or device.name not in passed:
            continue
        ratios[device.name] = device.flops * _seconds_a_byte(speed)
        advice.append(_when_it_pays(device, ratios[device.name]))
    if passed == ["cpu"]:
        advice.append(
            "On a CPU, call eager_offload.release_freed_memory() before the model is built and set "
            "THP_MEM_ALLOC_ENABLE=1 before Python starts, or freed memory stays with the process."
        )
    texts = {name: str(int(value) if isinstance(value, bool) else value) for name, value in settings.items()}
    return Verdict(
        works=bool(passed) and not wrong,
        summary=_summary(passed, wrong, settings),
        flop_per_byte=ratios,
        advice=advice,
        settings=dict(settings),
        python=f"eo.OffloadConfig({', '.join(f'{name}={value!r}' for name, value in settings.items())})",
        environment=" ".join(f"{variable_of(name)}={shlex.quote(text)}" for name, text in texts.items()),
    )


def _summary(passed: Sequence[str], wrong: Sequence[str], settings: Mapping[str, Any]) -> str:
    if wrong:
        return f"Gradients came out wrong on {', '.join(wrong)}: do not use it here, and please report this."
    if not passed:
        return "Offloading cannot work here: no device passed its self test. The lines above say why."
    # A CPU beside an accelerator is not what trains.
    trains = [name for name in passed if name != "cpu"] or list(passed)
    where = settings.get("disk_path", "disk") if trains == ["cpu"] else "host memory"
    then = f", then to {settings['disk_path']}" if trains != ["cpu"] and "disk_path" in settings else ""
    return f"Offloading works here: {', '.join(trains)} to {where}{then}."


def _when_it_pays(device: Device, flop_per_byte: float) -> str:
    itemsize = getattr(torch, device.dtype).itemsize
    width = hidden_from_width(flop_per_byte, itemsize)
    text = (
        f"{device.name} does {flop_per_byte:,.0f} FLOP ({device.dtype}) in the time that a saved byte takes. All that "
        f"a transformer block saves is hidden from a width of {width:,} on"
    )
    if width < _NARROW:
        # Threads copy what a CPU computes, on cores that it computes with: no link's speed tells what that takes.
        besides = ", and copies take a part of the processor" if device.name == "cpu" else ""
        return f"{text}: compute hardly waits for it{besides}."
    checkpointed = hidden_from_width(flop_per_byte, itemsize, checkpointed=True)
    return text + (
        f", and half of it from {width // 2:,}. Narrower ones do better with gradient checkpointing, alone or with "
        f"offloading: what a checkpointed block saves is hidden from a width of {checkpointed:,} on."
    )
