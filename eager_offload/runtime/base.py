"""The contract between the library and a device: streams, events, copies, memory.

A *runtime* knows how to move bytes and how to order that against compute; it knows nothing of autograd, of what is
worth moving, or when. There are two: ``accelerator`` (``torch.accelerator``) and ``host`` (the device is the CPU).
Tests have a third one, of virtual streams on a virtual clock.

Every call that orders or touches memory goes through this class, so that a log of it can be written, in the form that
the happens-before checker reads: see ``tests/simulation``.
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

#: Streams and events are opaque and named by identity; each runtime has its own types.
Stream: TypeAlias = Hashable
Event: TypeAlias = Hashable
#: A point in time: a ``float``, the seconds of the host's clock, where the host knows it at once; else opaque.
Moment: TypeAlias = Hashable


class Direction(enum.Enum):
    """Which way bytes travel; each has a transfer stream of its own."""

    OUT = "out"
    IN = "in"


class Layout(NamedTuple):
    """What a reload target must look like.

    Kernels choose their order of summation by alignment, so a reloaded tensor has to sit at the same address modulo 64
    as the one that was saved, or its gradients differ in the last bit.
    """

    nbytes: int
    #: The address of the first byte, modulo ``ALIGNMENT``.
    alignment_offset: int = 0


class Span(NamedTuple):
    """When a copy ran, or a part of its way."""

    #: The tier, of the part that lies between host memory and a disk, say; else empty.
    name: str
    began: Moment
    ended: Moment


#: Of the free memory of a device, the part that a process can have.
_FREE_PART = 0.9
#: Bytes; what ``Layout.alignment_offset`` is counted in. The widest vector register that torch's CPU kernels use.
ALIGNMENT = 64


class Pollable(Protocol):
    """Takes up what is over."""

    def holds_copies(self) -> bool:
        """Returns whether there are copies out that no stream was given yet."""

    def poll_from_thread(self) -> bool:
        """Does so on the calling thread, without waiting for a lock; ``False`` where it has to be asked again."""


class _Register(FinalizerRecord[object]):
    """The transfers of one owner: what has to stay until each is over."""

    __slots__ = ("pending",)
    #: By transfer, each of which has its ``event``.
    pending: Mapping[Any, object]


class DeviceMemory(NamedTuple):
    """How much of a device's memory this process uses; bytes."""

    used: int
    """On an accelerator what live tensors take, on a CPU all that is resident."""
    peak: int | None = None
    """The most that was used so far, where the device remembers it; a program may have that begin anew."""


