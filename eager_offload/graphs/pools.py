"""Resources that graphs need while they live, and may share: buffers, pinned memory and device memory.

Also the capture status of streams; without an accelerator it is ``NONE``.
"""

from __future__ import annotations

import enum
import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from eager_offload.config import parse_size
from eager_offload.errors import (
    CapacityError,
    CaptureStateError,
    HostAllocationUnderCaptureError,
    NoAcceleratorError,
    PoolInUseError,
    PoolSealedError,
)
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.base import ALIGNMENT, Event
from eager_offload.runtime.captures import MemoryPool
from eager_offload.torch_private.captures import accelerator_in_use, stream_is_capturing


class CaptureStatus(enum.Enum):
    """What happens to work that is enqueued on a stream."""

    NONE = "none"
    """The work runs."""
    ACTIVE = "active"
    """The work is recorded into a graph."""
    INVALIDATED = "invalidated"
    """An error: a call has invalidated the capture, which must be ended."""

    @property
    def is_capturing(self) -> bool:
        return self is CaptureStatus.ACTIVE

    @property
    def is_invalidated(self) -> bool:
        return self is CaptureStatus.INVALIDATED


def capture_status(stream: torch.Stream | None = None) -> CaptureStatus:
    """Returns the capture status of ``stream``, for captures by this library or another one.

    Args:
        stream: a stream of the accelerator; by default, the current one.
    """
    if stream is None:
        if not accelerator_in_use():
            return CaptureStatus.NONE
        stream = torch.accelerator.current_stream()
    if stream.device.type == "cpu" or not stream_is_capturing(stream):
        return CaptureStatus.NONE
    try:
        # Has the driver check the capture. Adds no node, and no new edge.
        stream.wait_event(stream.record_event())
    except RuntimeError:
        return CaptureStatus.INVALIDATED
    return CaptureStatus.ACTIVE


def is_capturing(stream: torch.Stream | None = None) -> bool:
    """Returns whether work on ``stream`` (by default, the current one) is recorded into a graph."""
    return capture_status(stream).is_capturing


def check_outside(what: str, stream: torch.Stream | None = None) -> None:
    """Raises ``CaptureStateError`` if the current stream, or ``stream``, is being captured."""
    if any(capture_status(one) is not CaptureStatus.NONE for one in {None, stream}):
        raise CaptureStateError(
            f"{what} in a capture: each replay would do it again with the arguments of now. Do it before the capture, "
            "and between replays"
        )


def require_runtime(what: str) -> AcceleratorRuntime:
    """Returns the runtime of the accelerator; raises ``NoAcceleratorError`` if there is none."""
    if torch.accelerator.current_accelerator(check_available=True) is None:
        raise NoAcceleratorError(
            f"{what} needs an accelerator, and torch finds none: a CPU has nothing to capture. There steps are "
            "looked up in those before them (OffloadConfig.step_tables)"
        )
    return accelerator_runtime()


class ReplayOrder:
    """Orders the replays of graphs that share memory."""

    def __init__(self) -> None:
        #: Held during a launch. Reentrant, because a signal handler may launch in the middle of another launch.
        self.lock = threading.RLock()
        #: After the last replay, or after the capture if nothing was replayed.
        self.latest: Event | None = None

    def outlive(self, runtime: AcceleratorRuntime, used: list[object]) -> None:
        """Keeps ``used`` alive until the last replay, and a capture in progress, is over.

        Takes no lock, does not wait, and does not invalidate a capture, as freeing a graph inside one would.
        """
        if self.latest is not None and (runtime.is_restricted() or not runtime.query(self.latest)):
            runtime.keep_until(self.latest, used)


