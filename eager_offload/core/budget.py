"""Chooses the fraction of a step's movable bytes that moves, to keep a memory budget or to hide all copies.

Works on numbers only, as ``core/schedule.py`` does. ``Controller`` gives the fraction when a step begins, and receives
the step's memory and waits afterwards (``eager/keeping.py`` measures them). ``share`` chooses the storages for a
fraction, in step tables, plans and compiled graphs.

[Note: the fraction]
Each class of steps (e.g. of one sequence length) has two fractions, and the larger is in force:

    memory   peak = base + (1 - f) * movable. The slope is known, so one measured peak gives the smallest fraction that
             fits. ``base``, the peak less the kept bytes, is the maximum over recent steps with a similar f
             only, because moving fewer bytes also lowers the bytes in flight, which ``base`` contains.
    free     ``hidden`` derives the hidden fraction from the times of two steps. After two stalled steps in a row it
             falls by a quarter.

An undecided class takes the free fraction of the class that was decided last. Steps without a table form one class:
with a budget, everything moves; otherwise the newest bytes are kept, as many as the fraction leaves of the bytes that
the thread's previous step could have moved.
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

#: Fraction of the budget that is left free.
_MARGIN = 0.02
#: The memory fraction rises by any amount, but falls only by more than this, or by more than the margin divided by the
#: movable bytes if that is smaller.
_LESS = 1 / 16
#: ``base`` is the maximum over those of the last ``_REMEMBERED`` steps whose fractions differ from the latest one by at
#: most ``_LIKE``.
_REMEMBERED, _LIKE = 64, 1 / 8
#: Fraction of a step for which compute may wait while copies still count as hidden.
_WAITED = 0.01
#: A step has stalled if its waits are longer than ``_STALLED`` times the rest of it. After two stalled steps in a row,
#: the free fraction is multiplied by ``_REDUCED``.
_STALLED, _REDUCED = 0.02, 0.75
#: To size windows, the measured speed of the link is multiplied by ``_SLOWER``, and the host is assumed to notice the
#: end of a copy ``_NOTICED`` seconds late.
_SLOWER, _NOTICED = 2 / 3, 1e-3
#: The smallest prefetch window is found to within ``1 / _PARTS`` of its size.
_PARTS = 16
#: ``share`` bisects the pace, from ``_OCTAVES`` octaves below the link's to as many above, in ``_HALVINGS`` halvings.
_OCTAVES, _HALVINGS = 32.0, 16


@dataclass(frozen=True)
class Timeline:
    """The storages of a step in save order, with times in seconds from its beginning."""

    nbytes: Sequence[int]
    """Bytes of each storage."""
    final: Sequence[float]
    """The time from which each storage may be offloaded."""
    unpacked_at: Sequence[float]
    """The time of each storage's first unpack."""
    unpacks: Sequence[int]
    """The unpacked storages, in order."""
    turn: float
    """The beginning of backward."""
    seconds: float
    """Length of the step without waits."""
    out: float
    back: float
    """Link bandwidth, in bytes per second."""
    window: int
    """The in-flight window, in bytes."""
    ahead: int
    """The prefetch window, in bytes."""
    first: Collection[int] = ()
    """Storages that move before all others, hidden or not."""

    @cached_property
    def leaving(self) -> list[int]:
        """The storages, ordered by the time from which they may leave."""
        return sorted(range(len(self.final)), key=self.final.__getitem__)

    @cached_property
    def called(self) -> list[float]:
        """The earliest time of each reload: when the prefetch window reaches its storage. Kept storages also count."""
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
        """Results of ``hidden`` by the binary logarithm of the pace; bisections for different fractions share paces."""
        return {}


def share(step: Timeline, fraction: float) -> list[bool]:
    """Returns, per storage, whether it moves, so that at least ``fraction`` of the bytes do.

    1. Bisect the pace of a link to find the slowest link that would hide enough bytes (see ``hidden``).
    2. All storages that a slower link would hide move, so that the storages of a smaller fraction are always among
       those of a larger one.
    3. Of the storages that only the faster of the last two links would hide, the oldest move.

    Storages of ``step.first`` are chosen before all others, which move only if all of ``step.first`` does.
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
    """Returns, per storage, whether it moves if copies must be hidden, with a link that is ``pace`` times as fast.

    Greedy, in the order in which storages may leave: a storage moves if compute still waits for at most ``_WAITED`` of
    the step, for both queues together:

        out    copies run one after another; forward waits while the window is full
        back   reloads run one after another, in unpack order, none before its storage is called
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
        # The queue is in reverse order of unpacking. If backward unpacks in reverse order of saving, this is its end.
        place = bisect_right(queue, -unpacked_at, key=lambda one: -one.unpacked_at)
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
    """The smallest windows that are never full and with which no storage is late."""

    window: int
    """The in-flight window, in bytes."""
    ahead: int
    """The prefetch window, in bytes; as many of the newest bytes are kept."""
    exempt: set[int]
    """Storages that are needed before their copy could finish, so that moving them would free nothing."""