class Runtime(abc.ABC):
    """One kind of device. All methods may be called from any thread."""

    #: Whether a copy that is enqueued holds both of its ends itself until it is over. Then nothing else has to, and
    #: they go when it ends without a call of the library; elsewhere at the next call that queries its event.
    copies_hold_their_ends: ClassVar[bool] = False
    #: Whether a copy that was enqueued cannot be taken back, so that the caller keeps most of them to itself.
    holds_copies_back: ClassVar[bool] = False
    #: Bytes of copies out that a transfer stream may be given at any time: so little that nothing is to be had of it.
    given_bytes: ClassVar[int] = 0
    #: Whether ``copy`` takes a storage as well, all of whose bytes leave: no tensor over them has to be made for it.
    copies_storages: ClassVar[bool] = False
    #: Whether streams of such a device may be captured into graphs, so that ``is_capturing`` has to be asked.
    can_capture: ClassVar[bool] = False
    #: Whether compute has one stream only, which the host carries out itself: none other is ever current, and what was
    #: enqueued is over.
    has_one_stream: ClassVar[bool] = False

    def __init__(self) -> None:
        self._kept: deque[tuple[Event, object]] = deque()
        self._users: Living[object] = Living()
        self._registers: set[_Register] = set()
        self._ownerless: deque[FinalizerRecord[object]] = deque()
        #: By device, the links that ``machine.link_of`` has had measured.
        self.links: dict[torch.device, LinkRates] = {}
        #: How many slabs of host memory should be pinned and could not be.
        self.pageable_slabs = 0

    # -- streams and events ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def current_stream(self, device: torch.device) -> Stream:
        """The stream that compute on ``device`` is enqueued on, for the calling thread, at this moment."""

    def is_capturing(self, device: torch.device | None = None) -> bool:
        """Whether what the calling thread enqueues on ``device`` goes into a graph that is being captured, and waits.

        Then nothing may be copied, and no event recorded, queried or waited for: to the driver each of these is an
        error that invalidates the capture, or makes a part of the graph of what is none.

        Args:
            device: that which is selected, where it is left out.
        """
        return False

    @abc.abstractmethod
    def transfer_stream(self, device: torch.device, direction: Direction) -> Stream:
        """The process's one transfer stream of ``device`` in ``direction``; created at the first call."""

    @abc.abstractmethod
    def record(self, stream: Stream) -> Event:
        """A new event that completes when all that is enqueued on ``stream`` so far has."""

    @abc.abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Makes ``stream`` wait for ``event``; the host goes on, except where compute *is* the host (a CPU device).

        Raises:
            OffloadError: on a CPU device, what made the awaited transfer fail.
        """

    def has_host_wait(self, event: Event) -> bool:
        """Whether ``wait`` for ``event`` makes the host wait too."""
        return self.has_one_stream

    @abc.abstractmethod
    def query(self, event: Event) -> bool:
        """Whether ``event`` has completed, by success or by failure; never blocks."""

    @abc.abstractmethod
    def synchronize(self, event: Event) -> None:
        """Makes the host wait for ``event``.

        Raises:
            OffloadError: what made the awaited transfer fail.
        """

    def may_have_failed(self, event: Event) -> object:
        """Whether ``synchronize`` with an event that is over may raise; true where that is not known."""
        return True

    def processor_seconds(self, event: Event) -> float:
        """What the copy that ``event`` stands behind, and that is over, took of the processor."""
        return 0.0

    def ran_inline(self, event: Event) -> bool:
        """Whether the copy that ``event`` stands behind kept the caller waiting, since no thread could be started."""
        return False

    # -- time -----------------------------------------------------------------------------------------------------

    def tells_time(self, device: torch.device) -> bool:
        """Whether ``seconds_between`` knows how long ``device`` takes.

        Probes it, for which the host waits for a stream that has nothing to do: the answer is to be remembered. No
        transfer is waited for.
        """
        return True

    #: Seconds of the clock that steps are timed by: of compute, where the host knows at once how far that has come, and
    #: else of the host. A call into C: each save and each ask takes one.
    timestamp: Callable[[], float] = staticmethod(time.perf_counter)

    def moment(self, stream: Stream | None) -> Moment:
        """When ``stream`` comes to what is enqueued next, on the device's own clock; for ``None``, now on the host's.

        Nothing waits.
        """
        return time.perf_counter()

    def seconds_between(self, before: Moment, after: Moment, *, synchronize: bool = False) -> float | None:
        """Seconds between two moments of one device, or of the host.

        Args:
            synchronize: makes the host wait until both have come; else this never blocks.

        Returns:
            ``None`` where one of them has not come yet, or never will: a place in a graph that was captured. 0 where
            the device does not tell the time, or is that of a parent process.
        """
        assert isinstance(before, float)
        assert isinstance(after, float)
        return after - before

    def spans(self, event: Event) -> tuple[Span, ...]:
        """When the copy ran that ``event`` stands behind, the slowest part of its way first; empty if not timed."""
        return ()

    def copy_seconds(self, event: Event) -> float | None:
        """Seconds of the slowest part of a copy that is over; ``None`` where it was not timed."""
        spans = self.spans(event)
        return self.seconds_between(spans[0].began, spans[0].ended) if spans else None

    # -- in between -----------------------------------------------------------------------------------------------

    def keep_until(self, event: Event, keepalive: object) -> None:
        """Holds ``keepalive`` until ``event`` has completed, for a transfer whose owner is gone.

        Takes no lock and waits for nothing.
        """
        self._kept.append((event, keepalive))

    def outlive(self, owner: object, pending: Mapping[Any, object]) -> None:
        """Once ``owner`` has gone, holds what ``pending`` has then, each until its transfer's ``event`` is over."""
        register = _Register(owner, self._ownerless.append)
        register.pending = pending
        self._registers.add(register)

    def poll(self) -> None:
        """Lets go of what is kept until events that have completed. Cheap; called at every pack and unpack."""
        while self._ownerless:
            self._take_over()
        while self._kept:
            try:
                event, keepalive = self._kept.popleft()
            except IndexError:  # another thread was faster: two objects share a runtime and no lock
                return
            if not self.query(event):
                self._kept.appendleft((event, keepalive))
                return

    def _take_over(self) -> None:
        try:
            register = self._ownerless.popleft()
        except IndexError:  # another thread was faster
            return
        assert isinstance(register, _Register)
        for transfer, keepalive in register.pending.items():
            self.keep_until(transfer.event, keepalive)
        self._registers.discard(register)

    def synchronize_kept(self) -> None:
        """Waits for the events that something is kept until, and lets go of it."""
        while self._ownerless:
            self._take_over()
        for event, _ in list(self._kept):
            with suppress(OffloadError):  # its owner, which would have raised it, is gone
                self.synchronize(event)
        self.poll()

    def release_idle(self) -> None:
        """A forward begins, in which nothing comes back: gives back to the system what only reloads need."""
        self.poll()

    def poll_when_idle(self, pollable: Pollable) -> None:  # noqa: B027  # most runtimes have no thread that could
        """Has ``pollable`` asked, when transfers have come to a pause, to take up what is over; it is held weakly.

        Only where transfers have threads of their own: elsewhere it is the next call of the library that does so.
        """

    def enter(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes ``stream`` the current one of the calling thread, for compute that belongs to it."""
        return nullcontext()

    def attach_user(self, user: object) -> None:
        """Counts ``user`` among those for whom threads and buffers are kept ready."""
        self._users.add(user)

    def detach_user(self, user: object) -> None:
        """``user`` has given its memory back. With the last one goes what was kept ready."""
        self._users.discard(user)
        if not self._users:
            self.close()

    def close(self) -> None:
        self.poll()

    # -- bytes ----------------------------------------------------------------------------------------------------

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
        """Enqueues a copy of bytes on ``stream``: a tensor into a slot (offload) or a slot into a tensor (reload).

        Args:
            dst, src: one slot and one flat ``uint8`` tensor on the device, of equal size in bytes. The caller keeps
                both alive until the copy is over, unless ``copies_hold_their_ends``.
            after: what ``stream`` waits for first.
            timed: whether ``spans`` has to tell when the copy runs. To time all takes time: else it tells of some.

        Returns:
            A new event, recorded behind the copy; it carries what makes the copy fail.
        """

    @abc.abstractmethod
    def allocate(self, layout: Layout, device: torch.device, stream: Stream) -> Tensor:
        """A flat ``uint8`` tensor of ``layout.nbytes`` on ``device``, owned by ``stream`` as allocators mean it.

        Its content is undefined. Its address is ``layout.alignment_offset`` modulo ``ALIGNMENT``.
        """

    def memory_of(self, storage: torch.UntypedStorage) -> int:
        """Bytes of memory that ``storage`` takes now, where it is on a device on which that may be less than it has."""
        return storage.nbytes()

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """How much of ``device`` is used now; ``None`` where that is not known. Waits for nothing."""
        return None

    def step_peak(self, device: torch.device) -> int | None:
        """Returns the most bytes that were in use in the last step, as far as the device tells."""
        memory = self.memory(device)
        return None if memory is None else memory.peak

    def total_memory(self, device: torch.device) -> int | None:
        """Returns the bytes of memory that ``device`` has; ``None`` where that is not known. Takes milliseconds."""
        return None

    def free_memory(self, device: torch.device) -> int:
        """Bytes that this process could take of ``device`` besides; 0 where that is not known. Takes milliseconds."""
        return 0

    def available_memory(self, device: torch.device, used: int) -> int:
        """Returns the bytes of ``device`` that this process can have beside ``used``, which it has, and with these.

        Allocators round and fragment, so that it is most of what is free.
        """
        return used + int(self.free_memory(device) * _FREE_PART)

    @abc.abstractmethod
    def host_buffer(self, nbytes: int) -> Tensor:
        """A slab of host memory: a flat ``uint8`` CPU tensor, page-aligned, pinned where that helps this device.

        The memory returns to the system when the tensor's storage goes.
        """

    def slab_sizes(self) -> SlabSizes | None:
        """How large a pool's slabs have to be so that nothing is wasted; ``None`` where any size will do."""
        return None

    @abc.abstractmethod
    def measure_link(self, device: torch.device) -> LinkRates:
        """Measures the link between ``device`` and host memory, for which the host waits.

        Ask ``machine.link_of``, which measures once.
        """
