"""What one step teaches the next: the order of need, what is asked for too soon, what the program keeps alive.

Numbers only, like ``schedule.py``: saves are counted from 0 in each forward, sizes are bytes, times are seconds.

[Note: what is learnt, and step plans]
A step plan holds the order of need and what is kept alive as well, but for a forward that follows it, and all of what
was done in one. What is learnt here is for forwards that follow none: all with ``step_plans=False``, the first ones
with "auto", those that are decided anew, and those of which no plan can be made. This module alone

    has such a forward expect its saves in the order of need, and leave alone what the program keeps alive
    knows how long after its pack each storage is asked for, so what the link cannot bring in time stays
    spreads what is to stay over the forward, where a limit of the slowdown says how many bytes
        (``LearnedForwards.keep``)
    has a storage that is saved again wait for its last save, and a forward that fits into the newest bytes stay
    counts forwards that are alike: after how many of them "auto" has one recorded

and what a recorder writes down is what these have led to. A forward that follows a plan logs nothing.

[Note: what is learnt is a hint]
    Forward          logs its saves while it is packed and its graph unpacked; dies with the last handle of that graph
    SaveLog          what it leaves behind
    LearnedForward   what follows from that, for a forward that begins alike
A forward whose saves have the sizes and the sharing of a learnt one, one after the other, follows that. At the first
save that differs it stops, and what is saved from there on is treated as if nothing had ever been learnt; at the first
unpack that is out of order the rest is expected in the reverse of packing again. So what does not fit costs time at
most, and shapes that change with every step are learnt and forgotten without ever being trusted.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import Any, NamedTuple

from eager_offload.step_recorder import StepRecorder
from eager_offload.tiers.finalizers import FinalizerRecord

#: How many are remembered: the forwards of one step may differ, of a generator and a discriminator say.
_MOST_LEARNED = 8
#: A storage that the program kept alive is taken in every so many forwards, to see whether it still does.
_LOOK_AGAIN = 16
#: Saves of one forward: a context that is never left, with a graph that is never whole, would fill the memory.
_MOST_SAVES = 1 << 16


class Decision(Enum):
    """What is to become of a storage that is saved now."""

    UNKNOWN = auto()
    """Nothing is known: the newest bytes stay, and it leaves when it is not among them any more."""
    LEAVE = auto()
    """It was not asked for before it could have been away and back: it leaves as soon as it is final."""
    STAY = auto()
    """It was asked for sooner than that: as if nothing were known, it stays as long as it is among the newest bytes."""
    FITS = auto()
    """Its forward saves hardly more than what may stay anyway: all of it stays, as long as there is room."""
    ALIVE = auto()
    """Its original was still alive when it was asked for, so that moving it frees nothing."""


@dataclass(slots=True)
class SaveLog:
    """What happened to one forward's saves; lists are by number of save."""

    sizes: list[int] = field(default_factory=list)
    #: The first save of the storage in this forward, whether or not it was taken anew since; its own number for that
    #: one, -1 for one that shares what an earlier forward took.
    owners: list[int] = field(default_factory=list)
    #: When it was packed; seconds.
    packed_at: list[float] = field(default_factory=list)
    #: Bytes that were on their way out before it.
    ahead: list[int] = field(default_factory=list)
    #: How many there were when the first one was asked for.
    before_backward: int = 0
    #: When each save was first asked for, in that order; seconds.
    asked_at: dict[int, float] = field(default_factory=dict)
    #: Those that took a storage whose original was alive when it was asked for, or would have: for how many forwards
    #: it was not looked at.
    alive: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """What travels in a second; bytes, each way."""

    out: float
    back: float

    def round_trip(self, nbytes: int, ahead: int) -> float:
        """Seconds until ``nbytes`` bytes could be away and back, behind ``ahead`` others on their way out."""
        return (ahead + nbytes) / self.out + nbytes / self.back


class LearnedForward:
    """What follows from the log of a forward whose graph is gone."""

    def __init__(self, log: SaveLog, link: Link | None, room: int = 0, times: int = 1) -> None:
        #: How many forwards were like it.
        self.times = times
        self.log, self.sizes, self.owners = log, log.sizes, log.owners
        #: Of each storage, by its first save.
        self.decisions = _decisions(log, link, room)
        #: The last save before backward of each storage that is saved more than once, by the first one.
        owners = log.owners[: log.before_backward]
        self.last_saves = {owner: number for number, owner in enumerate(owners) if owner != number}
        #: The saves that are to be asked for, in that order.
        self.order = [number for number in log.asked_at if log.owners[number] not in log.alive]

    def keep(self, nbytes: int, newest: int) -> None:
        """So many bytes are to stay, as ``LearnedForwards.keep`` says."""
        taken = _taken_saves(self.log)
        stays = _spread([(number, self.sizes[number]) for number in taken], nbytes, newest)
        self.decisions |= {number: Decision.STAY if number in stays else Decision.LEAVE for number in taken}

    def fits(self, number: int, nbytes: int, owner: int) -> bool:
        """Whether save ``number`` of a forward is as it was in the one that this was learnt from."""
        return number < len(self.sizes) and self.sizes[number] == nbytes and self.owners[number] == owner


