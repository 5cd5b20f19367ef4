"""How fast bytes travel between a device and pinned host memory: each way, and both ways at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eager_offload.runtime.accelerator_api import AcceleratorApi
from eager_offload.runtime.accelerator_events import EventPool
from eager_offload.runtime.base import Direction, Runtime

#: How many copies are timed, after one that is not.
_COPIES = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    """One direction: a stream, and what it copies from where to where."""

    direction: Direction
    stream: torch.Stream
    target: Tensor
    source: Tensor


class LinkProbe:
    """The link of one device; measured at the first question, then remembered. Thread-safe.

    Measuring makes the host wait for a few copies, and needs the memory of one on the device for each way.

    Args:
        nbytes: of one copy.
    """

    def __init__(
        self, runtime: Runtime, api: AcceleratorApi, events: EventPool, device: torch.device, nbytes: int
    ) -> None:
        self._nbytes = nbytes
        self._runtime = runtime
        self._api = api
        self._events = events
        self._device = device
        self._lock = threading.Lock()
        #: By which ways were used at once.
        self._found: dict[tuple[Direction, ...], dict[Direction, float]] = {}

    def bandwidth(self, direction: Direction, *, both_ways: bool = False) -> float:
        """Bytes a second in ``direction`` while nothing travels the other way, or with ``both_ways`` as much."""
        ways = tuple(Direction) if both_ways else (direction,)
        with self._lock:
            if ways not in self._found:
                self._found[ways] = self._measure(ways)
            return self._found[ways][direction]

    def _measure(self, directions: Iterable[Direction]) -> dict[Direction, float]:
        with torch.inference_mode(False), torch.no_grad():
            routes = [self._route(direction) for direction in directions]
            try:
                self._copy(routes)
                for route in routes:
                    self._runtime.synchronize(self._runtime.record(route.stream))
                seconds = self._time(routes)
            except BaseException:  # an interrupt: the copies go on
                for route in routes:
                    self._runtime.keep_until(self._runtime.record(route.stream), route)
                raise
        # The host has waited for the last copy, so that the blocks can go back to their own stream without an event.
        return {route.direction: _COPIES * route.source.numel() / elapsed for route, elapsed in seconds}

    def _route(self, direction: Direction) -> _Route:
        stream = self._runtime.transfer_stream(self._device, direction)
        compute = self._runtime.current_stream(self._device)
        assert isinstance(stream, torch.Stream)
        block = self._block()
        host = self._runtime.host_buffer(block.numel())
        # The block's last owner may have kernels queued.
        self._runtime.wait(stream, self._runtime.record(compute))
        target, source = (host, block) if direction is Direction.OUT else (block, host)
        return _Route(direction, stream, target, source)

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

    def _copy(self, routes: Iterable[_Route]) -> None:
        for route in routes:
            with self._runtime.enter(route.stream):
                self._api.copy(route.target, route.source)

    def _time(self, routes: list[_Route]) -> list[tuple[_Route, float]]:
        """Seconds that the copies of each route take, by the device's clock where it can tell, else by the host's."""
        began = time.perf_counter()
        starts = [self._events.record(route.stream, timed=True) for route in routes]
        for _ in range(_COPIES):
            self._copy(routes)
        stops = [self._events.record(route.stream, timed=True) for route in routes]
        for stop in stops:
            stop.synchronize()
        by_host = time.perf_counter() - began
        return [
            (route, start.seconds_until(stop) or by_host)
            for route, start, stop in zip(routes, starts, stops, strict=True)
        ]
