"""H24, H29: hooks of others inside ours and ours inside theirs; several offloads and several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.hazards.backends import Backend, assert_settled, hooks_are_gone, offloader_of
from tests.hazards.blocks import BOUNDARY, ROWS, WIDTH, Block
from tests.hazards.programs import REGIMES, Around, Regime, assert_identical, assert_moved, leaf, trained


def test_h24_a_forward_in_which_nothing_could_be_seen_is_counted_and_told_of_once(backend: Backend) -> None:
    offload, x = backend.offload(), leaf(ROWS, WIDTH)
    autograd = torch._C._autograd

    def train(steps: int) -> None:
        for _ in range(steps):
            with offload:
                # Past what the library has wrapped.
                autograd._push_saved_tensors_default_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
                loss = (x * 2).tanh().exp().sum()
                autograd._pop_saved_tensors_default_hooks()
            loss.backward()

    with pytest.warns(RuntimeWarning, match="no saved tensor could be seen") as warned:
        train(3)
    assert len(warned) == 1
    assert offload.stats().empty_forwards == 3
    with offload:
        loss = (x * 2).tanh().exp().sum()
    loss.backward()
    del loss
    assert_moved(assert_settled(offload))


def run_together(backend: Backend, jobs: list[Callable[[], object]]) -> list[object]:
    """Runs each job in a thread of its own; they start their work at the same moment."""
    start, results = threading.Barrier(len(jobs)), [None] * len(jobs)

    def run(index: int) -> None:
        start.wait(60)
        results[index] = jobs[index]()

    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda index: backend.in_thread(partial(run, index)), range(len(jobs))))
    return results


@pytest.mark.sampled(3, quick=True)
@pytest.mark.parametrize("regime", REGIMES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "one for both"])
def test_h29_two_threads(shared: bool, regime: Regime, backend: Backend) -> None:
    models = [nn.Sequential(Block(), Block()) for _ in range(2)]

    def job(index: int, offload: Around) -> Callable[[], object]:
        def work() -> object:
            model = deepcopy(models[index])

            def loss(step: int) -> Tensor:
                return model(leaf(ROWS, WIDTH, seed=100 * index + step)).square().mean()

            return trained(model.parameters(), offload, loss)

        return work

    expected = [job(index, nullcontext())() for index in range(2)]
    first = backend.offload(**regime.fields)
    offloads = [first, first if shared else backend.offload(**regime.fields)]
    actual = run_together(backend, [job(index, regime.around(offloads[index])) for index in range(2)])
    assert_identical(expected, actual)
    for offload in offloads:
        assert_moved(assert_settled(offload))
    assert hooks_are_gone()


def test_h29_different_offloads_inside_one_another(backend: Backend) -> None:
    def program(outer: Around, inner: Around) -> object:
        x = leaf(ROWS, WIDTH)
        with outer:
            h = (x * 2).tanh().exp()
            with inner:
                h = h.sin().exp()
                with outer:
                    h = h.cos().exp()
                h = h.tanh().sin()
            loss = h.cos().exp().sum()
        del h
        loss.backward()
        return x.grad

    expected = program(nullcontext(), nullcontext())
    for regime in REGIMES:
        outer, inner = backend.offload(**regime.fields), backend.offload(**regime.fields)
        assert_identical(expected, program(regime.around(outer), regime.around(inner)))
        for stats in (assert_settled(outer), assert_settled(inner)):
            assert_moved(stats)
            assert stats.foreign_hooks == 0


def test_h29_one_thread_waits_for_the_disk_and_the_other_goes_on(backend: Backend) -> None:
    slow, fast = backend.offload(), backend.offload()
    x, y = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
    with backend.gate() as gate:
        with slow:
            loss = (x * 2).tanh().exp().sum()

        def other() -> None:
            with fast:
                another = (y * 2).tanh().exp().sum()
            another.backward()

        backend.in_thread(other)
        assert offloader_of(fast).resident_bytes <= 2 * BOUNDARY
        gate.open()
    loss.backward()
    del loss
    assert torch.equal(x.grad, torch.autograd.grad((x * 2).tanh().exp().sum(), x)[0])
    assert_moved(assert_settled(slow))
    assert_moved(assert_settled(fast))
