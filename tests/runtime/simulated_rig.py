"""A simulated runtime with its streams and a slab, and slots for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eager_offload.runtime.base import Direction, Layout
from eager_offload.tiers.base import Slot
from eager_offload.tiers.memory import view_of
from tests.simulation.log import ByteRegion
from tests.simulation.simulated import SimulatedRuntime

CPU = torch.device("cpu")


class MemorySlot(Slot):
    """Bytes in a slab."""

    tier: ClassVar[str] = "host"

    def __init__(self, slab: Tensor, start: int, nbytes: int) -> None:
        super().__init__(nbytes, ())
        self.tensor = slab[start : start + nbytes]
        self.region_ = ByteRegion(("slab", id(slab)), start, start + nbytes)

    @property
    def region(self) -> ByteRegion:
        return self.region_

    def write(self, source: Tensor) -> None:
        self.tensor.copy_(source)

    def read(self, target: Tensor) -> None:
        target.copy_(self.tensor)

    def memory(self) -> memoryview:
        return view_of(self.tensor.data_ptr(), self.nbytes, self)


class DistantSlot(Slot):
    """Bytes that only the slot can reach."""

    tier: ClassVar[str] = "disk"

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, ())
        self.bytes = b""

    @property
    def region(self) -> ByteRegion:
        return ByteRegion(("distant", id(self)), 0, self.nbytes)

    def write(self, source: Tensor) -> None:
        self.bytes = bytes(source.tolist())

    def read(self, target: Tensor) -> None:
        target.copy_(torch.tensor(list(self.bytes), dtype=torch.uint8))

    def memory(self) -> memoryview:
        raise AssertionError("these bytes have no address")


def flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


@dataclass
class Rig:
    """A runtime with its three streams and a slab."""

    runtime: SimulatedRuntime

    def __post_init__(self) -> None:
        self.main = self.runtime.default_stream
        self.out = self.runtime.transfer_stream(CPU, Direction.OUT)
        self.inward = self.runtime.transfer_stream(CPU, Direction.IN)
        self.slab = self.runtime.host_buffer(1 << 16)

    def slot(self, nbytes: int, start: int = 0) -> MemorySlot:
        return MemorySlot(self.slab, start, nbytes)

    def target(self, nbytes: int) -> Tensor:
        return self.runtime.allocate(Layout(nbytes), CPU, self.main)
