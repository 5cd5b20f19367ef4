"""The runtime of an accelerator, written against ``torch.accelerator``: CUDA first, XPU and others by the same calls.

Nothing in pack or unpack makes the host wait here. Order exists only between streams, by events; memory belongs to the
stream that it was allocated on; and whatever stream and device the caller had selected is selected again afterwards.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eager_offload.errors import OffloadError
from eager_offload.runtime.accelerator_api import AcceleratorApi, TorchAcceleratorApi
from eager_offload.runtime.base import ALIGNMENT, Direction, Event, Layout, Runtime, Stream
from eager_offload.tiers.base import Slot
from eager_offload.tiers.memory import PAGE, anonymous_slab

__all__ = ["AcceleratorEvent", "AcceleratorRuntime", "AcceleratorStream", "accelerator_runtime"]

#: Bytes of one copy when bandwidth is measured, and how many are timed after one that is not.
_PROBE_BYTES = 64 << 20
_PROBE_COPIES = 4


# -- streams and events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AcceleratorStream:
    """A stream by its identity: torch makes a new Python object at each question for the current one."""

    #: With its index.
    device: torch.device
    stream_id: int
    torch_stream: torch.Stream = field(compare=False, repr=False)

    @staticmethod
    def of(stream: torch.Stream) -> AcceleratorStream:
        """Names a stream of torch's."""
        return AcceleratorStream(stream.device, stream.stream_id, stream)

    def __str__(self) -> str:
        return f"{self.device}/{self.stream_id}"


class AcceleratorEvent:
    """A point on a stream, recorded once; equal to itself only.

    [Note: an event that was never recorded]
    To CUDA such an event is complete: waiting for it is a silent no-op and querying it says yes, so a missing record
    would pass for a finished copy. The event therefore knows where it was recorded, and every use asserts it.
    """

    __slots__ = ("__weakref__", "_done", "_event", "recorded_on")

    def __init__(self, event: torch.Event) -> None:
        self._event = event
        self._done = False
        #: The stream it was recorded on (which names its device too); ``None`` before.
        self.recorded_on: AcceleratorStream | None = None

    def record(self, stream: AcceleratorStream) -> None:
        """Takes the place behind all that is enqueued on ``stream``."""
        assert self.recorded_on is None, "an event stands for one point of one stream: record a new one"
        stream.torch_stream.record_event(self._event)
        self.recorded_on = stream

    def hold_back(self, stream: AcceleratorStream) -> None:
        """Makes what is enqueued on ``stream`` from here on come after this event."""
        assert self.recorded_on is not None, "waiting for an event that was never recorded orders nothing"
        # A stream is in order by itself, and what is enqueued now comes after what is already over.
        if not self._done and stream != self.recorded_on:
            stream.torch_stream.wait_event(self._event)

    def query(self) -> bool:
        """Whether it is over; never blocks."""
        assert self.recorded_on is not None, "an event that was never recorded says that it is complete"
        if not self._done:
            self._done = self._event.query()
        return self._done

    def synchronize(self) -> None:
        """Makes the host wait until it is over."""
        assert self.recorded_on is not None, "waiting for an event that was never recorded orders nothing"
        if not self._done:
            self._event.synchronize()
            self._done = True


@dataclass(frozen=True, slots=True)
class _TransferStreams:
    """The two transfer streams of a device."""

    outward: AcceleratorStream
    inward: AcceleratorStream

    def towards(self, direction: Direction) -> AcceleratorStream:
        return self.outward if direction is Direction.OUT else self.inward


# -- the runtime ----------------------------------------------------------------------------------------------------


