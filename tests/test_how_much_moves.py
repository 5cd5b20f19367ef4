"""Windows, ``policy`` and ``device_budget``: on the simulated runtime's clock, and on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from tests.hazards.backends import assert_settled
from tests.hazards.programs import assert_identical
from tests.simulation.simulated import SimulatedRuntime
from tests.threads import on_threads

LAYERS, SIDE = 20, 64
NBYTES = SIDE * SIDE * 4
#: Bytes a second: a layer reads and writes ten tensors or so in forward and backward together, one of which is moved.
COMPUTE = 1e9
WITHOUT = nullcontext()
Make = Callable[..., eo.Offload]


class Trained(NamedTuple):
    gradients: list[Tensor]
    stats: eo.OffloadStats
    seconds: float
    moved: int


def layers(x: Tensor, weights: list[Tensor], last: int = 1) -> Tensor:
    """Returns the sum of the layers' results, and behind them of one that is so many times as large."""
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x.sum() if last == 1 else x.repeat(last, 1).tanh().sum()


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIDE, SIDE, generator=generator).div(8).requires_grad_() for _ in range(LAYERS)]


def simulate(link: float, steps: int = 80, *, compute: float = COMPUTE, last: int = 1, **fields: Any) -> Trained:
    """Trains behind a link that moves so many of the bytes that compute touches."""
    runtime = SimulatedRuntime(
        compute_rate=compute, out_bandwidth=compute * link, in_bandwidth=compute * link, launch_seconds=1e-7
    )
    windows = {"max_inflight_bytes": 3 * NBYTES, "prefetch_bytes": 3 * NBYTES}
    offload = eo.Offload(runtime=runtime, tier="host", min_bytes=NBYTES, **(windows | fields))
    parameters, x, seconds, moved = weights(), torch.ones(SIDE, SIDE), [], []
    with runtime.checked() as checker:
        for _ in range(steps):
            began, before = runtime.default_stream.tail, offload.stats().bytes_out
            with offload:
                loss = layers(x, parameters, last)
            gradients = [*torch.autograd.grad(loss, parameters)]
            del loss
            seconds.append(runtime.default_stream.tail - began)
            moved.append(offload.stats().bytes_out - before)
    checker.assert_clean()
    stats = offload.stats(synchronize=True)
    offload.close()
    return Trained(gradients, stats, median(seconds[-5:]), int(median(moved[-5:])))


@pytest.fixture(scope="module")
def alone() -> Trained:
    """Steps in which nothing moves."""
    with pytest.warns(RuntimeWarning, match="nothing moved"):
        return simulate(1.0, 5, keep_last_bytes="1GiB")


def assert_exact(trained: Trained, alone: Trained) -> None:
    assert all(map(torch.equal, trained.gradients, alone.gradients))
    assert trained.stats.bytes_out > 0 == alone.stats.bytes_out


@pytest.mark.filterwarnings("ignore:eager_offload. nothing moved:RuntimeWarning")
def test_behind_a_slow_link_what_it_hides_moves_and_the_rest_stays(alone: Trained) -> None:
    found = {
        "max": simulate(0.04, 10),
        "free": simulate(0.04, 12, policy="free"),
    }
    for trained in found.values():
        assert_exact(trained, alone)
    moved = {name: trained.moved for name, trained in found.items()}
    slower = {name: trained.seconds / alone.seconds for name, trained in found.items()}
    assert 0 < moved["free"] < moved["max"], moved
    assert 0.99 <= slower["free"] <= 1.02, slower
    assert slower["max"] > 2, slower
    assert found["free"].stats.slowdown == pytest.approx(slower["free"] - 1, abs=0.002), "it is measured as it is"
    assert "policy     free: compute waits" in str(found["free"].stats)


