"""H42: contexts of one thread that overlap without nesting: the right hooks are on, and none stays."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

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

kinds = pytest.mark.parametrize("kind", KINDS)


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


def settle(offloads: Sequence[eo.Offload]) -> None:
    for offload in set(offloads):
        stats = assert_settled(offload)
        assert_moved(stats)
        assert stats.foreign_hooks == stats.empty_forwards == 0


@kinds
@pytest.mark.parametrize("count", [2, 3])
def test_h42_every_order_of_entering_and_leaving(count: int, kind: str, backend: Backend) -> None:
    offloads = KINDS[kind](backend, count)
    for order in orders(count):
        assert_identical(plain(2 * count), enter_and_leave(offloads, order))
    settle(offloads)


@kinds
def test_h42_tasks_of_one_event_loop(kind: str, backend: Backend) -> None:
    async def task(around: Around, pauses: int, x: Tensor) -> Tensor:
        with around:
            h = x
            for _ in range(3):
                h = stage(h, x)
                for _ in range(pauses):
                    await asyncio.sleep(0)
        return h.sum()

    async def tasks(arounds: Sequence[Around], x: Tensor) -> Tensor:
        losses = await asyncio.gather(*(task(around, 1 + n, x) for n, around in enumerate(arounds)))
        return torch.stack(losses).sum()

    def program(arounds: Sequence[Around]) -> object:
        x = leaf(16, 16)
        asyncio.run(tasks(arounds, x)).backward()
        assert hooks_are_gone()
        return x.grad

    offloads = KINDS[kind](backend, 3)
    expected = program([nullcontext()] * 3)
    assert_identical(expected, program(offloads))
    assert_identical(expected, program(offloads[::-1]))
    settle(offloads)


@kinds
def test_h42_generators_that_hold_a_context_open(kind: str, backend: Backend) -> None:
    def layers(around: Around, x: Tensor) -> Iterator[Tensor]:
        with around:
            h = x
            while True:
                h = stage(h, x)
                yield h

    def program(arounds: Sequence[Around]) -> object:
        x = leaf(16, 16)
        first, second = (layers(around, x) for around in arounds)
        loss = next(first).sum() + next(second).sum() + next(first).sum()
        first.close()
        loss = loss + next(second).sum()
        del second
        assert hooks_are_gone()
        loss.backward()
        return x.grad

    offloads = KINDS[kind](backend, 2)
    assert_identical(program([nullcontext()] * 2), program(offloads))
    settle(offloads)


def test_h42_what_is_saved_goes_to_the_one_entered_last_that_is_open(backend: Backend) -> None:
    first, second = KINDS["different"](backend, 2)
    x = leaf(16, 16)

    def saved(number: int) -> list[bool]:
        before = [first.stats().saved_tensors, second.stats().saved_tensors]
        graphs.append(stage(x, x))
        after = [first.stats().saved_tensors, second.stats().saved_tensors]
        return [new > old for old, new in zip(before, after, strict=True)]

    graphs: list[Tensor] = []
    first.__enter__()
    second.__enter__()
    assert saved(0) == [False, True]
    first.__exit__(None, None, None)
    assert saved(1) == [False, True]
    first.__enter__()
    assert saved(2) == [True, False]
    first.__exit__(None, None, None)
    assert saved(3) == [False, True]
    second.__exit__(None, None, None)
    assert saved(4) == [False, False]


@pytest.mark.filterwarnings("ignore:eager_offload. other saved-tensor hooks:RuntimeWarning")
@pytest.mark.parametrize("order", sorted(orders(3)), ids=str)
def test_h42_with_hooks_of_others_in_between(order: tuple[int, ...], backend: Backend) -> None:
    first, second = KINDS["different"](backend, 2)
    for place in range(3):
        theirs, arounds = Theirs(), list[Around]([first, second])
        arounds.insert(place, theirs)
        assert_identical(plain(6), enter_and_leave(arounds, order))
        assert theirs.packed > 0
    assert_moved(assert_settled(first))


def test_h42_leaving_too_often_is_an_error_and_leaves_others_on(backend: Backend) -> None:
    first, second = KINDS["different"](backend, 2)
    x = leaf(16, 16)
    with first:
        for _ in range(2):
            with pytest.raises(eo.OffloadError, match="did not enter it, or that has left it already"):
                second.__exit__(None, None, None)
        with second:
            pass
        with pytest.raises(eo.OffloadError, match="did not enter it, or that has left it already"):
            second.__exit__(None, None, None)
        h = stage(x, x)
    assert hooks_are_gone()
    h.sum().backward()
    del h
    assert_moved(assert_settled(first))


@kinds
def test_h42_entered_in_one_thread_and_left_in_another(kind: str, backend: Backend) -> None:
    first, second = KINDS[kind](backend, 2)
    x = leaf(16, 16)

    def leave() -> None:
        with pytest.raises(eo.OffloadError, match="in a thread that did not enter it"):
            first.__exit__(None, None, None)
        assert hooks_are_gone()

    first.__enter__()
    second.__enter__()
    backend.in_thread(leave)
    first.__exit__(None, None, None)
    h = stage(x, x)
    second.__exit__(None, None, None)
    assert hooks_are_gone()
    h.sum().backward()
    assert_identical(plain(1), x.grad)
    del h
    assert_moved(assert_settled(second))


def test_h43_a_ban_on_hooks_that_an_error_left_behind_ends_with_the_context(backend: Backend) -> None:
    offload = backend.offload()
    with pytest.raises(eo.OffloadError, match="no saved tensor hooks here"), offload:
        torch._C._autograd._saved_tensors_hooks_disable("no saved tensor hooks here")
    assert_identical(plain(2), enter_and_leave([offload], [0, 0]))
    assert_moved(assert_settled(offload))


def test_h43_a_ban_from_outside_stays(backend: Backend) -> None:
    offload = backend.offload()
    with disable_saved_tensors_hooks("no saved tensor hooks today"):
        for _ in range(2):
            with pytest.raises(eo.OffloadError, match="no saved tensor hooks today"), offload:
                pass
        with pytest.raises(RuntimeError, match="no saved tensor hooks today"), Theirs():
            pass
    assert_identical(plain(2), enter_and_leave([offload], [0, 0]))
    assert_moved(assert_settled(offload))
