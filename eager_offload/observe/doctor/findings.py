"""What an examination finds. ``Diagnosis.as_dict`` is what ``--json`` prints: the fields below are its keys."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from eager_offload.tiers.limits import Limit

__all__ = ["FORMAT", "Device", "Diagnosis", "Disk", "Feature", "Memory", "SelfTest", "Software", "Speed", "Verdict"]

#: The version of the keys. New keys leave it as it is; a key that goes or changes its meaning adds one.
FORMAT = 1


@dataclass(frozen=True)
class Software:
    """Versions."""

    eager_offload: str
    torch: str
    python: str
    system: str
    """Operating system, its version, and the kind of processor."""
    accelerator: str
    """What torch was built for, such as ``"CUDA 13.0"``; empty for a CPU build."""


@dataclass(frozen=True)
class Speed:
    """Bytes a second, each way."""

    out: float
    """Off the device: to host memory, or written to disk."""
    back: float
    """Back to it."""


@dataclass(frozen=True)
class Device:
    """Something that trains."""

    name: str
    """As torch calls it, such as ``"cuda:0"``."""
    model: str
    memory_bytes: int | None = None
    flops: float | None = None
    """Operations a second of a product of two matrices."""
    dtype: str = ""
    """Of those matrices."""
    link: Speed | None = None
    """To pinned host memory and back, one way at a time. On a CPU a copy within host memory."""
    duplex: Speed | None = None
    """The same while as much travels the other way; ``None`` on a CPU."""
    numa_node: int | None = None
    """The node of memory that it is nearest to; ``None`` where that is not known or there is only one."""
    pin_seconds: float | None = None
    """Seconds to pin one GiB of host memory; ``None`` on a CPU."""


@dataclass(frozen=True)
class Memory:
    """Host memory."""

    total_bytes: int
    headroom_bytes: int
    """What a process may still take, by everything that limits it."""
    budget_bytes: int
    """What ``host_budget="auto"`` comes to for this process."""
    ranks: int
    """Processes that share it, by the launcher's word."""
    bound_by: str
    """What the headroom is limited by: a sentence."""
    remedy: str
    """What would raise it."""
    limits: list[Limit] = field(default_factory=list)
    """Everything that bounds it, the least first."""
    pinning_limit_bytes: int | None = None
    """``RLIMIT_MEMLOCK``, which some drivers count pinned memory against; ``None`` for no limit."""


@dataclass(frozen=True)
class Disk:
    """A directory that a spill file could be in."""

    path: str
    filesystem: str
    """Such as ``"ext4"``; empty where the system does not tell."""
    device: int
    """Directories with the same number are on one disk."""
    free_bytes: int
    direct: Speed | None = None
    """Around the page cache (``O_DIRECT``); ``None`` where the filesystem refuses that."""
    buffered: Speed | None = None
    """Through the page cache, which is flushed and dropped behind each piece."""
    refused: str = ""
    """Why it cannot serve; empty where it can."""

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
    """What happens where it is not there."""


@dataclass(frozen=True)
class SelfTest:
    """Four small layers, trained for a step with everything offloaded, and again without."""

    device: str
    equal: bool
    """Whether the gradients are equal, bit for bit."""
    moved_bytes: int


@dataclass(frozen=True)
class Verdict:
    """What follows from all that."""

    works: bool
    """Whether a self test passed."""
    summary: str
    """One sentence."""
    flop_per_byte: dict[str, float] = field(default_factory=dict)
    """By device: operations that it does while its tier takes one saved byte away, or half brings one back."""
    advice: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of ``OffloadConfig`` that should differ from their defaults."""
    python: str = ""
    """The same as a line to paste."""
    environment: str = ""
    """The same as variables, for ``OffloadConfig.from_env()``."""


@dataclass(frozen=True)
class Diagnosis:
    """All of it."""

    format: int
    seconds: float
    """How long the examination took."""
    software: Software
    devices: list[Device]
    memory: Memory | None
    disks: list[Disk]
    features: list[Feature]
    self_tests: list[SelfTest]
    failures: list[str]
    """Probes that failed, and warnings that came up, a line each."""
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """The same in dictionaries and lists."""
        return dataclasses.asdict(self)
