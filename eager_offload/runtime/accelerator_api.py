"""What the accelerator runtime needs from torch, as thin as it can be: the one part that only an accelerator can run.

Every decision is in ``accelerator.py``, above this line, which tests see on any machine by a device of their own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any, cast

import torch
from torch import Tensor

from eager_offload import _torch
from eager_offload._torch import host_registration, is_capturing

_PORTABLE = 1  # cudaHostRegisterPortable


class AcceleratorApi:
    """The calls into torch that need an accelerator, one each and without a decision in any of them.

    Streams and events have ``torch.Stream``'s and ``torch.Event``'s own methods.
    """

    def current_accelerator(self) -> torch.device | None:
        """The kind of accelerator that is usable at run time, without an index; ``None`` where there is none."""
        return torch.accelerator.current_accelerator(check_available=True)

    def current_device_index(self) -> int:
        """The device that the calling thread has selected."""
        return torch.accelerator.current_device_index()

    def device_index(self, index: int) -> AbstractContextManager[None]:
        """Selects a device inside a ``with`` and goes back to the previous one."""
        return torch.accelerator.device_index(index)

    def current_stream(self, device: torch.device) -> torch.Stream:
        """The stream that the calling thread has selected on ``device``."""
        return torch.accelerator.current_stream(device.index)  # of a device torch would ask whether it is one

    def is_capturing(self, index: int | None) -> bool:
        """Whether the calling thread's current stream is being captured: of the selected device, for ``None``."""
        return is_capturing(index)

    def makes_graphs(self) -> bool:
        """Whether this torch makes graphs of what is enqueued on the accelerator."""
        return _torch.graph_kind() is not None

    def graph(self, keep: bool) -> Any:
        """A new graph, in which nothing is captured; ``keep``: it can be dumped."""
        return _torch.new_graph(keep)

    def memory_pool(self) -> tuple[int, int] | None:
        """A new name for memory that graphs share; ``None`` where a graph names it itself."""
        return _torch.graph_memory_pool()

    def begin_graph(self, graph: Any, memory: tuple[int, int] | None, mode: str) -> None:
        """The current stream is captured from here on."""
        _torch.begin_graph(graph, memory, mode)

    def forget_workspaces(self) -> None:
        """Lets go of the memory that the device's libraries work in, which torch keeps for each stream."""
        _torch.forget_workspaces()

    def release_failed_graph(self, graph: Any, index: int, memory: tuple[int, int] | None, *, ended: bool) -> None:
        """Gives back what a graph has whose capture has failed: at its end, or at its begin."""
        _torch.release_failed_graph(graph, index, memory, ended=ended)

    def synchronize(self, index: int) -> None:
        """Makes the host wait for all streams of a device."""
        torch.accelerator.synchronize(index)

    def empty_cache(self) -> None:
        """Gives memory back in which no tensor lives: a graph allocates its own."""
        torch.accelerator.empty_cache()

    def set_stream(self, stream: torch.Stream) -> None:
        """Selects ``stream`` on its device, and that device, for the calling thread."""
        torch.accelerator.set_stream(stream)

    def stream(self, device: torch.device, priority: int = 0) -> torch.Stream:
        """A new stream. A device that has fewer priorities takes the nearest one, or raises ``RuntimeError``."""
        return torch.Stream(device=device, priority=priority)

    def event(self, device: torch.device, enable_timing: bool) -> torch.Event:
        """A new event, not recorded yet."""
        return torch.Event(device=device, enable_timing=enable_timing)

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Bytes of ``device`` that live tensors take now, and the most that they took so far.

        Raises ``KeyError``, ``NotImplementedError`` or ``RuntimeError`` where its allocator does not count them.
        """
        stats = torch.accelerator.memory_stats(device)
        return stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]

    def free_memory(self, device: torch.device) -> int:
        """Bytes of ``device`` that no process has taken, and those that its allocator keeps idle."""
        free, _ = torch.accelerator.get_memory_info(device)
        idle = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return free + max(idle, 0)

    def total_memory(self, device: torch.device) -> int | None:
        """Bytes that ``device`` has; ``None`` where it does not say."""
        try:
            _, total = torch.accelerator.get_memory_info(device)
        except (NotImplementedError, RuntimeError):
            return None
        return int(total)

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """A new flat ``uint8`` tensor that belongs to the current stream of ``device``."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def empty_pinned(self, nbytes: int) -> Tensor:
        """A new flat ``uint8`` CPU tensor in pinned memory. Raises ``RuntimeError`` where that cannot be had."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register(self, address: int, nbytes: int) -> None:
        """Pins memory where it lies. Raises ``NotImplementedError`` or ``RuntimeError`` where that cannot be done."""
        registration = host_registration()
        if registration is None:
            raise NotImplementedError("this torch cannot register memory")
        # Portable: for every device of the process.
        _check_code(registration.register(address, nbytes, _PORTABLE), f"cudaHostRegister of {nbytes} bytes")

    def unregister(self, address: int) -> None:
        """Unpins what was registered at ``address``. Raises ``RuntimeError`` where the driver refuses to."""
        registration = host_registration()
        assert registration is not None
        _check_code(registration.unregister(address), "cudaHostUnregister")

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Enqueues ``dst.copy_(src)`` on the current stream of the one that is on the accelerator."""
        dst.copy_(src, non_blocking=True)

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where ``tensor`` is, with its index."""
        return tensor.device


def _check_code(code: object, call: str) -> None:
    """Raises ``RuntimeError`` where a call of the driver's has returned the number of an error."""
    if number := int(cast(int, code)):
        # The error stays behind, and the next kernel would be taken for its cause. To launch one takes it away.
        with suppress(RuntimeError):
            torch.empty(1, device=torch.accelerator.current_accelerator()).fill_(1)
        raise RuntimeError(f"{call} failed with error {number}")
