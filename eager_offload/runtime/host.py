"""The runtime of a CPU device: a transfer stream is a thread with a queue.

The calling thread computes, so an event recorded on the compute stream has already completed, and a wait of compute is
a wait of the host. Copies run on their stream's thread while compute goes on, since system calls and large copies
release the interpreter's lock.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, Final

import psutil
import torch
from torch import Tensor

from eager_offload.errors import OffloadError, TransferError
from eager_offload.runtime.base import DeviceMemory, Direction, Event, Layout, Pollable, Runtime, Span, Stream
from eager_offload.runtime.transfer_threads import HostEvent, TransferThread
from eager_offload.tiers.base import TIMES, LinkRates, MustGrow, Rate, Slot
from eager_offload.tiers.forking import ForkSafeLock, Living, OwnThread, tell_after_fork
from eager_offload.tiers.host import trim
from eager_offload.tiers.limits import host_capacity, host_part
from eager_offload.tiers.memory import anonymous_slab, resident_bytes, resident_slab, view_of
from eager_offload.tiers.pool import Pool

_SLAB_BYTES = 16 << 20
#: Bytes of reload targets kept for the next reload: filling fresh pages takes two to three times as long.
_IDLE_BYTES = 64 << 20
_PROBE_BYTES = 64 << 20


#: The compute stream of every thread: the device's type, which `current_stream` returns by a call into C.
_COMPUTE: Final = "cpu"
_OVER: Final = HostEvent()
_OVER.complete(None)


class HostRuntime(Runtime):
    """The runtime of a CPU device.

    Streams and events are annotated ``Any``: these methods run for each saved tensor, and a ``cast`` is a call.
    """

    has_one_stream = True
    copies_hold_their_ends = True  # the thread holds them
    copies_storages = True
    holds_copies_back = True
    given_bytes = 16 << 20  # so that small steps do the same each time, however fast the thread is
    # Called several times for each saved tensor, so each is a call into C that takes positional arguments only.
    query: Callable[[Event], bool] = attrgetter("done")  # type: ignore[assignment]  # in place of a method
    may_have_failed: Callable[[Event], object] = attrgetter("error")  # type: ignore[assignment]  # likewise
    copy_seconds: Callable[[Event], float | None] = attrgetter("seconds")  # type: ignore[assignment]  # likewise
    processor_seconds: Callable[[Event], float] = attrgetter("processor_seconds")  # type: ignore[assignment]  # likewise
    ran_inline: Callable[[Event], bool] = attrgetter("inline")  # type: ignore[assignment]  # likewise
    current_stream: Callable[[torch.device], Stream] = attrgetter("type")  # type: ignore[assignment]  # likewise

    def __init__(self) -> None:
        super().__init__()
        # The threads start when they first have work.
        self._out = TransferThread("eager_offload-out")
        self._in = TransferThread("eager_offload-in")
        back = weakref.proxy(self._in)  # a proxy, because the thread holds the pool
        #: Reload targets: page-aligned for direct I/O, and reused without new page faults while reloads go on.
        self.pool = Pool(
            anonymous_slab, slab_bytes=_SLAB_BYTES, idle_bytes=_IDLE_BYTES, on_first_use=lambda: back.record()
        )
        self._in.pauses = self.pool.rest
        self._in.is_wanted = self._out.is_wanted = self._users.__bool__
        self._polled: Living[Pollable] = Living()
        # An idle thread takes queued copies: see [Note: queued copies] in engine/transfers.py.
        self._out.runs_dry = partial(_poll, self._polled, holding_copies=True)
        self._out.pauses = partial(_poll, self._polled)
        self._process = psutil.Process()
        self._rss = 0
        #: The most resident bytes seen in this step, and the process's peak before it.
        self._seen, self._most_before = 0, most_resident()
        tell_after_fork(self)

    def transfer_stream(self, device: torch.device, direction: Direction) -> Stream:
        return self._out if direction is Direction.OUT else self._in

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def attach_user(self, user: object) -> None:
        super().attach_user(user)
        for thread in (self._out, self._in):
            thread.serve(user)

    def poll_when_idle(self, pollable: Pollable) -> None:
        self._polled.add(pollable)

    def release_idle(self) -> None:
        super().release_idle()
        self.pool.release_idle()
        self._seen, self._most_before = 0, most_resident()

    def release_freed(self, setting: bool | str) -> None:
        with suppress(psutil.Error, OSError):
            trim.begin(setting, self._resident)

    def memory(self, device: torch.device) -> DeviceMemory:
        with suppress(OSError):  # no free file descriptor to read it with: return the last known value
            self._rss = self._resident()
        return DeviceMemory(self._rss)

    def step_peak(self, device: torch.device) -> int | None:
        most = most_resident()
        with suppress(psutil.Error, OSError):
            self._seen = max(self._seen, self._resident())
        return (most if most > self._most_before else self._seen) or None

    def total_memory(self, device: torch.device) -> int:
        return host_capacity()

    def free_memory(self, device: torch.device) -> int:
        return host_part()

    def memory_of(self, storage: torch.UntypedStorage) -> int:
        return resident_bytes(storage.data_ptr(), storage.nbytes())

    def host_buffer(self, nbytes: int) -> Tensor:
        return resident_slab(nbytes)

    def measure_link(self, device: torch.device) -> LinkRates:
        """Measures copies within host memory, as the host tier of a CPU makes them; see also ``DiskTier.measure``."""
        source, target = anonymous_slab(_PROBE_BYTES).fill_(1), anonymous_slab(_PROBE_BYTES)
        seconds = list[float]()
        for _ in range(TIMES + 1):
            started = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - started)
        rate = Rate.of(_PROBE_BYTES, seconds[1:])
        return LinkRates(rate, rate)

    def record(self, stream: Any) -> Event:
        return stream.record() if stream != _COMPUTE else _OVER

    def spans(self, event: Any) -> tuple[Span, ...]:
        return () if event.seconds is None else (Span("", event.began, event.began + event.seconds),)

    def wait(self, stream: Any, event: Any) -> None:
        if stream == _COMPUTE:
            if not event.done or event.error is not None:
                event.result()
        elif not event.done:
            stream.submit(event.wait)

    def synchronize(self, event: Any) -> None:
        if not event.done or event.error is not None:
            event.result()

    def copy(self, dst: Any, src: Any, stream: Any, after: Sequence[Any] = (), *, timed: bool = False) -> Event:
        pending: Sequence[HostEvent] = ()
        for event in after:  # a comprehension would be a call
            if not event.done:
                pending = (*pending, event)
        call, end, slot = (src.read, dst, src) if type(dst) is Tensor else (dst.write, src, dst)
        copied = HostEvent()  # `TransferThread.submit` inlined, to save a call for each copy
        copied.thread, copied.work = stream, partial(self._carry, call, end, slot, pending)
        stream.items.append(copied)
        if stream.sleeps:
            stream.bell.put(None)
        elif stream.thread is None:
            stream.hurry()
        return copied

    def _carry(self, *given: Any) -> None:
        carry(*given)
        if isinstance(threading.current_thread(), OwnThread):  # on a transfer thread, not within pack or unpack
            with suppress(psutil.Error, OSError):
                self._seen = max(self._seen, now := self._resident())
                trim.look(self._resident, now)

    def _resident(self) -> int:
        resident: int = self._process.memory_info().rss
        return resident

    def allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        # Blocks are page-aligned, so the address of byte `alignment_offset` is right; the bytes before it are unused.
        nbytes = layout.alignment_offset + layout.nbytes
        try:
            target = self.pool.take(nbytes, leased=True)
        except MustGrow:
            target = self.pool.lease(nbytes)
        return target[layout.alignment_offset :] if layout.alignment_offset else target

    def after_fork(self) -> None:
        self._process = psutil.Process()
        trim.after_fork()


def most_resident() -> int:
    """Returns the process's peak of resident memory in bytes; 0 if the system does not report it."""
    if sys.platform == "win32":
        return 0
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _poll(pollables: Living[Pollable], *, holding_copies: bool = False) -> bool:
    """Polls all of them, or only those with queued copies. Returns whether each could poll."""
    polled = [one.poll_from_thread() for one in pollables if not holding_copies or one.holds_copies()]
    return all(polled)


