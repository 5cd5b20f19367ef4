"""Small helpers for tests of the accelerator runtime on the recording double."""

from __future__ import annotations

import torch
from torch import Tensor

from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.slabs import HostSlot
from tests.doubles.recording_accelerator import RecordingAccelerator

DEVICE = torch.device("cuda", 0)
SECOND = torch.device("cuda", 1)
#: Small enough for torch to use one thread.
NBYTES = 1 << 14


def pattern(nbytes: int, seed: int) -> Tensor:
    return ((torch.arange(nbytes) * (2 * seed + 1) + seed) % 251).to(torch.uint8)


def host_slot(runtime: AcceleratorRuntime, nbytes: int) -> HostSlot:
    slot = HostTier(Arena(runtime.host_buffer), budget=1 << 30).reserve(nbytes)
    assert slot is not None
    return slot


def selection(double: RecordingAccelerator) -> list[object]:
    """What the calling thread has selected."""
    streams = [double.current_stream(device) for device in (DEVICE, SECOND)]
    return [double.current_device_index(), *streams]