@pytest.mark.parametrize(("link", "is_less"), [(4.0, True), (0.02, False)])
def test_automatic_windows_are_the_least_with_which_nothing_waits(alone: Trained, link: float, is_less: bool) -> None:
    auto = dict.fromkeys(("max_inflight_bytes", "prefetch_bytes"), "auto")
    # A layer takes as long as one of a large model, of which a host has time to see that a copy is over.
    by_bytes, by_times = (simulate(link, 12, compute=1e6, step_tables=one, **auto) for one in (False, "auto"))
    assert_exact(by_times, alone)
    windows = [(one.stats.max_inflight_bytes, one.stats.prefetch_bytes) for one in (by_bytes, by_times)]
    assert windows[1] == (NBYTES, NBYTES) if is_less else windows[1] == windows[0]
    assert by_times.moved >= by_bytes.moved or not is_less
    assert by_times.seconds <= by_bytes.seconds * 1.001


def test_what_backward_asks_for_before_it_could_be_away_stays(alone: Trained) -> None:
    auto = dict.fromkeys(("max_inflight_bytes", "prefetch_bytes"), "auto")
    in_vain, rests = (simulate(4.0, 12, compute=1e6, last=16, step_tables=one, **auto) for one in (False, "auto"))
    assert all(map(torch.equal, in_vain.gradients, rests.gradients))
    assert rests.moved == LAYERS * NBYTES <= in_vain.moved - 16 * NBYTES
    assert rests.seconds <= in_vain.seconds


def test_behind_a_fast_link_all_moves(alone: Trained) -> None:
    free, most = simulate(2.0, 12, policy="free"), simulate(2.0, 3, keep_last_bytes=0)
    assert_exact(free, alone)
    assert free.moved >= 0.9 * most.moved
    assert free.stats.keep_last_bytes <= 2 * NBYTES


# -- on a CPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def offloads(tmp_path: Path) -> Iterator[Callable[..., eo.Offload]]:
    """Makes an ``Offload`` to a disk, which holds nothing in the end."""
    with ExitStack() as stack:

        def make(**fields: Any) -> eo.Offload:
            offload = stack.enter_context(closing(eo.Offload(tier="disk", disk_path=tmp_path, min_bytes=0, **fields)))
            stack.callback(assert_settled, offload)
            return offload

        yield make


