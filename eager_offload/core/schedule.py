"""Scheduling: when saved storages leave and when they return.

Bookkeeping over numbers only: no streams, tensors or clocks. A storage is an opaque *key* with a size in bytes. The
callers perform the copies.

    ResidentQueue  chooses the storages that leave now: the newest bytes stay, and nothing leaves before it is final
    PrefetchOrder  chooses the storages that return next: in reverse order of packing, unless a table knows better
    Windows        limits the bytes in flight, for each direction

[Note: automatic windows]
A larger window needs more device memory, and keeps the link busier. On the simulator, a window of half a tensor makes
a step 28 % longer, one of two tensors 4.5 %, and one of four tensors 0.2 %. So ``"auto"`` is

1. an eighth of the bytes that a step could move, limited to 256 MiB or to a 64th of these bytes, whichever is larger;
2. raised to four times the fourth-largest tensor. The three largest tensors (e.g. logits and their gradients) do not
   count: backward begins with them, so they hardly move;
3. lowered to a quarter of the movable bytes, and to a sixteenth of the device's memory.

``"auto"`` is derived from the previous step, even if different kinds of steps alternate. The result applies from the
beginning of a step, except that windows grow during a first step. A forward that saves nothing movable does not count
as a step.

These windows are upper limits. Once two steps like a table were timed on the device, a step that follows the table has
smaller windows: the smallest for which nothing waits (``budget.least_windows``). If the step turns out to differ from
the table, the upper limits apply again.
"""

from __future__ import annotations

import heapq
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

#: Any object that hashes by identity, or an int.
Key: TypeAlias = Any

#: Sequence number that means "not before the context exits".
AFTER_CONTEXT = sys.maxsize


#: Bytes: the usual maximum of a window, and the size of a window before anything is known.
_LARGE_WINDOW, _FIRST_WINDOW = 256 << 20, 64 << 20
#: The number of tensors that keep a link busy.
_TENSORS = 4
#: Divisors of the movable bytes: for the usual window, for the minimum in a large step, and for the maximum.
_SMALL_PART, _LARGE_PART, _MOST_PART = 8, 64, 4
#: Divisor of the device's memory, for the maximum of a window.
_DEVICE_PART = 16
#: With a controller: how many in-flight windows of bytes may wait for a later save of their storages (otherwise one).
#: If the step is like its table, the program holds these bytes until that save anyway.
AWAITED_WINDOWS = 4
#: The rank of a use that is not expected: far from every other rank.
_UNEXPECTED = -sys.maxsize


def fourth_largest(sizes: Iterable[int]) -> int:
    """Returns the ``_TENSORS``-th largest size; 0 if there are fewer."""
    most = heapq.nlargest(_TENSORS, sizes)
    return most[-1] if len(most) == _TENSORS else 0


