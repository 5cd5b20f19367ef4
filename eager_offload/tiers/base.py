"""What a tier is: bytes that rest somewhere, named by slots that give themselves back, and the ranges of slabs that
slots are cut from."""

from __future__ import annotations

import abc
import itertools
import statistics
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from eager_offload.tiers.forking import FinalizerRecord

if TYPE_CHECKING:  # a command that prints rates does without torch
    from torch import Tensor


@dataclass(slots=True, unsafe_hash=True)
class Fence:
    """The last use of some bytes: they may be written again once ``event`` has completed. It never changes.

    The event and the runtime that can judge it travel together, since a slot may outlive every other
    trace of the transfer. There is one for each copy, and what is frozen takes three times as long to make.
    """

    runtime: _Judge
    event: Hashable

    def passed(self) -> bool:
        """Returns whether the event has completed; never blocks."""
        return self.runtime.query(self.event)


class _Judge(Protocol):
    """The part of a runtime that a fence needs."""

    def query(self, event: Hashable) -> bool: ...


class SlotRecord(FinalizerRecord["Slot"]):
    """What a slot leaves behind."""

    __slots__ = ("fences", "nbytes", "range")
    fences: tuple[Fence, ...]
    nbytes: int
    #: Where it was, for a tier that cuts its slots from slabs.
    range: Range[Any]


class Slot(abc.ABC):
    """Room for ``nbytes`` bytes in a tier.

    [Note: slots give themselves back]
    A slot is owned by references alone: the saved storage whose bytes it holds, and the transfer that is writing
    or reading it. When the last one goes, its record, which knows range and fences, lands in a ``deque`` of the tier;
    see [Note: finalizers] in ``forking.py``. The tier takes the range back when the next slot is reserved.
    """

    tier: ClassVar[str]
    #: Whether ``write`` takes a storage as well, whose first bytes are meant.
    writes_storages: ClassVar[bool] = False
    __slots__ = ("__weakref__", "nbytes", "record")

    def __init__(self, nbytes: int, fences: tuple[Fence, ...], record: SlotRecord | None = None) -> None:
        self.nbytes = nbytes
        self.record = SlotRecord(self) if record is None else record
        self.record.nbytes, self.record.fences = nbytes, fences

    @property
    def fences(self) -> tuple[Fence, ...]:
        """Uses of these bytes that have to be over before they are written again.

        A new slot carries those of the range's last owner; each transfer that touches the slot adds its own. That of a
        write goes once the host knows that it is over.
        """
        return self.record.fences

    @fences.setter
    def fences(self, fences: tuple[Fence, ...]) -> None:
        self.record.fences = fences

    @abc.abstractmethod
    def write(self, source: Tensor) -> None:
        """Copies ``source`` into the slot and returns when it is there.

        Args:
            source: a flat ``uint8`` CPU tensor of ``nbytes`` elements, at any address.

        Raises:
            TransferError: the bytes did not arrive; the slot's content is undefined.
        """

    @abc.abstractmethod
    def read(self, target: Tensor) -> None:
        """Copies the slot into ``target`` and returns when it is there.

        Args:
            target: a flat ``uint8`` CPU tensor of ``nbytes`` elements, at any address.

        Raises:
            TransferError: the bytes did not come back.
            CorruptionError: they came back changed (only with ``verify=True``).
        """

    @abc.abstractmethod
    def memory(self) -> memoryview:
        """Returns the slot's bytes as memory that keeps the slot. It takes none of its own until it is read.

        Raises:
            MemoryError: the system has no room for it among the process's addresses.
        """


class Shortage(NamedTuple):
    """Why a tier has no room."""

    #: A clause that says what binds, with numbers.
    reason: str
    #: What the user can do about it: a clause in the imperative.
    remedy: str


class MustGrow(Exception):
    """There is room once a tier has taken more memory from the system, or has made its file longer: by its ``args``."""


class Tier(abc.ABC):
    """A place where saved bytes rest, with a bound in bytes."""

    name: ClassVar[str]

    @abc.abstractmethod
    def reserve(self, nbytes: int) -> Slot | None:
        """Returns room for ``nbytes`` bytes, or ``None`` where the budget or the machine has none.

        Reserving comes before moving: once it has succeeded, only an I/O error can stop the bytes. Thread-safe.
        """

    #: Does the same for a caller with a lock that others wait for: it takes nothing from the system, and raises
    #: ``MustGrow`` where ``reserve`` would do that.
    at_hand: Callable[[int], Slot | None]

    @property
    @abc.abstractmethod
    def shortage(self) -> Shortage:
        """Why ``reserve`` last found no room."""

    def take(self, nbytes: int) -> Shortage | None:
        """Takes from the system now what slots of ``nbytes`` bytes in all need; those that there are count.

        Returns:
            Why it has less; ``None`` where it has as much.
        """
        raise NotImplementedError(f"the {self.name} tier takes nothing before it is needed")

    @abc.abstractmethod
    def warn(self, said: set[str]) -> None:
        """Warns of what ``reserve`` has taken, unless ``said`` holds that; see ``warn_once``."""

    def release_idle(self) -> None:  # noqa: B027  # most tiers keep nothing idle that another program could use
        """Gives idle memory back if the machine is short of it, as a forward begins. Cheap where nothing is to do."""

    @property
    @abc.abstractmethod
    def used_bytes(self) -> int:
        """Bytes in slots that are alive."""

    @property
    @abc.abstractmethod
    def held_bytes(self) -> int:
        """Bytes that the tier holds from the system: slots, rounding and idle room."""

    @property
    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """Most bytes in slots at one time since ``restart_peak``."""

    @property
    def written_bytes(self) -> int:
        """Bytes that were written to disks so far; 0 for memory, which does not wear."""
        return 0

    @abc.abstractmethod
    def restart_peak(self) -> None:
        """Starts measuring the peak anew, from what is in slots now."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives everything back to the system. Slots that are still alive keep working until they go. Idempotent."""


