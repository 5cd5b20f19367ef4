"""The runtime of an accelerator, written against ``torch.accelerator``: CUDA, XPU and others by the same calls.

Streams are ordered only by events, so a copy between device and pinned memory does not block the host. Memory belongs
to the stream on which it was allocated, and the caller's current stream and device are always restored.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from eager_offload.errors import HostAllocationUnderCaptureError, OffloadError
from eager_offload.runtime.base import ALIGNMENT, DeviceMemory, Direction, Event, Layout, Moment, Runtime, Span, Stream
from eager_offload.runtime.captures import (
    CAPTURES,
    AcceleratorCaptures,
    AcceleratorEvent,
    Capture,
    CaptureMode,
    EventPool,
    MemoryPool,
)
from eager_offload.runtime.pinned import PinnedMemory
from eager_offload.runtime.staging import StagedEvent, Staging
from eager_offload.tiers.base import TIMES, LinkRates, Rate, Slot
from eager_offload.tiers.forking import LEFT_TO_THE_PARENT, ForkSafeLock, UnderWayAtFork, tell_after_fork
from eager_offload.tiers.pool import SlabSizes
from eager_offload.torch_private.captures import graph_kind, is_capturing

#: The priority of copy streams. For each priority, torch returns the streams of a ring in turn (32 streams on CUDA). So
#: a program that creates many streams of the same priority would also get the copy streams, and its compute would wait
#: for copies. Programs use priority 0; FSDP and NCCL use -1. A high priority does not slow compute: copies run on copy
#: engines, without kernels.
_PRIORITY = -2
#: The first 16 copies of a transfer stream are timed, then every 16th: timing a copy takes one more event.
_TIMED = 16


class TransferStreams(NamedTuple):
    outward: torch.Stream
    inward: torch.Stream


class _Streams(NamedTuple):
    process: TransferStreams
    #: For captures (one at a time on a device), since other threads use the process's streams at the same time.
    capture: TransferStreams


class AcceleratorRuntime(Runtime):
    """The streams, events, copies and memory of torch's current accelerator.

    Use the process's instance, ``accelerator_runtime()``: transfer streams are process-wide.

    Args:
        probe_bytes: the size of each copy that measures the link.

    Raises:
        OffloadError: there is no usable accelerator.
    """

    can_capture = True
    holds_copies_back = True

    def __init__(self, *, probe_bytes: int = 64 << 20) -> None:
        super().__init__()
        self._probe_bytes = probe_bytes
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise OffloadError(
                "torch finds no usable accelerator (torch.accelerator.current_accelerator(check_available=True) is "
                "None); tensors on the CPU are offloaded by the host runtime"
            )
        #: The accelerator's type (e.g. ``"cuda"``).
        self.device_type: str = accelerator.type
        self._lock = threading.Lock()
        self._streams: dict[torch.device, _Streams] = {}
        self._separate_streams: dict[torch.device, torch.Stream] = {}
        self._pinned = PinnedMemory()
        self._staging = Staging(self, self._enqueue)
        self._events = EventPool()
        self._captures = AcceleratorCaptures(self._events.waiting, self.poll)
        self.end_capture, self.abandon_capture = self._captures.end, self._captures.abandon
        self._copies: dict[torch.Stream, int] = {}
        #: Whether this process was forked, so that the device belongs to its parent.
        self._inherited = False
        tell_after_fork(self)

    def current_stream(self, device: torch.device) -> torch.Stream:
        known = device if device in self._streams else self._indexed(device)
        return torch.accelerator.current_stream(known.index)  # given a device, torch would check its type

    def is_capturing(self, device: torch.device | None = None) -> bool:
        return not self._inherited and is_capturing(None if device is None else _index(device))

    def is_restricted(self) -> bool:
        """Returns whether the calling thread must not make calls that are unsafe during a capture (e.g. pinning)."""
        return CAPTURES.forbid_queries() or self.is_capturing()

    @property
    def captures(self) -> bool:
        """Whether ``begin_capture`` can capture graphs on this device."""
        return not self._inherited and graph_kind() is not None

    def begin_capture(
        self, stream: torch.Stream, mode: CaptureMode, pool: MemoryPool | None = None, *, keep: bool = False
    ) -> Capture:
        self._indexed(stream.device)
        if not self.is_capturing():
            self.slab_sizes()  # finds out whether memory can be registered: a test that a capture forbids
        return self._captures.begin(stream, mode, pool, keep=keep)

    def transfer_stream(self, device: torch.device, direction: Direction) -> torch.Stream:
        streams = (self._streams.get(device) or self._streams_of(device)).process
        return streams.outward if direction is Direction.OUT else streams.inward

    def capture_streams(self, device: torch.device) -> TransferStreams:
        return self._streams_of(device).capture

    @contextmanager
    def enter(self, stream: Stream) -> Iterator[None]:
        """Makes ``stream`` and its device current on the calling thread, and restores the caller's afterwards.

        Does nothing if both are current, so that consecutive copies inside need no switch.

        [Note: entering a stream]
        ``with torch.Stream`` stores the stream to restore *on the Python object*. If it is entered twice, by nesting or
        by two threads (autograd has a thread per device), it raises after the switch or restores the other thread's
        stream. All threads share the transfer streams, so this context stores the stream itself. The device is selected
        with ``device_index``, which creates no context on an unused device when it restores the previous one.
        """
        assert isinstance(stream, torch.Stream)
        index = stream.device_index
        before = torch.accelerator.current_stream(index)
        on_device = torch.accelerator.current_device_index() == index
        if on_device and before == stream:
            yield
            return
        with nullcontext() if on_device else torch.accelerator.device_index(index):
            try:
                torch.accelerator.set_stream(stream)
                yield
            finally:
                torch.accelerator.set_stream(before)

    def host_buffer(self, nbytes: int, *, pin_memory: bool = True) -> Tensor:
        """Returns a slab of host memory, flat and page-aligned.

        Args:
            pin_memory: ``False`` for pageable memory, for which copies block the host. If pinning fails, the memory is
                pageable too, and one warning says so.

        Raises:
            MemoryError: the system has no room.
            HostAllocationUnderCaptureError: a capture is active, which pinning would invalidate.
        """
        if pin_memory and self.is_restricted():
            raise HostAllocationUnderCaptureError(
                f"{nbytes:,} bytes of host memory were to be pinned during a capture: reserve them before the capture"
            )
        if not pin_memory:
            return self._pinned.pageable(nbytes)
        slab = self._pinned.allocate(nbytes)
        self.pageable_slabs = self._pinned.refused
        return slab

    def slab_sizes(self, *, pin_memory: bool = True) -> SlabSizes | None:
        return self._pinned.sizes if pin_memory else None

    def close(self) -> None:
        self._staging.close()
        super().close()

    def tells_time(self, device: torch.device) -> bool:
        # On a new stream, which is idle: on a transfer stream the host would wait for copies.
        event = self._events.record(torch.Stream(device=self._indexed(device)), timed=True)
        event.synchronize()
        return event.tells_time()

    def moment(self, stream: Any) -> Moment:
        return super().moment(None) if stream is None else self._events.record(stream, timed=True)

    def seconds_between(self, before: Moment, after: Moment, *, synchronize: bool = False) -> float | None:
        if isinstance(before, float):
            return super().seconds_between(before, after)
        if self._inherited:
            return 0.0
        assert isinstance(before, AcceleratorEvent)
        assert isinstance(after, AcceleratorEvent)
        with suppress(OffloadError):  # a moment in a captured graph has no time
            for moment in (after, before):
                if not self.query(moment):
                    if not synchronize:
                        return None
                    self.synchronize(moment)
            return before.seconds_until(after)
        return None

    def spans(self, event: Event) -> tuple[Span, ...]:
        assert isinstance(event, AcceleratorEvent | StagedEvent)
        carried: tuple[Span, ...] = ()
        on_device: AcceleratorEvent | None
        if isinstance(event, AcceleratorEvent):
            on_device = event
        else:
            carried, on_device = () if event.carried is None else (event.carried,), event.on_device
        if on_device is None or on_device.began is None:
            return carried
        return (*carried, Span("", on_device.began, on_device))

    def ran_inline(self, event: Event) -> bool:
        return isinstance(event, StagedEvent) and event.work is not None and event.work.inline

    def processor_seconds(self, event: Event) -> float:
        return event.work.processor_seconds if isinstance(event, StagedEvent) and event.work is not None else 0.0

    def poll(self) -> None:
        # Dropping keepalives in a capture could destroy a graph or unpin memory: either invalidates the capture.
        if self._inherited or (CAPTURES.under_way and CAPTURES.forbid_queries()):
            return
        super().poll()
        if self._pinned.returned:
            self._pinned.poll()

    def measure_link(self, device: torch.device) -> LinkRates:
        device = self._indexed(device)
        return LinkRates(*[_measured_link(self, device, way, self._probe_bytes) for way in Direction])

    def record(self, stream: Any) -> AcceleratorEvent:
        return self._events.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        event.wait_on(stream)

    def has_host_wait(self, event: Event) -> bool:
        return isinstance(event, StagedEvent)  # blocks until its thread has enqueued the copy to wait for

    def query(self, event: Any) -> bool:
        return not self._inherited and bool(event.query())

    def synchronize(self, event: Any) -> None:
        if self._inherited:
            raise UnderWayAtFork
        event.synchronize()

    def copy(
        self,
        dst: Tensor | Slot,
        src: Tensor | Slot,
        stream: Stream,
        after: Sequence[Event] = (),
        *,
        timed: bool = False,
    ) -> Event:
        assert isinstance(stream, torch.Stream)
        inward = type(dst) is Tensor  # isinstance(dst, Slot) would be slow: Slot is an abstract base class
        slot, tensor = cast(tuple[Slot, Tensor], (src, dst) if inward else (dst, src))
        assert tensor.numel() == slot.nbytes, f"{tensor.numel()} bytes for a slot of {slot.nbytes}"
        assert tensor.device == stream.device, "a copy runs on a transfer stream of the tensor's device"
        # Samples are timed, so that the link's speed is known. Captured copies are not: a captured event has no time.
        if not timed and (not CAPTURES.under_way or CAPTURES.own() is None):
            copies = self._copies.get(stream, 0)
            self._copies[stream] = copies + 1
            timed = copies < _TIMED or copies % _TIMED == 0
        in_memory = getattr(slot, "tensor", None)
        if isinstance(in_memory, Tensor):
            target, source = (tensor, in_memory) if inward else (in_memory, tensor)
            return self._enqueue(target, source, stream, after, timed=timed)
        if inward:
            return self._staging.reload(tensor, slot, stream, after, timed=timed)
        return self._staging.offload(slot, tensor, stream, after, timed=timed)

    def _enqueue(
        self,
        target: Tensor,
        source: Tensor,
        stream: torch.Stream,
        after: Sequence[Any],
        *,
        timed: bool,
    ) -> AcceleratorEvent:
        for end in (target, source):
            assert end.dtype is torch.uint8, "copies move bytes"
            assert end.is_contiguous(), "copies move flat bytes"
        for event in after:
            event.wait_on(stream)
        began = self._events.record(stream, timed=True) if timed else None
        with self.enter(stream):
            target.copy_(source, non_blocking=True)
        over = self._events.record(stream, timed=timed)
        over.began = began
        return over

    def memory(self, device: torch.device) -> DeviceMemory | None:
        with suppress(KeyError, NotImplementedError, RuntimeError):  # an allocator without statistics
            stats = torch.accelerator.memory_stats(self._indexed(device))
            return DeviceMemory(stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"])
        return None

    def total_memory(self, device: torch.device) -> int | None:
        device = self._indexed(device)
        with suppress(NotImplementedError, RuntimeError):
            _, total = torch.accelerator.get_memory_info(device)
            return int(total)
        return None

    def free_memory(self, device: torch.device) -> int:
        device = self._indexed(device)
        free, _ = torch.accelerator.get_memory_info(device)
        idle = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return free + max(idle, 0)

    def allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        assert isinstance(stream, torch.Stream)
        assert self._indexed(device) == stream.device
        assert 0 <= layout.alignment_offset < ALIGNMENT
        with torch.inference_mode(False), self.enter(stream):
            # Known allocators return addresses that are multiples of 256; the second attempt is for other allocators.
            block = torch.empty(layout.nbytes + layout.alignment_offset, dtype=torch.uint8, device=stream.device)
            start = layout.alignment_offset
            if block.data_ptr() % ALIGNMENT != 0:
                block = torch.empty(layout.nbytes + ALIGNMENT - 1, dtype=torch.uint8, device=stream.device)
                start = (layout.alignment_offset - block.data_ptr()) % ALIGNMENT
            return block if block.numel() == layout.nbytes else block[start : start + layout.nbytes]

    def after_fork(self) -> None:
        """Abandons the parent's events and streams without querying or freeing them: the child has no device."""
        self._inherited = True
        CAPTURES.under_way = ()
        LEFT_TO_THE_PARENT.extend([self._kept, self._events, self._streams, self._separate_streams])
        self._streams, self._separate_streams = {}, {}
        self._kept = deque()
        self._lock = threading.Lock()
        self._pinned.after_fork()

    def _indexed(self, device: torch.device) -> torch.device:
        if self._inherited:
            raise OffloadError(
                f"this process was forked from one that uses {device}, and cannot use it itself: start processes that "
                "use it with torch.multiprocessing's start method 'spawn'"
            )
        if device.type != self.device_type:
            raise OffloadError(f"{device} is not the accelerator of this process, which is {self.device_type!r}")
        if _index(device) is not None:
            return device
        return torch.device(device.type, torch.accelerator.current_device_index())

    def separate_stream(self, device: torch.device) -> torch.Stream:
        """Returns the stream of ``device`` for captures, which is not a transfer stream.

        torch returns the streams of a ring in turn: on a shared stream, copies of another thread would be captured.
        """
        device, streams = self._indexed(device), self._streams_of(device)
        with self._lock:
            if device not in self._separate_streams:
                taken = [*streams.process, *streams.capture]
                # Of len(taken) + 1 streams at least one is free.
                free = [one for one in self._new_streams(device, len(taken) + 1) if one not in taken]
                self._separate_streams[device] = free[0]
            return self._separate_streams[device]

    def _streams_of(self, device: torch.device) -> _Streams:
        device = self._indexed(device)
        with self._lock:
            if device not in self._streams:
                try:  # with a priority whose ring programs do not use, if the device supports it
                    found = self._new_streams(device, 4, _PRIORITY)
                except OffloadError:
                    found = self._new_streams(device, 4)
                self._streams[device] = _Streams(TransferStreams(*found[:2]), TransferStreams(*found[2:]))
            return self._streams[device]

    def _new_streams(self, device: torch.device, count: int, priority: int = 0) -> list[torch.Stream]:
        # All at once: torch returns the streams of a ring in turn, and consecutive streams are distinct.
        try:
            return [torch.Stream(device=device, priority=priority) for _ in range(count)]
        except RuntimeError as error:
            raise OffloadError(
                f"torch cannot create a stream on {device}, so nothing could be moved while it computes; "
                "run without Offload there"
            ) from error


