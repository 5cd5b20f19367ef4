"""The host tier: a share of an arena of host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import ClassVar, TypeAlias

from eager_offload.tiers.arena import Arena
from eager_offload.tiers.base import Shortage, Tier
from eager_offload.tiers.forking import ForkSafeLock
from eager_offload.tiers.guard import process_guard
from eager_offload.tiers.hostslots import HostSlot, Share
from eager_offload.tiers.limits import HOST_FRACTION, host_headroom, size_text

__all__ = ["HostTier", "shared_arena"]

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
            self._over = Shortage(
                f"all of host_budget is in use: {size_text(budget)}",
                "raise host_budget",
            )
        self._share = Share(budget, pooled=pooled)
        self._peak = 0
        self._next_look = 0
        arena.join(self._share)

    @property
    def budget(self) -> int:
        """Most bytes that its slots may take."""
        return self._share.budget

    def reserve(self, nbytes: int) -> HostSlot | None:
        slot = self._arena.allocate(nbytes, share=self._share)
        if slot is None:
            self._next_look = 0
        self._note_peak()
        return slot

    @property
    def shortage(self) -> Shortage:
        return self._share.refusal or self._over

    def trim(self) -> None:
        arena = self._arena
        if arena.served_bytes < self._next_look:
            return
        self._next_look = arena.served_bytes + _LOOK_BYTES
        others = [other for other in _all_arenas() if other is not arena]
        with_idle = [one for one in (arena, *others) if one.idle_bytes]
        missing = process_guard().missing_bytes() if with_idle else 0
        for one in with_idle:
            if missing <= 0:
                break
            idle = one.idle_bytes
            one.trim(max(idle - missing, 0))
            missing -= idle - one.idle_bytes

    @property
    def used_bytes(self) -> int:
        self._arena.drain()
        return self._share.used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the arena holds: slots of every tier on it, rounding and idle room."""
        return self._arena.held_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes that the arena held when this tier asked it for room."""
        return self._peak

    def restart_peak(self) -> None:
        self._peak = self._arena.held_bytes

    def _note_peak(self) -> None:
        held = self._arena.held_now
        if held > self._peak:
            self._peak = held

    def drain(self) -> None:
        """Takes up the slots that have died and gives back to the system what is idle beyond the arena's allowance."""
        self._arena.drain()

    def close(self) -> None:
        self._arena.leave(self._share)


# -- the arenas of this process -------------------------------------------------------------------------------------

_Arenas: TypeAlias = "weakref.WeakValueDictionary[Hashable, Arena]"

#: By runtime and kind of memory. Tiers keep their arena, so it goes with the last of them.
_arenas: weakref.WeakKeyDictionary[Hashable, _Arenas] = weakref.WeakKeyDictionary()
_arenas_lock = ForkSafeLock()


def _all_arenas() -> list[Arena]:
    with _arenas_lock.lock:
        return [arena for arenas in _arenas.values() for arena in arenas.values()]


def shared_arena(runtime: Hashable, kind: Hashable, make: Callable[[], Arena]) -> Arena:
    """The process's one arena for ``runtime`` and ``kind`` of memory; of ``make`` where nobody has one now."""
    with _arenas_lock.lock:
        arenas = _arenas.setdefault(runtime, weakref.WeakValueDictionary())
        arena = arenas.get(kind)
        if arena is None or arena.is_closed:  # a closed one only waits for its last slots
            arena = arenas[kind] = make()
        return arena