def gradient(around: AbstractContextManager[Any] = WITHOUT, steps: int = 12, contexts: int = 1) -> Tensor:
    """Of so many steps, each of which has several forwards before the first backward."""
    torch.set_num_threads(1)
    x = torch.linspace(0, 1, 1 << 14, requires_grad=True)
    for _ in range(steps):
        losses = []
        for _ in range(contexts):
            with around:
                y = x * 2
                for _ in range(8):
                    y = y.sin()
            losses.append(y.sum())
        while losses:
            losses.pop(0).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("fields", "contexts"),
    [
        ({"policy": "free"}, 1),
        ({"policy": "free"}, 3),
        ({"policy": "free", "device_budget": 1}, 3),
        ({"device_budget": 1}, 1),
        ({"device_budget": "1TiB"}, 1),
        ({"device_budget": "auto"}, 1),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*device_budget.*")
def test_h55_threads_share_one_offload_and_gradients_are_exact(
    fields: dict[str, Any], contexts: int, offloads: Callable[..., eo.Offload]
) -> None:
    offload = offloads(prefetch_bytes="256KiB", **fields)
    plain = gradient(contexts=contexts)
    assert all(torch.equal(one, plain) for one in on_threads(2, lambda _: gradient(offload, contexts=contexts)))
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    if "device_budget" in fields:
        too_small = fields["device_budget"] == 1
        assert ("over_budget" in stats.fallbacks) == too_small
        assert (stats.keep_last_bytes == 0) == too_small, "the lesser of the two"
        assert stats.device_memory_peak > 1
    else:
        assert stats.keep_last_bytes <= 9 << 16


def test_a_device_that_does_not_tell_is_an_error() -> None:
    x = torch.ones(64, requires_grad=True)
    offload = eo.Offload(device_budget="1GiB", tier="host", min_bytes=0, runtime=SimulatedRuntime())
    with (
        pytest.raises(eo.ConfigError, match=r"does not report how much of its memory is used.*keep_last_bytes"),
        offload,
    ):
        x.exp()


@pytest.mark.filterwarnings("ignore:eager_offload. device_budget=.* is not kept:RuntimeWarning")
def test_a_budget_without_its_unit_is_an_error_that_asks_for_one_and_a_small_one_is_repeated_as_given(
    offloads: Callable[..., eo.Offload],
) -> None:
    """What is there already takes more than 20 bytes, whatever moves."""
    with pytest.raises(eo.ConfigError, match=r"device_budget='20\.0' .* 20 bytes.*device_budget=\"20GiB\""):
        gradient(offloads(device_budget="20.0"), steps=1)
    with pytest.warns(RuntimeWarning, match="device_budget=3000 kB is not kept"):
        gradient(offloads(device_budget="3000 kB"), steps=6)
    meant = offloads(device_budget="20 B")
    assert torch.equal(gradient(meant, steps=1), gradient(steps=1))
    assert meant.stats(synchronize=True).bytes_out > 0


# -- windows, which are of the last step's bytes and in force where a step begins -------------------------------------

KIB, MIB = 1 << 10, 1 << 20
FIRST = 64 * MIB


def window_of(saves: int, nbytes: int) -> int:
    """Of a step that saves so many small tensors of so many bytes: four of them, an eighth, and at most a quarter."""
    return min(max(4 * nbytes, saves * nbytes // 8), saves * nbytes // 4)


def chain(saves: int, nbytes: int, around: AbstractContextManager[Any] = WITHOUT) -> object:
    """A step that saves so many storages of so many bytes."""
    x = torch.linspace(-1, 1, nbytes // 4).requires_grad_()
    with around:
        y = x * 1
        for _ in range(saves):
            y = y.sigmoid() * 2
        loss = y.sum()
    loss.backward()
    return loss.detach(), x.grad


def windows_of(offload: eo.Offload) -> tuple[int, int]:
    stats = offload.stats()
    return stats.max_inflight_bytes, stats.prefetch_bytes


@pytest.mark.parametrize("step_tables", [False, True])
def test_each_step_has_the_windows_that_the_one_before_it_asks_for(offloads: Make, step_tables: bool) -> None:
    offload, expected = offloads(step_tables=step_tables), FIRST
    kinds = [(12, 64 * KIB)] * 5 + [(40, 4 * KIB), (12, 64 * KIB), (40, 4 * KIB), (6, 256 * KIB), (12, 64 * KIB)]
    for kind in kinds:
        assert_identical(chain(*kind), chain(*kind, offload))
        assert windows_of(offload) == (expected, expected)
        expected = window_of(*kind)
    assert offload.stats(synchronize=True).bytes_out > 0
    assert "\nwindows    192.0 KiB on the way out, 192.0 KiB brought back early\n" not in str(offload.stats())
    chain(12, 64 * KIB, offload)
    assert "\nwindows    192.0 KiB on the way out, 192.0 KiB brought back early\n" in str(offload.stats())


def test_a_first_step_grows_with_the_largest_size_that_four_of_its_tensors_have(offloads: Make) -> None:
    offload, seen = offloads(keep_last_bytes=0), []
    y = torch.ones(8 * MIB // 4, requires_grad=True)
    with offload:
        for times in (1, 3, 1, 1, 1):  # of 8 MiB, then of 24
            y = y.repeat(times).sigmoid()
            seen.append(windows_of(offload))
    y.sum().backward()
    assert seen == [(FIRST, FIRST)] * 4 + [(96 * MIB, 96 * MIB)]
    assert offload.stats(synchronize=True).bytes_out >= 32 * MIB


def test_what_a_user_gives_stays_in_force(offloads: Make) -> None:
    offload, given = offloads(max_inflight_bytes="1MiB"), offloads(max_inflight_bytes="3MiB", prefetch_bytes=0)
    for window in (FIRST, window_of(12, 64 * KIB)):
        for one in (offload, given):
            chain(12, 64 * KIB, one)
        assert windows_of(offload) == (MIB, window)
        assert windows_of(given) == (3 * MIB, 0)
    offload.reset_stats()
    assert windows_of(offload) == (MIB, window)
