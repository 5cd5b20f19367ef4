"""When bytes leave and when they come back: three small machines over numbers.

No stream, no tensor and no clock appears here. A saved storage is a *key*, an int; what it weighs is its bytes. The
callers carry out what is answered.

    DelayLine      which saved storages leave now: the newest bytes stay, and nothing leaves before it is final
    Window         how much may be on its way out at once
    PrefetchOrder  what comes back next: along the reverse of packing, unless something better is known
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["AT_THE_EXIT", "DelayLine", "Plan", "PrefetchOrder", "Window"]

#: In place of the autograd sequence number at pack: not final before the context is left.
AT_THE_EXIT = sys.maxsize


class DelayLine:
    """The newest saved bytes of one thread, oldest first.

    [Note: final bytes]
    An operator may save a tensor first and fill it afterwards, without a version bump (``F.rrelu`` saves its noise).
    Every tensor that is filled late does not require grad. So one that requires grad is final when it is packed; any
    other is once the thread's autograd sequence number has grown, which happens when the operator's node is made, or
    at the latest when the context is left.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._waiting: dict[int, int] = {}  # oldest first
        self._packed_at: dict[int, int] = {}  # the autograd sequence number at pack, of those that were not final then
        self._urgent: dict[int, None] = {}  # a set that remembers its order

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def push(self, key: int, nbytes: int, packed_at: int | None, *, urgent: bool = False) -> None:
        """Takes in a storage.

        Args:
            packed_at: the thread's autograd sequence number, or ``None`` where the bytes are final already, or
                ``AT_THE_EXIT``.
            urgent: whether it is to leave as soon as it is final, however new it is.
        """
        self._waiting[key] = nbytes
        self.nbytes += nbytes
        if packed_at is not None:
            self._packed_at[key] = packed_at
        if urgent:
            self._urgent[key] = None

    def postpone(self, key: int, packed_at: int) -> None:
        """The storage was saved again by an operator that may still fill it."""
        assert key in self._waiting
        self._packed_at[key] = max(packed_at, self._packed_at.get(key, packed_at))

    def discard(self, key: int) -> int:
        """Takes a storage out, if it is here; returns its bytes."""
        if key not in self._waiting:
            return 0
        self._packed_at.pop(key, None)
        self._urgent.pop(key, None)
        nbytes = self._waiting[key]
        del self._waiting[key]
        self.nbytes -= nbytes
        return nbytes

    def due(self, sequence: int | None) -> int | None:
        """What has to leave next, oldest first, or ``None``. It stays in line until it is discarded.

        Args:
            sequence: the thread's autograd sequence number, or ``None`` when the context is left: then every operator
                has run.
        """
        for key in self._urgent:
            if self._is_final(key, sequence):
                return key
        if self.nbytes > self.limit:
            for key in self._waiting:
                if self._is_final(key, sequence):
                    return key
        return None

    def _is_final(self, key: int, sequence: int | None) -> bool:
        packed_at = self._packed_at.get(key)
        return packed_at is None or sequence is None or sequence > packed_at


class Window:
    """What is on its way out, in the order in which it left, and the bound on its bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._leaving: OrderedDict[int, int] = OrderedDict()

    @property
    def oldest(self) -> int | None:
        """The key that left first among those that have not arrived."""
        return next(iter(self._leaving), None)

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may leave. A storage larger than the window may, alone."""
        return not self._leaving or self.nbytes + nbytes <= self.limit

    def enter(self, key: int, nbytes: int) -> None:
        self._leaving[key] = nbytes
        self.nbytes += nbytes

    def leave(self, key: int) -> None:
        """It has arrived; if it is known here at all, see [Note: interrupts] in ``eager/ground.py``."""
        if key in self._leaving:
            self.nbytes -= self._leaving[key]
            del self._leaving[key]


@dataclass(slots=True)
class _Use:
    """One save of a storage: a link of its forward's chain, by default in the order of packing."""

    storage: int
    nbytes: int
    sequence: int
    before: int | None
    after: int | None = None


@dataclass(slots=True)
class Plan:
    """What an unpack sets off: storages to bring back, in the order of need, and storages to let go of."""

    bring: list[int] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)


