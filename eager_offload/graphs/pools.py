"""What graphs need for as long as they live, and may share: buffers, pinned memory, and memory of the device.

Also whether a stream is being captured: a machine without an accelerator captures nothing, which is an answer too.
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
    """What becomes of work that is enqueued on a stream."""

    NONE = "none"
    """It runs."""
    ACTIVE = "active"
    """It becomes a part of a graph."""
    INVALIDATED = "invalidated"
    """It is an error: a call has made the capture void, which has yet to end."""

    @property
    def is_capturing(self) -> bool:
        return self is CaptureStatus.ACTIVE

    @property
    def is_invalidated(self) -> bool:
        return self is CaptureStatus.INVALIDATED


def capture_status(stream: torch.Stream | None = None) -> CaptureStatus:
    """Whether ``stream`` is being captured, by this library or by another.

    Args:
        stream: of the accelerator; that which the calling thread computes on, where it is left out.
    """
    if stream is None:
        if not accelerator_in_use():
            return CaptureStatus.NONE
        stream = torch.accelerator.current_stream()
    if stream.device.type == "cpu" or not stream_is_capturing(stream):
        return CaptureStatus.NONE
    try:
        # No node comes of this, and no edge that is not there: it asks the driver to go on with the capture.
        stream.wait_event(stream.record_event())
    except RuntimeError:
        return CaptureStatus.INVALIDATED
    return CaptureStatus.ACTIVE


def is_capturing(stream: torch.Stream | None = None) -> bool:
    """Whether what is enqueued on ``stream``, else on the current one, becomes a part of a graph."""
    return capture_status(stream).is_capturing


def check_outside(what: str, stream: torch.Stream | None = None) -> None:
    """Raises ``CaptureStateError`` if the current stream, or ``stream``, is being captured."""
    if any(capture_status(one) is not CaptureStatus.NONE for one in {None, stream}):
        raise CaptureStateError(
            f"{what} in a capture: each replay would do it again, with what it is given now. Do it before the capture, "
            "and between replays"
        )


def require_runtime(what: str) -> AcceleratorRuntime:
    """The runtime of the accelerator, for ``what``; raises ``NoAcceleratorError`` where there is none."""
    if torch.accelerator.current_accelerator(check_available=True) is None:
        raise NoAcceleratorError(
            f"{what} needs an accelerator, and torch finds none: a CPU has nothing to capture. There steps are "
            "looked up in those before them (OffloadConfig.step_tables)"
        )
    return accelerator_runtime()


class ReplayOrder:
    """Has replays that share memory come one after another."""

    def __init__(self) -> None:
        #: Held while one is launched, which a signal handler may do in the midst of another launch.
        self.lock = threading.RLock()
        #: Behind the last one; where there was none yet, behind the capture.
        self.latest: Event | None = None

    def outlive(self, runtime: AcceleratorRuntime, used: list[object]) -> None:
        """Holds ``used`` until the last replay is over, and the capture where one is under way.

        Takes no lock, waits for nothing, and spoils no capture, as to destroy a graph in it would.
        """
        if self.latest is not None and (runtime.is_restricted() or not runtime.query(self.latest)):
            runtime.keep_until(self.latest, used)


class CapturePool:
    """Keeps what graphs that are captured with it use, for as long as one of them lives, or the caller holds the pool.

    A capture that ends with a graph seals it: nothing is added, and no other capture begins, before ``unseal``. Graphs
    with one pool share memory of the device as well; their replays come one after another, on whichever streams.

    Args:
        host_bytes: of the one slab of pinned memory that ``host_buffer`` hands out parts of, as a number or as a text
            such as ``"256MiB"``; ``None`` for none.

    Raises:
        ConfigError: ``host_bytes`` is no size.
    """

    def __init__(self, host_bytes: int | str | None = None) -> None:
        self._host_bytes = 0 if host_bytes is None else parse_size(host_bytes, "host_bytes")
        self._lock = threading.RLock()
        self._buffers: list[object] = []
        self._sealed = False
        self._capture: object | None = None
        self._graphs: weakref.WeakSet[object] = weakref.WeakSet()
        self._memory: MemoryPool | None = None
        #: Of the replays of all graphs of this pool.
        self.order = ReplayOrder()
        self._slab: Tensor | None = None
        self._slab_used = 0

    def record_buffer(self, obj: object) -> int:
        """Keeps ``obj``, of whatever kind, such as a tensor whose address a graph has.

        Returns:
            Its number, from 0 on; buffers go in this order.

        Raises:
            PoolSealedError: the pool is sealed.
        """
        with self._lock:
            self.check_open("a buffer was recorded")
            self._buffers.append(obj)
            return len(self._buffers) - 1

    @property
    def buffer_count(self) -> int:
        """How many buffers the pool keeps."""
        return len(self._buffers)

    def host_buffer(self, nbytes: int) -> Tensor:
        """A part of the slab: a flat ``uint8`` CPU tensor of ``nbytes``, pinned, in which nothing stands yet.

        The first call pins the slab, so it comes before a capture. Parts are given back together, by
        ``clear_buffers``; a tensor that is still alive then keeps the memory of all. A forked child does not have the
        memory, and ends where it reads or writes it.

        Raises:
            NoAcceleratorError: there is none that memory could be pinned for.
            PoolSealedError: the pool is sealed.
            HostAllocationUnderCaptureError: in a capture, the slab has no room, or has yet to be pinned.
            CapacityError: elsewhere, the slab has no room.
        """
        runtime = require_runtime("pinned memory")
        with self._lock:
            self.check_open("host memory was asked for")
            start = -(-self._slab_used // ALIGNMENT) * ALIGNMENT
            if start + nbytes > self._host_bytes:
                kind = CapacityError if capture_status() is CaptureStatus.NONE else HostAllocationUnderCaptureError
                raise kind(
                    f"{nbytes:,} bytes of pinned memory were asked for, and the pool has "
                    f"{max(self._host_bytes - start, 0):,} left of its {self._host_bytes:,}: make it with "
                    "CapturePool(host_bytes=...) of what all captures need together"
                )
            if self._slab is None:
                self._slab = runtime.host_buffer(self._host_bytes)
            self._slab_used = start + nbytes
            return self._slab[start : self._slab_used]

    def slots(self, nbytes: int) -> Tensor:
        """Pinned memory for what a captured step offloads: a part of the slab, and where there is none a new one.

        Raises: as ``host_buffer``.
        """
        if self._host_bytes or not nbytes:
            return self.host_buffer(nbytes)
        self.record_buffer(slab := require_runtime("pinned memory").host_buffer(nbytes))
        return slab

    @contextmanager
    def adding(self) -> Iterator[None]:
        """What is added inside goes again where an exception comes."""
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
        """From here on nothing is added; a capture that ends with a graph calls this."""
        with self._lock:
            self._sealed = True

    def unseal(self) -> None:
        """Lets another capture begin, and buffers be recorded."""
        with self._lock:
            self._sealed = False

    @property
    def sealed(self) -> bool:
        return self._sealed

    def clear_buffers(self, force: bool = False) -> None:
        """Lets go of the buffers, in the order in which they were recorded, and of the slab.

        Where a replay still runs, of a graph that has gone or by ``force``, they stay until it is over.

        Args:
            force: also where graphs that live use them, which must not be launched again then.

        Raises:
            PoolInUseError: graphs live, or a capture is under way, and ``force`` is not set.
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
        while buffers:  # outside of the lock: what goes may run code of others
            buffers.pop()

    # -- for a capture ----------------------------------------------------------------------------------------------

    def begin(self, capture: object) -> None:
        """``capture`` begins, and uses the pool until ``end``.

        Raises:
            PoolSealedError: the pool is sealed.
            PoolInUseError: another capture uses it.
        """
        with self._lock:
            self.check_open("a capture was begun")
            if self._capture is not None:
                raise PoolInUseError("a capture was begun with a pool that another one uses: one at a time")
            self._capture = capture

    def end(self, graph: object | None, memory: MemoryPool | None = None) -> None:
        """The capture has ended, with ``graph`` or without one; the next one shares ``memory`` of the device."""
        with self._lock:
            self._capture, self._memory = None, memory
            if graph is not None:
                self._graphs.add(graph)
                self._sealed = True

    @property
    def memory(self) -> MemoryPool | None:
        """The device memory of the graphs that live; torch knows none by this name once the last one has gone."""
        return self._memory if self._graphs else None

    def check_open(self, what: str) -> None:
        """Raises ``PoolSealedError`` where nothing may be added."""
        if self._sealed:
            raise PoolSealedError(f"{what} with a pool that is sealed, as a capture leaves it: call unseal() first")


@dataclass(frozen=True, slots=True)
class GraphPoolHandle:
    """Names a pool of this process; ``graph_pool_handle`` makes one that there is."""

    id: int


_pools: dict[int, CapturePool] = {}
_numbers = itertools.count(1)


def graph_pool_handle() -> GraphPoolHandle:
    """A new handle, of a new pool, which lives until the handle is released and nothing else holds it."""
    handle = GraphPoolHandle(next(_numbers))
    _pools[handle.id] = CapturePool()
    return handle


def capture_pool_for_handle(handle: GraphPoolHandle) -> CapturePool | None:
    """The pool that ``handle`` names; ``None`` for one that is unknown, or was released."""
    return _pools.get(handle.id)


def release_graph_pool_handle(handle: GraphPoolHandle) -> None:
    """``handle`` names nothing any more; its pool lives on while a graph or the caller holds it."""
    _pools.pop(handle.id, None)
