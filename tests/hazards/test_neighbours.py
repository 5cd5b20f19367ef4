"""H24, H29: hooks of others that hide ours; several offloads and several threads at once."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.hazards.backends import Backend, assert_settled, hooks_are_gone, offloader_of
from tests.hazards.programs import REGIMES, Around, assert_identical, assert_moved, leaf
from tests.programs import Run
from tests.programs.threads import model_of, train, train_together


def test_h24_a_forward_in_which_nothing_could_be_seen_is_counted_and_told_of_once(backend: Backend) -> None:
    offload, x = backend.offload(), leaf(16, 32)
    autograd = torch._C._autograd

    def steps(count: int, *, hidden: bool) -> None:
        for _ in range(count):
            with offload:
                if hidden:  # past what the library has wrapped
                    autograd._push_saved_tensors_default_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
                loss = (x * 2).tanh().exp().sum()
                if hidden:
                    autograd._pop_saved_tensors_default_hooks()
            loss.backward()

    with pytest.warns(RuntimeWarning, match="no saved tensor could be seen") as warned:
        steps(3, hidden=True)
    assert len(warned) == 1
    assert offload.stats().empty_forwards == 3
    steps(1, hidden=False)
    assert_moved(assert_settled(offload))


def test_h29_two_threads_with_an_offload_each(backend: Backend) -> None:
    expected = [train(Run(), model_of(number), number) for number in range(2)]
    for regime in REGIMES[::2]:
        offloads = [backend.offload(**regime.fields) for _ in range(2)]
        assert_identical(expected, train_together([Run(regime.around(offload)) for offload in offloads]))
        for offload in offloads:
            assert_moved(assert_settled(offload))
    assert hooks_are_gone()


def test_h29_different_offloads_inside_one_another(backend: Backend) -> None:
    def program(outer: Around, inner: Around) -> object:
        x = leaf(16, 32)
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
    x, y = leaf(16, 32), leaf(16, 32, seed=2)
    with backend.gate() as gate:
        with slow:
            loss = (x * 2).tanh().exp().sum()

        def other() -> None:
            with fast:
                another = (y * 2).tanh().exp().sum()
            another.backward()

        backend.in_thread(other)
        assert offloader_of(fast).resident_bytes <= 2 * x.nbytes
        gate.open()
    loss.backward()
    del loss
    assert torch.equal(x.grad, torch.autograd.grad((x * 2).tanh().exp().sum(), x)[0])
    assert_moved(assert_settled(slow))
    assert_moved(assert_settled(fast))
