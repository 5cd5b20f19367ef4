"""The accelerator of this machine, on which copies or compute come late."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.runtime.accelerator import AcceleratorEvent, accelerator_runtime
from eager_offload.runtime.base import Event
from tests.fake_cuda import LIBRARY
from tests.hazards.programs import assert_identical
from tests.programs import leaf

# Or cuBLAS may sum in another order on another stream; it looks when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# CUDA's headers come with a torch that pip has installed, where torch does not look for them.
for home in Path(torch.__file__).parents[1].glob("nvidia/cu[0-9]*"):
    os.environ.setdefault("CUDA_HOME", str(home))


class Skipped(Exception):
    """This machine cannot show it."""


class Machine:
    """The accelerator that torch names, its runtime, and the offloads that a scenario made on it."""

    #: Whether kernels compute. Where they do not, what a scenario compares of values is granted; all else is as it is.
    computes = True

    def __init__(self) -> None:
        self.runtime = runtime = accelerator_runtime()
        self.device = torch.device(runtime.device_type, torch.accelerator.current_device_index())
        self.offloads: list[Offload] = []
        # A few milliseconds on a device of 1.5 GHz: longer than it takes to enqueue an operator, or to run one. The
        # virtual device computes on the CPU: less, and so it need not be late by as much.
        self.width, self._cycles = (128, 3_000_000) if runtime.device_type == "virtual" else (1024, 8_000_000)
        if LIBRARY in os.environ:  # whose copies are those of the CPU
            self.width, self.computes = 256, False
        # What is enqueued for the first time may load a kernel or get memory from the driver, and both make the host
        # wait for the device: then nothing is late.
        weight = self.leaf()
        ((weight @ weight).tanh().exp() * weight).sin().sum().backward()
        self.doze()
        self.finish()

    def identical(self, expected: object, actual: object, where: str = "") -> None:
        """Asserts that two structures are equal, their tensors bit for bit where the machine computes."""
        assert_identical(expected, actual, where, values=self.computes)

    def holds(self, value: object) -> None:
        """Asserts what is said of values, where the machine computes."""
        assert value or not self.computes

    def offload(self, **fields: Any) -> Offload:
        """An ``Offload`` that moves everything that can move, unless ``fields`` say otherwise."""
        offload = Offload(**{"tier": "host", "min_bytes": 0, "keep_last_bytes": 0, **fields})
        self.offloads.append(offload)
        return offload

    def leaf(self, seed: int = 1) -> Tensor:
        """A leaf with values of its own, which leaves the size of numbers as it is where it is multiplied with."""
        with self.device:
            return (leaf(self.width, self.width, seed=seed) / self.width**0.5).detach().requires_grad_()

    @contextmanager
    def slow_links(self) -> Iterator[None]:
        """Every copy comes late: whatever does not wait for it overtakes it."""
        enqueue, staging = self.runtime._enqueue, self.runtime._staging

        def late(
            target: Tensor, source: Tensor, stream: torch.Stream, after: list[Event], *, timed: bool
        ) -> AcceleratorEvent:
            with self.runtime.enter(stream):
                self.doze()
            return enqueue(target, source, stream, after, timed=timed)

        self.runtime._enqueue = staging._enqueue = late
        try:
            yield
        finally:
            del self.runtime._enqueue
            staging._enqueue = self.runtime._enqueue

    @contextmanager
    def slow_compute(self) -> Iterator[None]:
        """Compute on the current stream, and on those that meet it, is behind the host by more than a small step."""
        for _ in range(8):
            self.doze()
        yield

    def meet(self, *streams: torch.Stream) -> None:
        """Each of ``streams`` waits for all of them, as in a program that changes streams."""
        for stream, event in itertools.product(streams, [stream.record_event() for stream in streams]):
            stream.wait_event(event)

    @property
    def current(self) -> torch.Stream:
        return self.runtime.current_stream(self.device)

    def require_graphs(self) -> None:
        if not self.runtime.captures:
            raise Skipped("this torch captures nothing on this device")

    def side_stream(self) -> torch.Stream:
        """A stream of the program's own."""
        return torch.Stream(device=self.device)

    def doze(self) -> None:
        """Has the current stream do nothing for so many cycles, or compute for a while where it cannot."""
        sleep = getattr(torch.get_device_module(self.device), "_sleep", None)
        if sleep is not None:
            sleep(self._cycles)
            return
        block = torch.ones(2048, 2048, device=self.device)
        for _ in range(max(self._cycles // 1_000_000, 1)):
            block = block @ block

    def finish(self) -> None:
        """The host waits for everything."""
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)

    def close(self) -> None:
        self.finish()
        for offload in self.offloads:
            offload.close()
