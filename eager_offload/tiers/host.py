"""The host tier: a quota of an arena of host memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import ClassVar

from eager_offload.config import size_text
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.base import Shortage, Tier, idle_slot_bytes, release_idle_slots
from eager_offload.tiers.finalizers import Living
from eager_offload.tiers.forking import ForkSafeLock
from eager_offload.tiers.guard import process_guard
from eager_offload.tiers.limits import HOST_FRACTION, host_headroom
from eager_offload.tiers.slabs import HostSlot, Quota

#: Bytes handed out until what the machine has left is looked at again when a forward begins.
_LOOK_BYTES = 1 << 30


class HostTier(Tier):
    """Host memory, up to a budget. What is idle in the arena is shared by all tiers on it.

    Args:
        arena: where the memory comes from; the budget, with those of other tiers on it, bounds all that it holds.
        budget: bytes; ``None`` for a part of what this process could take if the arena held nothing.
    """

    name: ClassVar[str] = "host"

    def __init__(self, arena: Arena, budget: int | None = None) -> None:
        self._arena = arena
        if budget is None:
            headroom, held = host_headroom(), arena.held_bytes
            budget, pooled = int((headroom.nbytes + held) * HOST_FRACTION), True
            self._over = Shortage(
                f'all of host_budget="auto" is in use: {size_text(budget)}, which is {HOST_FRACTION:.0%} of what this '
                f"process could take when it began to offload ({headroom.binding.reason})",
                f"{headroom.binding.remedy}, or give host_budget in bytes",
            )
        else:
            pooled = False
            self._over = Shortage(f"all of host_budget is in use: {size_text(budget)}", "raise host_budget")
        self._quota = Quota(budget, pooled=pooled)
        self._next_look = 0
        arena.join(self._quota)

    @property
    def budget(self) -> int:
        """Most bytes that its slots may take."""
        return self._quota.budget

    def reserve(self, nbytes: int) -> HostSlot | None:
        slot = self._arena.allocate(nbytes, quota=self._quota)
        if slot is None:
            self._next_look = 0
        return slot

    def at_hand(self, nbytes: int) -> HostSlot | None:
        slot = self._arena.at_hand(nbytes, quota=self._quota)
        if slot is None:
            self._next_look = 0
        return slot

    @property
    def shortage(self) -> Shortage:
        return self._quota.refusal or self._over

    def note_reuse(self, nbytes: int) -> None:
        self._arena.served_bytes += nbytes

    def release_idle(self) -> None:
        arena = self._arena
        if arena.served_bytes < self._next_look:
            return
        arenas = [arena, *[other for other in _arenas if other is not arena]]
        if not (any(one.idle_bytes for one in arenas) or idle_slot_bytes()):
            return
        self._next_look = arena.served_bytes + _LOOK_BYTES
        missing = process_guard().missing_bytes()
        if missing > 0:
            release_idle_slots()
        for one in arenas:
            idle = one.idle_bytes
            if idle and missing > 0:
                one.release_idle(max(idle - missing, 0))
                missing -= idle - one.idle_bytes

    @property
    def used_bytes(self) -> int:
        self._arena.poll()
        return self._quota.used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the arena holds: slots of every tier on it, rounding and idle room."""
        return self._arena.held_bytes

    @property
    def peak_bytes(self) -> int:
        return self._quota.peak_bytes

    def restart_peak(self) -> None:
        self._arena.restart_peak(self._quota)

    def close(self) -> None:
        self._arena.leave(self._quota)


# -- the arenas of this process -------------------------------------------------------------------------------------

#: Tiers keep their arena, so it goes with the last of them.
_arenas: Living[Arena] = Living()
_arenas_lock = ForkSafeLock()


def shared_arena(runtime: Hashable, kind: Hashable, make: Callable[[], Arena]) -> Arena:
    """The process's one arena for ``runtime`` and ``kind`` of memory; made by ``make`` where no tier has one."""
    with _arenas_lock.lock:
        for arena in _arenas:
            if arena.kind == (runtime, kind) and not arena.is_closed:  # a closed one only waits for its last slots
                return arena
        arena = make()
        arena.kind = runtime, kind
        _arenas.add(arena)
        return arena
