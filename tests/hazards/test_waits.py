"""H41: while one thread waits for a transfer, the others go on: no lock is held by a thread that waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload import Offload
from eager_offload.tiers.base import release_idle_slots
from tests.hazards.backends import Backend, SimulatedBackend, assert_settled, offloader_of
from tests.hazards.probes import meanwhile
from tests.hazards.programs import leaf

NBYTES = 64 * 64 * 4


def forward(offload: Offload, *, seed: int) -> Tensor:
    with offload:
        return leaf(64, 64, seed=seed).sin().cos().tanh().sum()


def forward_with_the_rest_at_its_end(offload: Offload) -> Tensor:
    """The first save leaves at once; the second may be filled until the context is left, and finds the window full."""
    with offload:
        return (leaf(64, 64, seed=0).mul(2).sin() * torch.rand(64, 64)).sum()


@pytest.mark.parametrize("what", ["a full window", "the end of a with", "stats", "close", "a trace"])
def test_h41_other_threads_go_on_while_one_waits(what: str, tmp_path: Path, disk: Backend) -> None:
    window = NBYTES if what in ("a full window", "the end of a with") else 1 << 20
    offload = disk.offload(min_bytes=NBYTES, max_inflight_bytes=window)
    other: list[Tensor] = []

    def others_go_on() -> None:
        with offload:
            small, kept = leaf(8, 8, seed=2).exp(), eo.keep(leaf(64, 64, seed=3).mul(2))
            other.extend([small.sin().sum(), kept.sin().sum()])
        for loss in other:
            loss.backward()
        kept_bytes = offload.stats().kept_bytes
        assert kept_bytes["small"] >= 8 * 8 * 4
        assert kept_bytes["marked"] == NBYTES
        gate.open()

    def while_it_waits() -> None:
        assert not offload._accounts.lock._is_owned(), "or the others would wait for ever"
        disk.in_thread(others_go_on)

    with disk.gate() as gate, meanwhile(while_it_waits) as done:
        loss = forward_with_the_rest_at_its_end(offload) if what == "the end of a with" else forward(offload, seed=0)
        if what == "stats":
            offload.stats(synchronize=True)
        elif what == "close":
            offload.close()
        elif what == "a trace":
            with offload.trace(tmp_path / "trace.json"):
                pass
    assert done == ["waits"]
    assert other
    loss.backward()
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    if window == NBYTES:
        assert stats.window_stall_seconds > 0
    del loss
    other.clear()
    assert_settled(offload)


@pytest.mark.parametrize("follows", [False, True], ids=["unknown step", "step that follows a plan"])
@pytest.mark.parametrize("what", ["a save", "the end of a with", "what a codec refuses"])
def test_h41_other_threads_go_on_while_the_system_gives_one_a_slab(
    what: str, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = what == "what a codec refuses"
    with SimulatedBackend() as simulated:
        codec = "lossless" if refuses else "identity"
        offload = simulated.offload(step_plans=follows, codec=codec, max_inflight_bytes=64 << 20)
        for _ in range(2):
            forward(offload, seed=1).backward()  # from here on there is a slab with room for as much
        large, other = leaf(1024, 1024, seed=0), []

        def step(last: float) -> Tensor:
            with offload:
                if what == "a save":
                    return large.sin().cos().sum()
                mask = torch.ones(1024, 1024)
                mask[0, 0], mask[-1, -1] = 0.0, last
                return (large * mask).sum()

        if follows:
            step(0.0).backward()
            large.grad = None
        offload.stats(synchronize=True)
        release_idle_slots()
        (tier,) = offloader_of(offload).tiers
        arena, kept = tier._arena, tier.reserve(NBYTES)
        assert kept is not None, "of the slab that is to serve the other thread"
        arena.release_idle()
        before, give = arena.held_bytes, arena._allocate_slab
        assert before < 4 << 20

        def others_go_on() -> None:
            with offload:
                marked, leaves = eo.keep(leaf(64, 64, seed=3).mul(2)), leaf(64, 64, seed=2)
                other.extend([marked.sin().sum(), leaves.sin().cos().sum()])
            for loss in other:
                loss.backward()

        def meanwhile_others(nbytes: int) -> Tensor:
            if not other:
                assert not offload._accounts.lock._is_owned(), "or the others would wait for ever"
                simulated.in_thread(others_go_on)
                assert other
                assert arena.held_bytes == before
            return give(nbytes)

        earlier = offload.stats()
        monkeypatch.setattr(arena, "_allocate_slab", meanwhile_others)
        loss = step(0.5)
        monkeypatch.undo()
        assert len(other) == 2
        assert arena.held_bytes > before
        loss.backward()
        stats = offload.stats(synchronize=True)
        assert stats.kept_bytes["marked"] == NBYTES
        assert stats.bytes_out - earlier.bytes_out >= NBYTES + (4 << 20), "both have offloaded"
        assert (stats.followed_forwards > earlier.followed_forwards) == follows
        assert stats.refused == ({"bitmask": 1} if refuses else {})
        assert stats.stall_seconds > 0
        assert not stats.demotions
        del loss, kept
        other.clear()
        assert_settled(offload)


def test_h10_nothing_leaves_after_a_crash_while_the_system_gives_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedBackend() as simulated:
        offload = simulated.offload(max_inflight_bytes=64 << 20)
        with offload:
            first = leaf(64, 64, seed=1).sin().cos().sum()
        offloader = offloader_of(offload)
        (tier,) = offloader.tiers
        arena, give = tier._arena, tier._arena._allocate_slab
        before, crashed = offload.stats(synchronize=True).bytes_out, []

        def crashes(nbytes: int) -> Tensor:
            crashed.append(nbytes)
            offloader.crash()
            return give(nbytes)

        large = leaf(1024, 1024, seed=0)
        monkeypatch.setattr(arena, "_allocate_slab", crashes)
        with offload:
            second = large.sin().cos().sum()
        monkeypatch.undo()
        assert crashed
        assert offloader.accounts.counters.bytes_out == before > 0
        (first + second).backward()
        assert torch.equal(large.grad, torch.autograd.grad(large.sin().cos().sum(), large)[0])
        del first, second
