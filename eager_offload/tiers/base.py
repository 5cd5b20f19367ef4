"""Tiers, their slots, and the free ranges of slabs from which slots are cut."""

from __future__ import annotations

import abc
import itertools
import statistics
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from eager_offload.tiers.forking import FinalizerRecord, ForkSafeLock

if TYPE_CHECKING:  # commands that only print rates do not import torch
    from torch import Tensor


@dataclass(slots=True, unsafe_hash=True)
class Fence:
    """A use of a slot's bytes, which may be overwritten once ``event`` has completed. Immutable by convention.

    Keeps the runtime that can query the event, since a slot may outlive all other records of the transfer. Not frozen,
    because every copy makes a fence and a frozen dataclass takes three times as long to make.
    """

    runtime: _Judge
    event: Hashable

    def passed(self) -> bool:
        """Returns whether the event has completed, without waiting."""
        return self.runtime.query(self.event)


class _Judge(Protocol):
    def query(self, event: Hashable) -> bool: ...


class SlotRecord(FinalizerRecord["Slot"]):
    """The data of a slot that outlive the slot."""

    __slots__ = ("fences", "nbytes", "range")
    #: Uses that have to complete before the bytes may be overwritten. A new slot inherits the fences of its range, and
    #: each transfer adds one. The fence of a write is removed when the host knows that the write has completed.
    fences: tuple[Fence, ...]
    nbytes: int
    #: The slot's range, in tiers that cut slots from slabs.
    range: Range[Any]


class Slot(abc.ABC):
    """Room for ``nbytes`` bytes in a tier.

    [Note: slots give themselves back]
    The saved storage and the transfers of a slot's bytes hold references to the slot. When the last one goes, the
    slot's record (range and fences) is appended to a ``deque`` of the tier: see [Note: finalizers] in ``forking.py``.
    The tier frees the range at the next call.
    """

    tier: ClassVar[str]
    #: Whether ``write`` also takes a storage, of which it copies the first ``nbytes`` bytes.
    writes_storages: ClassVar[bool] = False
    __slots__ = ("__weakref__", "nbytes", "record")

    def __init__(self, nbytes: int, fences: tuple[Fence, ...], record: SlotRecord | None = None) -> None:
        self.nbytes = nbytes
        self.record = SlotRecord(self) if record is None else record
        self.record.nbytes, self.record.fences = nbytes, fences

    @abc.abstractmethod
    def write(self, source: Tensor) -> None:
        """Copies ``source``, a flat ``uint8`` CPU tensor of ``nbytes`` elements, into the slot, and waits for the copy.

        Raises:
            TransferError: the write failed; the slot's content is undefined.
        """

    @abc.abstractmethod
    def read(self, target: Tensor) -> None:
        """Copies the slot into ``target``, a flat ``uint8`` CPU tensor of ``nbytes`` elements, and waits for the copy.

        Raises:
            TransferError: the read failed.
            CorruptionError: the bytes have changed (only with ``verify=True``).
        """

    @abc.abstractmethod
    def memory(self) -> memoryview:
        """Returns a view of the slot's bytes that keeps the slot alive. Bytes on disk are loaded when they are read.

        Raises:
            MemoryError: the system refused to map the bytes.
        """


class Shortage(NamedTuple):
    """Why a tier has no room."""

    #: A clause that states the binding limit, with numbers.
    reason: str
    #: A clause in the imperative that tells the user how to get more room.
    remedy: str


class MustGrow(Exception):
    """A tier has to allocate memory or extend its file before it has room; ``args`` has the sizes."""


class NoRoomError(MemoryError):
    """A request exceeds a budget or the reserve.

    Args:
        lacked: the bytes that ``HostBound`` refused; otherwise 0.
    """

    def __init__(self, shortage: Shortage, lacked: int = 0) -> None:
        super().__init__(shortage.reason)
        self.shortage = shortage
        self.lacked = lacked


