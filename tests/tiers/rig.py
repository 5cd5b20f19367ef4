"""Tiers to test, and exact bytes to put into them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eager_offload.tiers.base import Fence, Slot, Tier
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.forking import ReentrantLock
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.memory import anonymous_slab
from eager_offload.tiers.pool import Pool
from tests.tiers.files import Watched

MIB = 1 << 20


def noise(nbytes: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def reserve(tier: Tier, nbytes: int) -> Any:
    """A slot of the tier's own class, which has to have room for it."""
    slot = tier.reserve(nbytes)
    assert slot is not None
    return slot


def stored(tier: Tier, source: Tensor) -> Any:
    slot = reserve(tier, source.numel())
    slot.write(source)
    return slot


def content(slot: Slot) -> Tensor:
    target = torch.zeros(slot.nbytes, dtype=torch.uint8)
    slot.read(target)
    return target


def open_tier(
    directory: Path, file_type: type[Watched] = Watched, budget: int = 256 * MIB, *, verify: bool = False
) -> tuple[DiskTier, Any]:
    """A tier on one disk, and its file."""
    tier = DiskTier(directory, budget, verify=verify, file_type=file_type)
    return tier, Watched.opened[-1]


class Verdicts:
    """Answers what a fence asks of a runtime: its event completes when a test says so."""

    def __init__(self) -> None:
        self.over: set[Hashable] = set()
        #: Is called once, in the midst of the next question.
        self.meanwhile: Callable[[], object] | None = None

    def query(self, event: Hashable) -> bool:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return event in self.over

    def fence(self, event: Hashable) -> Fence:
        return Fence(self, event)


class System:
    """What a pool takes its memory from: counts slabs, watches them go, and refuses when a test says so."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.refusal: OSError | None = None
        #: Is called once, before the next slab is given.
        self.meanwhile: Callable[[], object] | None = None

    def __call__(self, nbytes: int) -> Tensor:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        if self.refusal is not None:
            raise MemoryError(self.refusal.strerror)
        slab = anonymous_slab(nbytes)
        self.sizes.append(nbytes)
        self.alive.add(slab)
        return slab


class Made:
    """A tier of one kind, what it takes its room from, and its locks.

    Args:
        kind: ``"host"`` or ``"disk"``.
        one_slab: whether room of all of ``budget`` is taken at once, and all slots are cut from that.
    """

    def __init__(self, kind: str, directory: Path, budget: int = 256 * MIB, *, one_slab: bool = False) -> None:
        self.system, self.files, self.owner = System(), list[Watched](), None
        self.tier: Tier
        if kind == "host":
            self.owner = Pool(self.system, slab_bytes=64 * MIB if one_slab else MIB, idle_bytes=64 * MIB)
            self.tier = HostTier(self.owner, budget)
        else:
            Watched.opened.clear()
            self.owner = self.tier = DiskTier(directory, budget, file_type=Watched)
            self.files = list(Watched.opened)
        if one_slab:
            reserve(self.tier, 4096)
            assert self.tier.held_bytes == budget

    def in_the_next_growth(self, meanwhile: Callable[[], object]) -> None:
        """Calls ``meanwhile`` once, in the midst of the next call that takes room from the system."""

        def once() -> None:
            for file in self.files:
                file.on_allocate = None
            meanwhile()

        self.system.meanwhile = meanwhile
        for file in self.files:
            file.on_allocate = once

    def refuses(self, error: OSError | None) -> None:
        """From now on the system gives nothing and says why, or gives again."""
        self.system.refusal = error
        for file in self.files:
            file.on_allocate = error
            if error is not None:
                raise error

    def waits_for_growth(self) -> threading.Event:
        """Is set once a thread has to wait until another one's growth is over."""
        lock = self.owner._growth
        lock.lock = watched = WatchedLock(lock.lock)
        return watched.waits

    @property
    def taken_bytes(self) -> int:
        """What the system has given, as it says itself."""
        return sum(slab.numel() for slab in self.system.alive) + sum(file.stat.st_size for file in self.files)


class WatchedLock:
    """A lock that says when a thread is about to wait for it."""

    def __init__(self, lock: ReentrantLock) -> None:
        self._lock, self._is_owned, self.waits = lock, lock._is_owned, threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waits.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def equal(slots: Sequence[Slot], seeds: Sequence[int]) -> bool:
    """Whether each slot has the noise of its seed."""
    return all(torch.equal(content(slot), noise(slot.nbytes, seed)) for slot, seed in zip(slots, seeds, strict=True))
