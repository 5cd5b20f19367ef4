"""How fast bytes travel between a device and pinned host memory: each way, and both ways at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eager_offload.runtime.accelerator_api import AcceleratorApi
from eager_offload.runtime.accelerator_streams import AcceleratorStream
from eager_offload.runtime.base import Direction, Runtime

__all__ = ["LinkProbe"]

#: How many copies are timed, after one that is not.
_COPIES = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """One direction: a stream, and what it copies from where to where."""

    direction: Direction
    stream: AcceleratorStream
    target: Tensor
    source: Tensor


class LinkProbe:
    """The link of one device; measured at the first question, then remembered. Thread-safe.

    Measuring makes the host wait for a few copies, and needs the memory of one on the device for each way.

    Args:
        nbytes: of one copy.
    """

    def __init__(self, runtime: Runtime, api: AcceleratorApi, device: torch.device, nbytes: int) -> None:
        self._nbytes = nbytes
        self._runtime = runtime
        self._api = api
        self._device = device
        self._lock = threading.Lock()
        self._alone: dict[Direction, float] = {}
        self._both: dict[Direction, float] | None = None

    def alone(self, direction: Direction) -> float:
        """Bytes a second in ``direction`` while nothing travels the other way."""
        with self._lock:
            if direction not in self._alone:
                self._alone.update(self._measure([direction]))
            return self._alone[direction]

    def both_ways(self, direction: Direction) -> float:
        """Bytes a second in ``direction`` while as much travels the other way."""
        with self._lock:
            if self._both is None:
                self._both = self._measure(list(Direction))
            return self._both[direction]

    def _measure(self, directions: list[Direction]) -> dict[Direction, float]:
        with torch.inference_mode(False), torch.no_grad():
            lanes = [self._lane(direction) for direction in directions]
            try:
                self._copy(lanes)
                self._finish(lanes)
                seconds = self._time(lanes)
            except BaseException:  # an interrupt: the copies go on
                for lane in lanes:
                    self._runtime.leave_behind(self._runtime.record(lane.stream), lane)
                raise
        # The host has waited for the last copy, so that the blocks can go back to their own stream without an event.
        return {lane.direction: _COPIES * lane.source.numel() / taken for lane, taken in seconds}

    def _lane(self, direction: Direction) -> _Lane:
        stream = self._runtime.transfer_stream(self._device, direction)
        compute = self._runtime.current_stream(self._device)
        assert isinstance(stream, AcceleratorStream)
        block = self._block()
        host = self._runtime.host_buffer(block.numel())
        # The block's last owner may have kernels queued.
        self._runtime.wait(stream, self._runtime.record(compute))
        target, source = (host, block) if direction is Direction.OUT else (block, host)
        return _Lane(direction, stream, target, source)

    def _block(self) -> Tensor:
        nbytes = self._nbytes
        while True:
            try:
                return self._api.empty(nbytes, self._device)
            except torch.OutOfMemoryError:
                # A device that is nearly full is measured less precisely, and the training step goes on.
                if nbytes <= self._nbytes >> 6:
                    raise
                nbytes >>= 2

    def _copy(self, lanes: Iterable[_Lane]) -> None:
        for lane in lanes:
            with self._runtime.enter(lane.stream):
                self._api.copy(lane.target, lane.source)

    def _finish(self, lanes: Iterable[_Lane]) -> None:
        for lane in lanes:
            self._runtime.synchronize(self._runtime.record(lane.stream))

    def _time(self, lanes: list[_Lane]) -> list[tuple[_Lane, float]]:
        """Seconds that each lane's copies take, by the device's clock where it can tell, else by the host's."""
        on_device = self._can_time(lanes[0].stream)
        marks = {lane: [self._api.event(self._device, enable_timing=on_device) for _ in range(2)] for lane in lanes}
        began = time.perf_counter()
        for lane in lanes:
            lane.stream.torch_stream.record_event(marks[lane][0])
        for _ in range(_COPIES):
            self._copy(lanes)
        for lane in lanes:
            lane.stream.torch_stream.record_event(marks[lane][1])
        for lane in lanes:
            marks[lane][1].synchronize()
        by_host = time.perf_counter() - began
        return [(lane, marks[lane][0].elapsed_time(marks[lane][1]) / 1e3 if on_device else by_host) for lane in lanes]

    def _can_time(self, stream: AcceleratorStream) -> bool:
        """Whether events of this device can tell the time between them, found out by asking two."""
        try:
            first, second = (self._api.event(self._device, enable_timing=True) for _ in range(2))
            stream.torch_stream.record_event(first)
            stream.torch_stream.record_event(second)
            second.synchronize()
            first.elapsed_time(second)
        except RuntimeError:
            return False
        return True
