"""How long kernels take: a trace of their launches, by events of the device, or by the wall clock on a CPU."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from eager_offload.errors import KernelError
from eager_offload.trace_file import Slice, SliceKind, Trace, write_trace
from eager_offload.version import VERSION


class _Launch(NamedTuple):
    name: str
    device: torch.device
    thread: int
    #: Seconds on a CPU, events on a device.
    start: Any
    stop: Any


class _Profile:
    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.launches: list[_Launch] = []
        #: By device, an event at the beginning, when the first kernel was launched there, and that moment's seconds.
        self.bases: dict[torch.device, tuple[Any, float]] = {}
        self.lock = threading.Lock()

    def base(self, device: torch.device) -> tuple[Any, float]:
        with self.lock:
            if device not in self.bases:
                self.bases[device] = (_moment(device), time.perf_counter() - self.start)
            return self.bases[device]

    def slices(self) -> Iterator[Slice]:
        threads: dict[int, int] = {}
        for one in self.launches:
            number = threads.setdefault(one.thread, len(threads) + 1)
            if one.device.type == "cpu":
                start, seconds = one.start - self.start, one.stop - one.start
            else:
                base, since = self.bases[one.device]
                start, seconds = since + base.elapsed_time(one.start) / 1e3, one.start.elapsed_time(one.stop) / 1e3
            track = "kernels" if number == 1 else f"kernels {number}"
            yield Slice(SliceKind.COMPUTE, one.name, str(one.device), track, start, seconds)


_running: _Profile | None = None
_lock = threading.Lock()


def _moment(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


@contextmanager
def profile(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes a trace of the kernels that are launched inside, which https://ui.perfetto.dev opens.

    Its file is that of ``offload.trace``. Times are those of the device; on a CPU, those of the host. At its end the
    host waits for what was launched.

    Raises:
        KernelError: another one is running.
        OSError: the file cannot be written.
    """
    global _running
    running = _Profile()
    with _lock:
        if _running is not None:
            raise KernelError("a profile of kernels is running: leave it before the next one begins")
        _running = running
    try:
        yield
    finally:
        with _lock:
            _running = None
    for device in running.bases:
        torch.accelerator.synchronize(device)
    slices = tuple(sorted(running.slices(), key=lambda one: (one.start, -one.seconds)))
    seconds = time.perf_counter() - running.start
    versions = {"eager_offload": VERSION, "torch": torch.__version__, "python": platform.python_version()}
    write_trace(Trace(seconds=seconds, config={}, stats={}, slices=slices, versions=versions), path)


def timed(name: str, device: torch.device) -> AbstractContextManager[None]:
    """Around a launch: notes when it began and ended, while a profile runs."""
    running = _running
    return nullcontext() if running is None else _note(running, name, device)


@contextmanager
def _note(running: _Profile, name: str, device: torch.device) -> Iterator[None]:
    if device.type != "cpu":
        running.base(device)
    start = _moment(device)
    yield
    launch = _Launch(name, device, threading.get_ident(), start, _moment(device))
    with running.lock:
        running.launches.append(launch)
