"""The host tier: a quota of a pool of host memory. And how freed memory goes back to the system.

[Note: freed memory]
glibc keeps freed blocks of up to 32 MiB in a heap, so a process whose saved tensors leave stays as large as it was.
Thresholds return each block when it is freed. Its next use costs page faults, which nearly double the processor time of
a convolutional network. So by itself the library leaves the thresholds alone and trims the heap only where its free
blocks would raise the peak of the process: once it is larger by ``_PART`` (and ``_LEAST``) than it was after any trim.
In between blocks are used again without a fault. Threads that copy look after each copy.
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
        """Bytes that the pool holds: slots of every tier on it, rounding and idle room."""
        return self._pool.held_bytes

    @property
    def peak_bytes(self) -> int:
        return self._quota.peak_bytes

    def restart_peak(self) -> None:
        self._pool.restart_peak(self._quota)

    def close(self) -> None:
        self._pool.unregister(self._quota)


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


# -- freed memory -----------------------------------------------------------------------------------------------------

# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_INT_MAX = (1 << 31) - 1

#: Freed memory stays up to so many bytes, or such a part of what is in use.
_LEAST, _PART = 96 << 20, 8
#: Whether the C library has accepted the thresholds of ``release_freed_memory``.
_is_released = False


def release_freed_memory(threshold: int | str = 1 << 20) -> bool:
    """Makes the C library return blocks of ``threshold`` bytes and more to the system as soon as they are freed.

    By default glibc keeps freed blocks of up to 32 MiB for later, and while CPU tensors move, an ``Offload`` returns
    what is more than an 8th of the process (``release_freed_memory="auto"``). This call returns all of it, at once and
    for the whole process (``mallopt``). Each such block costs page faults on its first use: a few percent of a step of
    a large transformer, as much as the step itself for a convolutional network. With ``THP_MEM_ALLOC_ENABLE=1`` in the
    environment before Python starts, torch asks Linux for huge pages, which are far fewer. Call it once, before the
    model is built.

    Args:
        threshold: bytes, or a text such as ``"1MiB"``.

    Returns:
        Whether the C library accepts it: glibc does, others have no such setting.
    """
    # The C library counts in an int, in which a larger size would wrap around: 4 GiB to 0.
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
    """Returns freed memory to the system while CPU tensors move; one for the process. See [Note: freed memory]."""

    def __init__(self) -> None:
        #: Trims the heap; ``None`` until a first ``Offload`` has begun that moves CPU tensors.
        self._trim: Callable[[int], object] | None = None
        #: The most bytes that were resident after a trim.
        self._level = 0
        self._trimming = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether freed memory goes back by this."""
        return self._trim is not None and not _is_released

    def begin(self, setting: bool | str, resident: Callable[[], int]) -> None:
        """Begins to return freed memory, first of all what was freed so far. Does nothing once it has begun.

        Args:
            setting: the field ``release_freed_memory`` of a config.
            resident: returns the bytes of the process that are in memory.
        """
        wanted = keeps_freed_memory() if setting == "auto" else setting
        if not wanted or self._trim is not None or _is_released:
            return
        try:
            self._trim = ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError, TypeError):  # of another C library, or another system
            return
        self._trim(0)
        self._level = resident()

    def look(self, resident: Callable[[], int], now: int) -> None:
        """Trims the heap if the process, of which ``now`` bytes are resident, has grown by much."""
        if not self.is_on or now <= self._level + max(_LEAST, self._level // _PART):
            return
        if self._trim is not None and self._trimming.acquire(blocking=False):
            try:
                self._trim(0)
                self._level = max(self._level, resident())
            finally:
                self._trimming.release()

    def after_fork(self) -> None:
        """Forgets a thread of the parent that was trimming."""
        self._trimming = threading.Lock()


trim = Trim()


def keeps_freed_memory() -> bool:
    """Returns whether freed blocks stay with this process, as far as is known: it uses glibc as it is by default."""
    if _is_released or trim.is_on or any(map(_changes_malloc, os.environ.items())):
        return False
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # of another C library, or another system
        return False


def _changes_malloc(variable: tuple[str, str]) -> bool:
    name, value = variable
    if name in ("GLIBC_TUNABLES", "LD_PRELOAD"):
        return "malloc" in value.lower()  # the other allocators have it in their names
    return name.startswith("MALLOC_") and bool(value)