def auto_window(movable: int, largest: int, device_bytes: int | None = None) -> int:
    """Returns the window in bytes for steps that could move ``movable`` bytes: see [Note: automatic windows].

    Args:
        largest: the ``fourth_largest`` movable storage.
        device_bytes: memory of the device; ``None`` if unknown.
    """
    wanted = max(min(_LARGE_WINDOW, movable // _SMALL_PART), movable // _LARGE_PART, _TENSORS * largest)
    return bounded_window(wanted, movable, device_bytes)


def bounded_window(wanted: int, movable: int, device_bytes: int | None = None) -> int:
    """Returns ``wanted``, capped at a quarter of ``movable`` and at a sixteenth of the device's memory."""
    return max(min(wanted, movable // _MOST_PART, _most_of(device_bytes)), 1)


def first_window(largest: int, device_bytes: int | None = None) -> int:
    """Returns the window for a step about which nothing is known.

    Args:
        largest: the ``fourth_largest`` of the storages saved so far.
        device_bytes: as for ``auto_window``.
    """
    return max(min(max(_FIRST_WINDOW, _TENSORS * largest), _most_of(device_bytes)), 1)


def _most_of(device_bytes: int | None) -> int:
    return sys.maxsize if device_bytes is None else device_bytes // _DEVICE_PART


class Windows:
    """The windows of one device.

    Args:
        inflight: fixed size in bytes; ``None``: derived from the previous step.
        prefetch: likewise.
        device_bytes: see ``auto_window``.
    """

    def __init__(self, inflight: int | None, prefetch: int | None, device_bytes: int | None = None) -> None:
        self._given = inflight, prefetch
        self._device_bytes = device_bytes
        self._most, self._auto = 0, (0, 0)
        #: Whether the windows of a timed step are in force.
        self.are_least = False
        #: Whether a window is derived from steps, and whether a step has been seen.
        self.is_auto, self.is_known = None in self._given, False
        #: Most bytes in flight, and most bytes prefetched.
        self.inflight = self.prefetch = 0
        self._take(first_window(0, device_bytes))

    def sized(self, nbytes: Sequence[int]) -> tuple[int, int]:
        """Returns the windows for a step that could move storages of these sizes."""
        auto = auto_window(sum(nbytes), fourth_largest(nbytes), self._device_bytes)
        return self._bounded(auto, auto)

    @property
    def most_prefetch(self) -> int:
        """The most bytes prefetched, derived from the previous step without its timing."""
        return self._bounded(self._most, self._most)[1]

    def begin(self, movable: int, largest: int) -> bool:
        """Begins a step; arguments as for ``auto_window``, of the previous step. Returns whether a window changed."""
        if not movable:
            return False
        self.is_known = True
        return self._take(auto_window(movable, largest, self._device_bytes))

    def use(self, least: tuple[int, int] | None) -> bool:
        """Applies the ``least`` windows of a timed table, or (``None``) the upper limits again.

        Returns whether a window changed.
        """
        self.are_least = least is not None
        return self._force(*(least or (self._most, self._most)))

    def grow(self, largest: int) -> bool:
        """Grows the windows of a first step; ``largest`` as in ``first_window``. Returns whether a window changed."""
        return self._take(max(first_window(largest, self._device_bytes), self._most))

    def _take(self, most: int) -> bool:
        self._most = most
        return not self.are_least and self._force(most, most)

    def _force(self, inflight: int, prefetch: int) -> bool:
        if (inflight, prefetch) == self._auto:
            return False
        self._auto = inflight, prefetch
        self.inflight, self.prefetch = self._bounded(inflight, prefetch)
        return self.is_auto

    def _bounded(self, inflight: int, prefetch: int) -> tuple[int, int]:
        given = self._given
        return inflight if given[0] is None else given[0], prefetch if given[1] is None else given[1]


class _Waiting:
    """A queued storage: its size, the bytes that count against the limit, and its latest pack's sequence number."""

    __slots__ = ("nbytes", "packed_at", "weight")
    nbytes: int
    weight: int
    packed_at: int


class ResidentQueue:
    """The saved storages of one thread that have not left yet, oldest first. It keeps the newest ``limit`` bytes.

    [Note: final bytes]
    An operator may save a tensor first and fill it afterwards, without a version bump (``F.rrelu`` saves its noise). A
    tensor is final once the thread's autograd sequence number has advanced past the operator that saved it (its node
    exists), or when the context exits. Nothing leaves before it is final.

    [Note: the last save]
    A copy serves the saves that were made before it started, but no later save: [Note: sharing] in ``eager/saves.py``.
    If the storage is saved again, an early start frees nothing: the program holds the storage until it saves it again.
    So a storage stays at least until another storage is saved. If a table shows that it is saved again even later, it
    stays until its last save.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        #: For the thread's current step: bytes of the movable storages, and the ``fourth_largest`` of them.
        self.movable = self.largest = 0
        self._most: list[int] = []  # a heap of the largest of them
        #: Nothing is due at sequence numbers up to this one, so callers need not call ``due`` there.
        self.final_after = AFTER_CONTEXT
        # OrderedDict: to find its first entry, a `dict` walks over all entries that were deleted before it.
        self._waiting: OrderedDict[Key, _Waiting] = OrderedDict()
        self._exempt: dict[Key, _Waiting] = {}  # storages that stay in any case
        #: Storages that are saved again later, and the number of their last save.
        self.awaited: dict[Key, int] = {}
        #: Storages that leave as soon as they are final; an ordered set.
        self.urgent: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting or key in self._exempt

    def push(
        self,
        key: Key,
        nbytes: int,
        packed_at: int,
        *,
        urgent: bool = False,
        weight: int | None = None,
        last_save: int | None = None,
        is_new: bool = True,
        rests: bool = False,
    ) -> None:
        """Queues a storage.

        Args:
            packed_at: the thread's autograd sequence number, or ``AFTER_CONTEXT``.
            urgent: whether the storage leaves as soon as it is final, however new it is.
            weight: the bytes that count against ``limit``; by default ``nbytes``.
            last_save: the number of the save that it waits for.
            is_new: whether to count the storage in this step's ``movable`` and ``largest``.
            rests: whether the storage is exempt: it stays and occupies no room in the queue.
        """
        if is_new:
            self.movable += nbytes
            most = self._most
            if len(most) < _TENSORS:
                heapq.heappush(most, nbytes)
            elif nbytes > most[0]:
                heapq.heapreplace(most, nbytes)
            if len(most) == _TENSORS and most[0] > self.largest:
                self.largest = most[0]
        waiting = _Waiting()
        waiting.nbytes, waiting.weight, waiting.packed_at = nbytes, nbytes if weight is None else weight, packed_at
        if rests:
            waiting.weight, self._exempt[key] = 0, waiting
            return
        self._waiting[key] = waiting
        self.nbytes += waiting.weight
        if urgent:
            self.urgent[key] = None
        if last_save is not None:
            self.awaited[key] = last_save
        elif packed_at < self.final_after:
            self.final_after = packed_at

    def begin_step(self) -> None:
        self.movable = self.largest = 0
        self._most = []

    def postpone(self, key: Key, packed_at: int) -> None:
        """Notes that the storage was saved again, by an operator that may still fill it."""
        waiting = self._waiting.get(key) or self._exempt[key]
        waiting.packed_at = max(packed_at, waiting.packed_at)

    def on_resave(self, key: Key, number: int) -> None:
        """Notes that the storage was saved again, as save ``number``: it may leave if that is the last save."""
        if self.awaited.get(key, number + 1) <= number:
            del self.awaited[key]
            self.final_after = 0

    def stop_awaiting(self) -> None:
        """Stops waiting for later saves, because the step no longer matches its table."""
        self.awaited.clear()
        self.final_after = 0

    def requeue_exempt(self) -> None:
        """Requeues the exempt storages, as the newest."""
        for key, waiting in self._exempt.items():
            waiting.weight = waiting.nbytes
            self.nbytes += waiting.weight
            self._waiting[key] = waiting
        self._exempt = {}
        self.final_after = 0

    @property
    def awaiting_bytes(self) -> int:
        return sum(self._waiting[key].nbytes for key in self.awaited)

    def discard(self, key: Key) -> int:
        """Removes a storage, if it is queued; returns its bytes."""
        waiting = self._waiting.pop(key, None) or self._exempt.pop(key, None)
        if waiting is None:
            return 0
        self.awaited.pop(key, None)
        self.urgent.pop(key, None)
        self.nbytes -= waiting.weight
        return waiting.nbytes

    def due(self, sequence: int | None, *, without: Key | None = None) -> Key | None:
        """Returns the next storage to copy out, oldest first, or ``None``. The caller removes it with ``discard``.

        Args:
            sequence: the thread's autograd sequence number; ``None`` when the context exits and every operator has run.
            without: the storage that was due before, which is removed first.
        """
        if without is not None:
            self.nbytes -= self._waiting.pop(without).weight
            self.awaited.pop(without, None)
            self.urgent.pop(without, None)
        for keys in (self.urgent, self._waiting if self.nbytes > self.limit else ()):
            final_after = AFTER_CONTEXT
            for key in keys:
                packed_at = self._waiting[key].packed_at
                if sequence is None or (sequence > packed_at and key not in self.awaited):
                    return key
                if packed_at < final_after and key not in self.awaited:
                    final_after = packed_at
            if keys is self._waiting:
                self.final_after = final_after
        return None


class Rate:
    """The average rate of one direction's latest timed transfers, without the slowest quarter.

    First copies may be slow, e.g. because their memory had to be allocated.
    """

    __slots__ = ("_last", "_value", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._last = deque[tuple[float, int]](maxlen=16)
        self._value: float | None = None

    def add(self, nbytes: int, seconds: float | None) -> float:
        """Adds a finished transfer; ``seconds`` is ``None`` or 0 if it was not timed. Returns ``seconds`` if given,
        otherwise an estimate by the rate of the other transfers; 0 if there is none."""
        self.nbytes += nbytes
        if not seconds:
            rate = self.value
            return 0.0 if rate is None else nbytes / rate
        self._last.append((seconds, nbytes))
        self._value = None
        return seconds

    @property
    def value(self) -> float | None:
        """Bytes per second; ``None`` before the first timed transfer."""
        if self._value is None and self._last:
            quick = sorted(self._last, key=lambda one: one[0] / max(one[1], 1))[: max(len(self._last) * 3 // 4, 1)]
            self._value = sum(nbytes for _, nbytes in quick) / sum(seconds for seconds, _ in quick)
        return self._value


class Stored(Protocol):
    """A storage whose bytes may return, as ``PrefetchOrder`` sees it."""

    #: Whether its last handle has died.
    is_gone: bool


class Use:
    """One save of a storage, linked in the expected order of unpacking."""

    __slots__ = ("following", "nbytes", "rank", "storage", "unpacked_in", "unpacks")
    storage: Stored
    nbytes: int
    #: The use expected next, or ``None``; and a rank, which is highest for the first expected use and falls by 1 per
    #: use.
    following: Use | None
    rank: int
    #: The number of unpacks, and the backward of the latest one: with ``retain_graph`` there may be several.
    unpacks: int
    unpacked_in: int | None


@dataclass(slots=True, eq=False)
class StepUses:
    """The uses of one step, by number of save; expected in reverse order of packing, until ``arrange`` is called."""

    by_number: list[Use | None] = field(default_factory=list)
    #: The number of uses: not every save has a handle.
    count: int = 0
    #: The use that backward is expected to unpack first, and (once it has begun) next.
    first: Use | None = None
    expected: Use | None = None
    is_unpacked: bool = False

    def add(self, number: int, storage: Stored, nbytes: int) -> Use:
        """Adds save ``number``, the latest."""
        use, uses = Use(), self.by_number
        use.storage, use.nbytes, use.unpacks, use.unpacked_in = storage, nbytes, 0, None
        use.following = following = self.first
        use.rank = 1 if following is None else following.rank + 1
        self.first = use
        self.count += 1
        while len(uses) < number:
            uses.append(None)
        uses.append(use)
        return use

    def arrange(self, numbers: Iterable[int]) -> None:
        """Sets the expected order; saves that are not in ``numbers`` are not expected."""
        for use in self.by_number:
            if use is not None:
                use.following, use.rank = None, _UNEXPECTED
        count = len(self.by_number)
        arranged = [use for number in numbers if number < count and (use := self.by_number[number]) is not None]
        self.first, self.expected, self.is_unpacked = arranged[0] if arranged else None, None, False
        for rank, (use, following) in enumerate(zip(reversed(arranged), [None, *reversed(arranged)], strict=False), 1):
            use.following, use.rank = following, rank


class Prefetch:
    """The storages to bring back after an unpack, in order of need, and the storages to drop."""

    __slots__ = ("bring", "drop")
    bring: list[Any]
    drop: list[Any]


class Promised:
    """A promised storage: its uses, and its size when it was first promised (the sizes of its uses may differ)."""

    __slots__ = ("nbytes", "uses")
    nbytes: int
    uses: set[Use]


class PrefetchOrder:
    """Looks ahead along the expected order of unpacking, up to a limit in bytes.

    Every save is a *use* of a storage. The uses ahead whose storages have at most ``limit`` bytes together are
    *promised*: their storages are resident, or on their way back.

        packed     1  2  3  4  5  6  7  8  9          unpacked: 9, 8, and now 7
                         ^  [-----]  ^
                       next promised now

    1. A storage that several uses share counts once, and stays as long as one of its uses is promised. A storage
       larger than the limit may be promised alone, as it may leave alone: otherwise every large storage would stop the
       look-ahead, and come late. With a limit of 0 nothing is promised.
    2. The look-ahead continues from its last position, so on average its cost per unpack is constant. It skips dead
       storages, and uses that this backward has unpacked. If the order is unknown, it also skips uses that were
       unpacked at least as often as the use that is unpacked now.
    3. With ``retain_graph`` a use may be unpacked again. It is then *held*: it stays promised unless a use ahead needs
       the room. The most recently held use is dropped first.
    4. The order is a hint. If backward unpacks a use that was not promised, the caller brings it back at once, and the
       look-ahead restarts from there. Overdue promises are dropped when their room is needed.
    5. If backward's order is unpredictable, dropping causes repeated reloads. So once misses (unpacks far from the
       expected use) outnumber hits by ``MISSES``, the order counts as unknown, and overdue promises are not dropped: a
       promise lasts until the unpack, and free room is filled with storages not yet unpacked. This ends when hits have
       made up for the misses, or when a new order is set.
    """

    #: The number of unpacks by which a promise may be overdue before it may be dropped (an operator unpacks its saves
    #: in any order); and the number of unpacked uses that one look-ahead skips before it stops.
    PATIENCE = 16
    #: The surplus of misses at which the order is unknown, and the largest distance from the expected use of a hit.
    MISSES, NEAR = 4, 2

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.promised_bytes = 0
        #: The number of unpacks so far.
        self.unpacks = 0
        #: The storages with a promised use.
        self.promised: dict[Stored, Promised] = {}
        self._due: OrderedDict[Use, int] = OrderedDict()  # promised uses, and the unpack by which each is expected
        self._held: OrderedDict[Use, None] = OrderedDict()  # promised uses that were unpacked already
        self._next: Use | None = None  # the position of the look-ahead
        self._lost = False  # whether the order has changed since the last unpack, so that `_next` is outdated
        self._misses = 0
        self._order_unknown = False

    def forget(self, storage: Stored) -> None:
        """Ends the promises of a dead storage."""
        promised = self.promised.pop(storage, None)
        if promised is not None:
            self.promised_bytes -= promised.nbytes
            for use in promised.uses:
                del self._due[use]
                self._held.pop(use, None)

    def arrange(self, uses: StepUses, numbers: Iterable[int]) -> None:
        uses.arrange(numbers)
        self._lost = True
        self._misses, self._order_unknown = 0, False

    def on_unpack(self, uses: StepUses, use: Use, backward: int, *, again: bool = False) -> Prefetch:
        """Looks ahead from ``use``, which is unpacked now; returns the storages to bring back and to drop.

        Args:
            uses: the uses of the step to which ``use`` belongs.
            backward: the number of the backward that unpacks it.
            again: whether ``use`` may be unpacked again, so that it is held if there is room.
        """
        self.unpacks += 1
        found, following = Prefetch(), use.following
        found.bring, found.drop = [], []
        if following is not None and following.storage.is_gone:
            use.following = following = _living(following)  # so that the dead ones are skipped only once
        if uses.first is not None:  # else the table does not expect any use
            expected = uses.expected if uses.is_unpacked else uses.first
            if self._misses or use is not expected:
                self._judge(use, _living(expected))
            uses.expected, uses.is_unpacked = following, True
        given_up = use if use in self._due else None
        if given_up is None and use is not self._next and use is not _living(self._next):
            # The other promises were made along another order. Make them due now, so that they are soon overdue.
            for other, due in self._due.items():
                self._due[other] = min(due, self.unpacks)
        if self._lost or given_up is None:
            self._next = following
            self._lost = False
        use.unpacks += 1
        use.unpacked_in = backward
        passed_over = 0
        while True:
            if given_up is not None:  # end this promise; drop the storage unless another use needs it
                del self._due[given_up]
                self._held.pop(given_up, None)
                promised = self.promised[given_up.storage]
                promised.uses.remove(given_up)
                if not promised.uses:
                    del self.promised[given_up.storage]
                    self.promised_bytes -= promised.nbytes
                    found.drop.append(given_up.storage)
                given_up = None
            if (ahead := self._next) is None:  # all further uses are promised
                break
            if ahead.storage.is_gone:
                pass
            elif ahead.unpacked_in == backward or (self._order_unknown and ahead.unpacks >= use.unpacks):
                passed_over += 1
                if passed_over == self.PATIENCE:
                    break
            elif ahead not in self._due:
                is_brought, needed = ahead.storage not in self.promised, self.promised_bytes + ahead.nbytes
                if is_brought and needed > self.limit and (self.promised_bytes or self.limit == 0):
                    given_up = next(reversed(self._held), None)
                    if given_up is None:
                        given_up, due = next(iter(self._due.items()), (None, 0))
                        if given_up is None or self._order_unknown or due + self.PATIENCE >= self.unpacks:
                            break
                    continue  # retry the same use, for which there may be room now
                self._promise(ahead, self.unpacks + len(self._due) + 1)
                if is_brought:
                    found.bring.append(ahead.storage)
            self._next = ahead.following
        has_room = self.promised_bytes + use.nbytes <= self.limit or self.limit > 0 == self.promised_bytes
        if again and use not in self._due and (use.storage in self.promised or has_room):
            self._promise(use, self.unpacks)
            self._held[use] = None
        return found

    def promise(self, use: Use) -> bool:
        """Promises ``use`` out of turn if there is room; returns whether its storage must be brought back."""
        is_brought, needed = use.storage not in self.promised, self.promised_bytes + use.nbytes
        if use in self._due or (is_brought and needed > self.limit and (self.promised_bytes or self.limit == 0)):
            return False
        self._promise(use, self.unpacks + len(self._due) + 1)
        return is_brought

    def _judge(self, use: Use, expected: Use | None) -> None:
        if expected is None or use is expected or abs(use.rank - expected.rank) <= self.NEAR:
            self._misses = max(self._misses - 1, 0)
        else:
            self._misses = min(self._misses + 1, self.MISSES)
        if self._misses in (0, self.MISSES):
            self._order_unknown = self._misses > 0

    def _promise(self, use: Use, due: int) -> None:
        self._due[use] = due
        promised = self.promised.get(use.storage)
        if promised is None:
            self.promised[use.storage] = promised = Promised()
            promised.nbytes, promised.uses = use.nbytes, set()
            self.promised_bytes += use.nbytes
        promised.uses.add(use)


def _living(use: Use | None) -> Use | None:
    """Returns the first use from ``use`` on whose storage is alive."""
    while use is not None and use.storage.is_gone:
        use = use.following
    return use