# -- which bytes are free ---------------------------------------------------------------------------------------------

_serial = itertools.count()


class Slab:
    """Bytes from the system, of which ranges are cut."""

    __slots__ = ("nbytes", "serial")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.serial = next(_serial)


S = TypeVar("S", bound=Slab)


@dataclass(slots=True, eq=False)
class Range(Generic[S]):
    """Bytes of a slab, with the earlier uses of them that may not be over yet; a slot has it, or ``Ranges``."""

    slab: S
    start: int
    nbytes: int
    fences: tuple[Fence, ...] = ()


#: By slab and start, in C.
_place = attrgetter("slab.serial", "start")


class Ranges(Generic[S]):
    """The free ranges of slabs. Not thread-safe: the lock of its owner guards it.

    [Note: choosing a range]
    A training step asks for the sizes of the step before. So a range that comes back is kept as it is, by size, with
    the uses of it that may not be over. A request takes

    1. the range of exactly its size that came back last: ``back[nbytes][-1]``;
    2. else a part of the smallest free range that holds it and that nothing uses (the first of several);
    3. else the same, once ranges that came back and whose uses are over have been joined with their neighbours;
    4. else a part of the smallest range that is still in use: it waits for the uses of that range alone. If all were
       joined first, one reload at the end of a long free range would hold up every offload into it;
    5. else the same, once all that is free has been joined, whether it is in use or not.

    ``fit`` makes 2 to 5 a case of 1. The owner pops the range once its new owner is written down: until then an
    interrupt could lose the uses of it.
    """

    __slots__ = ("_free", "back")

    def __init__(self) -> None:
        #: What came back and was not joined yet, by size. The owner appends what comes back, and what is new.
        self.back: defaultdict[int, list[Range[S]]] = defaultdict(list)
        #: What nothing uses, in order: size, serial number of the slab, start.
        self._free: list[tuple[int, int, int, Range[S]]] = []

    def fit(self, nbytes: int) -> list[Range[S]]:
        """Returns ``back[nbytes]``, where a range that was found for it is the last; empty if none is large enough."""
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
        """Returns the bytes that are free right before ``stop`` of the only slab, where ``fit`` has found no range."""
        free = [one for same in self.back.values() for one in same] + [one for *_, one in self._free]
        return max([one.nbytes for one in free if one.start + one.nbytes == stop], default=0)

    def withdraw(self, slab: S) -> bool:
        """Takes out a slab that is free as a whole, if nothing uses it; after a ``join``."""
        at = bisect_left(self._free, (slab.nbytes, slab.serial))
        if at == len(self._free) or self._free[at][:2] != (slab.nbytes, slab.serial):
            return False
        del self._free[at]
        return True

    def join(self, *, used: bool = False) -> None:
        """Joins what came back with its free neighbours, if its uses are over; or whether they are or not."""
        left, found = defaultdict[int, list[Range[S]]](list), list[Range[S]]()
        for nbytes, same in self.back.items():
            for at, one in enumerate(same):
                if one.fences and not used:
                    one.fences = pending(one.fences)
                    if one.fences:  # later ones are in use for longer, and each question is a call of the driver
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
                assert before is None or before.slab is not one.slab or before.start + before.nbytes < one.start, (
                    "twice"
                )
                joined.append(one)
        for one in joined:
            if one.fences:
                one.fences = pending(one.fences)
                if one.fences:
                    left[one.nbytes].append(one)
        self._free = sorted([(one.nbytes, one.slab.serial, one.start, one) for one in joined if not one.fences])
        self.back = left


def pending(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """Returns the fences that have not passed, each once."""
    return tuple([fence for fence in dict.fromkeys(fences) if not fence.passed()])


# -- how fast bytes travel ---------------------------------------------------------------------------------------------

#: How often a rate is measured, after a first time that is not counted: it loads kernels and touches memory.
TIMES = 5


class Rate(NamedTuple):
    """A rate by the second, as several short measurements find it: a single one may be 50 times too slow."""

    median: float
    spread: float = 1.0
    """The ninth decile of the measurements divided by the first."""

    @classmethod
    def of(cls, amount: float, seconds: Sequence[float]) -> Rate:
        """Returns the rate of work of ``amount`` that took ``seconds``, one number for each time."""
        rates = [amount / max(one, 1e-9) for one in seconds]
        if len(rates) == 1:
            return cls(rates[0])
        deciles = statistics.quantiles(rates, n=10, method="inclusive")
        return cls(statistics.median(rates), deciles[-1] / deciles[0])


class LinkRates(NamedTuple):
    """Bytes a second between a device and a tier, each way by itself."""

    out: Rate
    back: Rate
