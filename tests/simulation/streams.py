"""The streams of a simulated device, their events, and the copies that they put off."""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eager_offload.errors import OffloadError
from eager_offload.runtime.base import Direction, Span
from eager_offload.tiers.base import Slot
from eager_offload.torch_private.calls import without_dispatch_modes
from eager_offload.torch_private.memory import weak_storage
from tests.simulation.checker import Access

#: What bytes are filled with that may not be used. It reads as NaN in every floating-point format.
POISON = 0xFF


@dataclass(eq=False, slots=True)
class SimulatedStream:
    """Operations in order, and when they are over. Copies are put off; compute streams do everything at once."""

    name: str
    is_transfer: bool = False
    #: Seconds: when its last operation is over, and before which the next one must not start.
    tail: float = 0.0
    clear_from: float = 0.0
    #: Steps that were enqueued, and how many of those were carried out; the rest is in the queue.
    enqueued: int = 0
    done: int = 0
    queue: deque[Move | SimulatedEvent] = field(default_factory=deque)
    #: Copies that no event stands for yet.
    fresh: list[Move] = field(default_factory=list)

    def __repr__(self) -> str:
        return self.name

    def push(self, step: Move | SimulatedEvent) -> None:
        self.queue.append(step)
        self.enqueued += 1


class SimulatedEvent:
    """A point on a stream, which knows of the copies before it; equal to itself only."""

    __slots__ = ("__weakref__", "copy", "moves", "position", "stream", "time")

    def __init__(self, stream: SimulatedStream, time: float) -> None:
        self.stream = stream
        #: Seconds: when it completes.
        self.time = time
        #: When the copy runs that it was recorded behind.
        self.copy: Span | None = None
        #: How many steps of the stream come before it.
        self.position = stream.enqueued
        #: The copies whose failure it carries: those after the event before it.
        self.moves = tuple(stream.fresh)
        stream.fresh.clear()

    def __repr__(self) -> str:
        return f"event on {self.stream} at {self.time:.9f} s"

    def raise_failure(self) -> None:
        for move in self.moves:
            if move.error is not None:
                raise move.error


class Move:
    """A copy between a slot and device memory, carried out when a stream or the host is to know that it is over.

    [Note: what a pending copy holds]
    Nothing on the device: a copy engine knows addresses, so if the last reference goes too early the block goes too,
    and that has to show. Of a slot in memory only the bytes, so that the range returns to its tier and its next owner
    is written as early as on a device. A slot elsewhere is held itself, since only it knows how to read and write.
    """

    __slots__ = ("_host", "_nbytes", "_offset", "_storage", "direction", "entry", "error")

    def __init__(self, slot: Slot, tensor: Tensor, direction: Direction, entry: Access) -> None:
        assert tensor.dtype is torch.uint8, "copies move flat bytes"
        assert tensor.dim() == 1, "copies move flat bytes"
        assert tensor.is_contiguous(), "copies move flat bytes"
        assert tensor.numel() == slot.nbytes, f"{tensor.numel()} bytes for a slot of {slot.nbytes}"
        with without_dispatch_modes():
            in_memory = getattr(slot, "tensor", None)
        self._host: Slot | Tensor | None = in_memory if isinstance(in_memory, Tensor) else slot
        self._storage = weak_storage(tensor.untyped_storage())
        self._offset = tensor.storage_offset()
        self._nbytes = slot.nbytes
        self.direction = direction
        #: What is said of it should it run too late.
        self.entry = entry
        #: What the tier raised.
        self.error: OffloadError | None = None

    def carry_out(self) -> bool:
        """Moves the bytes, once; says whether the end on the device was still there."""
        host, self._host = self._host, None
        assert host is not None, "a copy is carried out once"
        storage = self._storage()
        alive = storage is not None and storage.nbytes() >= self._offset + self._nbytes
        with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            if storage is not None and alive:
                device = torch.empty(0, dtype=torch.uint8).set_(storage, self._offset, (self._nbytes,), (1,))
            else:
                device = torch.full((self._nbytes,), POISON, dtype=torch.uint8)
            outward = self.direction is Direction.OUT
            if isinstance(host, Tensor):
                to, by = (host, device) if outward else (device, host)
                ctypes.memmove(to.data_ptr(), by.data_ptr(), self._nbytes)
                return alive
            try:
                (host.write if outward else host.read)(device)
            except OffloadError as error:
                self.error = error
        return alive
