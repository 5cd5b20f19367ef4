"""How fast bytes travel between a device and pinned host memory, each way."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from eager_offload.runtime.accelerator_api import AcceleratorApi
from eager_offload.runtime.base import Direction, Runtime

#: How many copies are timed, after one that is not.
_COPIES = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    """A stream, and what it copies from where to where."""

    stream: torch.Stream
    target: Tensor
    source: Tensor


class LinkProbe:
    """The link of one device; measured at the first question, then remembered. Thread-safe.

    Measuring makes the host wait for a few copies, and needs the memory of one on the device.

    Args:
        nbytes: of one copy.
    """

    def __init__(self, runtime: Runtime, api: AcceleratorApi, device: torch.device, nbytes: int) -> None:
        self._nbytes = nbytes
        self._runtime = runtime
        self._api = api
        self._device = device
        self._lock = threading.Lock()
        self._found: dict[Direction, float] = {}

    def bandwidth(self, direction: Direction) -> float:
        """Bytes a second in ``direction`` while nothing travels the other way."""
        with self._lock:
            if direction not in self._found:
                self._found[direction] = self._measure(direction)
            return self._found[direction]

    def _measure(self, direction: Direction) -> float:
        with torch.inference_mode(False), torch.no_grad():
            route = self._route(direction)
            try:
                self._copy(route)
                self._runtime.synchronize(self._runtime.record(route.stream))
                seconds = self._time(route)
            except BaseException:  # an interrupt: the copies go on
                self._runtime.keep_until(self._runtime.record(route.stream), route)
                raise
        # The host has waited for the last copy, so that the block can go back to its own stream without an event.
        return _COPIES * route.source.numel() / seconds

    def _route(self, direction: Direction) -> _Route:
        stream = self._runtime.transfer_stream(self._device, direction)
        compute = self._runtime.current_stream(self._device)
        assert isinstance(stream, torch.Stream)
        block = self._block()
        host = self._runtime.host_buffer(block.numel())
        # The block's last owner may have kernels queued.
        self._runtime.wait(stream, self._runtime.record(compute))
        target, source = (host, block) if direction is Direction.OUT else (block, host)
        return _Route(stream, target, source)

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

    def _copy(self, route: _Route) -> None:
        with self._runtime.enter(route.stream):
            self._api.copy(route.target, route.source)

    def _time(self, route: _Route) -> float:
        """Seconds that the copies take, by the device's clock where it can tell, else by the host's."""
        runtime = self._runtime
        called, began = runtime.moment(None), runtime.moment(route.stream)
        for _ in range(_COPIES):
            self._copy(route)
        seconds = runtime.seconds_between(began, runtime.moment(route.stream), synchronize=True)
        seconds = seconds or runtime.seconds_between(called, runtime.moment(None))
        assert seconds is not None
        return seconds
