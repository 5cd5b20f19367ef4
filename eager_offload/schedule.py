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
"""

from __future__ import annotations

import heapq
import sys
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

#: Anything that hashes by its identity, or an int.
Key: TypeAlias = Any

#: In place of the autograd sequence number at pack: it is not to leave before the context is left.
AT_THE_EXIT = sys.maxsize


#: Bytes: a window is hardly ever larger, and of which size it is where nothing is known.
_LARGE_WINDOW, _FIRST_WINDOW = 256 << 20, 64 << 20
#: So many tensors keep a link busy.
_TENSORS = 4
#: The parts of what a step could move that a window is, as long as it is not large, otherwise, and at most.
_SMALL_PART, _LARGE_PART, _MOST_PART = 8, 64, 4
#: The part of a device's memory that a window is at most.
_DEVICE_PART = 16


def largest_of(sizes: Iterable[int]) -> int:
    """Returns the largest size that ``_TENSORS`` of ``sizes`` have or exceed; 0 where there are fewer."""
    most = heapq.nlargest(_TENSORS, sizes)
    return most[-1] if len(most) == _TENSORS else 0


def auto_window(movable: int, largest: int, device_bytes: int | None = None) -> int:
    """Returns the bytes of a window for steps that could move ``movable`` bytes. See [Note: automatic windows].

    Args:
        largest: ``largest_of`` the storages that could move.
        device_bytes: memory of the device; ``None`` where that is not known.
    """
    wanted = max(min(_LARGE_WINDOW, movable // _SMALL_PART), movable // _LARGE_PART, _TENSORS * largest)
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
        self._auto = 0
        #: Whether the last step says anything about them, and whether it is known.
        self.is_auto, self.is_known = None in self._given, False
        #: Bytes on their way out at most, and bytes that are brought back early at most.
        self.inflight = self.prefetch = 0
        self._take(first_window(0, device_bytes))

    def begin(self, movable: int, largest: int) -> bool:
        """A step begins; arguments as for ``auto_window``, of the one before it. Returns whether a window changes."""
        if not movable:
            return False
        self.is_known = True
        return self._take(auto_window(movable, largest, self._device_bytes))

    def grow(self, largest: int) -> bool:
        """A first step has saved storages, ``largest`` as in ``first_window``. Returns whether a window changes."""
        return self._take(max(first_window(largest, self._device_bytes), self._auto))

    def _take(self, auto: int) -> bool:
        if auto == self._auto:
            return False
        self._auto = auto
        self.inflight, self.prefetch = (auto if given is None else given for given in self._given)
        return self.is_auto


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
    A copy serves the saves that were made before it started, and no later one: [Note: sharing] in ``eager/saving.py``.
    To start it early frees nothing, since the tensor that is saved again holds the storage until then. So a storage
    stays until another one is saved; and where a step like this one has shown that it is saved again after that, until
    that save.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: What is in the queue weighs.
        self.nbytes = 0
        #: Of its thread's step so far: bytes of the storages that may leave, and ``largest_of`` them.
        self.movable = self.largest = 0
        self._most: list[int] = []  # a heap of the largest of them
        #: Up to this sequence number of the thread nothing is to leave; a later one is to be asked for with ``due``.
        self.final_after = AT_THE_EXIT
        # Oldest first. Ordered ones: to find the first of a `dict`, Python walks over all that was taken out before it.
        self._waiting: OrderedDict[Key, _Waiting] = OrderedDict()
        #: The last save of those that are to be saved again, by its number.
        self.awaited: dict[Key, int] = {}
        self._urgent: OrderedDict[Key, None] = OrderedDict()  # a set that remembers its order

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting

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
    ) -> None:
        """Takes in a storage.

        Args:
            packed_at: the thread's autograd sequence number, or ``AT_THE_EXIT``.
            urgent: whether it is to leave as soon as it is final, however new it is.
            weight: the bytes that it takes, where those are fewer than ``nbytes``.
            last_save: the number of the save that it waits for.
            is_new: whether the step could move it anew, in whose numbers it counts then.
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
        self._waiting[key] = waiting = _Waiting()
        waiting.nbytes, waiting.weight, waiting.packed_at = nbytes, nbytes if weight is None else weight, packed_at
        self.nbytes += waiting.weight
        if urgent:
            self._urgent[key] = None
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
        waiting = self._waiting[key]
        waiting.packed_at = max(packed_at, waiting.packed_at)

    def saved_again(self, key: Key, number: int) -> None:
        """The bytes of a storage were saved again, as save ``number``."""
        if self.awaited.get(key, number + 1) <= number:
            del self.awaited[key]
            self.final_after = 0

    def await_nothing(self) -> None:
        """What is saved again is not known any more."""
        self.awaited.clear()
        self.final_after = 0

    @property
    def awaiting_bytes(self) -> int:
        """The bytes of the storages that wait for their last save."""
        return sum(self._waiting[key].nbytes for key in self.awaited)

    def discard(self, key: Key) -> int:
        """Takes a storage out, if it is here; returns its bytes."""
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return 0
        self.awaited.pop(key, None)
        self._urgent.pop(key, None)
        self.nbytes -= waiting.weight
        return waiting.nbytes

    def due(self, sequence: int | None) -> Key | None:
        """What has to leave next, oldest first, or ``None``. It stays in the queue until it is discarded.

        Args:
            sequence: the thread's autograd sequence number, or ``None`` when the context is left: then every operator
                has run.
        """
        for keys in (self._urgent, self._waiting if self.nbytes > self.limit else ()):
            final_after = AT_THE_EXIT
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
    """What transfers in one direction have reached together."""

    __slots__ = ("_seconds", "_timed", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._timed = 0
        self._seconds = 0.0

    def add(self, nbytes: int, seconds: float | None) -> float:
        """A transfer that is over; ``None`` or 0 where it is not known how long it took.

        Returns:
            Seconds: those, or what it has taken at the rate of the others; 0 where that is not known either.
        """
        self.nbytes += nbytes
        if not seconds:
            rate = self.value
            return 0.0 if rate is None else nbytes / rate
        self._timed += nbytes
        self._seconds += seconds
        return seconds

    @property
    def value(self) -> float | None:
        """Bytes a second; ``None`` where none of them could be timed."""
        return self._timed / self._seconds if self._seconds else None


class _Use:
    """One save of a storage: a link of its forward's chain, by default in the order of packing."""

    __slots__ = ("after", "asked", "before", "nbytes", "sequence", "storage")
    storage: Key
    nbytes: int
    sequence: int
    before: int | None
    after: int | None
    #: How many times it was asked for; more than once where graphs are retained.
    asked: int


@dataclass(slots=True)
class Prefetch:
    """What an unpack sets off: storages to bring back, in the order of need, and storages to let go of."""

    bring: list[Key] = field(default_factory=list)
    drop: list[Key] = field(default_factory=list)


class PrefetchOrder:
    """Looks ahead along the reverse of packing, by bytes.

    Every save is a *use* of a storage, named by a position that grows with every pack. Backward is expected to ask for
    uses in reverse, unless a caller knows better (``arrange``). The uses ahead whose storages weigh at most ``limit``
    bytes together are *promised*: their storages are resident, or are being brought back. A storage that several uses
    share weighs once, and stays for as long as one of its uses is promised. One that weighs more is promised alone.

        packed     1  2  3  4  5  6  7  8  9          asked for: 9, 8, then 7
                      ^     [promised]  ^
                    next    4     6     7

    A use whose graph is kept may be asked for again, as by a backward in two halves. It is *held* then: it stays
    promised until it is, as long as nothing that comes sooner needs the room. What was held last goes first.

    The walk goes on from where it stopped, so its cost for each unpack is constant. The order is a hint: a use that was
    not promised is brought at once, and the look-ahead starts anew from there. Promises that were not taken up are
    dropped when their room is needed and they are overdue.

    Where what is asked for follows no order, what is dropped would have to come back once more, and so would what is
    brought in its place. So after some misses, saves asked for far from where the chain leads, nothing is dropped any
    more: what is promised stays until it is asked for, and the room that this leaves is filled with what was not asked
    for yet. It ends when as many were asked for in order, or when a better order is known.
    """

    #: How many unpacks late a promise may be before it is given up: one operator unpacks its saves in any order.
    PATIENCE = 16
    #: How many more misses than saves in order it takes, and how far from the expected save is still in order.
    MISSES, NEAR = 4, 2

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.promised_bytes = 0
        #: How many times something was asked for.
        self.unpacks = 0
        self._uses: dict[int, _Use] = {}
        self._newest: dict[int, int] = {}  # of each sequence
        self._promised: OrderedDict[int, int] = OrderedDict()  # position -> the unpack by which it is expected
        # storage -> how many promised uses it has, and what it weighed when it was promised: its uses may differ
        self._holders: dict[Key, tuple[int, int]] = {}
        self._held: OrderedDict[int, None] = OrderedDict()  # positions of those that were asked for already
        self._next: int | None = None  # the position that the walk comes to next
        self._lost = False  # whether the chains have changed under the walk
        self._expected: dict[int, int | None] = {}  # of each sequence that was asked for: what the chain leads to
        self._misses = 0
        self._follows_no_order = False

    def holds(self, storage: Key) -> bool:
        """Whether some promised use needs ``storage`` on the device."""
        return storage in self._holders

    def add(self, position: int, storage: Key, nbytes: int, sequence: int) -> None:
        """A save; ``sequence`` names the forward that it belongs to."""
        before = self._newest.get(sequence)
        self._uses[position] = use = _Use()
        use.storage, use.nbytes, use.sequence = storage, nbytes, sequence
        use.before, use.after, use.asked = before, None, 0
        if before is not None:
            self._uses[before].after = position
        self._newest[sequence] = position

    def remove(self, position: int) -> Key | None:
        """A save's handle is gone; returns its storage if that was promised for this use alone."""
        use = self._uses[position]
        dropped = self._unpromise(position) if position in self._promised else None
        newest = self._newest.get(use.sequence)
        before = use.before
        if self._next == position:
            self._next = before
        if self._expected.get(use.sequence) == position:
            self._expected[use.sequence] = before
        if before is not None:
            self._uses[before].after = use.after
        if use.after is not None:
            self._uses[use.after].before = before
        if newest == position:
            if before is not None:
                self._newest[use.sequence] = before
            else:
                del self._newest[use.sequence]
                self._expected.pop(use.sequence, None)
        del self._uses[position]
        return dropped

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may be promised. A storage larger than the limit may, alone, unless that is 0."""
        held = self.promised_bytes
        return held + nbytes <= self.limit or self.limit > 0 == held

    def hold(self, position: int) -> None:
        """The use at ``position``, which was asked for now, may be asked for again: it stays if there is room."""
        use = self._uses[position]
        if position not in self._promised and (use.storage in self._holders or self.has_room(use.nbytes)):
            self._promise(position, self.unpacks)
            self._held[position] = None

    def arrange(self, sequence: int, positions: Iterable[int]) -> None:
        """From now on the saves of a forward are expected to be asked for in this order.

        Args:
            positions: in the order of need; those that are not known (any more) are passed over, and the forward's
                others are not expected at all.
        """
        position = self._newest.pop(sequence, None)
        self._lost = True
        self._expected.pop(sequence, None)
        self._misses, self._follows_no_order = 0, False
        while position in self._uses:
            use = self._uses[position]
            position, use.before, use.after = use.before, None, None
        previous: int | None = None
        for position in positions:
            following = self._uses.get(position)
            if following is None:
                continue
            following.before, following.after = None, previous
            if previous is None:
                self._newest[sequence] = position
            else:
                self._uses[previous].before = position
            previous = position

    def unpacked(self, position: int) -> Prefetch:
        """The use at ``position`` is asked for now."""
        self.unpacks += 1
        use, found = self._uses[position], Prefetch()
        newest = self._newest.get(use.sequence)
        if newest is not None:  # else what is known of the order does not have it
            expected = self._expected.get(use.sequence, newest)
            if self._misses or position != expected:
                self._judge(position, expected)
            self._expected[use.sequence] = use.before
        promised = position in self._promised
        if promised:
            dropped = self._unpromise(position)
            if dropped is not None:
                found.drop.append(dropped)
        elif position != self._next:
            self._expect_all_by_now()
        if self._lost or not promised:
            self._next = use.before
            self._lost = False
        use.asked += 1
        self._look_ahead(found, use.asked)
        return found

    def _judge(self, position: int, expected: int | None) -> None:
        """Counts whether a save is asked for in order; see the class."""
        if position == expected or self._is_near(position, expected):
            self._misses = max(self._misses - 1, 0)
        else:
            self._misses = min(self._misses + 1, self.MISSES)
        if self._misses in (0, self.MISSES):
            self._follows_no_order = self._misses > 0

    def _is_near(self, position: int, expected: int | None) -> bool:
        if expected not in self._uses:
            return True
        ahead: int | None = expected
        behind: int | None = expected
        for _ in range(self.NEAR):
            ahead = self._uses[ahead].before if ahead in self._uses else None
            behind = self._uses[behind].after if behind in self._uses else None
            if position in (ahead, behind):
                return True
        return False

    def _expect_all_by_now(self) -> None:
        """The order has jumped: what was promised along the old one is due at once, and late soon."""
        for position, due in self._promised.items():
            self._promised[position] = min(due, self.unpacks)

    def _look_ahead(self, found: Prefetch, asked: int) -> None:
        """Promises what comes next; ``asked`` is how many times the save that was asked for was."""
        passed_over = 0
        while (position := self._next) in self._uses:
            assert position is not None
            use = self._uses[position]
            if self._follows_no_order and use.asked >= asked:  # its turn in this backward is over
                passed_over += 1
                if passed_over == self.PATIENCE:
                    return
            elif position not in self._promised:
                brought = use.storage not in self._holders
                if brought and not (self.has_room(use.nbytes) or self._make_room(use.nbytes, found)):
                    return
                self._promise(position, self.unpacks + len(self._promised) + 1)
                if brought:
                    found.bring.append(use.storage)
            self._next = use.before

    def _promise(self, position: int, due: int) -> None:
        """``due``: the unpack by which the use at ``position`` is expected."""
        use = self._uses[position]
        count, nbytes = self._holders.get(use.storage, (0, use.nbytes))
        self._promised[position] = due
        self._holders[use.storage] = count + 1, nbytes
        self.promised_bytes += 0 if count else nbytes

    def _make_room(self, nbytes: int, found: Prefetch) -> bool:
        """Gives up overdue promises, oldest first, until ``nbytes`` more fit; false where they do not.

        A storage larger than the limit may be promised, alone, as it may leave alone: where activations are that large,
        the walk would stop at each of them, and every one would come late. With a limit of 0 nothing is promised.
        """
        while not self.has_room(nbytes):
            if self._held:
                position = next(reversed(self._held))
            else:
                oldest = next(iter(self._promised.items()), None)
                if oldest is None or self._follows_no_order or oldest[1] + self.PATIENCE >= self.unpacks:
                    return False
                position = oldest[0]
            dropped = self._unpromise(position)
            if dropped is not None:
                found.drop.append(dropped)
        return True

    def _unpromise(self, position: int) -> Key | None:
        """Ends a promise; returns the storage if no other promise needs it."""
        use = self._uses[position]
        del self._promised[position]
        self._held.pop(position, None)
        count, nbytes = self._holders.pop(use.storage)
        if count > 1:
            self._holders[use.storage] = count - 1, nbytes
            return None
        self.promised_bytes -= nbytes
        return use.storage
