"""The part of a step's movable bytes that moves, so that a budget of memory and a limit of waiting hold.

Numbers only, like ``schedule.py``. ``Controller`` says the fraction when a step begins, and is told afterwards how much
memory the step took and how long compute waited in it; ``eager/keeping.py`` takes the readings. ``even_share`` says
which storages make up the fraction, for a step table, a plan and a compiled graph alike.

[Note: the fraction]
Steps of one kind, such as those of one sequence length, have a state of their own. For each,

    memory   Peak memory is a rest and what stays, ``(1 - f) * movable``. The slope is known, so a single step tells the
             least fraction that fits. The highest rest of the last steps with about the same fraction counts: the less
             moves, the less is on its way.
    time     Compute waits for nothing up to some fraction, and for more beyond. The largest fraction within the limit
             is searched between one that was within the limit and one that was not, along the line through what was
             waited with the two (regula falsi). Once they are close the lower one is kept, until it exceeds the limit
             twice in a row, and more is tried ever more rarely.

and the larger fraction is in force: memory comes first. A new kind begins with the time fraction of the kind before.
Steps that nothing is known of are one kind together. All of these moves if there is a budget, which they must not
exceed either; else their newest bytes stay, by the bytes of the step before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Of the budget: is left free, and what a change has to free or fill for it to be made.
_MARGIN = 0.02
#: The memory fraction falls by so much at once, or by the margin, if that is less: small changes are not made.
_LESS = 1 / 16
#: Of so many steps the rests count, where the fractions differ by less than ``_LIKE``.
_REMEMBERED, _LIKE = 64, 1 / 8
#: Of a step: a wait that counts as none, since clocks are not more exact.
_HIDDEN = 0.005
#: How close the bounds of the time fraction come.
_NEAR = 1 / 40
#: So many steps are judged together, unless one of them alone waits for so many limits, or for less than one part.
_JUDGED, _CLEAR = 4, 3.0
#: The fraction that was found is left when it exceeds the limit by so much, twice in a row.
_SLACK = 1.2
#: After so many steps within the limit more is tried; each time after twice as many.
_PAUSE = 32


def even_share(nbytes: Sequence[int], is_late: Sequence[bool], fraction: float) -> list[bool]:
    """Returns of each storage whether it moves, where that part of the bytes does.

    Of the storages that are in time the same part moves all along forward, so that the link is as busy at its beginning
    as at its end. Those that are late stay first, the newest before the others.

    Args:
        nbytes: of the storages, in the order in which they are saved.
        is_late: whether each is asked for sooner than it could be away and back.
    """
    room = int((1 - fraction) * sum(nbytes))
    moves = [True] * len(nbytes)
    for number in reversed([number for number, late in enumerate(is_late) if late]):
        if nbytes[number] > room:
            room = 0  # it moves, and all before it
            break
        room -= nbytes[number]
        moves[number] = False
    in_time = [number for number, late in enumerate(is_late) if not late]
    total, due = sum(nbytes[number] for number in in_time), 0
    left = min(room, total)
    for number in reversed(in_time):
        due += nbytes[number] * left  # in parts of a byte, as many as there are bytes in time
        if nbytes[number] * total <= due:
            due -= nbytes[number] * total
            moves[number] = False
    return moves


@dataclass(slots=True)
class Tried:
    """A fraction, and the part of a step for which compute waited with it."""

    fraction: float
    waited: float


@dataclass(slots=True)
class Kind:
    """The steps of one kind so far."""

    memory: float = 1.0
    time: float = 1.0
    #: Of the last steps, the fraction and the bytes beside those that stayed.
    rests: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    #: The largest time fraction that was within the limit, and the smallest that was not.
    within: Tried | None = None
    beyond: Tried | None = None
    #: A larger fraction, which was beyond the limit as well.
    before: Tried | None = None
    #: How much more is tried next while nothing was beyond the limit.
    stride: float = _NEAR
    #: Seconds of the steps that are judged next, and how many these are; the first step after a change does not count.
    waited: float = 0.0
    compute: float = 0.0
    steps: int = -1
    #: How often in a row the fraction that was found was beyond the limit, and for how many steps it was within.
    exceeded: int = 0
    rested: int = 0
    pause: int = _PAUSE

    @property
    def is_found(self) -> bool:
        """Whether the time fraction is that of ``within``, as close to ``beyond`` as they come."""
        within, beyond = self.within, self.beyond
        if within is None or within.fraction != self.time:
            return False
        return beyond is not None and beyond.fraction - within.fraction <= _NEAR


class Controller:
    """Sets the fraction for each kind of step.

    Args:
        budget: bytes of the device; ``None`` for any number.
        limit: the part of a step without offload for which compute may wait; ``None`` for any.
        time: the time fraction of new kinds; without a limit that of all.
    """

    def __init__(self, budget: int | None, limit: float | None, time: float | None = None) -> None:
        self.budget = budget
        self.limit = None if limit is None else max(limit, _HIDDEN)
        #: The part of the steps that were judged last for which compute waited.
        self.slowdown = 0.0
        self._time = (0.0 if limit is None else 1.0) if time is None else time
        #: The steps that nothing is known of.
        self.unknown = self.new_kind()

    def without_time(self) -> Controller:
        """Returns one for steps that have no time of their own, with the time fraction that was found last."""
        return Controller(None, None, self._time)

    def new_kind(self) -> Kind:
        """Returns the state of a kind of steps that was not seen before."""
        return Kind(time=self._time)

    def fraction(self, kind: Kind) -> float:
        """Returns the part of the movable bytes that moves in a step of that kind."""
        memory = 0.0 if self.budget is None else kind.memory
        return max(memory, self._time if self.limit is None else kind.time)

    def observe_memory(self, kind: Kind, peak: int, kept: int, movable: int, growth: int, *, is_exact: bool) -> None:
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

    def observe_time(self, kind: Kind, fraction: float, waited: float, compute: float) -> None:
        """Learns from the time of a step that is over.

        Args:
            fraction: with which it was begun.
            waited: seconds for which compute waited.
            compute: its other seconds.
        """
        if self.limit is None or fraction != kind.time:
            return  # memory asked for more, or it was begun before a change
        kind.steps += 1
        if not kind.steps:
            return
        kind.waited, kind.compute = kind.waited + waited, kind.compute + compute
        part = kind.waited / max(kind.compute, 1e-12)
        if kind.steps == _JUDGED or not self.limit / _CLEAR < part < self.limit * _CLEAR:
            self.slowdown = part
            self._judge(kind, Tried(fraction, part), self.limit)

    def _judge(self, kind: Kind, tried: Tried, limit: float) -> None:
        """Takes in what came of the time fraction, and sets the next one."""
        if kind.is_found:
            kind.exceeded = kind.exceeded + 1 if tried.waited > limit * _SLACK else 0
            kind.rested += kind.steps
            if kind.exceeded == 2:
                kind.within, kind.beyond, kind.pause = None, tried, _PAUSE
            elif kind.rested >= kind.pause:
                kind.within, kind.beyond, kind.stride, kind.pause = tried, None, _NEAR, 2 * kind.pause
        elif tried.waited <= limit:
            kind.within = tried
            if kind.beyond is not None and kind.beyond.fraction <= tried.fraction:
                kind.beyond = None
        else:
            kind.before, kind.beyond = kind.beyond, tried
            if kind.within is not None and kind.within.fraction >= tried.fraction:
                kind.within = None
        kind.waited, kind.compute, kind.steps = 0.0, 0.0, 0
        self._time = kind.time = _next(kind, limit)
        if kind.time != tried.fraction:
            kind.steps, kind.rested, kind.exceeded = -1, 0, 0


def _next(kind: Kind, limit: float) -> float:
    """Returns the time fraction that is tried next."""
    within, beyond = kind.within, kind.beyond
    if beyond is None:
        if within is None:
            return kind.time
        stride, kind.stride = kind.stride, 2 * kind.stride
        return min(within.fraction + stride, 1.0)
    if within is None:
        # As if a step took as long as its transfers; or along the line through the last two, where that leads further.
        guess = beyond.fraction * (1 + limit) / (1 + beyond.waited)
        before = kind.before
        if before is not None and before.fraction > beyond.fraction and before.waited > beyond.waited:
            slope = (before.waited - beyond.waited) / (before.fraction - beyond.fraction)
            guess = min(guess, max(beyond.fraction - (beyond.waited - limit) / slope, beyond.fraction / 2))
        return max(min(guess, beyond.fraction - _NEAR), 0.0)
    gap = beyond.fraction - within.fraction
    if gap <= _NEAR:
        return within.fraction
    part = (limit - within.waited) / max(beyond.waited - within.waited, 1e-12)
    return within.fraction + gap * min(max(part, 0.2), 0.8)
