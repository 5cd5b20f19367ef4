"""The host tier: a quota of a pool of host memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import ClassVar

from eager_offload.config import size_literal, size_text
from eager_offload.errors import OffloadError, warn_once
from eager_offload.tiers.base import MustGrow, Shortage, Tier
from eager_offload.tiers.finalizers import Living
from eager_offload.tiers.forking import ForkSafeLock
from eager_offload.tiers.guard import process_guard
from eager_offload.tiers.limits import HOST_FRACTION, host_headroom
from eager_offload.tiers.pool import Pool
from eager_offload.tiers.quotas import Quota
from eager_offload.tiers.ranks import warn_of_guess
from eager_offload.tiers.slabs import HostSlot

#: Bytes handed out until what the machine has left is looked at again when a forward begins.
_LOOK_BYTES = 1 << 30
#: Bytes that are refused without another look at the machine, once a budget that follows it is used up.
_REFUSED = 256 << 20


class HostTier(Tier):
    """Host memory, up to a budget. What is idle in the pool is shared by all tiers on it.

    [Note: a budget that follows the machine]
    A part of what this process could take is known when it is looked at, and may be more later: other programs end, and
    a virtual machine may have more memory the more of it is touched. So a budget that nobody gave in bytes is worked
    out anew when it is used up, from what there is then, and never comes down: what is taken beyond that is for the
    guard to say. A look is as dear as the guard's, and after one the next 256 MiB are refused without.

    [Note: a budget in bytes]
    What the user gives in bytes holds, however little the machine says that it has: it may have more, and nobody else
    knows. Where the guard would refuse, one warning says so. Only the system itself refuses.

    Args:
        pool: where the memory comes from; the budget, with those of other tiers on it, bounds all that it holds.
        budget: bytes; ``None`` for a part of what this process could take if the pool held nothing.
        given: ``budget`` as the user has written it, if that was a text: warnings repeat it.
    """

    name: ClassVar[str] = "host"

    def __init__(self, pool: Pool, budget: int | None = None, *, given: str | None = None) -> None:
        self._pool = pool
        self._quota = Quota(budget or 0, pooled=budget is None)
        self._given = given
        if budget is None:
            self._look()
        else:
            self._over = Shortage(f"all of host_budget is in use: {given or size_text(budget)}", "raise host_budget")
        self._next_look = 0
        #: Bytes that are refused until the budget is worked out anew, where it follows the machine.
        self._refused_until_look = 0
        pool.join(self._quota)

    @property
    def budget(self) -> int:
        """Most bytes that its slots may take."""
        return self._quota.budget

    def reserve(self, nbytes: int) -> HostSlot | None:
        slot = self._pool.allocate(nbytes, quota=self._quota)
        if slot is None and self._count_refused(nbytes):
            self._refused_until_look = _REFUSED
            self._look()
            slot = self._pool.allocate(nbytes, quota=self._quota)
        if slot is None:
            self._next_look = 0
        return slot

    def at_hand(self, nbytes: int) -> HostSlot | None:
        try:
            return self._pool.take(nbytes, HostSlot, quota=self._quota)
        except OffloadError:
            raise
        except (MemoryError, RuntimeError) as error:
            self._quota.refuse(error)
        self._next_look = 0
        if self._count_refused(nbytes):
            raise MustGrow(nbytes)
        return None

    def take(self, nbytes: int) -> Shortage | None:
        if self._quota.pooled and nbytes > self.budget:
            self._look()
        if nbytes > self.budget:
            return Shortage(f"host_budget comes to {size_text(self.budget)}", self._over.remedy)
        try:
            self._pool.reserve(nbytes, self._quota)
        except OffloadError:
            raise
        except (MemoryError, RuntimeError) as error:
            self._quota.refuse(error)
            return self.shortage
        return None

    def _look(self) -> None:
        """Works the budget out anew, which follows the machine; see the note."""
        held = self._pool.held_bytes
        try:
            limit = min(host_headroom().limits, key=lambda limit: limit.budget(held))
        except OSError:  # no free file descriptor to look with
            return
        budget = limit.budget(held)
        if budget < self.budget:
            return
        self._quota.budget = max(self._quota.budget, budget)  # another thread may have looked meanwhile
        self._over = Shortage(
            f'all of host_budget="auto" is in use: {size_text(budget)}, which is {HOST_FRACTION:.0%} of what this '
            f"process could take when it last looked ({limit.reason})",
            f"{limit.remedy}, or give host_budget in bytes",
        )

    def _count_refused(self, nbytes: int) -> bool:
        """Counts bytes that the budget has refused. Returns whether it is to be worked out anew."""
        if not self._quota.pooled or self._quota.refusal is not None:
            return False
        self._refused_until_look -= nbytes
        return self._refused_until_look < 0

    def warn(self, said: set[str]) -> None:
        if self._quota.pooled:
            warn_of_guess()
        elif (overdraft := self._quota.overdraft) is not None:
            warn_once(
                "host_budget",
                f"host_budget={self._given or size_literal(self.budget)} is taken as it was given, although memory is "
                f"short: {overdraft.reason}. The system may end processes that go beyond what it has. To change that, "
                f'{overdraft.remedy}, or leave it to host_budget="auto"',
                said,
            )

    @property
    def shortage(self) -> Shortage:
        return self._quota.refusal or self._over

    def release_idle(self) -> None:
        pool = self._pool
        if pool.served_bytes < self._next_look:
            return
        pools = [one for one in (pool, *[other for other in _pools if other is not pool]) if not one.is_given]
        if not any(one.idle_bytes for one in pools):
            return
        self._next_look = pool.served_bytes + _LOOK_BYTES
        missing = process_guard().missing_bytes()
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
