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

Where a codec packs a storage, what was packed takes bytes beside it until the copy is over, and in its place from the
start of the reload until it is asked for. Packing and unpacking are compute.

In a compiled graph every transfer and wait has its place before it runs (``ordered``). It holds a source until the
window has to have its room, or forward ends, and what is in use leaves the room that it was brought back in at once.
So its peak depends on no time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import NamedTuple

from eager_offload.planning.program import Program, Storage
from eager_offload.tiers.memory import PAGE, round_up

#: For each storage that may move, whether it does.
Moves = tuple[bool, ...]


class Prediction(NamedTuple):
    """What comes of a decision."""

    step_seconds: float
    peak_bytes: int
    moved_bytes: int
    """That travel out and back; what is asked for before its copy is over is none of them."""


class Course(NamedTuple):
    """The same, operator by operator."""

    step_seconds: float
    living: tuple[int, ...]
    """Bytes that live while each operator runs."""
    returning: tuple[int, ...]
    """The numbers of the storages that go out and come back, in order."""

    @property
    def peak_bytes(self) -> int:
        """Bytes that live at one time, at most."""
        return max(self.living, default=0)


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
    memory: float = math.inf
    """Bytes a second that a codec reads and writes."""
    ordered: bool = False
    """Whether the order of transfers and waits is that of a compiled graph."""

    @cached_property
    def begins(self) -> list[float]:
        """When each operator begins where compute never waits and no codec packs, and at last when the step ends."""
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

    @property
    def packs(self) -> bool:
        """Whether a codec packs any of its storages."""
        return any(storage.packing is not None for storage in self.program.storages)

    def packing(self, *, pays: bool) -> Problem:
        """With codecs for those only where the link saves more time than they take, if it ``pays``; else for none."""

        def chosen(storage: Storage) -> Storage:
            packing = storage.packing
            if packing is None:
                return storage
            takes = (packing.pack_bytes + packing.unpack_bytes) / self.memory
            saves = (storage.nbytes - packing.nbytes) * (1 / self.out + 1 / self.back)
            return storage if pays and takes < saves else storage._replace(moved_bytes=storage.nbytes, packing=None)

        storages = tuple(map(chosen, self.program.storages))
        return replace(self, program=replace(self.program, storages=storages))

    def with_forced(self, moves: Moves) -> Moves:
        """``moves`` with those that move whatever is decided."""
        return tuple(one or number in self._forced for number, one in enumerate(moves)) if self._forced else moves

    @cached_property
    def _forced(self) -> frozenset[int]:
        return frozenset(number for number, one in enumerate(self.program.storages) if one.is_forced)

    def within_room(self, moves: Moves) -> Moves:
        """The same without the newest of the others, as far as the tier has no room for all."""
        moves = self.with_forced(moves)
        if self.room is None or (over := self.tier_bytes(moves) - self.room) <= 0:
            return moves
        found = list(moves)
        for number in reversed(self.by_save):
            if over > 0 and found[number] and number not in self._parts | self._forced:
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
        return frozenset(number for number, one in enumerate(storages) if not one.is_whole)

    def predict(self, moves: Moves) -> Prediction:
        """What comes of it where those storages move; see [Note: the model]."""
        return _Step(self, moves).run()

    def course(self, moves: Moves) -> Course:
        """The same, operator by operator."""
        step = _Step(self, moves)
        return Course(step.run().step_seconds, tuple(step.living()), tuple(step.returning))


