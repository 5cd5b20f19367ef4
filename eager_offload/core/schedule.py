"""When bytes leave and when they come back: small machines over numbers.

No stream, no tensor and no clock appears here. A saved storage is a *key*, whatever names it; what it weighs is its
bytes. The callers carry out what is answered.

    ResidentQueue  which saved storages leave now: the newest bytes stay, and nothing leaves before it is final
    PrefetchOrder  what comes back next: along the reverse of packing, unless something better is known
    Windows        how many bytes may be on their way, each way

[Note: automatic windows]
A window is memory that offloading does not free, and what keeps the link busy. Of half a tensor it makes a step 28 %
longer, of two tensors 4.5 %, of four 0.2 %; so ``"auto"`` is a small part of what a step could move, and at least four
times the largest size that four of its tensors have, as long as that is no large part of it, or of the device. One or
two that are larger than all others, such as logits, and what a loss makes of them, make no window large: backward
begins with them, so they hardly move. ``"auto"`` follows the last step, literally: of steps that take turns each has
the windows that the one before it asks for. It changes where a step begins and nowhere else, but in a first step, which
is met as it comes. A forward that saves nothing that may leave is no step.

That is the most. A step that is looked up in a table of two steps that the device has timed has the windows of that:
the least that make nothing wait, see ``budget.least_windows``. Where it turns out to differ, it has the most again.
"""

from __future__ import annotations

import heapq
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

#: Anything that hashes by its identity, or an int.
Key: TypeAlias = Any

#: In place of the autograd sequence number at pack: it is not to leave before the context is left.
AFTER_CONTEXT = sys.maxsize


#: Bytes: a window is hardly ever larger, and of which size it is where nothing is known.
_LARGE_WINDOW, _FIRST_WINDOW = 256 << 20, 64 << 20
#: So many tensors keep a link busy.
_TENSORS = 4
#: The parts of what a step could move that a window is, as long as it is not large, otherwise, and at most.
_SMALL_PART, _LARGE_PART, _MOST_PART = 8, 64, 4
#: The part of a device's memory that a window is at most.
_DEVICE_PART = 16
#: So many windows of bytes may wait for their last save, of steps of which a part moves: they are the program's until
#: then, if the step is as it was.
AWAITED_WINDOWS = 4
#: The rank of a use that is not expected at all: far from that of any other.
_UNEXPECTED = -sys.maxsize


def fourth_largest(sizes: Iterable[int]) -> int:
    """Returns the largest size that ``_TENSORS`` of ``sizes`` have or exceed; 0 where there are fewer."""
    most = heapq.nlargest(_TENSORS, sizes)
    return most[-1] if len(most) == _TENSORS else 0


