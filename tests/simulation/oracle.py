"""The best that could be done: a schedule that knows how long everything takes. Plain arithmetic."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from eager_offload.machine import Machine
from eager_offload.planning.predict import Problem


@dataclass
class Program:
    """What a step saves and asks for, by storage: the bytes, and how many operators ran before each of these moments.

    From when it is asked for first until it is asked for last a storage has to be there.
    """

    nbytes: list[int]
    saved_at: list[int]
    first_asked_at: list[int]
    last_asked_at: list[int]

    @classmethod
    def of(cls, problem: Problem) -> Program:
        """What the schedule is told of a step that was traced."""
        traced, storages = problem.program, problem.program.storages
        last = {traced.saves[ask.save].storage: ask.op for ask in traced.asks}
        return cls(
            nbytes=[one.nbytes for one in storages],
            saved_at=[one.saved for one in storages],
            first_asked_at=[one.asked for one in storages],
            last_asked_at=[last[number] for number in range(len(storages))],
        )


def best_step(program: Program, seconds: Sequence[float], forward_ops: int, link: Machine, room: int) -> float:
    """How long a step takes under a schedule that knows the time of every operator.

    Copies start the moment that their bytes and the link are ready, reloads the moment that there is room; the newest
    storages that fit stay, as many as turn out best. The host takes no time.

    Args:
        seconds: of every operator, forward first.
        forward_ops: how many of them are forward's.
        room: bytes of saved storages on the device at any time, on their way included.
    """
    kept, choices = 0, [len(program.nbytes)]
    for number in reversed(range(len(program.nbytes))):
        kept += program.nbytes[number]
        if kept > room:
            break
        choices.append(number)
    return min(_step(program, seconds, forward_ops, link, room, leaving) for leaving in choices)


@dataclass
class _Held:
    """Bytes on the device, and when the next of them go."""

    room: int
    nbytes: int = 0
    going: list[tuple[float, int]] = field(default_factory=list)  # a heap of times and bytes

    def take(self, nbytes: int, ready: float) -> float:
        """When ``nbytes`` more fit, not before ``ready``. What is larger than the room has it alone."""
        while self.going and (self.going[0][0] <= ready or self.nbytes + nbytes > self.room):
            when, gone = heapq.heappop(self.going)
            ready = max(ready, when)
            self.nbytes -= gone
        self.nbytes += nbytes
        return ready

    def let_go(self, nbytes: int, when: float) -> None:
        heapq.heappush(self.going, (when, nbytes))


def _step(
    program: Program, seconds: Sequence[float], forward_ops: int, link: Machine, room: int, leaving: int
) -> float:
    """The first ``leaving`` storages leave, the others stay."""
    held, now, link_free = _Held(room), 0.0, 0.0
    away_at: dict[int, float] = {}
    at = 0
    for number, nbytes in enumerate(program.nbytes):
        while at < program.saved_at[number]:
            now += seconds[at]
            at += 1
        now = held.take(nbytes, now)
        if number < leaving:
            link_free = away_at[number] = max(link_free, now) + nbytes / link.out
            held.let_go(nbytes, link_free)
    now += sum(seconds[at:forward_ops])
    return _backward(program, seconds, forward_ops, link, held, now, away_at)


def _backward(
    program: Program,
    seconds: Sequence[float],
    forward_ops: int,
    link: Machine,
    held: _Held,
    now: float,
    away_at: dict[int, float],
) -> float:
    firsts, lasts = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for number, position in enumerate(program.first_asked_at):
        firsts[position].append(number)
        lasts[program.last_asked_at[number]].append(number)
    begun, link_free = now, now
    for position in range(forward_ops, len(seconds)):
        for number in firsts[position]:
            if number in away_at:
                nbytes = program.nbytes[number]
                link_free = held.take(nbytes, max(begun, link_free, away_at[number])) + nbytes / link.back
                now = max(now, link_free)
        now += seconds[position]
        for number in lasts[position]:
            held.let_go(program.nbytes[number], now)
    return now