class _Step:
    """One step on its way. A search asks for thousands of them, so loops read numbers once."""

    def __init__(self, problem: Problem, moves: Moves) -> None:
        self.problem, self.moves = problem, moves
        self.storages = problem.program.storages
        #: By how much compute is behind one that never waits.
        self.behind = 0.0
        self.change = [0] * (len(problem.op_seconds) + 1)
        #: What is on its way out, the oldest first: the time at which its copy is over, and its number.
        self.leaving: deque[tuple[float, int]] = deque()
        #: The numbers of that, but for what was asked for meanwhile and stays.
        self.on_way: set[int] = set()
        #: By operator, bytes that are taken before it runs, and given back.
        self.scratch: dict[int, int] = {}
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
        assert not self.on_way, "all that moves is asked for"
        peak = max(self.living(), default=0)
        moved = sum(self.storages[number].moved_bytes for number in self.returning)
        return Prediction(problem.compute_seconds + self.behind, peak, moved)

    def living(self) -> list[int]:
        """Bytes that live at each operator, once it has run."""
        found = list(map(add, accumulate(self.change[:-1]), self.problem.program.other_bytes))
        for op, nbytes in self.scratch.items():
            found[min(op, len(found) - 1)] += nbytes
        return found

    def _needs(self, op: int, nbytes: int) -> None:
        """Packing takes so many bytes before ``op``, for a moment."""
        self.scratch[op] = max(self.scratch.get(op, 0), nbytes)

    def _forward(self) -> None:
        problem, moves, storages, leaving = self.problem, self.moves, self.storages, self.leaving
        change, begins, out, window = self.change, problem.begins, problem.out, problem.window
        link_free, leaving_bytes, on_way, ordered = 0.0, 0, self.on_way, problem.ordered
        for number in problem.by_save:
            if not moves[number]:
                continue
            storage = storages[number]
            nbytes = storage.moved_bytes
            now = begins[storage.saved] + self.behind
            if leaving and not ordered:
                leaving_bytes -= self._note_left(now)
            while leaving and leaving_bytes + nbytes > window:
                if ordered:
                    leaving_bytes -= storages[leaving[0][1]].moved_bytes
                    now = self._wait_for_the_oldest(now, storage.saved)
                    continue
                over = leaving[0][0]
                self.behind += over - now
                now = over
                leaving_bytes -= self._note_left(now, storage.saved)
            if storage.packing is not None:
                self.behind += (packing := storage.packing.pack_bytes / problem.memory)
                now += packing
                change[storage.saved] += nbytes
                self._needs(storage.saved, storage.packing.pack_scratch)
            link_free = (now if now > link_free else link_free) + nbytes / out
            leaving.append((link_free, number))
            on_way.add(number)
            leaving_bytes += nbytes
        if ordered:
            now = problem.forward_seconds + self.behind
            while leaving:
                now = self._wait_for_the_oldest(now, problem.program.forward_ops)

    def _wait_for_the_oldest(self, now: float, op: int) -> float:
        """The copy of the oldest is waited for at ``op``, which compute reaches ``now``; when it is over."""
        over, number = self.leaving.popleft()
        self.behind += max(over - now, 0.0)
        self.on_way.remove(number)
        self.change[max(self.storages[number].freed, op)] -= self.storages[number].nbytes
        return max(over, now)

    def _note_left(self, now: float, op: int = 0) -> int:
        """Copies that are over by ``now``, at operator ``op`` if compute waits there, have given their bytes back:
        how many were on their way."""
        problem, leaving, nbytes = self.problem, self.leaving, 0
        while leaving and leaving[0][0] <= now:
            over, number = leaving.popleft()
            storage = self.storages[number]
            nbytes += storage.moved_bytes
            if number in self.on_way:
                self.on_way.remove(number)
                # From that operator on it takes no bytes.
                begun = min(bisect_left(problem.begins, over - self.behind), len(problem.op_seconds))
                self.change[max(begun, storage.freed, op)] -= storage.nbytes
                if storage.packing is not None:
                    self.change[max(begun, storage.saved, op)] -= storage.moved_bytes
        return nbytes

    def _backward(self) -> None:
        problem, change, storages, moves = self.problem, self.change, self.storages, self.moves
        begins, back, most = problem.begins, problem.back, problem.ahead
        order = [number for number in problem.by_ask if moves[number]]
        arrives, on_way, packed = dict[int, float](), self.on_way, set[int]()
        link_free, ahead, following, count = 0.0, 0, 0, len(order)
        op = problem.program.forward_ops
        for place, number in enumerate([-1, *order]):
            if number >= 0:  # after what the beginning of backward starts
                op = storages[number].asked
            now = begins[op] + self.behind
            if self.leaving:
                self._note_left(now)
            if problem.ordered and number >= 0:
                ahead -= storages[number].moved_bytes
            # As many as fit begin to come back; what is asked for now does in any case.
            while following < count:
                coming = order[following]
                storage = storages[coming]
                nbytes = storage.moved_bytes
                if following >= place and (not most or (ahead > 0 and ahead + nbytes > most)):
                    break
                following += 1
                ahead += nbytes
                change[storage.dropped] -= storage.nbytes
                if coming in on_way:  # still here: it stays
                    on_way.remove(coming)
                    arrives[coming] = now
                    if storage.packing is not None:
                        change[op] -= nbytes
                    continue
                self.returning.append(coming)
                link_free = (now if now > link_free else link_free) + nbytes / back
                arrives[coming] = link_free
                if storage.packing is None:
                    change[op] += storage.nbytes
                else:
                    packed.add(coming)
                    change[op] += nbytes
            if number >= 0:
                if not problem.ordered:
                    ahead -= storages[number].moved_bytes
                if arrives[number] > now:
                    self.behind += arrives[number] - now
                    self._note_left(arrives[number], op)
                if number in packed:
                    storage = storages[number]
                    assert storage.packing is not None
                    self.behind += storage.packing.unpack_bytes / problem.memory
                    change[op] += storage.nbytes - storage.moved_bytes
                    self._needs(op, storage.moved_bytes + storage.packing.unpack_scratch)