def _index(device: torch.device) -> int | None:
    return device.index


def _measured_link(runtime: AcceleratorRuntime, device: torch.device, direction: Direction, nbytes: int) -> Rate:
    """Measures the link of ``device`` in ``direction``, while the library moves nothing the other way.

    The host waits for a few copies, and the device needs memory for one.

    Args:
        nbytes: the size of a copy; smaller if the device has no room.
    """
    with torch.inference_mode(False), torch.no_grad():
        stream = runtime.transfer_stream(device, direction)
        block = _block(device, nbytes)
        host = runtime.host_buffer(block.numel())
        target, source = (host, block) if direction is Direction.OUT else (block, host)
        # Kernels of the block's last owner may still be queued.
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
            # A device that cannot measure time reports 0: use the host's time of all copies together.
            if not whole:
                whole = runtime.seconds_between(called, runtime.moment(None))
                assert whole is not None
                return Rate.of(TIMES * block.numel(), [whole])
            each = [runtime.seconds_between(*pair, synchronize=True) for pair in itertools.pairwise(moments)]
        except BaseException:  # an interrupt: the copies go on, and need their memory
            runtime.keep_until(runtime.record(stream), (host, block))
            raise
    # The host has waited for the last copy, so the block returns to its stream without an event.
    return Rate.of(block.numel(), [one for one in each if one is not None])


def _block(device: torch.device, nbytes: int) -> Tensor:
    least = nbytes >> 6
    while True:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            # A nearly full device is measured less precisely, so that the training step can go on.
            if nbytes <= least:
                raise
            nbytes >>= 2


_runtime: AcceleratorRuntime | None = None
_runtime_lock = ForkSafeLock()


def accelerator_runtime() -> AcceleratorRuntime:
    """Returns the process's runtime of torch's current accelerator.

    Raises:
        OffloadError: there is no usable accelerator. The next call looks again.
    """
    global _runtime
    with _runtime_lock.lock:
        if _runtime is None:
            _runtime = AcceleratorRuntime()
        return _runtime
