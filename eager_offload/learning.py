"""What one step teaches the next: the order of need, what is asked for too soon, what someone else keeps alive.

Numbers only, like ``schedule.py``: saves are counted from 0 in each forward, sizes are bytes, times are seconds.

[Note: a lesson is a hint]
    Forward   takes notes while a forward is packed and its graph unpacked; dies with the last handle of that graph
    Notes     what it leaves behind
    Lesson    what follows from them, for a forward that begins alike
A forward whose saves have the sizes and the sharing of a lesson, one after the other, follows it. At the first save
that differs it stops, and what is saved from there on is treated as if nothing had ever been learnt; at the first
unpack that is out of order the rest is expected in the reverse of packing again. So a lesson that does not fit costs
time at most, and shapes that change with every step are learnt and forgotten without ever being trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

__all__ = ["Advice", "Forward", "Lesson", "Lessons", "Link", "Notes", "Rate"]

#: How many lessons are remembered: the forwards of one step may differ, of a generator and a discriminator say.
_MOST_LESSONS = 8
#: A storage that someone else kept alive is taken again, to see, each time that a lesson was followed this often.
_LOOK_AGAIN = 16


class Advice(Enum):
    """What is to become of a storage that is saved now."""

    UNKNOWN = auto()
    """Nothing is known: the newest bytes stay, and it leaves when it is not among them any more."""
    LEAVE = auto()
    """It was not asked for before it could have been away and back: it leaves as soon as it is final."""
    STAY = auto()
    """It was asked for sooner than that: it stays, as long as it is among the newest bytes."""
    ALIVE = auto()
    """Its original was still alive when it was asked for, so that moving it frees nothing."""


@dataclass(slots=True)
class Notes:
    """What happened to one forward's saves; lists are by number of save."""

    sizes: list[int] = field(default_factory=list)
    #: The save that took the storage; its own number for one that did, -1 where an earlier forward did.
    owners: list[int] = field(default_factory=list)
    #: When it was packed; seconds.
    packed_at: list[float] = field(default_factory=list)
    #: Bytes that were on their way out before it.
    ahead: list[int] = field(default_factory=list)
    #: When each save was first asked for, in that order; seconds.
    asked_at: dict[int, float] = field(default_factory=dict)
    #: Those that took a storage whose original was alive when it was asked for.
    alive: set[int] = field(default_factory=set)
    #: How many forwards in a row have followed a lesson from the first save to the last.
    followed: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """What travels in a second; bytes, each way."""

    out: float
    back: float

    def round_trip(self, nbytes: int, ahead: int) -> float:
        """Seconds until ``nbytes`` bytes could be away and back, behind ``ahead`` others on their way out."""
        return (ahead + nbytes) / self.out + nbytes / self.back