class Tier(abc.ABC):
    """A store of saved bytes with a budget in bytes."""

    name: ClassVar[str]

    @abc.abstractmethod
    def reserve(self, nbytes: int) -> Slot | None:
        """Returns a slot of ``nbytes`` bytes, or ``None`` if the budget or the machine has no room. Thread-safe.

        Reserve before copying: after that, the copy can only fail by an I/O error.
        """

    #: Like ``reserve``, for callers that hold a lock: raises ``MustGrow`` instead of taking memory or disk space from
    #: the system, which is slow.
    at_hand: Callable[[int], Slot | None]

    @property
    @abc.abstractmethod
    def shortage(self) -> Shortage:
        """The reason why the last ``reserve`` found no room."""

    def take(self, nbytes: int) -> Shortage | None:
        """Takes memory until the tier has ``nbytes`` bytes in all. Returns why the tier has less, or ``None``."""
        raise NotImplementedError(f"the {self.name} tier takes nothing before it is needed")

    @abc.abstractmethod
    def warn(self, said: set[str]) -> None:
        """Warns of assumptions and excesses of ``reserve``, except those already in ``said``; see ``warn_once``."""

    def release_idle(self) -> None:  # noqa: B027  # most tiers keep no idle memory
        """Frees idle memory if the machine is short of memory. Called when a forward begins."""

    @property
    @abc.abstractmethod
    def used_bytes(self) -> int:
        """Bytes in living slots."""

    @property
    @abc.abstractmethod
    def held_bytes(self) -> int:
        """Bytes taken from the system: slots, rounding and idle room."""

    @property
    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """Most bytes in slots at one time since ``restart_peak``."""

    @property
    def written_bytes(self) -> int:
        """Bytes written to disk so far."""
        return 0

    @abc.abstractmethod
    def restart_peak(self) -> None:
        """Restarts the peak from the bytes that are in slots now."""

    @abc.abstractmethod
    def close(self) -> None:
        """Returns everything to the system. Living slots keep working until they die. Idempotent."""


# -- free ranges ------------------------------------------------------------------------------------------------------

_serial = itertools.count()


class Slab:
    """Bytes from the system, from which ranges are cut."""

    __slots__ = ("nbytes", "serial")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.serial = next(_serial)


S = TypeVar("S", bound=Slab)


@dataclass(slots=True, eq=False)
class Range(Generic[S]):
    """Consecutive bytes of a slab with their pending fences, owned by a slot or by ``Ranges``."""

    slab: S
    start: int
    nbytes: int
    fences: tuple[Fence, ...] = ()


_place = attrgetter("slab.serial", "start")


class Ranges(Generic[S]):
    """The free ranges of slabs. Not thread-safe: guarded by the lock of the tier or pool.

    [Note: choosing a range]
    A training step requests the sizes of the previous step. So returned ranges are kept by size, with the fences of
    uses that may be pending. A request takes

    1. the last returned range of exactly this size: ``back[nbytes][-1]``;
    2. else a part of the smallest unused range that is large enough (the first of several);
    3. else the same, after returned ranges without pending fences were joined with their neighbours;
    4. else a part of the smallest range with pending fences. The new slot then waits for these fences alone. If all
       ranges were joined first, one reload at the end of a long free range would delay every offload into the range;
    5. else the same, after all free ranges were joined.

    ``fit`` reduces cases 2 to 5 to case 1. The caller pops the range after it has stored the record of the new slot:
    otherwise an interrupt between the two could lose the fences.
    """

    __slots__ = ("_free", "back")

    def __init__(self) -> None:
        #: Ranges not joined yet, by size. The owner appends returned and new ranges.
        self.back: defaultdict[int, list[Range[S]]] = defaultdict(list)
        #: Ranges without fences, sorted by size, serial number of the slab, and start.
        self._free: list[tuple[int, int, int, Range[S]]] = []

    def fit(self, nbytes: int) -> list[Range[S]]:
        """Returns ``back[nbytes]`` after appending a range of that size; an empty list if none is large enough."""
        for joined in ("nothing", "what is at rest", "all"):
            if joined != "nothing":
                self.join(used=joined == "all")
            same, at = self.back[nbytes], bisect_left(self._free, (nbytes,))
            if at < len(self._free):
                same.append(self._free.pop(at)[3])
            elif joined == "nothing":
                continue
            elif sizes := [size for size, others in self.back.items() if size >= nbytes and others]:
                same.append(self.back[min(sizes)].pop())
            else:
                continue
            one = same[-1]
            if one.nbytes > nbytes:
                rest = Range(one.slab, one.start + nbytes, one.nbytes - nbytes, one.fences)
                if one.fences:
                    self.back[rest.nbytes].append(rest)
                else:
                    insort(self._free, (rest.nbytes, rest.slab.serial, rest.start, rest))
                one.nbytes = nbytes
            return same
        return []

    def free_before(self, stop: int) -> int:
        """Returns the free bytes that end at ``stop`` of the only slab. Call after ``fit``, which has joined ranges."""
        free = [one for same in self.back.values() for one in same] + [one for *_, one in self._free]
        return max([one.nbytes for one in free if one.start + one.nbytes == stop], default=0)

    def withdraw(self, slab: S) -> bool:
        """Removes ``slab`` if all of it is free and without fences, and returns whether it was. Call after ``join``."""
        at = bisect_left(self._free, (slab.nbytes, slab.serial))
        if at == len(self._free) or self._free[at][:2] != (slab.nbytes, slab.serial):
            return False
        del self._free[at]
        return True

    def join(self, *, used: bool = False) -> None:
        """Joins returned ranges with their free neighbours; with ``used``, also ranges with pending fences."""
        left, found = defaultdict[int, list[Range[S]]](list), list[Range[S]]()
        for nbytes, same in self.back.items():
            for at, one in enumerate(same):
                if one.fences and not used:
                    one.fences = pending(one.fences)
                    if one.fences:  # later ranges are used longer, and each query calls the driver
                        left[nbytes] = same[at:]
                        break
                found.append(one)
        if not found:
            return
        joined = list[Range[S]]()
        for one in sorted([*found, *[free for *_, free in self._free]], key=_place):
            before = joined[-1] if joined else None
            if before is not None and before.slab is one.slab and before.start + before.nbytes == one.start:
                before.nbytes += one.nbytes
                before.fences += one.fences
            else:
                assert before is None or before.slab is not one.slab or before.start + before.nbytes < one.start
                joined.append(one)
        for one in joined:
            if one.fences:
                one.fences = pending(one.fences)
                if one.fences:
                    left[one.nbytes].append(one)
        self._free = sorted([(one.nbytes, one.slab.serial, one.start, one) for one in joined if not one.fences])
        self.back = left