def carry(
    call: Callable[[Any], None], end: Tensor | torch.UntypedStorage, slot: Slot, after: Sequence[HostEvent] = ()
) -> None:
    """Writes or reads ``slot`` on the calling thread, after ``after`` has completed.

    Args:
        end: the other end: flat ``uint8``, or a storage whose first ``slot.nbytes`` bytes are written.

    Raises:
        OffloadError: the copy failed; a ``TransferError`` with the cause if the tier raised another exception.
    """
    for event in after:
        event.wait()
    try:
        if not (slot.writes_storages or isinstance(end, Tensor)):
            # Not `set_`, which would enlarge a storage that was made smaller since.
            end = torch.frombuffer(view_of(end.data_ptr(), slot.nbytes, end), dtype=torch.uint8)
        call(end)
    except OffloadError:
        raise
    except Exception as error:
        raise TransferError(
            f"moving {slot.nbytes} bytes to or from the {slot.tier} tier failed: {error}",
            errno=error.errno if isinstance(error, OSError) else None,
            tier=slot.tier,
            nbytes=slot.nbytes,
        ) from error


_runtime: HostRuntime | None = None
_runtime_lock = ForkSafeLock()


def host_runtime() -> HostRuntime:
    global _runtime
    with _runtime_lock.lock:
        if _runtime is None:
            _runtime = HostRuntime()
        return _runtime