class Rate:
    """What transfers in one direction have reached together."""

    __slots__ = ("_seconds", "_timed", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._timed = 0
        self._seconds = 0.0

    def add(self, nbytes: int, seconds: float | None) -> None:
        """A transfer that is over; ``None`` where nobody knows how long it took."""
        self.nbytes += nbytes
        if seconds is not None:
            self._timed += nbytes
            self._seconds += seconds

    @property
    def value(self) -> float | None:
        """Bytes a second; ``None`` where none of them could be timed."""
        return self._timed / self._seconds if self._seconds else None


class Lesson:
    """What follows from the notes of a forward whose graph is gone."""

    def __init__(self, notes: Notes, link: Link | None) -> None:
        self.sizes = notes.sizes
        self.owners = notes.owners
        #: The saves that were asked for, in that order.
        self.order = list(notes.asked_at)
        self.followed = notes.followed
        self.advice = _advice(notes, link)

    def fits(self, number: int, nbytes: int, owner: int) -> bool:
        """Whether save ``number`` of a forward is as it was in the one that this was learnt from."""
        return number < len(self.sizes) and self.sizes[number] == nbytes and self.owners[number] == owner


def _advice(notes: Notes, link: Link | None) -> list[Advice]:
    first_asked: dict[int, float] = {}
    for number, seconds in notes.asked_at.items():
        first_asked.setdefault(notes.owners[number], seconds)
    found = []
    for number, nbytes in enumerate(notes.sizes):
        asked = first_asked.get(number)
        if number in notes.alive:
            found.append(Advice.ALIVE)
        elif link is None:
            found.append(Advice.UNKNOWN)
        elif asked is None or asked - notes.packed_at[number] >= link.round_trip(nbytes, notes.ahead[number]):
            found.append(Advice.LEAVE)
        else:
            found.append(Advice.STAY)
    return found


class Lessons:
    """The lessons of one device, by the size of the first save. Whoever uses them holds the lane's lock."""

    def __init__(self) -> None:
        self._lessons: dict[int, Lesson] = {}

    def __len__(self) -> int:
        return len(self._lessons)

    def learn(self, notes: Notes, link: Link | None) -> None:
        """Takes in what a forward has left behind, in place of what was known of its like.

        Args:
            link: ``None`` where nothing has been moved that could tell.
        """
        if not notes.asked_at:
            return  # a graph that was dropped: nothing was asked for, and nothing follows from that
        self._lessons.pop(notes.sizes[0], None)
        self._lessons[notes.sizes[0]] = Lesson(notes, link)
        if len(self._lessons) > _MOST_LESSONS:
            del self._lessons[next(iter(self._lessons))]

    def about(self, nbytes: int) -> Lesson | None:
        """What is known of a forward whose first save has ``nbytes`` bytes."""
        return self._lessons.get(nbytes)


class Forward:
    """One forward of one thread on one device: the notes that are taken of it, and the lesson that it follows.

    Its thread holds it until the next forward begins, and so do the handles of its graph. When the last one goes, the
    notes go to ``leave``, in a finalizer: it may append to a deque, and nothing else.
    """

    __slots__ = ("_in_order", "_leave", "_lesson", "_lessons", "notes", "positions", "sequence")

    def __init__(self, sequence: int, lessons: Lessons, leave: Callable[[Notes], object]) -> None:
        #: Names it in the prefetch order.
        self.sequence = sequence
        self.notes = Notes()
        #: What the prefetch order calls each save; 0 for one that has no handle.
        self.positions: list[int] = []
        self._lessons = lessons
        self._leave = leave
        self._lesson: Lesson | None = None
        self._in_order = False

    def __del__(self) -> None:
        self._leave(self.notes)

    def save(self, nbytes: int, owner: int | None, seconds: float, ahead: int) -> Advice:
        """The next save; what to do with it, if it takes its storage.

        Args:
            nbytes: of the storage's footprint.
            owner: the number of the save that took its storage, -1 if that was in another forward, ``None`` if this
                one has to.
            seconds: the time.
            ahead: bytes that are on their way out.
        """
        notes = self.notes
        number = len(notes.sizes)
        owner = number if owner is None else owner
        if number == 0:
            self._lesson = self._lessons.about(nbytes)
        lesson = self._lesson
        if lesson is not None and not lesson.fits(number, nbytes, owner):
            lesson = self._lesson = None
        notes.sizes.append(nbytes)
        notes.owners.append(owner)
        notes.packed_at.append(seconds)
        notes.ahead.append(ahead)
        self.positions.append(0)
        if lesson is None or owner != number:
            return Advice.UNKNOWN
        advice = lesson.advice[number]
        if advice is Advice.ALIVE:
            if lesson.followed % _LOOK_AGAIN == _LOOK_AGAIN - 1:
                return Advice.UNKNOWN
            notes.alive.add(number)
        return advice

    def asked(self, number: int, seconds: float) -> Sequence[int] | None:
        """Save ``number`` is asked for; the positions in the order of need, if what was expected has changed."""
        notes = self.notes
        if number in notes.asked_at:
            return None  # a second backward
        rank = len(notes.asked_at)
        notes.asked_at[number] = seconds
        lesson = self._lesson
        if rank == 0:
            if lesson is None or len(lesson.sizes) != len(notes.sizes):
                return None
            notes.followed = lesson.followed + 1
            self._in_order = True
            if lesson.order[0] == number:
                return [self.positions[number] for number in lesson.order]
        if not self._in_order:
            return None
        assert lesson is not None
        if rank < len(lesson.order) and lesson.order[rank] == number:
            return None
        self._in_order = False
        return self.positions[::-1]

    def was_alive(self, number: int) -> None:
        """The original of the storage that save ``number`` took was alive when it was asked for."""
        self.notes.alive.add(number)
