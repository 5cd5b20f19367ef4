"""``policy``, ``max_slowdown`` and ``device_budget``: on the simulated runtime's clock, and on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from tests.processes import printed_by
from tests.simulation.simulated import SimulatedRuntime
from tests.threads import on_threads

LAYERS, SIDE = 20, 64
NBYTES = SIDE * SIDE * 4
#: Bytes a second: a layer reads and writes ten tensors or so in forward and backward together, one of which is moved.
COMPUTE = 1e9
WITHOUT = nullcontext()


class Trained(NamedTuple):
    """The medians are of the last steps, in some of which less may be tried."""

    gradients: list[Tensor]
    stats: eo.OffloadStats
    seconds: float
    moved: int


def layers(x: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x.sum()


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIDE, SIDE, generator=generator).div(8).requires_grad_() for _ in range(LAYERS)]


def simulate(link: float, steps: int = 50, **fields: Any) -> Trained:
    """Trains behind a link that moves so many of the bytes that compute touches."""
    runtime = SimulatedRuntime(
        compute_rate=COMPUTE, out_bandwidth=COMPUTE * link, in_bandwidth=COMPUTE * link, launch_seconds=1e-7
    )
    windows = {"max_inflight_bytes": 3 * NBYTES, "prefetch_bytes": 3 * NBYTES}
    offload = eo.Offload(runtime=runtime, tier="host", min_bytes=NBYTES, **windows, **fields)
    parameters, x, seconds, moved = weights(), torch.ones(SIDE, SIDE), [], []
    with runtime.checked() as checker:
        for _ in range(steps):
            began, before = runtime.default_stream.tail, offload.stats().bytes_out
            with offload:
                loss = layers(x, parameters)
            gradients = [*torch.autograd.grad(loss, parameters)]
            del loss
            seconds.append(runtime.default_stream.tail - began)
            moved.append(offload.stats().bytes_out - before)
    checker.assert_clean()
    stats = offload.stats(synchronize=True)
    offload.close()
    return Trained(gradients, stats, median(seconds[-20:]), int(median(moved[-20:])))


@pytest.fixture(scope="module")
def alone() -> Trained:
    """Steps in which nothing moves."""
    return simulate(1.0, 5, keep_last_bytes="1GiB")


def assert_exact(trained: Trained, alone: Trained) -> None:
    assert all(map(torch.equal, trained.gradients, alone.gradients))
    assert trained.stats.bytes_out > 0 == alone.stats.bytes_out


def test_behind_a_slow_link_what_it_hides_moves_and_the_rest_stays(alone: Trained) -> None:
    asked: dict[str, dict[str, Any]] = {"max": {}, "half": {"max_slowdown": 0.5}, "free": {"policy": "free"}}
    found = {name: simulate(0.04, **fields) for name, fields in asked.items()}
    for trained in found.values():
        assert_exact(trained, alone)
    moved = {name: trained.moved for name, trained in found.items()}
    slower = {name: trained.seconds / alone.seconds for name, trained in found.items()}
    assert 0 < moved["free"] < moved["half"] < moved["max"], moved
    assert 0.99 <= slower["free"] <= 1.02, slower
    assert 1.1 <= slower["half"] <= 1 + 0.5 * 1.2, slower
    assert slower["max"] > 2, slower
    assert "policy     free: compute waits" in str(found["free"].stats)
    assert "policy     max_slowdown of 50.0 %: compute waits" in str(found["half"].stats)


def test_a_slowdown_is_measured_as_it_is(alone: Trained) -> None:
    trained = simulate(0.04, 30, max_slowdown=100)
    assert_exact(trained, alone)
    assert trained.stats.keep_last_bytes == 0, "all that may move does"
    assert trained.stats.slowdown == pytest.approx(trained.seconds / alone.seconds - 1, rel=0.02)


def test_behind_a_fast_link_all_moves(alone: Trained) -> None:
    free, most = simulate(2.0, 40, policy="free"), simulate(2.0, 3, keep_last_bytes=0)
    assert_exact(free, alone)
    assert free.moved >= 0.9 * most.moved
    assert free.stats.keep_last_bytes <= 2 * NBYTES


# -- on a CPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def offloads(tmp_path: Path) -> Iterator[Callable[..., eo.Offload]]:
    """Makes an ``Offload`` to a disk, which is closed at the end."""
    made: list[eo.Offload] = []

    def make(**fields: Any) -> eo.Offload:
        made.append(eo.Offload(**{"tier": "disk", "disk_path": tmp_path, "min_bytes": 0, **fields}))
        return made[-1]

    yield make
    for offload in made:
        offload.close()


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
        ({"max_slowdown": 0.05}, 3),
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
        assert ("over_budget" in stats.demotions) == too_small
        assert (stats.keep_last_bytes == 0) == too_small, "the lesser of the two"
        assert stats.device_memory_peak > 1
    else:
        assert stats.keep_last_bytes <= 9 << 16


def test_a_device_that_does_not_tell_is_an_error() -> None:
    x = torch.ones(64, requires_grad=True)
    offload = eo.Offload(device_budget="1GiB", tier="host", min_bytes=0, runtime=SimulatedRuntime())
    with pytest.raises(eo.ConfigError, match=r"does not tell how much of its memory is used.*keep_last_bytes"), offload:
        x.exp()


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


#: In MiB: the peaks of eight steps and of one without offload above what there was, what moved, and how often it was
#: over the budget of 130.
PEAKS = """
import sys, psutil, torch, eager_offload as eo
MIB, LAYERS = 1 << 20, 24
eo.release_freed_memory()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*(m for _ in range(LAYERS) for m in (torch.nn.Linear(256, 256), torch.nn.Tanh())))
process, peaks, used = psutil.Process(), [], []
for layer in model:
    layer.register_forward_hook(lambda *_: used.append(process.memory_info().rss))
    layer.register_full_backward_hook(lambda *_: used.append(process.memory_info().rss))
base = process.memory_info().rss
windows = {"max_inflight_bytes": "16MiB", "prefetch_bytes": "16MiB"}
offload = eo.Offload(device_budget=base + 130 * MIB, disk_path=sys.argv[1], **windows)
gradients = []
for around in (*[offload] * 8, eo.Offload(enabled=False)):
    used.clear()
    with around:
        loss = model(torch.ones(8192, 256)).square().mean()
    loss.backward()
    peaks.append((max(used) - base) // MIB)
    gradients.append([parameter.grad for parameter in model.parameters()])
    model.zero_grad()
assert all(torch.equal(one, other) for one, other in zip(gradients[0], gradients[-1], strict=True))
stats = offload.stats(synchronize=True)
print(*peaks, stats.bytes_out // MIB, stats.demotions.get("over_budget", 0))
"""


@pytest.mark.long
def test_h55_on_a_cpu_it_is_the_memory_of_the_process(tmp_path: Path) -> None:
    """As the system measures it, in a process of its own: the newest hold its peak up to the budget, and no further."""
    printed = printed_by("-c", PEAKS, tmp_path)
    *peaks, without, moved, over = map(int, printed.split())
    assert without > 180
    assert moved > 0
    assert 130 * 0.75 <= max(peaks[4:]) <= 130 * 1.05, printed
    assert over <= 2, printed