def _taken_saves(log: SaveLog) -> list[int]:
    """The saves that take a storage that may leave."""
    return [number for number, owner in enumerate(log.owners) if owner == number and number not in log.alive]


def _spread(storages: Sequence[tuple[int, int]], keep: int, newest: int) -> set[int]:
    """Which of ``storages`` stay: the newest, and of the others each stretch its part.

    Args:
        storages: the number and the bytes of each, the oldest first.
        keep: bytes that stay in all.
        newest: bytes that stay of the newest, before any other does.
    """
    found, at, kept = set[int](), len(storages), 0
    while at and kept + storages[at - 1][1] <= min(keep, newest):
        at -= 1
        kept += storages[at][1]
        found.add(storages[at][0])
    earlier, due = sum(nbytes for _, nbytes in storages[:at]), 0
    room = min(keep - kept, earlier)
    for number, nbytes in reversed(storages[:at]):
        due += nbytes * room  # in parts of a byte, as many as there are earlier bytes
        if nbytes * earlier <= due:
            due -= nbytes * earlier
            found.add(number)
    return found


def _decisions(log: SaveLog, link: Link | None, room: int) -> dict[int, Decision]:
    """What becomes of each storage, by its first save."""
    found, taken = dict.fromkeys(log.alive, Decision.ALIVE), _taken_saves(log)
    if sum([log.sizes[number] for number in taken]) <= room:
        return found | dict.fromkeys(taken, Decision.FITS)
    if link is None:
        return found | dict.fromkeys(taken, Decision.UNKNOWN)
    first_asked = {log.owners[number]: seconds for number, seconds in reversed(log.asked_at.items())}
    for number in taken:
        resting = first_asked.get(number, math.inf) - log.packed_at[number]
        is_in_time = resting >= link.round_trip(log.sizes[number], log.ahead[number])
        found[number] = Decision.LEAVE if is_in_time else Decision.STAY
    return found


class LearnedForwards:
    """The forwards of one device that are remembered, the latest last. Callers hold the offloader's lock.

    Args:
        room: bytes; a forward that saves no more is left where it is.
    """

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self._learned: list[LearnedForward] = []
        #: What ``keep`` was told.
        self._keep: tuple[int, int] | None = None

    def learn(self, log: SaveLog, link: Link | None) -> None:
        """Takes in what a forward has left behind, in place of what was known of its like.

        Args:
            link: ``None`` where nothing has been moved that could tell.
        """
        if not log.asked_at and not log.alive:
            return  # a graph that was dropped: nothing was asked for, and nothing follows from that
        alike = [old for old in self._learned if old.sizes == log.sizes and old.owners == log.owners]
        others = [old for old in self._learned if old not in alike]
        times = 1 + sum(old.times for old in alike)
        learned = LearnedForward(log, link, self.room, times)
        if self._keep is not None:
            learned.keep(*self._keep)
        self._learned = [*others, learned][-_MOST_LEARNED:]

    def keep(self, nbytes: int, newest: int) -> None:
        """Of a forward that is alike so many bytes stay, whatever the link may be.

        Args:
            newest: bytes that stay of the newest, before any other does.
        """
        if self._keep != (nbytes, newest):
            self._keep = (nbytes, newest)
            for learned in self._learned:
                learned.keep(nbytes, newest)

    @property
    def most_bytes(self) -> int:
        """Bytes of the storages that may leave, of the forward that has most of them."""
        return max((sum(one.sizes[number] for number in _taken_saves(one.log)) for one in self._learned), default=0)

    def most_alike(self) -> int:
        """How many forwards there were of the kind that was most frequent."""
        return max((learned.times for learned in self._learned), default=0)

    def forget_how_many(self) -> None:
        """Counts anew how many forwards are alike."""
        for learned in self._learned:
            learned.times = 0

    def all(self) -> list[LearnedForward]:
        """All that a forward may turn out to fit, the latest first."""
        return self._learned[::-1]


class Kept(NamedTuple):
    """A storage that stays because the program keeps it alive, and the save that it is."""

    storage: Callable[[], object]
    number: int


