"""How fast this machine is: compute, links, pinning, disks. Each probe takes about a second or less."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eager_offload.errors import ConfigError
from eager_offload.observe.doctor.findings import Speed
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Direction, Runtime
from eager_offload.runtime.host import host_runtime
from eager_offload.tiers.base import Slot
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.memory import anonymous_slab
from eager_offload.tiers.rawfile import RawFile

__all__ = ["Measured", "disk", "duplex_link", "link", "matmul_flops", "pin_seconds"]

#: Rows and columns of the matrices that are multiplied, on a CPU and on an accelerator.
_SIZE_ON_CPU, _SIZE = 1024, 4096
#: Seconds that one measurement should take.
_MEASURING = 0.4
#: Bytes that are pinned to see how long it takes.
_PINNED_BYTES = 256 << 20
#: Bytes moved to a disk at a time, and in all.
_PIECE, _MOST_ON_DISK = 8 << 20, 128 << 20
#: The part of what is free on a disk that measuring it may take.
_PART_OF_FREE = 16


@dataclass(frozen=True)
class Measured:
    """What became of measuring a directory."""

    speed: Speed | None = None
    refused: str = ""
    """Why a spill file cannot be there."""


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a product of two square matrices of random numbers."""
    size = _SIZE_ON_CPU if device.type == "cpu" else _SIZE
    generator = torch.Generator(device)  # not torch's own, whose numbers belong to whoever trains
    with torch.inference_mode(False), torch.no_grad():
        left, right = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
        for _ in range(2):  # the first loads kernels and starts threads
            seconds = _seconds_of_products(left, right, 1)
        repeats = min(max(round(_MEASURING / max(seconds, 1e-6)), 1), 1000)
        return 2.0 * size**3 * repeats / _seconds_of_products(left, right, repeats)


def _seconds_of_products(left: Tensor, right: Tensor, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        torch.mm(left, right)
    if left.device.type != "cpu":
        torch.accelerator.synchronize(left.device)
    return max(time.perf_counter() - started, 1e-9)


def link(device: torch.device) -> Speed:
    """To host memory and back, one way at a time."""
    runtime = _runtime_of(device)
    return Speed(runtime.bandwidth(device, Direction.OUT), runtime.bandwidth(device, Direction.IN))


def duplex_link(device: torch.device) -> Speed:
    """The same, both ways at once."""
    runtime = _runtime_of(device)
    return Speed(runtime.duplex_bandwidth(device, Direction.OUT), runtime.duplex_bandwidth(device, Direction.IN))


def _runtime_of(device: torch.device) -> Runtime:
    return host_runtime() if device.type == "cpu" else accelerator_runtime()


def pin_seconds() -> float:
    """Seconds to pin one GiB as offloading does it, in a slab of a quarter of that."""
    runtime = accelerator_runtime()
    runtime.slab_sizes()  # finds out how to pin
    started = time.perf_counter()
    slab = runtime.host_buffer(_PINNED_BYTES)
    seconds = time.perf_counter() - started
    if not slab.is_pinned():
        raise RuntimeError("the memory that came is pageable")
    return seconds * (1 << 30) / _PINNED_BYTES


def disk(path: Path, free_bytes: int, *, direct: bool) -> Measured:
    """What one transfer at a time reaches there, through the disk tier itself.

    Args:
        free_bytes: on that disk; a small part of it is used.
        direct: around the page cache, which gives no speed where the filesystem refuses that.
    """
    budget = min(_MOST_ON_DISK, free_bytes // _PART_OF_FREE)
    if budget < 2 * _PIECE:
        return Measured(refused=f"only {free_bytes} bytes are free there")
    try:
        tier = DiskTier([path], budget, file_type=RawFile if direct else _Buffered)
    except ConfigError as error:
        return Measured(refused=_cause(error))
    try:
        if direct and not tier.direct_io:
            return Measured()
        return Measured(_speed_of(tier, budget))
    finally:
        tier.close()


class _Buffered(RawFile):
    """Never goes around the page cache."""

    def set_direct(self, direct: bool) -> None:
        if direct:
            raise OSError(errno.EOPNOTSUPP, "measured without it")


def _speed_of(tier: DiskTier, budget: int) -> Speed:
    source = anonymous_slab(_PIECE)
    # Not zeros: filesystems and disks that compress would make nothing of them.
    source.view(torch.int64).random_(generator=torch.Generator())
    slots: list[Slot] = []
    for _ in range(budget // _PIECE):
        if (slot := tier.reserve(_PIECE)) is None:
            break
        slots.append(slot)
    if not slots:
        raise OSError(errno.ENOSPC, "no room for the bytes that it is measured with")
    written, out = _timed(slots, source, write=True)
    read, back = _timed(slots[:written], source, write=False)
    return Speed(written * _PIECE / out, read * _PIECE / back)


def _timed(slots: Sequence[Slot], piece: Tensor, *, write: bool) -> tuple[int, float]:
    """How many of the slots were written or read until the time for it was over, and how long that took."""
    started = time.perf_counter()
    for done, slot in enumerate(slots, 1):
        slot.write(piece) if write else slot.read(piece)
        elapsed = time.perf_counter() - started
        if elapsed > 2 * _MEASURING:
            return done, elapsed
    return len(slots), max(elapsed, 1e-9)


def _cause(error: ConfigError) -> str:
    """Why a directory cannot serve, without what else may be given."""
    return str(error.__cause__ or error)
