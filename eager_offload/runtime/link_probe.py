"""How fast bytes travel between a device and pinned host memory, each way."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from eager_offload.runtime.accelerator_api import AcceleratorApi
from eager_offload.runtime.base import Direction, Runtime

#: How many copies are timed, after one that is not.
_COPIES = 4


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
        runtime, api = self._runtime, self._api
        with torch.inference_mode(False), torch.no_grad():
            stream = runtime.transfer_stream(self._device, direction)
            block = self._block()
            host = runtime.host_buffer(block.numel())
            target, source = (host, block) if direction is Direction.OUT else (block, host)
            # The block's last owner may have kernels queued.
            runtime.wait(stream, runtime.record(runtime.current_stream(self._device)))
            try:
                with runtime.enter(stream):
                    api.copy(target, source)
                    runtime.synchronize(runtime.record(stream))
                    called, began = runtime.moment(None), runtime.moment(stream)
                    for _ in range(_COPIES):
                        api.copy(target, source)
                seconds = runtime.seconds_between(began, runtime.moment(stream), synchronize=True)
                # A device that does not tell the time says 0: then the host does.
                seconds = seconds or runtime.seconds_between(called, runtime.moment(None))
            except BaseException:  # an interrupt: the copies go on
                runtime.keep_until(runtime.record(stream), (host, block))
                raise
        assert seconds is not None
        # The host has waited for the last copy, so that the block can go back to its own stream without an event.
        return _COPIES * block.numel() / seconds

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
