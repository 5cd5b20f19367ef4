"""H54: what a program keeps of a step that followed a plan, or of its gradients, counts for itself alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from eager_offload import Offload
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.runtime.base import Layout, Stream
from eager_offload.tiers.base import Slot
from tests.hazards.backends import offloader_of, saves_of
from tests.hazards.programs import leaf
from tests.hazards.test_following import deep

pytestmark = pytest.mark.filterwarnings("ignore:eager_offload. tier=.host.")


SAVE = 64 * 64 * 4


class Counted(NamedTuple):
    """What is counted of some steps."""

    followed_bytes: int
    """That forwards which follow a plan have promised, once a branch of one that is kept has gone."""
    resident_bytes: int
    """At the same time."""
    came_back: Counter[str]
    """How many storages were reloaded and prefetched, in the steps after that."""
    most_bytes: int
    """That autograd would have held."""


def counted(
    step_plans: bool, monkeypatch: pytest.MonkeyPatch, branches: Sequence[int], *, side: int = 64, drops: bool = False
) -> Counted:
    """Steps of three branches, of which the third keeps a metric of its own, and the graph of another or not.

    Args:
        branches: how many operators that other branch has in each step.
        side: of the matrices of that step.
    """
    offload = Offload(tier="host", min_bytes=0, keep_last_bytes=0, prefetch_bytes=4 * SAVE, step_plans=step_plans)
    came_back: Counter[str] = Counter()
    reload = DeviceOffloader.reload

    def noting(self: DeviceOffloader, slot: Slot, layout: Layout, stream: Stream, what: str, **more: Any) -> Any:
        came_back[what] += 1
        return reload(self, slot, layout, stream, what, **more)

    monkeypatch.setattr(DeviceOffloader, "reload", noting)

    def step(seed: int, is_whole: bool) -> tuple[Tensor, Tensor]:
        sizes = (side, side) if seed == 2 else (64, 64)
        x, middle, z = (leaf(*sizes, seed=seed + one) for one in range(3))
        with offload:
            metric, other, loss = (
                deep(z, nullcontext(), 1),
                deep(middle, nullcontext(), branches[seed]),
                deep(x, nullcontext(), 6),
            )
        offload.stats(synchronize=True)
        loss.backward()
        if is_whole:
            other.backward()
            metric.backward()
        return metric, other

    for seed in range(2):
        step(seed, True)
    kept = [*step(2, False)]
    if drops:
        kept.pop()
    offload.stats(synchronize=True)
    lane, order = offloader_of(offload), saves_of(offload).order
    resident, followed = lane.census().resident_bytes, order.followed_bytes
    came_back.clear()
    for seed in range(3, len(branches)):
        step(seed, True)
    stats = offload.stats(synchronize=True)
    if side == 64 and len({*branches}) == 1:
        assert stats.followed_forwards == 12 * step_plans
    del kept
    offload.stats(synchronize=True)
    assert order.followed_bytes == order.promised_bytes == 0
    assert lane.census().resident_bytes == 0
    monkeypatch.undo()
    offload.close()
    return Counted(followed, resident, came_back, stats.without_offload_bytes_peak)


def test_h54_what_has_died_of_a_step_that_is_kept_is_counted_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = counted(True, monkeypatch, [6] * 13, drops=True)
    assert followed == counted(False, monkeypatch, [6] * 13, drops=True)
    assert followed.followed_bytes == followed.resident_bytes == 0
    assert followed.came_back["prefetch"] > 100


@pytest.mark.parametrize(
    ("branches", "side"),
    [([40] * 13, 64), ([6] * 13, 128), ([6, 6, 6, *range(7, 17)], 64)],
    ids=["all follow", "the kept one follows none", "the later ones follow none"],
)
def test_h54_what_a_kept_graph_expects_in_vain_gives_way_to_later_steps(
    monkeypatch: pytest.MonkeyPatch, branches: list[int], side: int
) -> None:
    followed, anew = (counted(one, monkeypatch, branches, side=side) for one in (True, False))
    assert followed.most_bytes == anew.most_bytes
    assert followed.resident_bytes == anew.resident_bytes == 4 * SAVE
    assert followed.came_back["prefetch"] >= 0.95 * anew.came_back["prefetch"] > 80


@pytest.mark.parametrize("keep", [0, 1 << 20], ids=["away", "waiting"])
def test_h54_graphs_that_are_dropped_while_forward_goes_on_count_no_more(keep: int) -> None:
    def step(offload: Offload, *, drops: bool) -> int:
        """Returns the bytes that the library holds on the device at the end of the forward."""
        x, losses = leaf(64, 64), []
        with offload:
            losses += [deep(x, nullcontext(), 2)]
            for _ in range(5):
                losses += [deep(x, nullcontext(), 3)]
                offload.stats(synchronize=True)
                del losses[1 if drops else 6 :]
                offload.stats(synchronize=True)
            resident = offloader_of(offload).census().resident_bytes
        while losses:
            losses.pop().backward()
        return resident

    found = []
    for step_plans in (True, False):
        offload = Offload(tier="host", min_bytes=0, keep_last_bytes=keep, step_plans=step_plans)
        for _ in range(2):
            step(offload, drops=False)
        offload.reset_stats()
        resident = step(offload, drops=True)
        stats = offload.stats(synchronize=True)
        assert stats.followed_forwards == step_plans
        assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
        found.append((stats.without_offload_bytes_peak, stats.released_bytes, resident))
        offload.close()
    assert found[0] == found[1]
    assert found[0][0] == 5 * SAVE
