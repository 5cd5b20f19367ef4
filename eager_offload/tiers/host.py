"""The host tier: a quota of a pool of host memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import ClassVar

from eager_offload.config import size_literal, size_text
from eager_offload.errors import OffloadError, warn_once
from eager_offload.tiers.base import Shortage, Tier
from eager_offload.tiers.forking import ForkSafeLock, Living
from eager_offload.tiers.limits import warn_of_guess
from eager_offload.tiers.pool import HostSlot, Pool, Quota

#: Bytes handed out until what the machine has left is looked at again when a forward begins.
_LOOK_BYTES = 1 << 30


class HostTier(Tier):
    """Host memory, up to a budget. What is idle in the pool is shared by all tiers on it.

    Args:
        pool: where the memory comes from; the budget, with those of other tiers on it, bounds all that it holds.
        budget: bytes; ``None`` for what the machine has to give: see ``HostBound``.
        given: ``budget`` as the user has written it, if that was a text: warnings repeat it.
    """

    name: ClassVar[str] = "host"

    def __init__(self, pool: Pool, budget: int | None = None, *, given: str | None = None) -> None:
        self._pool = pool
        self._given = given
        over = Shortage(f"all of host_budget is in use: {given or size_text(budget or 0)}", "raise host_budget")
        self._quota = Quota(budget, over)
        self._next_look = 0
        self.at_hand = partial(pool.take, quota=self._quota)  # for each saved tensor: a call of C
        pool.join(self._quota)

    def reserve(self, nbytes: int) -> HostSlot | None:
        return self._pool.allocate(nbytes, self._quota)

    def take(self, nbytes: int) -> Shortage | None:
        budget = self._quota.budget
        if budget is not None and nbytes > budget:
            return Shortage(f"host_budget comes to {size_text(budget)}", "raise host_budget")
        try:
            self._pool.reserve(nbytes, self._quota)
        except OffloadError:
            raise
        except (MemoryError, RuntimeError) as error:
            self._quota.refuse(error)
            return self.shortage
        return None

    def warn(self, said: set[str]) -> None:
        budget, overdraft = self._quota.budget, self._quota.overdraft
        if budget is None:
            warn_of_guess()
        elif overdraft is not None:
            warn_once(
                "host_budget",
                f"host_budget={self._given or size_literal(budget)} is taken as it was given, although memory is "
                f"short: {overdraft.reason}. The system may end processes that go beyond what it has. To change that, "
                f'{overdraft.remedy}, or leave it to host_budget="auto"',
                said,
            )

    @property
    def shortage(self) -> Shortage:
        return self._quota.refusal

    def release_idle(self) -> None:
        pool, bound = self._pool, self._pool.bound
        if bound is None or (pool.served_bytes < self._next_look and not self._quota.is_refused):
            return
        pools = [one for one in (pool, *[other for other in _pools if other is not pool]) if not one.is_given]
        if not any(one.idle_bytes for one in pools):
            return
        self._next_look, self._quota.is_refused = pool.served_bytes + _LOOK_BYTES, False
        missing = bound.missing_bytes()
        for one in pools:
            idle = one.idle_bytes
            if idle and missing > 0:
                one.release_idle(max(idle - missing, 0))
                missing -= idle - one.idle_bytes

    @property
    def used_bytes(self) -> int:
        self._pool.poll()
        return self._quota.used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the pool holds: slots of every tier on it, rounding and idle room."""
        return self._pool.held_bytes

    @property
    def peak_bytes(self) -> int:
        return self._quota.peak_bytes

    def restart_peak(self) -> None:
        self._pool.restart_peak(self._quota)

    def close(self) -> None:
        self._pool.leave(self._quota)


# -- the pools of this process -------------------------------------------------------------------------------------

#: Tiers keep their pool, so it goes with the last of them.
_pools: Living[Pool] = Living()
_pools_lock = ForkSafeLock()


def shared_pool(runtime: Hashable, kind: Hashable, make: Callable[[], Pool]) -> Pool:
    """Returns the process's one pool for ``runtime`` and ``kind`` of memory; ``make`` makes the first."""
    with _pools_lock.lock:
        for pool in _pools:
            if pool.kind == (runtime, kind) and not pool.is_closed:  # a closed one only waits for its last slots
                return pool
        pool = make()
        pool.kind = runtime, kind
        _pools.add(pool)
        return pool