class PrefetchOrder:
    """Looks ahead along the reverse of packing, by bytes.

    Every save is a *use* of a storage, named by a position that grows with every pack. Backward is expected to ask for
    uses in reverse, unless somebody knows better (``arrange``). The uses ahead whose storages weigh at most ``limit``
    bytes together are *promised*: their storages are resident, or are being brought back. A storage that several uses
    share weighs once, and stays for as long as one of its uses is promised. One that weighs more is promised alone.

        packed     1  2  3  4  5  6  7  8  9          asked for: 9, 8, then 7
                      ^     [promised]  ^
                    next    4     6     7

    The walk goes on from where it stopped, so its cost for each unpack is constant. The order is a hint: a use that was
    not promised is brought at once, and the look-ahead starts anew from there. Promises that nobody took up are dropped
    when their room is needed and they are overdue.
    """

    #: How many unpacks late a promise may be before it is given up: one operator unpacks its saves in any order.
    PATIENCE = 16

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.promised_bytes = 0
        self._uses: dict[int, _Use] = {}
        self._newest: dict[int, int] = {}  # of each sequence
        self._promised: OrderedDict[int, int] = OrderedDict()  # position -> the unpack by which it is expected
        self._holders: dict[int, int] = {}  # storage -> how many promised uses it has
        self._next: int | None = None  # the position that the walk comes to next
        self._lost = False  # whether the chains have changed under the walk
        self._unpacks = 0

    def __len__(self) -> int:
        """How many saves are known."""
        return len(self._uses)

    def holds(self, storage: int) -> bool:
        """Whether some promised use needs ``storage`` on the device."""
        return storage in self._holders

    def add(self, position: int, storage: int, nbytes: int, sequence: int) -> None:
        """A save; ``sequence`` names the forward that it belongs to."""
        before = self._newest.get(sequence)
        use = _Use(storage, nbytes, sequence, before)
        self._uses[position] = use
        if before is not None:
            self._uses[before].after = position
        self._newest[sequence] = position

    def remove(self, position: int) -> int | None:
        """A save's handle is gone; returns its storage if that was promised for this use alone."""
        use = self._uses.get(position)
        if use is None:
            return None  # an interrupt came between the making of the handle and `add`
        dropped = self._unpromise(position)
        newest = self._newest.get(use.sequence)
        # An interrupted `arrange` leaves links of which the other end does not know; they count for nothing.
        before = use.before if use.before in self._uses else None
        if self._next == position:
            self._next = before
        if before is not None and self._uses[before].after == position:
            self._uses[before].after = use.after
        if use.after in self._uses and self._uses[use.after].before == position:
            self._uses[use.after].before = before
        if newest == position:
            if before is not None:
                self._newest[use.sequence] = before
            else:
                del self._newest[use.sequence]
        del self._uses[position]
        return dropped

    def arrange(self, sequence: int, positions: Iterable[int]) -> None:
        """From now on the saves of a forward are expected to be asked for in this order.

        Args:
            positions: in the order of need; those that are not known (any more) are passed over, and the forward's
                others are not expected at all.
        """
        position = self._newest.pop(sequence, None)
        self._lost = True
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

    def unpacked(self, position: int) -> Plan:
        """The use at ``position`` is asked for now."""
        self._unpacks += 1
        plan = Plan()
        promised = position in self._promised
        if promised:
            dropped = self._unpromise(position)
            if dropped is not None:
                plan.drop.append(dropped)
        elif position != self._next:
            self._expect_all_by_now()
        if self._lost or not promised:
            self._next = self._uses[position].before
            self._lost = False
        self._look_ahead(plan)
        return plan

    def _expect_all_by_now(self) -> None:
        """The order has jumped: what was promised along the old one is due at once, and late soon."""
        for position, due in self._promised.items():
            self._promised[position] = min(due, self._unpacks)

    def _look_ahead(self, plan: Plan) -> None:
        while (position := self._next) in self._uses:
            assert position is not None
            use = self._uses[position]
            if position not in self._promised:
                brought = use.storage not in self._holders
                if brought and not self._make_room(use.nbytes, plan):
                    return
                due = self._unpacks + len(self._promised) + 1
                # No call between the holder, its bytes and the promise: [Note: interrupts] in `eager/ground.py`.
                if brought:
                    self._holders[use.storage] = 1
                    self.promised_bytes += use.nbytes
                else:
                    self._holders[use.storage] += 1
                self._promised[position] = due
                if brought:
                    plan.bring.append(use.storage)
            self._next = use.before

    def _make_room(self, nbytes: int, plan: Plan) -> bool:
        """Gives up overdue promises, oldest first, until ``nbytes`` more fit; false where they do not.

        A storage larger than the limit may be promised, alone, as it may leave alone: where activations are that large,
        the walk would stop at each of them, and every one would come late. With a limit of 0 nothing is promised.
        """
        while self.promised_bytes + nbytes > self.limit:
            oldest = next(iter(self._promised.items()), None)
            if oldest is None:
                return self.limit > 0
            if oldest[1] + self.PATIENCE >= self._unpacks:
                return False
            dropped = self._unpromise(oldest[0])
            if dropped is not None:
                plan.drop.append(dropped)
        return True

    def _unpromise(self, position: int) -> int | None:
        """Ends a promise; returns the storage if no other promise needs it."""
        if position not in self._promised:
            return None
        use = self._uses[position]
        del self._promised[position]
        self._holders[use.storage] -= 1
        if self._holders[use.storage]:
            return None
        del self._holders[use.storage]
        self.promised_bytes -= use.nbytes
        return use.storage
