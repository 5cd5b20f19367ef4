"""The contract between the library and a device: streams, events, copies, memory.

A *runtime* moves bytes and orders copies against compute. It knows nothing of autograd, nor which bytes move when. The
runtimes are ``accelerator`` (``torch.accelerator``), ``host`` (a CPU device) and, in tests, a simulated device with
virtual streams and clocks.

Every call that orders or touches memory goes through ``Runtime``, so that tests can log the calls and check their
happens-before order: see ``tests/simulation``.
"""

from __future__ import annotations

import abc
import enum
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from eager_offload.errors import OffloadError
from eager_offload.tiers.base import LinkRates, Slot
from eager_offload.tiers.forking import FinalizerRecord, Living
from eager_offload.tiers.pool import SlabSizes

#: Streams and events are opaque, and compared by identity; each runtime has its own types.
Stream: TypeAlias = Hashable
Event: TypeAlias = Hashable
#: A point in time: seconds of the host's clock (a ``float``) if the host knows it at once, otherwise opaque.
Moment: TypeAlias = Hashable


class Direction(enum.Enum):
    """The direction of a copy; each direction has a transfer stream."""

    OUT = "out"
    IN = "in"


class Layout(NamedTuple):
    """The size and alignment of a reload target.

    Kernels choose their order of summation by alignment. A reloaded tensor must therefore have the address of the saved
    tensor modulo 64, or gradients may differ in the last bit.
    """

    nbytes: int
    #: The address of the first byte, modulo ``ALIGNMENT``.
    alignment_offset: int = 0


class Span(NamedTuple):
    """The time in which a copy, or one stage of it, ran."""

    #: The tier, for a stage between host memory and a tier (e.g. a disk); otherwise empty.
    name: str
    began: Moment
    ended: Moment


#: The part of a device's free memory that a process can allocate.
_FREE_PART = 0.9
#: Bytes: the widest vector register that torch's CPU kernels use.
ALIGNMENT = 64


class Pollable(Protocol):
    def holds_copies(self) -> bool:
        """Returns whether copies out are queued that no stream has yet."""

    def poll_from_thread(self) -> bool:
        """Handles completed transfers without waiting for a lock; ``False`` if the caller has to try again."""


class _Register(FinalizerRecord[object]):
    """The transfers of one owner, with the objects to hold until each is over."""

    __slots__ = ("pending",)
    #: By transfer; each has an ``event``.
    pending: Mapping[Any, object]


class DeviceMemory(NamedTuple):
    """The memory of a device that this process uses, in bytes."""

    used: int
    """Live tensors on an accelerator; resident memory on a CPU."""
    peak: int | None = None
    """The largest use so far, if the device records it. A program may reset it."""


