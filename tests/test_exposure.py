"""``policy="free"`` and ``max_slowdown``: the rule as numbers, and steps on the simulated runtime's clock and a CPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import eager_offload as eo
from eager_offload.eager.exposure import LeastKept
from eager_offload.learning import _spread
from tests.simulation.simulated import SimulatedRuntime

#: Bytes that stay at first, and that are enough for nothing to be exposed, in parts of all; and how steep it is there.
DEVICES = {
    "most": st.integers(1000, 1 << 40),
    "first": st.floats(0.0, 1.5),
    "enough": st.floats(0.0, 1.0),
    "steep": st.floats(0.1, 20.0),
    "bent": st.floats(0.5, 3.0),
}


class Device:
    """Exposed seconds of a step that takes one second without, for each number of bytes that stay."""

    def __init__(self, most: int, enough: float, steep: float, bent: float = 1.0) -> None:
        self.most, self.enough, self.steep, self.bent = most, enough, steep, bent

    def exposed(self, keep: int) -> float:
        return self.steep * max(self.enough - keep / self.most, 0.0) ** self.bent

    def least(self, limit: float) -> float:
        """The fewest bytes with which the slowdown is within ``limit``."""
        return max(self.enough - (limit / self.steep) ** (1 / self.bent), 0.0) * self.most


def train(rule: LeastKept, steps: Iterator[float], count: int, most: int) -> list[int]:
    """What stayed in each step."""
    kept = []
    for exposed in itertools.islice(steps, count):
        kept.append(rule.keep)
        rule.adapt(rule.keep, exposed, 1.0 + exposed, most)
    return kept


def changes(kept: list[int]) -> int:
    return sum(one != other for one, other in itertools.pairwise(kept))


@settings(max_examples=300)
@given(limit=st.floats(0, 1), **DEVICES)
def test_it_finds_the_least_that_is_enough_and_comes_to_rest(
    limit: float, most: int, first: float, enough: float, steep: float, bent: float
) -> None:
    device, rule = Device(most, enough, steep, bent), LeastKept(limit, int(first * most))
    kept = train(rule, iter(lambda: device.exposed(rule.keep), None), 400, most)
    assert all(0 <= keep <= most for keep in kept[1:]), "never more than there is"
    assert rule._found or kept[-1] != kept[-40], "it is found, or less is tried, to see whether that will do now"
    found = max(kept[300:])
    assert device.exposed(found) <= rule.limit * 1.001 or found == most
    assert min(kept[300:]) <= device.least(rule.limit) + most / 16 + 1
    more = train(rule, iter(lambda: device.exposed(rule.keep), None), 4000, most)
    assert changes(more) <= 2 * 8, "it tries less ever more rarely"
    assert rule.slowdown <= rule.limit or kept[-1] == most or not rule._found


@settings(max_examples=60)
@given(seed=st.integers(0, 999), enough=st.floats(0.1, 0.9), steep=st.floats(0.5, 5.0))
def test_steps_that_differ_do_not_make_it_change_for_ever(seed: int, enough: float, steep: float) -> None:
    most, chance = 1 << 30, random.Random(seed)
    device, rule = Device(most, enough, steep), LeastKept(0.05, 0)
    steps = iter(lambda: device.exposed(rule.keep) * chance.uniform(0.7, 1.3), None)
    train(rule, steps, 2000, most)
    assert changes(train(rule, steps, 2000, most)) <= 40


def test_steps_of_two_kinds_in_turn_are_judged_as_one() -> None:
    most, rule, kept = 1000, LeastKept(0.1, 0), []
    for step in range(400):
        kept.append(rule.keep)
        exposed = max(600 - rule.keep, 0) / 1000 if step % 2 else 0.0
        rule.adapt(rule.keep, exposed, 1.0 + exposed, most)
    assert 0.9 * 400 <= kept[-1] <= 480, "0.2 of one and nothing of the other are 0.1 of both"
    assert changes(kept[100:]) <= 8


def test_a_link_that_becomes_slower_is_noticed_and_one_that_becomes_faster_is_in_time() -> None:
    most, rule = 3200, LeastKept(0.01, 0)
    slow, fast = Device(most, 0.75, 1.0), Device(most, 0.25, 1.0)
    assert train(rule, iter(lambda: fast.exposed(rule.keep), None), 200, most)[-1] < 0.4 * most
    after = train(rule, iter(lambda: slow.exposed(rule.keep), None), 100, most)
    assert slow.exposed(after[-1]) <= 0.01
    assert min(train(rule, iter(lambda: fast.exposed(rule.keep), None), 1000, most)) < 0.4 * most


def test_another_amount_is_learnt_anew_and_no_more_stays_than_there_is() -> None:
    rule = LeastKept(0, 0)
    train(rule, itertools.repeat(1.0), 200, 1000)
    assert rule.keep == 1000
    train(rule, itertools.repeat(0.0), 1, 100)
    assert rule.keep == 100
    train(rule, itertools.repeat(0.0), 100, 100)
    assert rule.keep == 0


def test_steps_that_began_before_the_last_change_do_not_count() -> None:
    rule = LeastKept(0, 500)
    for _ in range(20):
        rule.adapt(400, 1.0, 2.0, 1000)
    assert (rule.keep, rule.slowdown) == (500, 0.0)


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(1, 1000), max_size=40), keep=st.integers(0, 30_000), newest=st.integers(0, 5000))
def test_what_stays_is_within_the_bytes_and_every_stretch_has_its_part(
    sizes: list[int], keep: int, newest: int
) -> None:
    stays = _spread(list(enumerate(sizes)), keep, newest)
    kept = sum(sizes[number] for number in stays)
    assert kept <= keep
    assert kept + max(sizes, default=1) > min(keep, sum(sizes)), "as much of it as whole storages can be"
    if keep >= sum(sizes):
        assert len(stays) == len(sizes)
    alike = _spread([(number, 10) for number in range(100)], 500, 100)
    assert {*range(90, 100)} <= alike
    assert all(3 <= len(alike & {*range(begin, begin + 10)}) <= 6 for begin in range(0, 90, 10))


# -- on the simulated runtime's clock -------------------------------------------------------------------------------

LAYERS, SIDE = 20, 64
NBYTES = SIDE * SIDE * 4
#: Bytes a second: a layer reads and writes ten tensors or so in forward and backward together, one of which is moved.
COMPUTE = 1e9


class Trained(NamedTuple):
    gradients: list[Tensor]
    stats: eo.OffloadStats
    #: The medians of the last steps, in some of which less may be tried.
    seconds: float
    moved: int


def layers(x: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x.sum()


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIDE, SIDE, generator=generator).div(8).requires_grad_() for _ in range(LAYERS)]


def simulate(link: float, steps: int = 80, **fields: object) -> Trained:
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
            for parameter in parameters:
                parameter.grad = None
            with offload:
                loss = layers(x, parameters)
            loss.backward()
            loss = None
            seconds.append(runtime.default_stream.tail - began)
            moved.append(offload.stats().bytes_out - before)
    checker.assert_clean()
    stats = offload.stats(synchronize=True)
    offload.close()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return Trained(gradients, stats, median(seconds[-20:]), int(median(moved[-20:])))


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    parameters = weights()
    layers(torch.ones(SIDE, SIDE), parameters).backward()
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@pytest.fixture(scope="module")
def alone() -> float:
    """Seconds of a step in which nothing moves."""
    return simulate(1.0, 5, keep_last_bytes="1GiB").seconds


def assert_exact(trained: Trained, expected: list[Tensor]) -> None:
    assert len(trained.gradients) == len(expected) == LAYERS
    assert all(torch.equal(one, other) for one, other in zip(trained.gradients, expected, strict=True))
    assert trained.stats.bytes_out > 0


@pytest.mark.parametrize("plans", ["auto", pytest.param(False, marks=pytest.mark.long)])
def test_behind_a_slow_link_what_it_hides_moves_and_the_rest_stays(
    plans: object, expected: list[Tensor], alone: float
) -> None:
    found = {
        name: simulate(0.04, step_plans=plans, **fields)
        for name, fields in {
            "max": {},
            "half": {"max_slowdown": 0.5},
            "free": {"policy": "free"},
        }.items()
    }
    for trained in found.values():
        assert_exact(trained, expected)
        assert (trained.stats.followed_forwards > 20) == (plans == "auto")
    moved = {name: trained.moved for name, trained in found.items()}
    slower = {name: trained.seconds / alone for name, trained in found.items()}
    assert 0 < moved["free"] < moved["half"] < moved["max"], moved
    assert 0.99 <= slower["free"] <= 1.02, slower
    assert 1.1 <= slower["half"] <= 1 + 0.5 * 1.2, slower
    assert slower["max"] > 2, slower
    assert "policy     free: compute waits" in str(found["free"].stats)
    assert "policy     max_slowdown of 50 %: compute waits" in str(found["half"].stats)


def test_a_slowdown_is_measured_as_it_is(expected: list[Tensor], alone: float) -> None:
    trained = simulate(0.04, 30, max_slowdown=100)
    assert_exact(trained, expected)
    assert trained.stats.keep_last_bytes == 0, "all that may move does"
    assert trained.stats.slowdown == pytest.approx(trained.seconds / alone - 1, rel=0.02)


def test_behind_a_fast_link_all_moves(expected: list[Tensor]) -> None:
    free, most = simulate(2.0, 40, policy="free"), simulate(2.0, 3, keep_last_bytes=0)
    assert_exact(free, expected)
    assert free.moved >= 0.9 * most.moved
    assert free.stats.keep_last_bytes <= 2 * NBYTES


def exact_in_threads(offload: eo.Offload, steps: int = 30, contexts: int = 1) -> list[bool]:
    """Two threads with one ``Offload``; whether the gradients of each are those without."""

    def run(around: AbstractContextManager[object]) -> Tensor:
        torch.set_num_threads(1)
        x = torch.linspace(0, 1, 1 << 14, requires_grad=True)
        for _ in range(steps):
            graphs = []
            for _ in range(contexts):
                with around:
                    y = x * 2
                    for _ in range(8):
                        y = y.sin()
                graphs.append(y.sum())
            for graph in graphs:
                graph.backward()
        assert x.grad is not None
        return x.grad

    plain = run(nullcontext())
    with ThreadPoolExecutor(2) as pool:
        return [torch.equal(one, plain) for one in pool.map(run, [offload] * 2)]


@pytest.mark.parametrize("fields", [{"policy": "free"}, {"max_slowdown": 0.05}, {"policy": "free", "device_budget": 1}])
@pytest.mark.parametrize("contexts", [1, 3])
@pytest.mark.filterwarnings("ignore:.*device_budget.*")
def test_threads_share_it_and_several_forwards_may_come_before_a_backward(
    fields: dict[str, object], contexts: int, tmp_path: Path
) -> None:
    offload = eo.Offload(tier="disk", disk_path=tmp_path, min_bytes=0, prefetch_bytes="256KiB", **fields)
    assert all(exact_in_threads(offload, contexts=contexts))
    stats = offload.stats(synchronize=True)
    offload.close()
    assert stats.bytes_out > 0
    assert stats.keep_last_bytes <= 9 << 16
    assert "device_budget" not in fields or stats.keep_last_bytes == 0, "the lesser of the two"


def test_in_one_context_around_many_steps_each_is_a_step(tmp_path: Path) -> None:
    offload = eo.Offload(tier="disk", disk_path=tmp_path, min_bytes=0, prefetch_bytes="64KiB", policy="free")
    x, plain = (torch.linspace(0, 1, 1 << 14, requires_grad=True) for _ in range(2))
    with offload:
        for _ in range(30):
            x.sin().exp().tanh().sum().backward()
    for _ in range(30):
        plain.sin().exp().tanh().sum().backward()
    stats = offload.stats(synchronize=True)
    offload.close()
    assert stats.bytes_out > 0
    assert torch.equal(x.grad, plain.grad)


def test_compiled_code_moves_no_more_than_without_it_and_all_where_a_step_may_take_ever_so_long(tmp_path: Path) -> None:
    def moved(**fields: object) -> tuple[int, Tensor]:
        offload = eo.Offload(tier="disk", disk_path=tmp_path, min_bytes=0, prefetch_bytes=0, **fields)
        compiled = offload.compile(lambda x: (x * 2).sin().exp().sum(), backend="aot_eager")
        x = torch.ones(1 << 14, requires_grad=True)
        for _ in range(3):
            compiled(x).backward()
        stats = offload.stats(synchronize=True)
        offload.close()
        torch.compiler.reset()
        return stats.bytes_out, x.grad

    (free_bytes, free_gradient), (plain_bytes, plain_gradient) = moved(policy="free"), moved()
    assert free_bytes <= plain_bytes
    assert torch.equal(free_gradient, plain_gradient)
    long_bytes, long_gradient = moved(max_slowdown=1e9)
    assert long_bytes == plain_bytes > 0
    assert torch.equal(long_gradient, plain_gradient)