class ForwardRecord(FinalizerRecord["Forward"]):
    """A weak reference to a forward, and what that leaves behind."""

    __slots__ = ("log", "recorder", "saves")
    log: SaveLog
    recorder: StepRecorder | None
    #: The saved tensors of its device, which learn from it; weak, since they hold the record.
    saves: weakref.ref[Any]

    def on_finalized(self) -> None:
        """Its thread has begun another one, and its graph is gone."""
        if (saves := self.saves()) is not None:
            saves.learn(self)


class Forward:
    """One forward of one thread on one device: the log of its saves, and the learnt one that it follows.

    Its thread holds it until the next forward begins, and so do the handles of its graph.
    """

    def __init__(self, sequence: int, remembered: LearnedForwards) -> None:
        #: Names it in the prefetch order.
        self.sequence = sequence
        self.log = SaveLog()
        #: What the prefetch order calls each save that has a handle.
        self.positions: dict[int, int] = {}
        #: Whether whatever is saved now belongs to another forward: all that has a handle was asked for. So it is where
        #: one context surrounds many steps. One that is never over ends when it is very long.
        self.is_over = False
        #: Storages that stay although they could move, by name, for further saves of them.
        self.kept: dict[Hashable, Kept] = {}
        #: Writes down what becomes of its saves, where that may be followed.
        self.recorder: StepRecorder | None = None
        #: The learnt one that it follows.
        self.learned: LearnedForward | None = None
        self._remembered = remembered
        self._fitting: list[LearnedForward] = []  # those that it may still turn out to fit, with that in front
        self._expected: Iterator[tuple[int, int]] = iter(())  # the size and the owner of each save to come, as it says
        self._rank = 0
        self._in_order: LearnedForward | None = None  # the one in whose order backward goes

    def save(self, nbytes: int, owner: int | None, seconds: float, ahead: int) -> Decision:
        """The next save; what to do with it, if it takes its storage.

        Args:
            nbytes: of the storage's footprint.
            owner: the number of the first save of its storage, -1 if it shares what was taken in another forward,
                ``None`` if it is the first.
            seconds: the time.
            ahead: bytes that are on their way out.
        """
        log = self.log
        number = len(log.sizes)
        owner = number if owner is None else owner
        if number == 0:
            self._follow_one_of(self._remembered.all(), number, nbytes, owner)
        elif self.learned is not None and next(self._expected, None) != (nbytes, owner):
            self._follow_one_of(self._fitting, number, nbytes, owner)
        log.sizes.append(nbytes)
        log.owners.append(owner)
        log.packed_at.append(seconds)
        log.ahead.append(ahead)
        self.is_over = number + 1 >= _MOST_SAVES
        learned = self.learned
        if learned is None or owner != number:
            return Decision.UNKNOWN
        if learned.decisions[number] is Decision.ALIVE:
            skipped = learned.log.alive[number] + 1
            if skipped == _LOOK_AGAIN or (self.recorder is not None and self.recorder.looks_again):
                return Decision.UNKNOWN
            log.alive[number] = skipped
        return learned.decisions[number]

    def _follow_one_of(self, remembered: Sequence[LearnedForward], number: int, nbytes: int, owner: int) -> None:
        """Follows the first of ``remembered`` that has a save like this one, from the next save on."""
        self._fitting = [learned for learned in remembered if learned.fits(number, nbytes, owner)]
        self.learned = learned = self._fitting[0] if self._fitting else None
        if learned is not None:
            self._expected = islice(zip(learned.sizes, learned.owners, strict=True), number + 1, None)

    def taken(self, number: int) -> None:
        """Save ``number`` has taken its storage against the decision: whether that lives will be seen."""
        self.log.alive.pop(number, None)

    def asked(self, number: int, seconds: float) -> Sequence[int] | None:
        """Save ``number`` is asked for; the positions in the order of need, if what was expected has changed."""
        log = self.log
        if number in log.asked_at:
            return None  # a second backward
        first = not log.asked_at
        log.asked_at[number] = seconds
        self.is_over = self.is_over or len(log.asked_at) >= len(self.positions)
        if first:  # more may be saved later, so what is followed now is noted apart from what still fits
            log.before_backward = len(log.sizes)
            fitting = [learned for learned in self._fitting if len(learned.sizes) == len(log.sizes)]
            self._in_order = fitting[0] if fitting else None
        learned = self._in_order
        if learned is None or number >= len(learned.sizes) or learned.owners[number] in learned.log.alive:
            return None
        order, rank, positions = learned.order, self._rank, self.positions
        self._rank += 1
        if rank < len(order) and order[rank] == number:
            return [positions[number] for number in order if number in positions] if rank == 0 else None
        self._in_order = None
        return [*reversed(positions.values())] if rank else None

    def was_alive(self, number: int) -> None:
        """The original of the storage that save ``number`` took was alive when it was asked for."""
        self.log.alive[number] = 0
