"""The runtime's calls into torch, written down where a test counts them, and made to fail where it says so."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eager_offload.runtime.accelerator_api import AcceleratorApi


class Api(AcceleratorApi):
    """Of the accelerator of this process.

    Args:
        skew: bytes by which a block is off the addresses that its allocator hands out.
        can_register: whether memory can be pinned where it lies.
    """

    def __init__(self, *, skew: int = 0, can_register: bool = True) -> None:
        self._skew, self._can_register = skew, can_register
        self._faults: dict[str, deque[Exception]] = defaultdict(deque)
        #: The calls that pin and unpin memory or begin a graph, in order.
        self.calls: list[str] = []
        #: Bytes that are registered, by address.
        self.registered: dict[int, int] = {}
        #: Runs inside every ``copy``, on the thread that makes it.
        self.during_copy: Callable[[], object] = lambda: None

    def fail(self, call: str, *errors: Exception) -> None:
        """Lets the next calls of this method raise ``errors``, one each."""
        self._faults[call].extend(errors)

    def set_stream(self, stream: torch.Stream) -> None:
        self._called("set_stream")
        super().set_stream(stream)

    def stream(self, device: torch.device, priority: int = 0) -> torch.Stream:
        self._called("stream")
        return super().stream(device, priority)

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        self._called("empty")
        return super().empty(nbytes + self._skew, device)[self._skew :]

    def empty_pinned(self, nbytes: int) -> Tensor:
        self._called("empty_pinned", f"empty_pinned {nbytes}")
        return super().empty_pinned(nbytes + self._skew)[self._skew :]

    def register(self, address: int, nbytes: int) -> None:
        self._called("register", f"register {nbytes}")
        if not self._can_register:
            raise NotImplementedError("this device cannot register memory")
        super().register(address, nbytes)
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self._called("unregister", "unregister")
        super().unregister(address)
        del self.registered[address]

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self._called("copy")
        self.during_copy()
        super().copy(dst, src)

    def begin_graph(self, graph: Any, memory: tuple[int, int] | None, mode: str) -> None:
        self._called("begin_graph", "begin_graph")
        super().begin_graph(graph, memory, mode)

    def forget_workspaces(self) -> None:
        self._called("forget_workspaces", "forget_workspaces")
        super().forget_workspaces()

    def _called(self, name: str, written: str | None = None) -> None:
        if written is not None:
            self.calls.append(written)
        if self._faults[name]:
            raise self._faults[name].popleft()
