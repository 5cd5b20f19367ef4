"""What moves where the link carries what it can, all of the time: decisions for a search to begin with."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from eager_offload.plan.predict import Moves, Problem

#: By how much faster than it is the link is taken to be.
_PACES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0)
#: How closely a pace is searched for.
_BISECTIONS = 12


class Way(NamedTuple):
    """What a pace makes larger by which power of itself; see [Note: the search]."""

    window: float
    """The bytes on their way out."""
    back: float
    """The rate of the way back; infinite where nothing there is too late."""
    ahead: float
    """The bytes brought back early."""


WAYS = tuple(Way(*one) for one in itertools.product((0.0, 1.0), (0.0, 1.0), (0.0, 1.0, 8.0)))
WAYS += Way(0.0, math.inf, 0.0), Way(1.0, math.inf, 0.0)


def of_all_paces(problem: Problem) -> Iterator[Moves]:
    """What a link of every pace has moving."""
    for pace, way in itertools.product(_PACES, WAYS):
        yield paced(problem, pace, way)


def least_pace(problem: Problem, budget: int, way: Way, bisections: int = _BISECTIONS) -> Moves | None:
    """What a link of about the least pace has moving that makes it fit ``budget``; ``None`` where none does."""
    low, high = _PACES[0], _PACES[-1]
    found: Moves | None = None
    for _ in range(bisections):
        pace = math.sqrt(low * high)
        moves = paced(problem, pace, way)
        if problem.predict(moves).peak_bytes <= budget:
            found, high = moves, pace
        else:
            low = pace
    return found


def paced(problem: Problem, pace: float, way: Way) -> Moves:
    """What moves where the link is faster by ``pace`` and compute never waits."""
    storages = problem.program.storages
    moves, in_time = [False] * len(storages), _in_time(problem, pace, way)
    rate, window = problem.out * pace, problem.window * pace**way.window
    free, leaving, leaving_bytes = 0.0, deque[tuple[float, int]](), 0
    for number in problem.by_save:
        now, nbytes = problem.begins[storages[number].saved], storages[number].moved_bytes
        while leaving and leaving[0][0] <= now:
            leaving_bytes -= leaving.popleft()[1]
        if in_time[number] and (leaving_bytes + nbytes <= window or not leaving):
            moves[number] = True
            free = max(free, now) + nbytes / rate
            leaving.append((free, nbytes))
            leaving_bytes += nbytes
    return tuple(moves)


def _in_time(problem: Problem, pace: float, way: Way) -> list[bool]:
    """What comes back in time, if all of it moves and has left."""
    storages = problem.program.storages
    found = [way.back == math.inf] * len(storages)
    if all(found):
        return found
    rate, ahead = problem.back * pace**way.back, problem.ahead * pace**way.ahead
    free = room_since = problem.forward_seconds
    coming, coming_bytes = deque[tuple[float, int]](), 0
    for number in problem.by_ask:
        wanted, nbytes = problem.begins[storages[number].asked], storages[number].moved_bytes
        while coming and coming_bytes + nbytes > ahead:
            since, gone = coming.popleft()
            room_since, coming_bytes = max(room_since, since), coming_bytes - gone
        arrives = max(free, room_since) + nbytes / rate
        if arrives <= wanted:
            found[number] = True
            free = arrives
            coming.append((wanted, nbytes))
            coming_bytes += nbytes
    return found