class AcceleratorRuntime(Runtime):
    """Streams, events, copies and memory of the accelerator that torch names.

    Take the process's one instance from ``accelerator_runtime()``: transfer streams are process-wide.

    Args:
        api: where the calls go; ``torch.accelerator`` unless a test says otherwise.

    Raises:
        OffloadError: there is no usable accelerator.
    """

    def __init__(self, api: AcceleratorApi | None = None) -> None:
        super().__init__()
        self._api: AcceleratorApi = TorchAcceleratorApi() if api is None else api
        accelerator = self._api.current_accelerator()
        if accelerator is None:
            raise OffloadError(
                "torch finds no usable accelerator (torch.accelerator.current_accelerator(check_available=True) is "
                "None); tensors on the CPU are offloaded by the host runtime"
            )
        #: What kind of device this runtime serves, such as ``"cuda"``.
        self.device_type: str = accelerator.type
        self._lock = threading.Lock()
        self._transfer_streams: dict[torch.device, _TransferStreams] = {}
        self._measuring = threading.Lock()
        self._bandwidth: dict[tuple[torch.device, Direction], float] = {}
        self._warned_of_pageable = False

    def current_stream(self, device: torch.device) -> AcceleratorStream:
        return AcceleratorStream.of(self._api.current_stream(self._indexed(device)))

    def transfer_stream(self, device: torch.device, direction: Direction) -> AcceleratorStream:
        """The process's one transfer stream of ``device`` in ``direction``; created at the first call.

        Raises:
            OffloadError: this kind of device has no streams of its own making, or is not the accelerator.
        """
        device = self._indexed(device)
        streams = self._transfer_streams.get(device)
        if streams is None:
            with self._lock:
                streams = self._transfer_streams.get(device)
                if streams is None:
                    streams = self._transfer_streams[device] = self._create_streams(device)
        return streams.towards(direction)

    @contextmanager
    def enter(self, stream: Stream) -> Iterator[None]:
        """Selects ``stream`` and its device for the calling thread inside; whatever happens, the caller's come back.

        [Note: entering a stream]
        ``with torch_stream:`` keeps what it has to restore *on the Python object*: entered twice, by nesting or by two
        threads (autograd has a thread for each device), it raises after the switch, or restores the other thread's
        stream. Transfer streams are shared by all threads, so what to restore is kept here. The device is selected
        with ``device_index``, since its way back does not create a context on a device that has none.
        """
        assert isinstance(stream, AcceleratorStream)
        with self._api.device_index(stream.device.index):
            before = self._api.current_stream(stream.device)
            try:
                self._api.set_stream(stream.torch_stream)
                yield
            finally:
                self._api.set_stream(before)

    def host_buffer(self, nbytes: int, *, pin_memory: bool = True) -> Tensor:
        """A slab of host memory: a flat ``uint8`` CPU tensor of ``nbytes``, page-aligned.

        Pinned memory comes from torch's cache of it, which rounds up to a power of two: ask for powers of two.

        Args:
            pin_memory: ``False`` for pageable memory. Copies between that and the device make the host wait for them.
                Where pinning fails, the memory is pageable too, and one warning says so.

        Raises:
            MemoryError: the system has no room.
        """
        with torch.inference_mode(False):
            if pin_memory:
                try:
                    return self._pinned_slab(nbytes)
                except RuntimeError as error:
                    self._warn_of_pageable(nbytes, error)
            return anonymous_slab(nbytes)

    def bandwidth(self, device: torch.device, direction: Direction) -> float:
        """Bytes a second between ``device`` and pinned host memory in ``direction``.

        The first call makes the host wait for a few copies of up to 64 MiB; later ones return what it found.
        """
        device = self._indexed(device)
        stream = self.transfer_stream(device, direction)
        with self._measuring:
            if (device, direction) not in self._bandwidth:
                self._bandwidth[device, direction] = self._measure(stream, direction)
            return self._bandwidth[device, direction]

    # -- the contract's inner half ----------------------------------------------------------------------------------

    def _record(self, stream: Stream) -> AcceleratorEvent:
        assert isinstance(stream, AcceleratorStream)
        event = AcceleratorEvent(self._api.event(stream.device, enable_timing=False))
        event.record(stream)
        return event

    def _wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(stream, AcceleratorStream)
        assert isinstance(event, AcceleratorEvent)
        event.hold_back(stream)

    def _query(self, event: Event) -> bool:
        assert isinstance(event, AcceleratorEvent)
        return event.query()

    def _synchronize(self, event: Event) -> None:
        assert isinstance(event, AcceleratorEvent)
        event.synchronize()

    def _copy(self, dst: Tensor | Slot, src: Tensor | Slot, stream: Stream, after: Sequence[Event]) -> Event:
        assert isinstance(stream, AcceleratorStream)
        assert isinstance(dst, Slot) != isinstance(src, Slot), "one end of a copy rests in a tier, the other does not"
        target, source = _bytes_of(dst), _bytes_of(src)
        assert target.numel() == source.numel(), f"{source.numel()} bytes do not fit {target.numel()}"
        on_device = source if isinstance(dst, Slot) else target
        assert self._api.device_of(on_device) == stream.device, (
            "a copy runs on a transfer stream of the tensor's device"
        )
        for event in after:
            self._wait(stream, event)
        with torch.no_grad(), self.enter(stream):
            self._api.copy(target, source)
        return self._record(stream)

    def _allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        assert isinstance(stream, AcceleratorStream)
        assert self._indexed(device) == stream.device
        assert 0 <= layout.phase < ALIGNMENT
        with torch.inference_mode(False), torch.no_grad(), self.enter(stream):
            # The allocators of today hand out multiples of 256 or more, so the second attempt is for those of tomorrow.
            block = self._api.empty(layout.nbytes + layout.phase, stream.device)
            start = layout.phase
            if block.data_ptr() % ALIGNMENT != 0:
                block = self._api.empty(layout.nbytes + ALIGNMENT - 1, stream.device)
                start = (layout.phase - block.data_ptr()) % ALIGNMENT
            return block if block.numel() == layout.nbytes else block[start : start + layout.nbytes]

    # -- inside -----------------------------------------------------------------------------------------------------

    def _indexed(self, device: torch.device) -> torch.device:
        if device.type != self.device_type:
            raise OffloadError(f"{device} is not the accelerator of this process, which is {self.device_type!r}")
        if _index(device) is not None:
            return device
        return torch.device(device.type, self._api.current_device_index())

    def _create_streams(self, device: torch.device) -> _TransferStreams:
        # Both at once: CUDA hands streams out of a ring, so two that are taken one after the other are surely two.
        try:
            outward, inward = self._api.stream(device), self._api.stream(device)
        except RuntimeError as error:
            raise OffloadError(
                f"torch cannot create a stream on {device}, so nothing could be moved while it computes; "
                "run without Offload there"
            ) from error
        return _TransferStreams(AcceleratorStream.of(outward), AcceleratorStream.of(inward))

    def _pinned_slab(self, nbytes: int) -> Tensor:
        # Pinned memory starts at a page as it is. Room to spare would double a slab whose size is a power of two.
        slab = self._api.empty_pinned(nbytes)
        if slab.data_ptr() % PAGE == 0:
            return slab
        slab = self._api.empty_pinned(nbytes + PAGE - 1)
        start = -slab.data_ptr() % PAGE
        return slab[start : start + nbytes]

    def _warn_of_pageable(self, nbytes: int, error: RuntimeError) -> None:
        with self._lock:
            if self._warned_of_pageable:
                return
            self._warned_of_pageable = True
        reason = str(error).partition("\n")[0]
        warnings.warn(
            f"{nbytes} bytes of host memory could not be pinned ({reason}); offloading goes on with pageable memory, "
            "and the host waits for each copy. A higher limit on locked memory (ulimit -l) or a smaller host_budget "
            "may help; pin_memory=False says that it is meant so",
            RuntimeWarning,
            stacklevel=3,
        )

    def _measure(self, stream: AcceleratorStream, direction: Direction) -> float:
        compute = self.current_stream(stream.device)
        with torch.inference_mode(False), torch.no_grad():
            block = self._probe_block(stream.device)
            host = self.host_buffer(block.numel())
            target, source = (host, block) if direction is Direction.OUT else (block, host)
            self._record(compute).hold_back(stream)
            with self.enter(stream):
                self._api.copy(target, source)
                self._record(stream).synchronize()
                seconds = self._time_copies(stream, target, source)
        # The host has waited for the last copy, so that the block can go back to its own stream without an event.
        return _PROBE_COPIES * block.numel() / seconds

    def _probe_block(self, device: torch.device) -> Tensor:
        nbytes = _PROBE_BYTES
        while True:
            try:
                return self._api.empty(nbytes, device)
            except torch.OutOfMemoryError:
                # A device that is nearly full is measured less precisely, and the training step goes on.
                if nbytes <= _PROBE_BYTES >> 6:
                    raise
                nbytes >>= 2

    def _time_copies(self, stream: AcceleratorStream, target: Tensor, source: Tensor) -> float:
        """Seconds that the probe's copies take, by the device's clock where it can tell, else by the host's."""
        on_device = self._can_time(stream)
        start, stop = (self._api.event(stream.device, enable_timing=on_device) for _ in range(2))
        began = time.perf_counter()
        stream.torch_stream.record_event(start)
        for _ in range(_PROBE_COPIES):
            self._api.copy(target, source)
        stream.torch_stream.record_event(stop)
        stop.synchronize()
        by_host = time.perf_counter() - began
        return start.elapsed_time(stop) / 1e3 if on_device else by_host

    def _can_time(self, stream: AcceleratorStream) -> bool:
        """Whether events of this device can tell the time between them, found out by asking two."""
        try:
            first, second = (self._api.event(stream.device, enable_timing=True) for _ in range(2))
            stream.torch_stream.record_event(first)
            stream.torch_stream.record_event(second)
            second.synchronize()
            first.elapsed_time(second)
        except RuntimeError:
            return False
        return True


def _bytes_of(end: Tensor | Slot) -> Tensor:
    """One end of a copy as a flat tensor of bytes."""
    if isinstance(end, Slot):
        tensor = getattr(end, "tensor", None)
        if not isinstance(tensor, Tensor):
            raise OffloadError(
                f"an accelerator copies to and from host memory, and a slot of the {end.tier!r} tier is not in it; "
                'use tier="host" (the disk tier serves tensors on the CPU)'
            )
        end = tensor
    assert end.dtype is torch.uint8, "copies move bytes"
    assert end.is_contiguous(), "copies move flat bytes"
    return end


def _index(device: torch.device) -> int | None:
    # torch's stubs leave the None out.
    return device.index


# -- the one of this process ----------------------------------------------------------------------------------------

_runtime: AcceleratorRuntime | None = None
_runtime_lock = threading.Lock()


def accelerator_runtime() -> AcceleratorRuntime:
    """The runtime of the accelerator that torch names; one for the process.

    Raises:
        OffloadError: there is no usable accelerator. The next call looks again.
    """
    global _runtime
    with _runtime_lock:
        if _runtime is None:
            _runtime = AcceleratorRuntime()
        return _runtime