class CapturePool:
    """Keeps the resources of the graphs captured with this pool, until the last graph and the pool are gone.

    A successful capture seals the pool: until ``unseal`` nothing can be added, and no other capture can begin. Graphs
    of one pool also share device memory, so their replays run one after another, on any streams.

    Args:
        host_bytes: size of the slab of pinned memory that ``host_buffer`` divides, as a number or a text such as
            ``"256MiB"``; ``None`` for no slab.

    Raises:
        ConfigError: ``host_bytes`` is not a size.
    """

    def __init__(self, host_bytes: int | str | None = None) -> None:
        self._host_bytes = 0 if host_bytes is None else parse_size(host_bytes, "host_bytes")
        self._lock = threading.RLock()
        self._buffers: list[object] = []
        self._sealed = False
        self._capture: object | None = None
        self._graphs: weakref.WeakSet[object] = weakref.WeakSet()
        self._memory: MemoryPool | None = None
        self.order = ReplayOrder()
        self._slab: Tensor | None = None
        self._slab_used = 0

    def record_buffer(self, obj: object) -> int:
        """Keeps ``obj`` alive: an object of any type, such as a tensor whose address a graph uses.

        Returns:
            The index of ``obj``, from 0 on. Buffers are freed in this order.

        Raises:
            PoolSealedError: the pool is sealed.
        """
        with self._lock:
            self.check_open("a buffer was recorded")
            self._buffers.append(obj)
            return len(self._buffers) - 1

    @property
    def buffer_count(self) -> int:
        """The number of buffers."""
        return len(self._buffers)

    def host_buffer(self, nbytes: int) -> Tensor:
        """Returns a part of the slab: a flat, uninitialized, pinned ``uint8`` CPU tensor of ``nbytes``.

        The first call pins the slab, and must come before a capture. ``clear_buffers`` returns all parts together; a
        tensor that is still alive then keeps the whole slab. A forked child does not have the memory and crashes when
        it reads or writes a part.

        Raises:
            NoAcceleratorError: there is no accelerator to pin memory for.
            PoolSealedError: the pool is sealed.
            HostAllocationUnderCaptureError: in a capture, and the slab is full or not pinned yet.
            CapacityError: outside of captures, and the slab is full.
        """
        runtime = require_runtime("pinned memory")
        with self._lock:
            self.check_open("host memory was asked for")
            start = -(-self._slab_used // ALIGNMENT) * ALIGNMENT
            if start + nbytes > self._host_bytes:
                kind = CapacityError if capture_status() is CaptureStatus.NONE else HostAllocationUnderCaptureError
                raise kind(
                    f"{nbytes:,} bytes of pinned memory were requested, but the pool has "
                    f"{max(self._host_bytes - start, 0):,} left of its {self._host_bytes:,}: make it with "
                    "CapturePool(host_bytes=...), the sum of all captures"
                )
            if self._slab is None:
                self._slab = runtime.host_buffer(self._host_bytes)
            self._slab_used = start + nbytes
            return self._slab[start : self._slab_used]

    def slots(self, nbytes: int) -> Tensor:
        """Returns pinned memory for the offloads of a captured step: a part of the slab, or new memory if the pool has
        no slab.

        Raises: as ``host_buffer``.
        """
        if self._host_bytes or not nbytes:
            return self.host_buffer(nbytes)
        self.record_buffer(slab := require_runtime("pinned memory").host_buffer(nbytes))
        return slab

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Removes the additions of a ``with`` if an exception ends it."""
        with self._lock:
            count, used = len(self._buffers), self._slab_used
        try:
            yield
        except BaseException:
            with self._lock:
                del self._buffers[count:]
                self._slab_used = used
            raise

    def seal(self) -> None:
        """Forbids additions; called after a successful capture."""
        with self._lock:
            self._sealed = True

    def unseal(self) -> None:
        """Allows additions and another capture."""
        with self._lock:
            self._sealed = False

    @property
    def sealed(self) -> bool:
        return self._sealed

    def clear_buffers(self, force: bool = False) -> None:
        """Frees the buffers, in the order in which they were recorded, and the slab.

        During a replay (of a freed graph, or with ``force``) they stay until it is over.

        Args:
            force: also clear if live graphs use the buffers. Those graphs must not be launched again.

        Raises:
            PoolInUseError: a graph is alive or a capture is active, and ``force`` is not set.
        """
        with self._lock:
            if not force and (self._graphs or self._capture is not None):
                users = f"{len(self._graphs)} graphs" if self._graphs else "a capture that is under way"
                raise PoolInUseError(
                    f"the {self.buffer_count} buffers of the pool are in use by {users}: let go of them first, or call "
                    "clear_buffers(force=True) if nothing launches them again"
                )
            buffers, self._buffers = self._buffers, []
            slab, self._slab, self._slab_used = self._slab, None, 0
        if self.order.latest is not None:
            self.order.outlive(accelerator_runtime(), [list(buffers), slab])
        buffers.reverse()
        while buffers:  # outside of the lock, because freeing may run foreign code
            buffers.pop()

    # -- for a capture ----------------------------------------------------------------------------------------------

    def begin(self, capture: object) -> None:
        """Reserves the pool for ``capture`` until ``end``.

        Raises:
            PoolSealedError: the pool is sealed.
            PoolInUseError: another capture uses the pool.
        """
        with self._lock:
            self.check_open("a capture was begun")
            if self._capture is not None:
                raise PoolInUseError("a capture was begun with a pool that another capture is using: end that first")
            self._capture = capture

    def end(self, graph: object | None, memory: MemoryPool | None = None) -> None:
        """Ends a capture, with ``graph`` if it succeeded; the next capture shares the device memory ``memory``."""
        with self._lock:
            self._capture, self._memory = None, memory
            if graph is not None:
                self._graphs.add(graph)
                self._sealed = True

    @property
    def memory(self) -> MemoryPool | None:
        """The device memory that live graphs share; ``None`` without one, because torch has then freed it."""
        return self._memory if self._graphs else None

    def check_open(self, what: str) -> None:
        """Raises ``PoolSealedError`` if the pool is sealed."""
        if self._sealed:
            raise PoolSealedError(f"{what} with a pool that is sealed, as a capture leaves it: call unseal() first")


@dataclass(frozen=True, slots=True)
class GraphPoolHandle:
    """Names a pool of this process; made by ``graph_pool_handle``."""

    id: int


_pools: dict[int, CapturePool] = {}
_numbers = itertools.count(1)


def graph_pool_handle() -> GraphPoolHandle:
    """Returns a new handle for a new pool, which lives until the handle is released and nothing else refers to the
    pool."""
    handle = GraphPoolHandle(next(_numbers))
    _pools[handle.id] = CapturePool()
    return handle


def capture_pool_for_handle(handle: GraphPoolHandle) -> CapturePool | None:
    """Returns the pool of ``handle``; ``None`` if the handle is unknown or released."""
    return _pools.get(handle.id)


def release_graph_pool_handle(handle: GraphPoolHandle) -> None:
    """Releases ``handle``; graphs and callers that use the pool keep it alive."""
    _pools.pop(handle.id, None)
