"""The part of a step's movable bytes that moves, so that a budget of memory holds, or that the link hides.

Numbers only, like ``core/schedule.py``. ``Controller`` says the fraction when a step begins, and is told afterwards how
much memory the step took and how long compute waited in it; ``eager/keeping.py`` takes the readings. ``share`` says
which storages make up the fraction, for a step table, a plan and a compiled graph alike.

[Note: the fraction]
Steps of one kind, such as those of one sequence length, have a state of their own. For each,

    memory   Peak memory is a rest and what stays, ``(1 - f) * movable``. The slope is known, so a single step tells the
             least fraction that fits. The highest rest of the last steps with about the same fraction counts: the less
             moves, the less is on its way.
    free     What the link hides follows from two steps: ``hidden`` says it by when their storages were saved and asked
             for. After two steps in a row that stall, a quarter less moves.

and the larger fraction is in force: memory comes first. A kind that is not decided has the free fraction of the kind
decided last. Steps that nothing is known of are one kind together. All of these moves if there is a budget, which they
must not exceed either; else their newest bytes stay, by the bytes of the step before.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

#: Of the budget: is left free, and what a change has to free or fill for it to be made.
_MARGIN = 0.02
#: The memory fraction falls by so much at once, or by the margin, if that is less: small changes are not made.
_LESS = 1 / 16
#: Of so many steps the rests count, where the fractions differ by less than ``_LIKE``.
_REMEMBERED, _LIKE = 64, 1 / 8
#: Of a step: the part for which compute may wait for what a link hides.
_WAITED = 0.01
#: Of a step: a wait that is too long, and of what moves, the part that does after two such steps in a row.
_STALLED, _REDUCED = 0.02, 0.75
#: A link is taken to be of such a part of its pace where windows are sized, and a copy to be noticed so many seconds
#: after it is over: a host that waits for that has to be ahead of compute by then.
_SLOWER, _NOTICED = 2 / 3, 1e-3
#: The bytes that are brought back early are known to such a part.
_PARTS = 16
#: A pace is looked for within so many octaves around that of the link, which are halved so often.
_OCTAVES, _HALVINGS = 32.0, 16


@dataclass(frozen=True)
class Timeline:
    """A step as the rule by pace sees it: its storages in the order in which they are saved, in bytes and seconds."""

    nbytes: Sequence[int]
    """Of each storage."""
    final: Sequence[float]
    """When each may leave."""
    unpacked_at: Sequence[float]
    """When each is asked for first."""
    unpacks: Sequence[int]
    """Those that are asked for, in that order."""
    turn: float
    """When backward begins."""
    seconds: float
    """Of the step, in which compute never waits."""
    out: float
    back: float
    """Bytes a second."""
    window: int
    """Bytes on their way out at most."""
    ahead: int
    """Bytes brought back early at most."""
    first: Collection[int] = ()
    """Those that move before any other does, whatever the link hides."""

    @cached_property
    def leaving(self) -> list[int]:
        """The storages in the order in which they may leave."""
        return sorted(range(len(self.final)), key=self.final.__getitem__)

    @cached_property
    def called(self) -> list[float]:
        """When each is brought back at the earliest: the look-ahead, which what stays takes a part of, comes to it."""
        called, first, between = [self.turn] * len(self.nbytes), 0, 0
        for at, number in enumerate(self.unpacks):
            between += self.nbytes[number]
            while between > self.ahead and first < at:
                between -= self.nbytes[self.unpacks[first]]
                first += 1
            if first:
                called[number] = self.unpacked_at[self.unpacks[first - 1]]
        return called

    @cached_property
    def known(self) -> dict[float, list[bool]]:
        """What links of some paces hide: the parts of one step are bisected through the same paces."""
        return {}


def share(step: Timeline, fraction: float) -> list[bool]:
    """Returns of each storage whether it moves, where that part of the bytes does: the least that is not less.

    1. A link of the least pace is looked for that hides so many bytes; see ``hidden``. The pace is bisected.
    2. What moves behind a slower link moves behind a faster one too. So less is always a part of more.
    3. Between the last two paces the oldest move.

    This chooses among ``step.first``, and among the others once all of those move.
    """
    nbytes = step.nbytes
    due = sum(nbytes) - round((1 - fraction) * sum(nbytes))
    least, most = set[int](), set(step.first)
    if sum(nbytes[number] for number in most) < due:
        least, most = most, set(range(len(nbytes)))
    low, high = -_OCTAVES, _OCTAVES
    for _ in range(_HALVINGS):
        if len(most) - len(least) <= 1:
            break
        middle = (low + high) / 2
        if (moves := step.known.get(middle)) is None:
            moves = step.known[middle] = hidden(step, 2.0**middle)
        between = least | {number for number in most if moves[number]}
        if sum(nbytes[number] for number in between) < due:
            low, least = middle, between
        else:
            high, most = middle, between
    due -= sum(nbytes[number] for number in least)
    for number in sorted(most - least):
        if due <= 0:
            break
        due -= nbytes[number]
        least.add(number)
    return [number in least for number in range(len(nbytes))]


def hidden(step: Timeline, pace: float = 1.0) -> list[bool]:
    """Returns of each storage whether it moves, where a link hides that which is so many times as fast.

    Storages are taken in the order in which they may leave. One moves if with those taken before it compute waits for
    at most ``_WAITED`` of the step, for both queues together:

        out    copies run one after the other, and forward waits where the window is full
        back   copies run one after the other, in the order in which they are asked for, each once it is called
    """
    out, back, allowed = step.out * pace, step.back * pace, _WAITED * step.seconds
    moves = [False] * len(step.nbytes)
    leaving, inflight, free, waited = deque[tuple[float, int]](), 0, -math.inf, 0.0
    queue: list[_Reload] = []
    for number in step.leaving:
        nbytes, unpacked_at, now = step.nbytes[number], step.unpacked_at[number], step.final[number] + waited
        while leaving and leaving[0][0] <= now:
            inflight -= leaving.popleft()[1]
        over, begins = inflight + nbytes - step.window, now
        for gone, freed in leaving:
            if over <= 0 or begins > now + allowed:
                break
            over, begins = over - freed, gone
        waits, gone = waited + begins - now, max(free, begins) + nbytes / out
        place = bisect_right(
            queue, -unpacked_at, key=lambda one: -one.unpacked_at
        )  # the end, where backward asks in reverse
        after = queue[place:]
        del queue[place:]
        queue.append(_reload(queue, unpacked_at, nbytes / back, step.called[number]))
        for one in after:
            queue.append(_reload(queue, one.unpacked_at, one.seconds, one.called))
        if waits + queue[-1].late <= allowed and gone + nbytes / back <= unpacked_at + allowed:
            moves[number] = True
            leaving.append((gone, nbytes))
            inflight, free, waited = inflight + nbytes, gone, waits
        else:
            queue[place:] = after
    return moves


class Least(NamedTuple):
    """The least bytes of windows with which no window of a step is full and no storage late."""

    window: int
    """On their way out."""
    ahead: int
    """Brought back early, and the newest that stay."""
    in_vain: set[int]
    """Storages that are asked for before a copy out could be over: to move them would free nothing."""


def least_windows(step: Timeline) -> Least | None:
    """Returns the least windows; ``None`` for a step whose link is busy even with the windows of ``step``.

    1. The newest storages, of as many bytes as are brought back early, stay. All others leave one after the other, as
       each may, and come back one after the other. One that is asked for too soon with any windows is left out.
    2. The bytes brought back early are the least with which each storage is away in time to be called, and called in
       time to be back. They are bisected.
    3. The bytes on their way out are the most that there are at one time.

    A link is taken to be slower than it is, and its copies to be noticed late.
    """
    nbytes, final, out, back = step.nbytes, step.final, step.out * _SLOWER, step.back * _SLOWER
    before = [0, *accumulate(nbytes[number] for number in step.unpacks)]
    unpacked_at = [step.unpacked_at[number] for number in step.unpacks]
    newest = [*accumulate(nbytes[number] for number in reversed(step.leaving))]

    def staying(ahead: int) -> set[int]:
        return set(step.leaving[len(step.leaving) - bisect_right(newest, ahead) :])

    stays = staying(step.ahead)
    leaving = [number for number in step.leaving if number not in stays]
    too_soon = {one for one in leaving if final[one] + nbytes[one] / out + nbytes[one] / back > step.unpacked_at[one]}

    def needed(ahead: int) -> float:
        """Returns the most bytes on their way out; without end where ``ahead`` is too little."""
        left_out = staying(ahead) | too_soon
        begins, latest = dict[int, float](), math.inf
        for place in reversed(range(len(unpacked_at))):
            if (number := step.unpacks[place]) not in left_out:
                begins[number] = latest = min(latest, unpacked_at[place]) - nbytes[number] / back
                called = bisect_right(unpacked_at, latest)
                if called == 0 or before[place + 1] - before[called] > max(ahead, nbytes[number]):
                    return math.inf
        copies, inflight, peak, free = deque[tuple[float, int]](), 0, 0, -math.inf
        for number in step.leaving:
            if number not in left_out:
                while copies and copies[0][0] + _NOTICED <= final[number]:
                    inflight -= copies.popleft()[1]
                free = max(free, final[number]) + nbytes[number] / out
                if free > begins.get(number, math.inf):
                    return math.inf
                copies.append((free, nbytes[number]))
                inflight += nbytes[number]
                peak = max(peak, inflight)
        return peak

    low, high, window = 0, step.ahead, needed(step.ahead)
    if window > step.window:
        return None
    while high - low > max(high // _PARTS, 1):
        middle = (low + high) // 2
        if (found := needed(middle)) <= step.window:
            high, window = middle, found
        else:
            low = middle
    in_vain = {number for number in too_soon if final[number] + nbytes[number] / step.out > step.unpacked_at[number]}
    largest = max((nbytes[number] for number in leaving if number not in in_vain), default=1)
    return Least(max(int(window), 1), min(max(high, largest), step.ahead), in_vain)


class _Reload(NamedTuple):
    """A storage in the queue back, in which the last to be asked for is the first."""

    unpacked_at: float
    seconds: float
    called: float
    begins: float
    """When it has to begin, for it and those that are asked for after it to be there in time, or as late as those are
    anyway."""
    late: float
    """For how long compute waits for it and those that are asked for after it."""


def _reload(queue: Sequence[_Reload], unpacked_at: float, seconds: float, called: float) -> _Reload:
    """Returns what is in front of ``queue`` if it is asked for before all of that."""
    begins, late = (min(unpacked_at, queue[-1].begins), queue[-1].late) if queue else (unpacked_at, 0.0)
    begins -= seconds
    return _Reload(unpacked_at, seconds, called, max(begins, called), late + max(called - begins, 0.0))


@dataclass(slots=True)
class StepClass:
    """The steps of one kind so far."""

    memory: float = 1.0
    #: Of the last steps, the fraction and the bytes beside those that stayed.
    rests: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    #: The part that the link hides; ``None`` until that is decided.
    free: float | None = None
    #: Whether compute waited for too long in the last step with that.
    is_stalled: bool = False


class Controller:
    """Sets the fraction for each kind of step.

    Args:
        budget: bytes of the device; ``None`` for any number.
        part: the least that moves in steps of which it is not decided what the link hides.
        is_free: whether that is decided.
    """

    def __init__(self, budget: int | None, part: float = 0.0, *, is_free: bool = False) -> None:
        self.budget, self.is_free = budget, is_free
        #: The part of the last step that was judged for which compute waited.
        self.slowdown = 0.0
        self._part = part
        #: The steps that nothing is known of.
        self.unknown = StepClass()

    def fixed(self) -> Controller:
        """Returns one for steps that have no time of their own, with the part that was decided last."""
        return Controller(None, self._part)

    def fraction(self, kind: StepClass) -> float:
        """Returns the part of the movable bytes that moves in a step of that kind."""
        memory = 0.0 if self.budget is None else kind.memory
        return max(memory, self._part if kind.free is None else kind.free)

    def decide(self, kind: StepClass, part: float) -> None:
        """Has the link hide that part of steps of that kind, and of kinds that are not decided yet."""
        kind.free = self._part = part

    def observe_waits(self, kind: StepClass, fraction: float, part: float) -> None:
        """Learns from the part of a step for which compute waited; ``fraction``: with which the step was begun."""
        if kind.free is None or fraction != kind.free:
            return  # memory asked for more, or it was begun before a change
        self.slowdown = part
        was_stalled, kind.is_stalled = kind.is_stalled, part > _STALLED
        if was_stalled and kind.is_stalled:
            self.decide(kind, kind.free * _REDUCED)
            kind.is_stalled = False

    def observe_memory(
        self, kind: StepClass, peak: int, kept: int, movable: int, growth: int, *, is_exact: bool
    ) -> None:
        """Learns from the memory of a step that is over.

        Args:
            peak: bytes of the device that were used at one time.
            kept: movable bytes that stayed.
            movable: bytes that could have moved.
            growth: bytes that are used from now on, and were not when the step began, such as gradients.
            is_exact: ``False``: the peak was that at most, so more may stay, and less has to for ``growth`` alone.
        """
        if self.budget is None or not movable:
            return
        fraction, rest, growth = 1 - kept / movable, peak - kept, max(growth, 0)
        if is_exact:
            kind.rests.append((fraction, rest))
            rest = max(one for then, one in kind.rests if abs(then - fraction) <= _LIKE)
        small = self.budget * _MARGIN
        least = min(max(1 - (self.budget - small - rest - growth) / movable, 0.0), 1.0)
        if not is_exact:
            least = min(least, kind.memory + growth / movable)
        if least > kind.memory or kind.memory - least > min(small / movable, _LESS):
            kind.memory = min(least, 1.0)
