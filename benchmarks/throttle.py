"""A token bucket around any tier: what a slower link, or a slower disk, would be.

A CPU with an NVMe disk computes few operations in the time of a byte, so nothing can be shown there about links that
are the bottleneck, or just are not. Behind a bucket the ratio is whatever is wanted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Protocol

from torch import Tensor

from eager_offload.tiers.base import ByteRegion, Slot, Tier

#: Seconds; how much a bucket holds. A sleep takes some tenths of a millisecond longer than it was asked to, and what
#: comes in meanwhile makes up for that.
_BURST_SECONDS = 2e-3


class TokenBucket:
    """Bytes come in at a rate, up to what the bucket holds; a transfer takes its bytes out, and has to wait for those
    that are missing.

    Transfers queue: each begins to fill when the one before has its bytes. So over any time the bytes that got through
    are at most ``rate`` times that, and ``burst`` more. No clock: the caller says what time it is.

    Args:
        rate: bytes a second, more than 0.
        burst: bytes that a full bucket holds; it begins full.
    """

    def __init__(self, rate: float, burst: float = 0.0) -> None:
        assert rate > 0
        assert burst >= 0
        self.rate = rate
        self.burst = burst
        self._empty_at = float("-inf")  # when the bucket had nothing in it, or will have: all else follows from that

    def take(self, nbytes: int, now: float) -> float:
        """Takes ``nbytes`` out; returns when they are all there, in seconds on the clock of ``now``; never earlier."""
        self._empty_at = max(self._empty_at, now - self.burst / self.rate) + nbytes / self.rate
        return max(self._empty_at, now)


class Clock(Protocol):
    """What a throttled tier needs of time; the module ``time`` has it."""

    def perf_counter(self) -> float:
        """Seconds, from any origin."""

    def sleep(self, seconds: float, /) -> None:
        """Returns after ``seconds``, more than 0."""


class _Gate:
    """One direction of a throttled tier."""

    def __init__(self, bucket: TokenBucket, clock: Clock) -> None:
        self._bucket = bucket
        self._clock = clock
        self._lock = threading.Lock()

    @contextmanager
    def passing(self, nbytes: int) -> Iterator[None]:
        """Around a transfer, on the thread that moves the bytes: it ends when the bucket has given them all."""
        with self._lock:
            due = self._bucket.take(nbytes, self._clock.perf_counter())
        yield
        early = due - self._clock.perf_counter()
        if early > 0:
            self._clock.sleep(early)


class ThrottledSlot(Slot):
    """A slot of another tier, behind that tier's gates."""

    __slots__ = ("_slot", "_tier")

    def __init__(self, slot: Slot, tier: ThrottledTier) -> None:
        self._slot = slot
        self._tier = tier
        super().__init__(slot.nbytes, slot.fences, slot.record)

    @property
    def tier(self) -> str:  # type: ignore[override]  # of the slot that it stands for
        return self._slot.tier

    @property
    def region(self) -> ByteRegion:
        return self._slot.region

    def write(self, source: Tensor) -> None:
        with self._tier.writes.passing(self.nbytes):
            self._slot.write(source)

    def read(self, target: Tensor) -> None:
        with self._tier.reads.passing(self.nbytes):
            self._slot.read(target)

    def memory(self) -> memoryview:
        return self._slot.memory()


class ThrottledTier(Tier):
    """A tier whose slots are written and read at no more than a given rate.

    A transfer takes as long as its bytes at that rate, or as it takes in reality where that is more; a thread that
    transfers sleeps for the difference. For tiers that transfer threads write and read: on a device that copies by
    itself the copy would not be slower.

    Args:
        tier: where the bytes rest; it keeps its name.
        write_rate, read_rate: bytes a second; each direction has a bucket of its own.
        clock: the module ``time``, or what a test puts in its place.
    """

    name: ClassVar[str] = "throttled"

    def __init__(self, tier: Tier, write_rate: float, read_rate: float, *, clock: Clock = time) -> None:
        self.tier = tier
        self.name = tier.name  # type: ignore[misc]  # statistics by tier mean the one inside
        self.writes = _Gate(TokenBucket(write_rate, write_rate * _BURST_SECONDS), clock)
        self.reads = _Gate(TokenBucket(read_rate, read_rate * _BURST_SECONDS), clock)

    def reserve(self, nbytes: int) -> ThrottledSlot | None:
        return self._throttled(self.tier.reserve(nbytes))

    def at_hand(self, nbytes: int) -> ThrottledSlot | None:
        return self._throttled(self.tier.at_hand(nbytes))

    def _throttled(self, slot: Slot | None) -> ThrottledSlot | None:
        return None if slot is None else ThrottledSlot(slot, self)

    def release_idle(self) -> None:
        self.tier.release_idle()

    def restart_peak(self) -> None:
        self.tier.restart_peak()

    def close(self) -> None:
        self.tier.close()

    shortage, used_bytes, held_bytes, written_bytes, peak_bytes = (
        property(lambda self, name=name: getattr(self.tier, name))
        for name in ("shortage", "used_bytes", "held_bytes", "written_bytes", "peak_bytes")
    )
