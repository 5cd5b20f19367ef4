"""H42, H43: contexts of one thread that overlap without nesting: the right hooks are on, and none stays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

import eager_offload as eo
from tests.hazards.backends import Backend, assert_settled, hooks_are_gone
from tests.hazards.programs import Around, assert_identical, assert_moved, leaf

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


def enter_and_leave(arounds: Sequence[Around], order: Sequence[int]) -> object:
    """Enters and leaves, by number, each at its first and its second place in ``order``; computes after each."""
    x = leaf(16, 16)
    h, entered = x, set[int]()
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


def plain(stages: int) -> object:
    """The gradient of so many stages, computed in no context at all."""
    h = x = leaf(16, 16)
    for _ in range(stages):
        h = stage(h, x)
    h.sum().backward()
    return x.grad


def orders(count: int) -> Iterator[tuple[int, ...]]:
    """All ways in which ``count`` contexts, entered by number, may overlap."""
    for order in set(itertools.permutations([*range(count), *range(count)])):
        if list(dict.fromkeys(order)) == list(range(count)):
            yield order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3])
def test_h42_every_order_of_entering_and_leaving(count: int, kind: str, backend: Backend) -> None:
    offloads = KINDS[kind](backend, count)
    for order in orders(count):
        assert_identical(plain(2 * count), enter_and_leave(offloads, order))
    for offload in {*offloads}:
        stats = assert_settled(offload)
        assert_moved(stats)
        assert stats.foreign_hooks == stats.empty_forwards == 0


@pytest.mark.filterwarnings("ignore:eager_offload. other saved-tensor hooks:RuntimeWarning")
def test_h42_with_hooks_of_others_in_between(backend: Backend) -> None:
    first, second = KINDS["different"](backend, 2)
    for order, place in itertools.product(sorted(orders(3)), range(3)):
        theirs, arounds = Theirs(), list[Around]([first, second])
        arounds.insert(place, theirs)
        assert_identical(plain(6), enter_and_leave(arounds, order))
        assert theirs.packed > 0
    assert_moved(assert_settled(first))


def test_h42_what_is_saved_goes_to_the_one_entered_last_that_is_open(backend: Backend) -> None:
    first, second = KINDS["different"](backend, 2)
    graphs, x = list[Tensor](), leaf(16, 16)

    def saved() -> list[bool]:
        before = [first.stats().saved_tensors, second.stats().saved_tensors]
        graphs.append(stage(x, x))
        after = [first.stats().saved_tensors, second.stats().saved_tensors]
        return [new > old for old, new in zip(before, after, strict=True)]

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
    assert_identical(plain(2), enter_and_leave([offload], [0, 0]))
    with disable_saved_tensors_hooks("no saved tensor hooks today"):
        for _ in range(2):
            with pytest.raises(eo.OffloadError, match="no saved tensor hooks today"), offload:
                pass
        with pytest.raises(RuntimeError, match="no saved tensor hooks today"), Theirs():
            pass
    assert_identical(plain(2), enter_and_leave([offload], [0, 0]))
    assert_moved(assert_settled(offload))
