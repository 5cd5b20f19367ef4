"""The host tier: a quota of a pool of host memory. Also returns freed CPU memory to the system.

[Note: freed memory]
glibc keeps freed blocks of up to 32 MiB in its heap, so a process does not shrink when its saved CPU tensors are
offloaded. ``mallopt`` thresholds would return each block when it is freed, but the page faults of new blocks nearly
double the processor time of a convolutional network. Thus by default the library trims the heap only if free blocks
would raise the peak of the process: when it has grown by an eighth (and 96 MiB) beyond its size after any trim. Between
trims, blocks are reused without faults. The threads that copy check this after each copy.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import ClassVar

from eager_offload.config import parse_size, size_literal, size_text
from eager_offload.errors import OffloadError, warn_once
from eager_offload.tiers.base import Shortage, Tier
from eager_offload.tiers.forking import ForkSafeLock, Living
from eager_offload.tiers.limits import warn_of_guess
from eager_offload.tiers.pool import HostSlot, Pool, Quota

#: A forward begins with a look at the limits after this many bytes were handed out.
_LOOK_BYTES = 1 << 30


class HostTier(Tier):
    """Stores bytes in host memory, up to a budget.

    Args:
        pool: the pool that supplies the memory, and shares idle memory between its tiers.
        budget: limit in bytes; ``None`` for an automatic budget (``HostBound``).
        given: ``budget`` as the user has written it, if that was a text, for warnings.
    """

    name: ClassVar[str] = "host"

    def __init__(self, pool: Pool, budget: int | None = None, *, given: str | None = None) -> None:
        self._pool = pool
        self._given = given
        over = Shortage(f"all of host_budget is in use: {given or size_text(budget or 0)}", "raise host_budget")
        self._quota = Quota(budget, over)
        self._next_look = 0
        self.at_hand = partial(pool.take, quota=self._quota)  # called for each saved tensor: a method would be slower
        pool.register(self._quota)

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
            if self._pool.bound is not None and self._pool.bound.is_alone:
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
        pools = [one for one in (pool, *[other for other in _pools if other is not pool]) if not one.is_user_provided]
        if not any(one.idle_bytes for one in pools):
            return
        self._next_look, self._quota.is_refused = pool.served_bytes + _LOOK_BYTES, False
        missing = bound.missing_bytes()
        for one in pools:
            idle = one.idle_bytes
            if idle and missing > 0:
                one.release_idle(max(idle - missing, 0))
                missing -= idle - one.idle_bytes
            one.restart_idle()

    @property
    def used_bytes(self) -> int:
        self._pool.poll()
        return self._quota.used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the pool holds: slots of all its tiers, rounding and idle memory."""
        return self._pool.held_bytes

    @property
    def peak_bytes(self) -> int:
        return self._quota.peak_bytes

    def restart_peak(self) -> None:
        self._pool.restart_peak(self._quota)

    def close(self) -> None:
        self._pool.unregister(self._quota)


# -- the pools of this process -------------------------------------------------------------------------------------

#: Tiers keep their pool alive, so a pool dies with its last tier.
_pools: Living[Pool] = Living()
#: Guards ``_pools``, so that two threads do not make the same pool.
_pools_lock = ForkSafeLock()


def shared_pool(runtime: Hashable, kind: Hashable, make: Callable[[], Pool]) -> Pool:
    """Returns the process's pool for ``runtime`` and ``kind`` of memory, made by ``make`` on first use."""
    with _pools_lock.lock:
        for pool in _pools:
            if pool.kind == (runtime, kind) and not pool.is_closed:  # a closed pool only waits for its last slots
                return pool
        pool = make()
        pool.kind = runtime, kind
        _pools.add(pool)
        return pool


# -- freed memory -----------------------------------------------------------------------------------------------------

# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_INT_MAX = (1 << 31) - 1

#: Trim when the process has grown by 96 MiB, or by an eighth if that is more.
_LEAST, _PART = 96 << 20, 8
#: Whether the C library has accepted the thresholds of ``release_freed_memory``.
_is_released = False


def release_freed_memory(threshold: int | str = 1 << 20) -> bool:
    """Makes the C library return blocks of ``threshold`` bytes and more to the system as soon as they are freed.

    By default glibc keeps freed blocks of up to 32 MiB for reuse, and an ``Offload`` that moves CPU tensors returns
    them when they exceed an eighth of the process (``release_freed_memory="auto"``). This function (``mallopt``)
    returns every such block at once, for the whole process. Call it once, before the model is built.

    Each new block then costs page faults on its first use: a few percent of a step for a large transformer, as much as
    the step itself for a convolutional network. With ``THP_MEM_ALLOC_ENABLE=1`` in the environment before Python
    starts, torch requests huge pages, which cause far fewer faults.

    Args:
        threshold: smallest block to return, in bytes or as a text (e.g. ``"1MiB"``).

    Returns:
        Whether the C library has accepted the threshold: glibc does, others have no such setting.
    """
    # The C library takes an int, in which larger sizes would wrap around (e.g. 4 GiB to 0).
    nbytes = min(parse_size(threshold, "threshold"), _INT_MAX)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl and macOS have no mallopt, Windows no CDLL(None)
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    global _is_released
    _is_released = bool(mallopt(_M_MMAP_THRESHOLD, nbytes)) and bool(mallopt(_M_TRIM_THRESHOLD, nbytes))
    return _is_released


class Trim:
    """Trims the heap of the process while CPU tensors move: see [Note: freed memory]."""

    def __init__(self) -> None:
        #: ``malloc_trim``; ``None`` before the first ``Offload`` that moves CPU tensors.
        self._trim: Callable[[int], object] | None = None
        #: Most bytes that were resident after a trim.
        self._level = 0
        #: Held while a thread trims, so that others continue instead of trimming too.
        self._trimming = threading.Lock()

    @property
    def is_on(self) -> bool:
        return self._trim is not None and not _is_released

    def begin(self, setting: bool | str, resident: Callable[[], int]) -> None:
        """Trims the heap and enables ``look`` if ``setting`` (of ``OffloadConfig.release_freed_memory``) says so.

        Does nothing at later calls.
        """
        wanted = keeps_freed_memory() if setting == "auto" else setting
        if not wanted or self._trim is not None or _is_released:
            return
        try:
            self._trim = ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError, TypeError):  # another C library or system
            return
        self._trim(0)
        self._level = resident()

    def look(self, resident: Callable[[], int], now: int) -> None:
        """Trims the heap if ``now``, the resident bytes of the process, exceeds the level after trims by enough."""
        if not self.is_on or now <= self._level + max(_LEAST, self._level // _PART):
            return
        if self._trim is not None and self._trimming.acquire(blocking=False):
            try:
                self._trim(0)
                self._level = max(self._level, resident())
            finally:
                self._trimming.release()

    def after_fork(self) -> None:
        """Replaces the lock, which a thread of the parent may have held."""
        self._trimming = threading.Lock()


trim = Trim()


def keeps_freed_memory() -> bool:
    """Returns whether the C library is glibc with its default settings, which keeps freed blocks in the process."""
    if _is_released or trim.is_on or any(value for name, value in os.environ.items() if name.startswith("MALLOC_")):
        return False
    # Allocators to preload have "malloc" in their names (e.g. jemalloc).
    if any("malloc" in os.environ.get(name, "").lower() for name in ("GLIBC_TUNABLES", "LD_PRELOAD")):
        return False
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # another C library or system
        return False