def pending(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """Returns the distinct fences that have not passed."""
    return tuple([fence for fence in dict.fromkeys(fences) if not fence.passed()])


class Cutter(abc.ABC):
    """Cuts slots from slabs under a lock, and takes the ranges of dead slots back."""

    #: Whether an exception has interrupted a change, so that ranges may be lost.
    _is_crashed: bool
    #: Bytes requested by living slots.
    _used: int

    def __init__(self) -> None:
        #: Guards all counts and ranges.
        self._lock = ForkSafeLock()
        #: Held while room is taken from the system: see [Note: growth] in ``pool.py``. Acquired before ``_lock``.
        self._growth = ForkSafeLock()

    @abc.abstractmethod
    def _poll(self) -> None:
        """Does what ``poll`` does, with the lock held."""

    def poll(self) -> None:
        """Collects dead slots, and frees idle room beyond the allowance."""
        if not self._lock.is_held():  # reentrant calls leave this to a later one; see [Note: reentry] in forking.py
            with self._lock.lock, self._crashing():
                self._poll()

    @property
    def used_bytes(self) -> int:
        """Bytes requested by living slots and leases."""
        self.poll()
        return self._used

    @contextmanager
    def _crashing(self) -> Iterator[None]:
        """Marks this object as crashed after an exception that is no lack of room."""
        try:
            yield
        except (MustGrow, NoRoomError):
            raise
        except BaseException:
            self._is_crashed = True
            raise


# -- rates of links ----------------------------------------------------------------------------------------------------

#: Number of measurements of a rate, after a warm-up that loads kernels and touches memory.
TIMES = 5


class Rate(NamedTuple):
    """A rate per second from several short measurements, since a single one may be 50 times too slow."""

    median: float
    spread: float = 1.0
    """The ninth decile of the measurements divided by the first."""

    @classmethod
    def of(cls, amount: float, seconds: Sequence[float]) -> Rate:
        """Returns the rate from measurements of ``amount``, which took ``seconds``."""
        rates = [amount / max(one, 1e-9) for one in seconds]
        if len(rates) == 1:
            return cls(rates[0])
        deciles = statistics.quantiles(rates, n=10, method="inclusive")
        return cls(statistics.median(rates), deciles[-1] / deciles[0])


class LinkRates(NamedTuple):
    """Rates between a device and a tier in bytes per second, measured one direction at a time."""

    out: Rate
    back: Rate
