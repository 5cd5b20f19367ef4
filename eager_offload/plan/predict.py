"""How long a step takes, and how much memory, when some of its storages move: arithmetic on a ``Program``.

[Note: the model]
Compute runs operators in order. Each direction of the link carries one storage at a time, in the order of saving and in
that of asking, as the library's schedule has them:

    out    a copy starts when its storage was saved and the link is free. At most ``window`` bytes are on their way, or
           one storage that is larger; where there is no room, compute waits for the oldest.
    back   a reload starts when its copy out is over and the link is free, at most ``ahead`` bytes before they are asked
           for, or one storage that is larger, and none with 0; where it has not arrived, compute waits. Backward starts
           the first ones.

A storage takes its bytes from the operator that makes it until forward has let go of it and its copy is over, and again
from the start of its reload until backward drops it. One that is asked for before its copy is over stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import NamedTuple

from eager_offload.plan.program import Program
from eager_offload.tiers.memory import PAGE, round_up

__all__ = ["Moves", "Prediction", "Problem", "floor_seconds"]

#: For each storage that may move, whether it does.
Moves = tuple[bool, ...]


class Prediction(NamedTuple):
    """What comes of a decision."""

    step_seconds: float
    peak_bytes: int
    moved_bytes: int
    """That travel out and back; what is asked for before its copy is over is none of them."""


def floor_seconds(forward: float, backward: float, nbytes: float, out: float, back: float) -> float:
    """Each half of a step takes as long as its compute or as its transfers, whichever is longer."""
    return max(forward, nbytes / out) + max(backward, nbytes / back)


@dataclass(frozen=True)
class Problem:
    """A step on a device behind a link."""

    program: Program
    op_seconds: Sequence[float]
    """How long each operator takes."""
    out: float
    back: float
    """Bytes a second."""
    window: int
    """Bytes on their way out: ``max_inflight_bytes``."""
    ahead: int
    """Bytes brought back early: ``prefetch_bytes``."""
    room: int | None = None
    """Bytes that may rest in the tier at one time; ``None``: any number."""

    @cached_property
    def begins(self) -> list[float]:
        """When each operator begins where compute never waits, and at last when the step ends."""
        return list(accumulate(self.op_seconds, initial=0.0))

    @property
    def compute_seconds(self) -> float:
        """Of a step in which compute never waits."""
        return self.begins[-1]

    @property
    def forward_seconds(self) -> float:
        """Of its forward."""
        return self.begins[self.program.forward_ops]

    def with_more(self, nbytes: int) -> Problem:
        """Where so many other bytes more live at each operator, or fewer."""
        other = tuple(max(one + nbytes, 0) for one in self.program.other_bytes)
        return replace(self, program=replace(self.program, other_bytes=other))

    @cached_property
    def by_save(self) -> list[int]:
        """The storages in the order in which they leave."""
        storages = self.program.storages
        return sorted(range(len(storages)), key=lambda number: storages[number].saved)

    @cached_property
    def by_ask(self) -> list[int]:
        """The storages in the order in which they are asked for."""
        storages = self.program.storages
        return sorted(range(len(storages)), key=lambda number: storages[number].asked)

    def floor_seconds(self, moved_bytes: int) -> float:
        """What no order of so many bytes goes below."""
        backward = self.compute_seconds - self.forward_seconds
        return floor_seconds(self.forward_seconds, backward, moved_bytes, self.out, self.back)

    def within_room(self, moves: Moves) -> Moves:
        """``moves`` without the newest ones, as far as the tier has no room for all."""
        if self.room is None or (over := self.tier_bytes(moves) - self.room) <= 0:
            return moves
        found = list(moves)
        for number in reversed(self.by_save):
            if over > 0 and found[number] and number not in self._parts:
                found[number] = False
                over -= self._pages[number]
        return tuple(found)

    def tier_bytes(self, moves: Moves) -> int:
        """Bytes that rest in the tier where those move, in whole pages: between forward and backward all of them.

        Storages of which a part leaves are among them in any case: each step decides about these anew.
        """
        return sum(nbytes for number, nbytes in enumerate(self._pages) if moves[number] or number in self._parts)

    @cached_property
    def _pages(self) -> list[int]:
        return [round_up(storage.moved_bytes, PAGE) for storage in self.program.storages]

    @cached_property
    def _parts(self) -> frozenset[int]:
        storages = self.program.storages
        return frozenset(number for number, one in enumerate(storages) if one.moved_bytes != one.nbytes)

    def predict(self, moves: Moves) -> Prediction:
        """What comes of it where those storages move; see [Note: the model]."""
        return _Step(self, moves).run()

    def returning(self, moves: Moves) -> frozenset[int]:
        """The storages that travel out and back where those move."""
        step = _Step(self, moves)
        step.run()
        return frozenset(step.returning)

    def living(self, moves: Moves) -> list[int]:
        """Bytes that live at each operator where those move."""
        step = _Step(self, moves)
        step.run()
        return step.living()


class _Step:
    """One step on its way."""

    def __init__(self, problem: Problem, moves: Moves) -> None:
        self.problem, self.moves = problem, moves
        self.storages = problem.program.storages
        #: By how much compute is behind one that never waits.
        self.behind = 0.0
        self.change = [0] * (len(problem.op_seconds) + 1)
        #: What is on its way out, the oldest first, with the time at which its copy is over; how many bytes that is.
        self.leaving: dict[int, float] = {}
        self.leaving_bytes = 0
        #: What has come back.
        self.returning: list[int] = []

    def run(self) -> Prediction:
        problem, moves, change = self.problem, self.moves, self.change
        for number, storage in enumerate(self.storages):
            change[storage.made] += storage.nbytes
            if not moves[number]:
                change[storage.dropped] -= storage.nbytes
        self._forward()
        self._backward()
        assert not self.leaving, "all that moves is asked for"
        peak = max(self.living(), default=0)
        moved = sum(self.storages[number].moved_bytes for number in self.returning)
        return Prediction(problem.compute_seconds + self.behind, peak, moved)

    def living(self) -> list[int]:
        """Bytes that live at each operator, once it has run."""
        return list(map(add, accumulate(self.change[:-1]), self.problem.program.other_bytes))

    def _forward(self) -> None:
        problem, begins, link_free = self.problem, self.problem.begins, 0.0
        for number in problem.by_save:
            if not self.moves[number]:
                continue
            storage = self.storages[number]
            now = begins[storage.saved] + self.behind
            self._note_left(now)
            while self.leaving and self.leaving_bytes + storage.moved_bytes > problem.window:
                over = next(iter(self.leaving.values()))
                self.behind += over - now
                now = over
                self._note_left(now, storage.saved)
            link_free = max(now, link_free) + storage.moved_bytes / problem.out
            self.leaving[number] = link_free
            self.leaving_bytes += storage.moved_bytes

    def _note_left(self, now: float, op: int = 0) -> None:
        """Copies that are over by ``now``, at operator ``op`` if compute waits there, have given their bytes back."""
        while self.leaving:
            number, over = next(iter(self.leaving.items()))
            if over > now:
                return
            self._leave(number)
            # From that operator on it takes no bytes.
            begun = min(bisect_left(self.problem.begins, over - self.behind), len(self.problem.op_seconds))
            self.change[max(begun, self.storages[number].freed, op)] -= self.storages[number].nbytes

    def _leave(self, number: int) -> None:
        """A storage is not on its way any more."""
        del self.leaving[number]
        self.leaving_bytes -= self.storages[number].moved_bytes

    def _backward(self) -> None:
        problem, begins, storages = self.problem, self.problem.begins, self.storages
        order = [number for number in problem.by_ask if self.moves[number]]
        arrives: dict[int, float] = {}
        link_free, ahead, following = 0.0, 0, 0
        op = problem.program.forward_ops
        for place, number in enumerate([-1, *order]):
            if number >= 0:  # after what the beginning of backward starts
                op = storages[number].asked
            now = begins[op] + self.behind
            self._note_left(now)
            # As many as fit begin to come back; what is asked for now does in any case.
            while following < len(order):
                coming = order[following]
                storage = storages[coming]
                is_full = not problem.ahead or (ahead and ahead + storage.moved_bytes > problem.ahead)
                if is_full and following >= place:
                    break
                following += 1
                ahead += storage.moved_bytes
                if coming in self.leaving:  # still here: it stays
                    self._leave(coming)
                    self.change[storage.dropped] -= storage.nbytes
                    arrives[coming] = now
                    continue
                self.returning.append(coming)
                link_free = max(now, link_free) + storage.moved_bytes / problem.back
                arrives[coming] = link_free
                self.change[op] += storage.nbytes
                self.change[storage.dropped] -= storage.nbytes
            if number >= 0:
                ahead -= storages[number].moved_bytes
                if arrives[number] > now:
                    self.behind += arrives[number] - now
                    self._note_left(arrives[number], op)
