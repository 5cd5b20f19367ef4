"""How much memory this process uses: the operating system's word on a CPU, the allocator's on an accelerator."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import psutil
import torch

__all__ = ["Meter", "Sample"]

#: Between two samples.
PERIOD_SECONDS = 0.02
#: One sample in so many is shown on the screen.
SHOW_EVERY = 8


@dataclass(frozen=True)
class Sample:
    """Memory at one moment."""

    #: Since the meter's clock was started.
    seconds: float
    nbytes: int


def peak_resident_bytes() -> int:
    """The most memory that this process ever had resident, as the operating system counts it.

    On Linux this is ``VmHWM`` and not ``getrusage``'s ``ru_maxrss``, which a process inherits from the one that
    started it.
    """
    if sys.platform == "linux":
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


class Meter:
    """Samples memory in a thread while its ``with`` block runs."""

    def __init__(self, device: torch.device, show: Callable[[int], None]) -> None:
        self.device = device
        self.samples: list[Sample] = []
        self._process = psutil.Process()
        self._show = show
        self._started = time.perf_counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)

    def now(self) -> int:
        """Bytes in use at this moment."""
        if self.device.type == "cpu":
            return int(self._process.memory_info().rss)
        return torch.accelerator.memory_allocated(self.device)

    def peak(self) -> int:
        """The most bytes that were ever in use; exact, where samples may miss a moment."""
        if self.device.type == "cpu":
            return peak_resident_bytes()
        return torch.accelerator.max_memory_allocated(self.device)

    def __enter__(self) -> Meter:
        self._started = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            sample = Sample(seconds=time.perf_counter() - self._started, nbytes=self.now())
            self.samples.append(sample)
            if len(self.samples) % SHOW_EVERY == 1:
                self._show(sample.nbytes)
