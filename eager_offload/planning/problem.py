"""``Problem``: a step, the device that it runs on, and how much may be on its way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from eager_offload.core.budget import Timeline
from eager_offload.planning.program import Program, ProgramSave
from eager_offload.tiers.memory import PAGE, round_up

#: For each storage that may move, whether it does.
Moves: TypeAlias = tuple[bool, ...]


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
    launch_seconds: float = 0.0
    """What each call costs the host; 0 where the host is the device, and waits for each operator."""
    room: int | None = None
    """Bytes that may rest in the tier at one time; ``None``: any number."""
    ordered: bool = False
    """Whether the order of transfers and waits is that of a compiled graph."""

    @cached_property
    def begins(self) -> list[float]:
        """When each operator begins where compute never waits, and at last when the step ends."""
        return list(accumulate(self.op_seconds, initial=0.0))

    @cached_property
    def timeline(self) -> Timeline:
        """The step as the rule by pace sees it."""
        program, storages, begins = self.program, self.program.storages, self.begins
        final, asks = [begins[one.saved] for one in storages], self.by_ask
        if not self.ordered:  # a graph has what it computes at once; autograd, when a later node brings another one in
            saves = [save for save in program.saves if save.storage >= 0]
            brought = dict[int, ProgramSave]()
            for save in saves:
                brought.setdefault(save.storage, save)
            first = list(brought.values())
            for save in saves:
                later = bisect_right(first, save.node, key=lambda one: one.node)
                final[save.storage] = begins[first[later].op] if later < len(first) else self.forward_seconds
            asks = [one for one in dict.fromkeys(program.saves[ask.save].storage for ask in program.asks) if one >= 0]
        return Timeline(
            [one.moved_bytes for one in storages],
            final,
            [begins[one.asked] for one in storages],
            asks,
            self.forward_seconds,
            self.compute_seconds,
            self.out,
            self.back,
            self.window,
            self.ahead,
        )

    @property
    def compute_seconds(self) -> float:
        """Of a step in which compute never waits."""
        return self.begins[-1]

    @property
    def forward_seconds(self) -> float:
        """Of its forward."""
        return self.begins[self.program.forward_ops]

    def with_more(self, nbytes: int) -> Problem:
        """Where so many other bytes more live at each operator."""
        other = tuple(one + nbytes for one in self.program.other_bytes)
        return replace(self, program=replace(self.program, other_bytes=other))

    @cached_property
    def by_ask(self) -> list[int]:
        """The storages in the order in which they are asked for."""
        storages = self.program.storages
        return sorted(range(len(storages)), key=lambda number: storages[number].asked)

    def floor_seconds(self, moved_bytes: int) -> float:
        """Returns the seconds that a step takes at least in which so many bytes move."""
        backward = self.compute_seconds - self.forward_seconds
        return floor_seconds(self.forward_seconds, backward, moved_bytes, self.out, self.back)

    def within_room(self, moves: Moves) -> Moves:
        """Returns ``moves`` with those that move in any case, without the newest others that the tier has no room
        for."""
        found = [moves[number] or one.is_forced for number, one in enumerate(self.program.storages)]
        over = 0 if self.room is None else self.tier_bytes(tuple(found)) - self.room
        for number in reversed(range(len(found))):
            if over > 0 and found[number] and not self.program.storages[number].is_forced:
                found[number] = False
                over -= self._pages[number]
        return tuple(found)

    def tier_bytes(self, moves: Moves) -> int:
        """Bytes that rest in the tier where those move, in whole pages: between forward and backward all of them."""
        return sum(nbytes for number, nbytes in enumerate(self._pages) if moves[number])

    @cached_property
    def _pages(self) -> list[int]:
        return [round_up(storage.moved_bytes, PAGE) for storage in self.program.storages]
