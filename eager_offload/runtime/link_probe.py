"""How fast bytes travel between a device and pinned host memory, each way."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from eager_offload.runtime.base import Direction, Runtime
from eager_offload.tiers.rates import TIMES, Rate


def measured_link(runtime: Runtime, device: torch.device, direction: Direction, nbytes: int) -> Rate:
    """Measures the link of ``device`` in ``direction``, while nothing of the library travels the other way.

    The host waits for a few copies, and the device needs the memory of one.

    Args:
        nbytes: of one copy; less where the device has no room.
    """
    with torch.inference_mode(False), torch.no_grad():
        stream = runtime.transfer_stream(device, direction)
        block = _block(device, nbytes)
        host = runtime.host_buffer(block.numel())
        target, source = (host, block) if direction is Direction.OUT else (block, host)
        # The block's last owner may have kernels queued.
        runtime.wait(stream, runtime.record(runtime.current_stream(device)))
        try:
            with runtime.enter(stream):
                target.copy_(source, non_blocking=True)
                runtime.synchronize(runtime.record(stream))
                called, moments = runtime.moment(None), [runtime.moment(stream)]
                for _ in range(TIMES):
                    target.copy_(source, non_blocking=True)
                    moments.append(runtime.moment(stream))
            whole = runtime.seconds_between(moments[0], moments[-1], synchronize=True)
            # A device that does not tell the time says 0: then the host does, of all copies together.
            if not whole:
                whole = runtime.seconds_between(called, runtime.moment(None))
                assert whole is not None
                return Rate.of(TIMES * block.numel(), [whole])
            each = [runtime.seconds_between(*pair, synchronize=True) for pair in itertools.pairwise(moments)]
        except BaseException:  # an interrupt: the copies go on
            runtime.keep_until(runtime.record(stream), (host, block))
            raise
    # The host has waited for the last copy, so that the block can go back to its own stream without an event.
    return Rate.of(block.numel(), [one for one in each if one is not None])


def _block(device: torch.device, nbytes: int) -> Tensor:
    least = nbytes >> 6
    while True:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            # A device that is nearly full is measured less precisely, and the training step goes on.
            if nbytes <= least:
                raise
            nbytes >>= 2