def least_windows(step: Timeline) -> Least | None:
    """Returns the smallest windows; ``None`` if even the windows of ``step`` are too small.

    1. The newest storages are kept, as many bytes as the prefetch window. All others are offloaded and reloaded one
       after another, except those that are needed too soon with any windows.
    2. Bisect the prefetch window, to find the smallest with which each copy out ends before its reload has to begin,
       and each reload may begin early enough.
    3. The in-flight window is the maximum of the bytes in flight.

    The link is assumed to be slower than measured, and its copies to be noticed late.
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
        """Returns the maximum of the bytes in flight; infinite if ``ahead`` is too small."""
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
    exempt = {number for number in too_soon if final[number] + nbytes[number] / step.out > step.unpacked_at[number]}
    largest = max((nbytes[number] for number in leaving if number not in exempt), default=1)
    return Least(max(int(window), 1), min(max(high, largest), step.ahead), exempt)


class _Reload(NamedTuple):
    """A storage in the queue of reloads, whose first element is the last to be unpacked."""

    unpacked_at: float
    seconds: float
    called: float
    begins: float
    """When it has to begin so that neither it nor a reload after it is late; ``called`` if that is later."""
    late: float
    """Seconds that compute waits for this and the later reloads."""


def _reload(queue: Sequence[_Reload], unpacked_at: float, seconds: float, called: float) -> _Reload:
    """Returns the reload that precedes all of ``queue``."""
    begins, late = (min(unpacked_at, queue[-1].begins), queue[-1].late) if queue else (unpacked_at, 0.0)
    begins -= seconds
    return _Reload(unpacked_at, seconds, called, max(begins, called), late + max(called - begins, 0.0))


@dataclass(slots=True)
class StepClass:
    """The controller's state for one class of steps."""

    memory: float = 1.0
    #: The fraction and ``base`` of the latest steps.
    bases: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    #: The free fraction; ``None`` until it is decided.
    free: float | None = None
    #: Whether the last step with this fraction stalled.
    is_stalled: bool = False


class Controller:
    """Sets the fraction for each class of steps.

    Args:
        budget: bytes of device memory; ``None``: unlimited.
        part: the free fraction of undecided classes.
        is_free: whether to decide the free fractions.
    """

    def __init__(self, budget: int | None, part: float = 0.0, *, is_free: bool = False) -> None:
        self.budget, self.is_free = budget, is_free
        #: The waits of compute in the last observed step, relative to the rest of the step.
        self.slowdown = 0.0
        self._part = part
        #: The class of unknown steps.
        self.unknown = StepClass()

    def fixed(self) -> Controller:
        """Returns a controller for steps that are not timed, with the fraction that was decided last."""
        return Controller(None, self._part)

    def fraction(self, kind: StepClass) -> float:
        """Returns the fraction of the movable bytes that moves in the next step of the class."""
        memory = 0.0 if self.budget is None else kind.memory
        return max(memory, self._part if kind.free is None else kind.free)

    def decide(self, kind: StepClass, part: float) -> None:
        """Sets the free fraction of a class, and of undecided classes."""
        kind.free = self._part = part

    def observe_waits(self, kind: StepClass, fraction: float, part: float) -> None:
        """Updates the free fraction from the waits of a finished step.

        Args:
            fraction: the fraction that was in force in the step.
            part: the time for which compute waited, relative to the rest of the step.
        """
        if kind.free is None or fraction != kind.free:
            return  # the memory fraction was in force, or the step began before a change
        self.slowdown = part
        was_stalled, kind.is_stalled = kind.is_stalled, part > _STALLED
        if was_stalled and kind.is_stalled:
            self.decide(kind, kind.free * _REDUCED)
            kind.is_stalled = False

    def observe_memory(
        self, kind: StepClass, peak: int, kept: int, movable: int, growth: int, *, is_exact: bool
    ) -> None:
        """Updates the memory fraction by the memory of a finished step.

        Args:
            peak: the step's peak, in bytes.
            kept: movable bytes that were kept.
            movable: bytes that could have moved.
            growth: bytes that were allocated in the step and stay in use (e.g. gradients).
            is_exact: whether ``peak`` is exact; otherwise it is an upper bound, and the fraction rises by no more than
                ``growth`` requires.
        """
        if self.budget is None or not movable:
            return
        fraction, base, growth = 1 - kept / movable, peak - kept, max(growth, 0)
        if is_exact:
            kind.bases.append((fraction, base))
            base = max(one for then, one in kind.bases if abs(then - fraction) <= _LIKE)
        small = self.budget * _MARGIN
        least = min(max(1 - (self.budget - small - base - growth) / movable, 0.0), 1.0)
        if not is_exact:
            least = min(least, kind.memory + growth / movable)
        if least > kind.memory or kind.memory - least > min(small / movable, _LESS):
            kind.memory = min(least, 1.0)