def auto_window(movable: int, largest: int, device_bytes: int | None = None) -> int:
    """Returns the bytes of a window for steps that could move ``movable`` bytes. See [Note: automatic windows].

    Args:
        largest: ``fourth_largest`` the storages that could move.
        device_bytes: memory of the device; ``None`` where that is not known.
    """
    wanted = max(min(_LARGE_WINDOW, movable // _SMALL_PART), movable // _LARGE_PART, _TENSORS * largest)
    return bounded_window(wanted, movable, device_bytes)


def bounded_window(wanted: int, movable: int, device_bytes: int | None = None) -> int:
    """Returns a window of ``wanted`` bytes, or fewer where those are too many; other arguments as there."""
    return max(min(wanted, movable // _MOST_PART, _most_of(device_bytes)), 1)


def first_window(largest: int, device_bytes: int | None = None) -> int:
    """Returns the same of a step before which nothing is known; ``largest``: of the storages that it has saved."""
    return max(min(max(_FIRST_WINDOW, _TENSORS * largest), _most_of(device_bytes)), 1)


def _most_of(device_bytes: int | None) -> int:
    return sys.maxsize if device_bytes is None else device_bytes // _DEVICE_PART


class Windows:
    """The windows of one device that are in force.

    Args:
        inflight: bytes; ``None``: as the last step says.
        prefetch: likewise.
        device_bytes: as of ``auto_window``.
    """

    def __init__(self, inflight: int | None, prefetch: int | None, device_bytes: int | None = None) -> None:
        self._given = inflight, prefetch
        self._device_bytes = device_bytes
        self._most, self._auto = 0, (0, 0)
        #: Whether those of a timed step are in force.
        self.are_least = False
        #: Whether the last step says anything about them, and whether it is known.
        self.is_auto, self.is_known = None in self._given, False
        #: Bytes on their way out at most, and bytes that are brought back early at most.
        self.inflight = self.prefetch = 0
        self._take(first_window(0, device_bytes))

    def sized(self, nbytes: Sequence[int]) -> tuple[int, int]:
        """Returns the windows of a step that could move storages of those sizes, by its bytes alone."""
        auto = auto_window(sum(nbytes), fourth_largest(nbytes), self._device_bytes)
        return self._bounded(auto, auto)

    @property
    def most_prefetch(self) -> int:
        """The bytes that are brought back early at most, by the bytes of the last step."""
        return self._bounded(self._most, self._most)[1]

    def begin(self, movable: int, largest: int) -> bool:
        """A step begins; arguments as for ``auto_window``, of the one before it. Returns whether a window changes."""
        if not movable:
            return False
        self.is_known = True
        return self._take(auto_window(movable, largest, self._device_bytes))

    def use(self, least: tuple[int, int] | None) -> bool:
        """Has those of a timed step in force; ``None``: the most again. Returns whether a window changes."""
        self.are_least = least is not None
        return self._force(*(least or (self._most, self._most)))

    def grow(self, largest: int) -> bool:
        """A first step has saved storages, ``largest`` as in ``first_window``. Returns whether a window changes."""
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
    """A storage in a queue: its bytes, the memory that they take, and the sequence number at the latest pack."""

    __slots__ = ("nbytes", "packed_at", "weight")
    nbytes: int
    weight: int
    packed_at: int


class ResidentQueue:
    """The newest saved bytes of one thread, oldest first.

    [Note: final bytes]
    An operator may save a tensor first and fill it afterwards, without a version bump (``F.rrelu`` saves its noise). It
    has when the thread's autograd sequence number has grown, which happens when the operator's node is made, or at the
    latest when the context is left. Nothing leaves before.

    [Note: the last save]
    A copy serves the saves that were made before it started, and no later one: [Note: sharing] in ``eager/saves.py``.
    To start it early frees nothing, since the tensor that is saved again holds the storage until then. So a storage
    stays until another one is saved; and where a step like this one has shown that it is saved again after that, until
    that save.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: What is in the queue weighs.
        self.nbytes = 0
        #: Of its thread's step so far: bytes of the storages that may leave, and ``fourth_largest`` them.
        self.movable = self.largest = 0
        self._most: list[int] = []  # a heap of the largest of them
        #: Up to this sequence number of the thread nothing is to leave; a later one is to be asked for with ``due``.
        self.final_after = AFTER_CONTEXT
        # Oldest first. Ordered ones: to find the first of a `dict`, Python walks over all that was taken out before it.
        self._waiting: OrderedDict[Key, _Waiting] = OrderedDict()
        self._exempt: dict[Key, _Waiting] = {}  # those that stay, whatever else there is
        #: The last save of those that are to be saved again, by its number.
        self.awaited: dict[Key, int] = {}
        #: Those that are to leave as soon as they are final: a set that remembers its order.
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
        """Takes in a storage.

        Args:
            packed_at: the thread's autograd sequence number, or ``AFTER_CONTEXT``.
            urgent: whether it is to leave as soon as it is final, however new it is.
            weight: the bytes that it takes, where those are fewer than ``nbytes``.
            last_save: the number of the save that it waits for.
            is_new: whether the step could move it anew, in whose numbers it counts then.
            rests: whether it stays, and leaves its room to others.
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
        """Counts what the step that begins could move anew."""
        self.movable = self.largest = 0
        self._most = []

    def postpone(self, key: Key, packed_at: int) -> None:
        """The storage was saved again, by an operator that may still fill it."""
        waiting = self._waiting.get(key) or self._exempt[key]
        waiting.packed_at = max(packed_at, waiting.packed_at)

    def on_resave(self, key: Key, number: int) -> None:
        """The bytes of a storage were saved again, as save ``number``."""
        if self.awaited.get(key, number + 1) <= number:
            del self.awaited[key]
            self.final_after = 0

    def stop_awaiting(self) -> None:
        """What is saved again is not known any more."""
        self.awaited.clear()
        self.final_after = 0

    def requeue_exempt(self) -> None:
        """Has the storages that rest leave as any other, the newest of all."""
        for key, waiting in self._exempt.items():
            waiting.weight = waiting.nbytes
            self.nbytes += waiting.weight
            self._waiting[key] = waiting
        self._exempt = {}
        self.final_after = 0

    @property
    def awaiting_bytes(self) -> int:
        """The bytes of the storages that wait for their last save."""
        return sum(self._waiting[key].nbytes for key in self.awaited)

    def discard(self, key: Key) -> int:
        """Takes a storage out, if it is here; returns its bytes."""
        waiting = self._waiting.pop(key, None) or self._exempt.pop(key, None)
        if waiting is None:
            return 0
        self.awaited.pop(key, None)
        self.urgent.pop(key, None)
        self.nbytes -= waiting.weight
        return waiting.nbytes

    def due(self, sequence: int | None, *, without: Key | None = None) -> Key | None:
        """Returns what has to leave next, oldest first, or ``None``. It stays in the queue until it is taken out.

        Args:
            sequence: the thread's autograd sequence number, or ``None`` when the context is left: then every operator
                has run.
            without: what was due before, which is taken out first.
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
    """What transfers in one direction reach together: the last that were timed, but for the slowest quarter of them.

    A first copy may have met memory that was not there yet.
    """

    __slots__ = ("_last", "_value", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._last = deque[tuple[float, int]](maxlen=16)
        self._value: float | None = None

    def add(self, nbytes: int, seconds: float | None) -> float:
        """A transfer that is over; ``None`` or 0 where it is not known how long it took.

        Returns:
            Seconds: those, or what it has taken at the rate of the others; 0 where that is not known either.
        """
        self.nbytes += nbytes
        if not seconds:
            rate = self.value
            return 0.0 if rate is None else nbytes / rate
        self._last.append((seconds, nbytes))
        self._value = None
        return seconds

    @property
    def value(self) -> float | None:
        """Bytes a second; ``None`` where none of them could be timed."""
        if self._value is None and self._last:
            quick = sorted(self._last, key=lambda one: one[0] / max(one[1], 1))[: max(len(self._last) * 3 // 4, 1)]
            self._value = sum(nbytes for _, nbytes in quick) / sum(seconds for seconds, _ in quick)
        return self._value


class Stored(Protocol):
    """A storage whose bytes may come back, as the look-ahead knows it."""

    #: Whether no handle of it is left.
    is_gone: bool


class Use:
    """One save of a storage, in the order in which its step's backward is expected to ask."""

    __slots__ = ("following", "nbytes", "rank", "storage", "unpacked_in", "unpacks")
    storage: Stored
    nbytes: int
    #: The use that is expected after this one, and the place of this one: ranks fall along the order.
    following: Use | None
    rank: int
    #: How many times it was asked for, and by which backward the last time: another one may ask again where graphs are
    #: retained.
    unpacks: int
    unpacked_in: int | None


class StepUses:
    """The uses of one step, by the number of the save; expected in the reverse of packing until they are arranged."""

    __slots__ = ("by_number", "count", "expected", "first", "is_unpacked")

    def __init__(self) -> None:
        self.by_number: list[Use | None] = []
        #: How many there are: some saves have no handle that could ask.
        self.count = 0
        #: The use that backward is expected to begin with, and where it has begun, to go on with.
        self.first: Use | None = None
        self.expected: Use | None = None
        self.is_unpacked = False

    def add(self, number: int, storage: Stored, nbytes: int) -> Use:
        """Takes in save ``number``, the latest."""
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
        """Expects the saves in that order, and those that are not in it not at all."""
        for use in self.by_number:
            if use is not None:
                use.following, use.rank = None, _UNEXPECTED
        count = len(self.by_number)
        arranged = [use for number in numbers if number < count and (use := self.by_number[number]) is not None]
        self.first, self.expected, self.is_unpacked = arranged[0] if arranged else None, None, False
        for rank, (use, following) in enumerate(zip(reversed(arranged), [None, *reversed(arranged)], strict=False), 1):
            use.following, use.rank = following, rank


class Prefetch:
    """The storages that an unpack has brought back, in the order of need, and those that it has let go of."""

    __slots__ = ("bring", "drop")
    bring: list[Any]
    drop: list[Any]


class Promised:
    """A storage that is promised: its bytes when that began, since those of its uses may differ, and the uses."""

    __slots__ = ("nbytes", "uses")
    nbytes: int
    uses: set[Use]


class PrefetchOrder:
    """Looks ahead along the order in which backward is expected to ask, by bytes.

    Every save is a *use* of a storage. The uses ahead whose storages weigh at most ``limit`` bytes together are
    *promised*: their storages are resident, or are being brought back. A storage that several uses share weighs once,
    and stays for as long as one of its uses is promised. One that weighs more is promised alone.

        packed     1  2  3  4  5  6  7  8  9          asked for: 9, 8, then 7
                      ^     [promised]  ^
                    next    4     6     7

    A use whose graph is kept may be asked for again, as by a backward in two halves. It is *held* then: it stays
    promised until it is, as long as nothing that comes sooner needs the room. What was held last goes first.

    A storage larger than the limit may be promised, alone, as it may leave alone: where activations are that large, the
    walk would stop at each of them, and every one would come late. With a limit of 0 nothing is promised.

    The walk goes on from where it stopped, so its cost for each unpack is constant. It passes over storages that are
    gone, and over uses that this backward has asked for; where that follows no order, over uses that were asked for as
    often. The order is a hint: a use that was not promised is brought at once, and the look-ahead starts anew from
    there. Promises that were not taken up are dropped when their room is needed and they are overdue.

    Where backward follows no order, what is dropped would have to come back once more, and so would what is brought in
    its place. So after some misses, saves asked for far from where the order leads, nothing is dropped any more: what
    is promised stays until it is asked for, and the room that this leaves is filled with what was not asked for yet.
    It ends when as many were asked for in order, or when a better order is known.
    """

    #: How many unpacks late a promise may be before it is given up: one operator unpacks its saves in any order. And
    #: how many uses that were asked for already the walk passes over in one unpack.
    PATIENCE = 16
    #: How many more misses than saves in order it takes, and how far from the expected save is still in order.
    MISSES, NEAR = 4, 2

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.promised_bytes = 0
        #: How many times something was asked for.
        self.unpacks = 0
        #: The storages that some promised use needs on the device.
        self.promised: dict[Stored, Promised] = {}
        self._due: OrderedDict[Use, int] = OrderedDict()  # the uses: the unpack by which each is expected
        self._held: OrderedDict[Use, None] = OrderedDict()  # those that were asked for already
        self._next: Use | None = None  # that the walk comes to next
        self._lost = False  # whether the order has changed under the walk
        self._misses = 0
        self._order_unknown = False

    def forget(self, storage: Stored) -> None:
        """Ends the promises of a storage that is gone."""
        promised = self.promised.pop(storage, None)
        if promised is not None:
            self.promised_bytes -= promised.nbytes
            for use in promised.uses:
                del self._due[use]
                self._held.pop(use, None)

    def arrange(self, uses: StepUses, numbers: Iterable[int]) -> None:
        """Expects the saves of a step in this order from now on; see ``StepUses.arrange``."""
        uses.arrange(numbers)
        self._lost = True
        self._misses, self._order_unknown = 0, False

    def on_unpack(self, uses: StepUses, use: Use, backward: int, *, again: bool = False) -> Prefetch:
        """Looks ahead from ``use``, one of ``uses``, which the backward of that number asks for now.

        Args:
            again: whether ``use`` may be asked for again, so that it is held if there is room.
        """
        self.unpacks += 1
        found, following = Prefetch(), use.following
        found.bring, found.drop = [], []
        if following is not None and following.storage.is_gone:
            use.following = following = _living(following)  # so that those in between are passed over once
        if uses.first is not None:  # else the step table does not have it
            expected = uses.expected if uses.is_unpacked else uses.first
            if self._misses or use is not expected:
                self._judge(use, _living(expected))
            uses.expected, uses.is_unpacked = following, True
        given_up = use if use in self._due else None
        if given_up is None and use is not self._next and use is not _living(self._next):
            for other, due in self._due.items():  # promised along another order: due by now, and late soon
                self._due[other] = min(due, self.unpacks)
        if self._lost or given_up is None:
            self._next = following
            self._lost = False
        use.unpacks += 1
        use.unpacked_in = backward
        passed_over = 0
        while True:
            if given_up is not None:  # a promise ends; the storage goes if no other one needs it
                del self._due[given_up]
                self._held.pop(given_up, None)
                promised = self.promised[given_up.storage]
                promised.uses.remove(given_up)
                if not promised.uses:
                    del self.promised[given_up.storage]
                    self.promised_bytes -= promised.nbytes
                    found.drop.append(given_up.storage)
                given_up = None
            if (ahead := self._next) is None:  # else it is promised
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
                    continue  # with the same one, for which there may be room now
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
        """Promises ``use`` out of its turn, and returns whether its storage is to be brought: if there is room."""
        is_brought, needed = use.storage not in self.promised, self.promised_bytes + use.nbytes
        if use in self._due or (is_brought and needed > self.limit and (self.promised_bytes or self.limit == 0)):
            return False
        self._promise(use, self.unpacks + len(self._due) + 1)
        return is_brought

    def _judge(self, use: Use, expected: Use | None) -> None:
        """Counts whether a save is asked for in order; see the class."""
        if expected is None or use is expected or abs(use.rank - expected.rank) <= self.NEAR:
            self._misses = max(self._misses - 1, 0)
        else:
            self._misses = min(self._misses + 1, self.MISSES)
        if self._misses in (0, self.MISSES):
            self._order_unknown = self._misses > 0

    def _promise(self, use: Use, due: int) -> None:
        """Promises ``use``, which is expected by unpack ``due``."""
        self._due[use] = due
        promised = self.promised.get(use.storage)
        if promised is None:
            self.promised[use.storage] = promised = Promised()
            promised.nbytes, promised.uses = use.nbytes, set()
            self.promised_bytes += use.nbytes
        promised.uses.add(use)


def _living(use: Use | None) -> Use | None:
    """Returns the first use from ``use`` on whose storage is not gone."""
    while use is not None and use.storage.is_gone:
        use = use.following
    return use