class Runtime(abc.ABC):
    """One kind of device. All methods are thread-safe."""

    #: Whether an enqueued copy holds both its ends until it is over. Otherwise the caller holds them, and releases them
    #: at the next call of the library that finds the copy's event completed.
    copies_hold_their_ends: ClassVar[bool] = False
    #: Whether callers should queue most copies, because an enqueued copy cannot be cancelled.
    holds_copies_back: ClassVar[bool] = False
    #: Bytes of copies out that a transfer stream may always have: too few for queueing to save memory.
    given_bytes: ClassVar[int] = 0
    #: Whether ``copy`` also takes a storage, and moves all of its bytes, which saves making a tensor.
    copies_storages: ClassVar[bool] = False
    #: Whether streams of the device can be captured into graphs, so that callers must check ``is_capturing``.
    can_capture: ClassVar[bool] = False
    #: Whether the host computes, on a single stream: work has completed when its call returns.
    has_one_stream: ClassVar[bool] = False

    def __init__(self) -> None:
        self._kept: deque[tuple[Event, object]] = deque()
        self._users: Living[object] = Living()
        self._registers: set[_Register] = set()
        self._ownerless: deque[FinalizerRecord[object]] = deque()
        self.links: dict[torch.device, LinkRates] = {}
        #: How many slabs of host memory should be pinned and could not be.
        self.pageable_slabs = 0

    @abc.abstractmethod
    def current_stream(self, device: torch.device) -> Stream:
        """Returns the stream on which the calling thread enqueues compute on ``device`` now."""

    def is_capturing(self, device: torch.device | None = None) -> bool:
        """Returns whether work that the calling thread enqueues on ``device`` is captured in a graph.

        During a capture nothing may be copied, and no event recorded, queried or waited for: the driver would
        invalidate the capture, or add the call to the graph.

        Args:
            device: by default the current device.
        """
        return False

    @abc.abstractmethod
    def transfer_stream(self, device: torch.device, direction: Direction) -> Stream:
        """Returns the process's transfer stream of ``device`` in ``direction``, created at the first call."""

    @abc.abstractmethod
    def record(self, stream: Stream) -> Event:
        """Returns a new event that completes after all work enqueued on ``stream`` so far."""

    @abc.abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Makes ``stream`` wait for ``event``, without blocking the host unless the host computes (a CPU device).

        Raises:
            OffloadError: on a CPU device, the error of the awaited transfer.
        """

    def has_host_wait(self, event: Event) -> bool:
        return self.has_one_stream

    @abc.abstractmethod
    def query(self, event: Event) -> bool:
        """Returns whether ``event`` has completed, successfully or not; never blocks."""

    @abc.abstractmethod
    def synchronize(self, event: Event) -> None:
        """Makes the host wait for ``event``.

        Raises:
            OffloadError: the error of the awaited transfer.
        """

    def may_have_failed(self, event: Event) -> object:
        """Returns whether ``synchronize`` with a completed event may raise; true if that is unknown."""
        return True

    def processor_seconds(self, event: Event) -> float:
        """Returns the CPU time of the completed copy before ``event``, in seconds."""
        return 0.0

    def ran_inline(self, event: Event) -> bool:
        """Returns whether the copy before ``event`` blocked its caller, because no thread could be started."""
        return False

    def tells_time(self, device: torch.device) -> bool:
        """Returns whether ``seconds_between`` can measure ``device``.

        Probes the device: the host waits for an idle stream, and for no transfer. Callers should cache the answer.
        """
        return True

    #: Seconds of the clock that times steps: compute's clock if the host can read it at once, otherwise the host's.
    #: A call into C, since each save and each unpack makes one.
    timestamp: Callable[[], float] = staticmethod(time.perf_counter)

    def moment(self, stream: Stream | None) -> Moment:
        """Returns the moment at which ``stream`` reaches its next work; for ``None``, now on the host. Never waits."""
        return time.perf_counter()

    def seconds_between(self, before: Moment, after: Moment, *, synchronize: bool = False) -> float | None:
        """Returns the seconds between two moments of one device, or of the host.

        Args:
            synchronize: makes the host wait until both have passed; otherwise this never blocks.

        Returns:
            ``None`` if a moment has not passed, or never will (it lies in a captured graph). 0 if the device cannot
            measure time, or belongs to the parent of a forked process.
        """
        assert isinstance(before, float)
        assert isinstance(after, float)
        return after - before

    def spans(self, event: Event) -> tuple[Span, ...]:
        """Returns the times of the copy before ``event``, the slowest stage first; empty if it was not timed."""
        return ()

    def copy_seconds(self, event: Event) -> float | None:
        """Returns the seconds of the slowest stage of a completed copy; ``None`` if it was not timed."""
        spans = self.spans(event)
        return self.seconds_between(spans[0].began, spans[0].ended) if spans else None

    def keep_until(self, event: Event, keepalive: object) -> None:
        """Holds ``keepalive`` until ``event`` has completed, if no owner can. Takes no lock and never waits."""
        self._kept.append((event, keepalive))

    def outlive(self, owner: object, pending: Mapping[Any, object]) -> None:
        """Once ``owner`` has died, holds the values of ``pending``, each until its transfer's ``event`` completes."""
        register = _Register(owner, self._ownerless.append)
        register.pending = pending
        self._registers.add(register)

    def poll(self) -> None:
        """Releases keepalives whose events have completed. Cheap: called at every pack and unpack."""
        while self._ownerless:
            self._take_over()
        while self._kept:
            try:
                event, keepalive = self._kept.popleft()
            except IndexError:  # another thread took it: offloaders share a runtime without a lock
                return
            if not self.query(event):
                self._kept.appendleft((event, keepalive))
                return

    def _take_over(self) -> None:
        try:
            register = self._ownerless.popleft()
        except IndexError:  # another thread took it
            return
        assert isinstance(register, _Register)
        for transfer, keepalive in register.pending.items():
            self.keep_until(transfer.event, keepalive)
        self._registers.discard(register)

    def synchronize_kept(self) -> None:
        """Waits for the events of all keepalives, and releases these."""
        while self._ownerless:
            self._take_over()
        for event, _ in list(self._kept):
            with suppress(OffloadError):  # the owner, to which the error belongs, is dead
                self.synchronize(event)
        self.poll()

    def release_idle(self) -> None:
        """Returns idle memory of reloads to the system, at the beginning of a forward."""
        self.poll()

    def poll_when_idle(self, pollable: Pollable) -> None:  # noqa: B027  # most runtimes have no thread that could
        """Has ``pollable``, held weakly, poll whenever the transfer threads become idle.

        Does nothing on runtimes without transfer threads: there the next call of the library polls.
        """

    def enter(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def attach_user(self, user: object) -> None:
        """Registers ``user``, for whom threads and buffers are kept ready."""
        self._users.add(user)

    def detach_user(self, user: object) -> None:
        """Removes ``user``, whose memory was returned; the last one closes the runtime."""
        self._users.discard(user)
        if not self._users:
            self.close()

    def close(self) -> None:
        self.poll()

    @abc.abstractmethod
    def copy(
        self,
        dst: Tensor | Slot,
        src: Tensor | Slot,
        stream: Stream,
        after: Sequence[Event] = (),
        *,
        timed: bool = False,
    ) -> Event:
        """Enqueues a copy on ``stream``: from a tensor to a slot (offload), or from a slot to a tensor (reload).

        Args:
            dst, src: a slot and a flat ``uint8`` tensor on the device, of equal size. The caller keeps both alive until
                the copy is over, unless ``copies_hold_their_ends``.
            after: events that ``stream`` waits for first.
            timed: whether ``spans`` must have the copy's times. Timing costs time; otherwise only samples are timed.

        Returns:
            A new event, recorded after the copy, which carries the copy's error.
        """

    @abc.abstractmethod
    def allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        """Returns a new flat ``uint8`` tensor of ``layout.nbytes`` on ``device``, allocated on ``stream``.

        Its contents are undefined. Its address is ``layout.alignment_offset`` modulo ``ALIGNMENT``.
        """

    def memory_of(self, storage: torch.UntypedStorage) -> int:
        """Returns the bytes of memory that ``storage`` occupies now, which may be less than its size."""
        return storage.nbytes()

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """Returns the memory of ``device`` in use; ``None`` if unknown. Never waits."""
        return None

    def step_peak(self, device: torch.device) -> int | None:
        """Returns the most bytes in use during the last step; ``None`` if unknown."""
        memory = self.memory(device)
        return None if memory is None else memory.peak

    def total_memory(self, device: torch.device) -> int | None:
        """Returns the bytes of memory of ``device``; ``None`` if unknown. Takes milliseconds."""
        return None

    def free_memory(self, device: torch.device) -> int:
        """Returns the bytes that this process could still allocate on ``device``; 0 if unknown. Takes milliseconds."""
        return 0

    def available_memory(self, device: torch.device, used: int) -> int:
        """Returns ``used`` plus the bytes of ``device`` that this process could still have.

        Only a part of the free memory counts, because allocators round and fragment.
        """
        return used + int(self.free_memory(device) * _FREE_PART)

    @abc.abstractmethod
    def host_buffer(self, nbytes: int) -> Tensor:
        """Returns a slab of host memory: a flat ``uint8`` CPU tensor, page-aligned, pinned if this device profits.

        The memory returns to the system when the tensor's storage dies.
        """

    def slab_sizes(self) -> SlabSizes | None:
        """Returns the slab sizes that waste no memory, for a pool; ``None`` if any size is fine."""
        return None

    @abc.abstractmethod
    def measure_link(self, device: torch.device) -> LinkRates:
        """Measures the link between ``device`` and host memory; the host waits.

        Callers use ``measuring.link_of``, which measures once.
        """
