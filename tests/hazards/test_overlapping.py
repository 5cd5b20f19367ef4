"""H24, H29, H42, H43: contexts inside one another, in several threads, and of one thread that overlap without nesting:
the right hooks are on, none stays, and what hides ours is told of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

import eager_offload as eo
from tests.hazards.backends import Backend, assert_settled, hooks_are_gone
from tests.hazards.programs import REGIMES, Around, assert_identical, assert_moved
from tests.programs import Run, leaf
from tests.programs.threads import model_of, train, train_together

#: What two, or three, contexts have in common.
KINDS: dict[str, Callable[[Backend, int], list[eo.Offload]]] = {
    "equal": lambda backend, count: [backend.offload() for _ in range(count)],
    "different": lambda backend, count: [backend.offload(prefetch_bytes=1024 * (1 + n)) for n in range(count)],
    "the same object": lambda backend, count: [backend.offload()] * count,
}


class Theirs(saved_tensors_hooks):
    """Hooks of others that change nothing, and count."""

    def __init__(self) -> None:
        self.packed = 0
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        self.packed += 1
        return tensor.detach()


def stage(h: Tensor, x: Tensor) -> Tensor:
    return h.sin() * x.exp()


def gradient(arounds: Sequence[Around], order: Sequence[int]) -> Tensor | None:
    """Enters and leaves, by number, each at its first and its second place in ``order``; has a stage after each."""
    h = x = leaf(16, 16)
    entered = set[int]()
    for number in order:
        if number in entered:
            arounds[number].__exit__(None, None, None)
        else:
            arounds[number].__enter__()
            entered.add(number)
        h = stage(h, x)
    assert hooks_are_gone()
    h.sum().backward()
    return x.grad


def plain(stages: int) -> Tensor | None:
    return gradient([nullcontext()] * stages, range(stages))


def orders(count: int) -> Iterator[tuple[int, ...]]:
    """All ways in which ``count`` contexts, entered by number, may overlap."""
    for order in sorted(set(itertools.permutations([*range(count), *range(count)]))):
        if list(dict.fromkeys(order)) == list(range(count)):
            yield order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3])
def test_h42_every_order_of_entering_and_leaving(count: int, kind: str, backend: Backend) -> None:
    offloads = KINDS[kind](backend, count)
    for order in orders(count):
        assert_identical(plain(2 * count), gradient(offloads, order))
    for offload in {*offloads}:
        stats = assert_settled(offload)
        assert_moved(stats)
        assert stats.foreign_hooks == stats.empty_forwards == 0


@pytest.mark.filterwarnings("ignore:eager_offload. other saved-tensor hooks:RuntimeWarning")
def test_h42_with_hooks_of_others_in_between(backend: Backend) -> None:
    first, second = KINDS["different"](backend, 2)
    for order, place in itertools.product(orders(3), range(3)):
        theirs, arounds = Theirs(), list[Around]([first, second])
        arounds.insert(place, theirs)
        assert_identical(plain(6), gradient(arounds, order))
        assert theirs.packed > 0
    assert_moved(assert_settled(first))


def test_h42_what_hooks_of_others_have_left_behind_goes_and_not_an_open_context_of_ours(backend: Backend) -> None:
    first, second = KINDS["equal"](backend, 2)
    theirs, x = Theirs(), leaf(16, 16)
    theirs.__enter__()
    first.__enter__()
    theirs.__exit__(None, None, None)  # takes ours off
    second.__enter__()
    first.__exit__(None, None, None)
    h = stage(x, x)
    second.__exit__(None, None, None)
    assert hooks_are_gone()
    assert theirs.packed == 0
    h.sum().backward()
    assert_identical(plain(1), x.grad)
    del h
    assert_moved(assert_settled(second))


@pytest.mark.filterwarnings("ignore:eager_offload. another Offload, entered:RuntimeWarning")
def test_h42_what_is_saved_goes_to_the_one_entered_last_that_is_open(backend: Backend) -> None:
    first, second = KINDS["different"](backend, 2)
    graphs, x = list[Tensor](), leaf(16, 16)

    def saved() -> list[bool]:
        before = [one.stats().saved_tensors for one in (first, second)]
        graphs.append(stage(x, x))
        return [one.stats().saved_tensors > old for one, old in zip((first, second), before, strict=True)]

    first.__enter__()
    second.__enter__()
    assert saved() == [False, True]
    first.__exit__(None, None, None)
    assert saved() == [False, True]
    first.__enter__()
    assert saved() == [True, False]
    first.__exit__(None, None, None)
    assert saved() == [False, True]
    second.__exit__(None, None, None)
    assert saved() == [False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_h42_leaving_too_often_or_in_another_thread_is_an_error_and_leaves_others_on(
    kind: str, backend: Backend
) -> None:
    first, second = KINDS[kind](backend, 2)

    def leave(one: eo.Offload, text: str) -> None:
        with pytest.raises(eo.OffloadError, match=text):
            one.__exit__(None, None, None)

    first.__enter__()
    second.__enter__()
    backend.in_thread(lambda: leave(first, "in a thread that did not enter it"))
    first.__exit__(None, None, None)
    if first is not second:
        leave(first, "did not enter it, or that has left it already")
    x = leaf(16, 16)
    h = stage(x, x)
    second.__exit__(None, None, None)
    for one in (first, second):
        leave(one, "did not enter it, or that has left it already")
    assert hooks_are_gone()
    h.sum().backward()
    assert_identical(plain(1), x.grad)
    del h
    assert_moved(assert_settled(second))


def test_h43_a_ban_on_hooks_ends_with_the_context_or_stays_if_it_is_from_outside(backend: Backend) -> None:
    offload = backend.offload()
    with pytest.raises(eo.OffloadError, match="no saved tensor hooks here"), offload:
        torch._C._autograd._saved_tensors_hooks_disable("no saved tensor hooks here")
    assert_identical(plain(2), gradient([offload], [0, 0]))
    with disable_saved_tensors_hooks("no saved tensor hooks today"):
        for _ in range(2):
            with pytest.raises(eo.OffloadError, match="no saved tensor hooks today"), offload:
                pass
        with pytest.raises(RuntimeError, match="no saved tensor hooks today"), Theirs():
            pass
    assert_identical(plain(2), gradient([offload], [0, 0]))
    assert_moved(assert_settled(offload))


def test_h24_a_forward_in_which_nothing_could_be_seen_is_counted_and_told_of_once(backend: Backend) -> None:
    offload, x, autograd = backend.offload(), leaf(16, 16), torch._C._autograd

    def hidden() -> None:
        with offload:  # past what the library has wrapped
            autograd._push_saved_tensors_default_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
            stage(x, x)
            autograd._pop_saved_tensors_default_hooks()

    with pytest.warns(RuntimeWarning, match="no saved tensor could be seen") as warned:
        [hidden() for _ in range(3)]
    assert len(warned) == 1
    assert offload.stats().empty_forwards == 3
    assert_identical(plain(2), gradient([offload], [0, 0]))
    assert_moved(assert_settled(offload))


def test_h29_two_threads_with_an_offload_each(backend: Backend) -> None:
    expected = [train(Run(), model_of(number), number) for number in range(2)]
    for regime in REGIMES[::2]:
        offloads = [backend.offload(**regime.fields) for _ in range(2)]
        assert_identical(expected, train_together([Run(regime.around(offload)) for offload in offloads]))
        for offload in offloads:
            assert_moved(assert_settled(offload))
    assert hooks_are_gone()
