"""torch's calls for an accelerator, written down where a test counts them, and made to fail where it says so."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.virtual_device import NAME


class Api:
    """The calls of the virtual device in a test, patched in torch.

    Args:
        patch: puts torch's own back.
        can_register: whether memory can be pinned where it lies.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, can_register: bool = True) -> None:
        self._faults: dict[str, deque[Exception]] = defaultdict(deque)
        #: The calls that pin and unpin memory, in order.
        self.calls: list[str] = []
        #: Bytes that are registered, by address.
        self.registered: dict[int, int] = {}
        #: Runs inside every copy, on the thread that makes it.
        self.during_copy: Callable[[], object] = lambda: None
        empty, copy, set_stream = torch.empty, torch.Tensor.copy_, torch.accelerator.set_stream
        driver = torch.get_device_module(NAME).cudart()

        def empty_(*size: Any, **named: Any) -> torch.Tensor:
            is_bytes = not size[1:] and type(size[0]) is int and named.get("dtype") is torch.uint8
            if is_bytes and named.get("pin_memory"):
                self.calls.append(f"empty_pinned {size[0]}")
                self._fail("empty_pinned")
            elif is_bytes and torch.device(named.get("device") or "cpu").type == NAME:
                self._fail("empty")
            return empty(*size, **named)

        def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if target.dtype is source.dtype is torch.uint8:
                self._fail("copy")
                self.during_copy()
            return copy(target, source, non_blocking)

        def select(stream: torch.Stream) -> None:
            self._fail("set_stream")
            set_stream(stream)

        def register(address: int, nbytes: int, flags: int) -> int:
            self.calls.append(f"register {nbytes}")
            self._fail("register")
            code: int = driver.cudaHostRegister(address, nbytes, flags)
            if not code:
                self.registered[address] = nbytes
            return code

        def unregister(address: int) -> int:
            self.calls.append("unregister")
            self._fail("unregister")
            code: int = driver.cudaHostUnregister(address)
            if not code:
                del self.registered[address]
            return code

        found = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister) if can_register else None
        patch.setattr(torch.get_device_module(NAME), "cudart", lambda: found)
        patch.setattr(torch, "empty", empty_)
        patch.setattr(torch.Tensor, "copy_", copy_)
        patch.setattr(torch.accelerator, "set_stream", select)

    def fail(self, call: str, *errors: Exception) -> None:
        """Lets the next calls of this name raise ``errors``, one each."""
        self._faults[call].extend(errors)

    def _fail(self, call: str) -> None:
        if self._faults[call]:
            raise self._faults[call].popleft()
