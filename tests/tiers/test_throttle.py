"""The token bucket, and a tier behind it, on a clock that only sleeping moves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.throttle import ThrottledTier, TokenBucket
from eager_offload import Offload
from eager_offload.tiers.arena import Arena
from eager_offload.tiers.base import Tier
from eager_offload.tiers.host import HostTier
from tests.hazards.programs import Settled
from tests.tiers.rig import noise, reserve

KIB = 1 << 10


class FakeClock:
    """Time that passes when a thread sleeps, or when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def throttled(clock: FakeClock, *, write_rate: float = 1024.0, read_rate: float = 1024.0) -> ThrottledTier:
    return ThrottledTier(HostTier(Arena(), 1 << 24), write_rate, read_rate, clock=clock)


# -- the bucket ---------------------------------------------------------------------------------------------------


def test_transfers_queue_and_an_idle_link_saves_up_no_more_than_its_burst() -> None:
    bucket = TokenBucket(rate=100.0)
    assert [bucket.take(100, now=0.0) for _ in range(3)] == [1.0, 2.0, 3.0]
    bucket = TokenBucket(rate=100.0, burst=50.0)
    assert bucket.take(50, now=0.0) == 0.0, "a full bucket lets its burst through at once"
    assert bucket.take(100, now=0.0) == 1.0
    assert bucket.take(100, now=1000.0) == 1000.5, "as full as on the first day, no fuller"


arrivals = st.lists(st.tuples(st.floats(0, 5), st.integers(0, 2000)), min_size=1, max_size=30)


@given(arrivals, st.floats(1, 1000), st.floats(0, 500))
def test_no_more_gets_through_than_the_rate_and_one_burst(
    drawn: list[tuple[float, int]], rate: float, burst: float
) -> None:
    bucket, now, ends = TokenBucket(rate, burst), 0.0, []
    for gap, nbytes in drawn:
        now += gap
        ends.append((now, bucket.take(nbytes, now), nbytes))
    assert all(end >= begin for begin, end, _ in ends)
    assert [end for _, end, _ in ends] == sorted(end for _, end, _ in ends)
    for first, (begin, _, _) in enumerate(ends):
        moved = 0
        for _, end, nbytes in ends[first:]:
            moved += nbytes
            assert moved <= rate * (end - begin) + burst + 1e-6 * (1 + moved)


# -- a tier behind it ---------------------------------------------------------------------------------------------


def test_writes_and_reads_take_their_time_at_rates_of_their_own() -> None:
    clock = FakeClock()
    tier = throttled(clock, write_rate=1024.0, read_rate=4096.0)
    source, target = noise(8 * KIB), torch.zeros(8 * KIB, dtype=torch.uint8)
    slot = reserve(tier, 8 * KIB)
    slot.write(source)
    assert clock.now - 100.0 == pytest.approx(8.0, abs=0.01)
    written = clock.now
    slot.read(target)
    assert clock.now - written == pytest.approx(2.0, abs=0.01)
    assert torch.equal(target, source)


def test_the_time_that_the_bytes_really_take_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    tier = throttled(clock)
    slot = reserve(tier, 2 * KIB)
    inside = type(slot._slot)
    write = inside.write

    def slow(self: object, source: Tensor) -> None:
        clock.now += pause
        write(slot._slot, source)  # type: ignore[arg-type]

    monkeypatch.setattr(inside, "write", slow)
    pause = 1.5
    slot.write(noise(2 * KIB))
    assert clock.sleeps == [pytest.approx(0.5, abs=0.01)], "two seconds in all"
    pause = 10.0
    slot.write(noise(2 * KIB))
    assert len(clock.sleeps) == 1, "slower than the bucket already"


def test_training_behind_a_bucket_is_exact_and_moves_its_bytes(tmp_path: Path) -> None:
    clocks = []

    def around(tier: Tier) -> Tier:
        clocks.append(FakeClock())
        return ThrottledTier(tier, 1e6, 2e6, clock=clocks[-1])

    torch.manual_seed(0)
    weight = torch.randn(64, 64, requires_grad=True)
    data = torch.randn(32, 64)

    def gradient(around: AbstractContextManager[object]) -> Tensor:
        x = data
        with around:
            for _ in range(4):
                x = (x @ weight).sigmoid()
        (found,) = torch.autograd.grad(x.sum(), weight)
        return found

    expected = gradient(nullcontext())
    offload = Offload(tier="disk", disk_path=tmp_path, min_bytes=0, keep_last_bytes=0, around_tier=around)
    assert torch.equal(gradient(Settled(offload)), expected)
    stats = offload.stats(synchronize=True)
    eligible = stats.saved_bytes - stats.kept_bytes.get("parameter", 0)
    assert stats.offloaded_bytes + stats.shared_bytes >= 0.9 * eligible > 0
    assert stats.bytes_out > 0
    (clock,) = clocks
    slept = stats.bytes_out / 1e6 + stats.bytes_in / 2e6
    assert sum(clock.sleeps) == pytest.approx(slept, abs=0.005), "but for one burst each way"
    offload.close()
