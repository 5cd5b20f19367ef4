"""The virtual device as a backend of the hazards: their tensors are made on it, and copies to and from it come late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch

from eager_offload import Offload
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.base import Direction
from tests.hazards.backends import Backend, Gate
from tests.virtual_device import NAME, install


class _LinkGate(Gate):
    """Holds the link to the host."""

    def __init__(self, reached: Any, opened: Any) -> None:
        super().__init__()
        self._reached_link, self._opened_link = reached, opened

    def open(self) -> None:
        self._opened_link.open()

    def wait_until_reached(self) -> None:
        end = time.monotonic() + 60
        while not self._reached_link.is_open():
            assert time.monotonic() < end, "no copy came to the gate"
            time.sleep(0.001)


class VirtualBackend(Backend):
    """Streams that are threads: what is not ordered is overtaken, and shows as wrong bits."""

    name = "virtual"
    tier = "host"

    def __init__(
        self, latency: float = 1e-4, bandwidth: float = 1e9, compute: float = 0.0, *, is_default: bool = True
    ) -> None:
        """
        Args:
            latency, bandwidth: of the links, in seconds and in bytes a second.
            compute: seconds that each operator takes longer.
            is_default: whether tensors are made on the device unless a test says otherwise.
        """
        super().__init__()
        self._links = {"latency": latency, "bandwidth": bandwidth}
        self._compute, self._is_default = compute, is_default
        self._stack = ExitStack()

    @property
    def runtime(self) -> AcceleratorRuntime:
        return accelerator_runtime()

    @contextmanager
    def counting_events(self) -> Iterator[Callable[[], int]]:
        yield lambda: sum(len(self.runtime._events.of(index)) for index in range(2))

    def watching(self) -> AbstractContextManager[object]:
        return torch.device(NAME) if self._is_default else nullcontext()  # a thread has a default device of its own

    @contextmanager
    def gate(self) -> Iterator[Gate]:
        with install().held_link() as (reached, opened):
            yield _LinkGate(reached, opened)

    def assert_nothing_is_held(self) -> None:
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
        super().assert_nothing_is_held()

    def _make(self, fields: dict[str, Any]) -> Offload:
        return Offload(**fields)

    def __enter__(self) -> Self:
        virtual = install()
        self._stack.enter_context(virtual.slow_links(**self._links))
        self._stack.enter_context(virtual.slow_compute(self._compute))
        self._stack.enter_context(self.watching())
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
        self._stack.close()


def side_stream(device: int = 0) -> torch.Stream:
    """One on which no transfers run: torch hands out a few in turn, and what they move would be captured."""
    place, runtime = torch.device(NAME, device), accelerator_runtime()
    transfers = [runtime.transfer_stream(place, direction) for direction in Direction]
    while (stream := torch.Stream(device=place)) in transfers:
        pass
    return stream
