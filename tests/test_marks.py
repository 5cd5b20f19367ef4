"""What a user says about tensors: regions in which nothing moves, and marks on single storages."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from tests.hazards.backends import DiskBackend, assert_settled
from tests.hazards.programs import assert_identical
from tests.threads import on_a_thread

BIG = 1 << 14  # elements: 64 KiB


def leaf(elements: int = BIG, seed: int = 1) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def squared(x: Tensor, mark: Callable[[Tensor], object] = lambda tensor: None) -> Tensor:
    """``y = 2x`` and ``y * y``: one activation that is saved twice."""
    y = x * 2
    mark(y)
    return (y * y).sum()


def kept(stats: eo.OffloadStats) -> dict[str, int]:
    """What stays apart from the leaf and the factors of torch's own."""
    return {reason: nbytes for reason, nbytes in stats.kept_bytes.items() if reason not in ("parameter", "small")}


# -- regions --------------------------------------------------------------------------------------------------------


@eo.no_offload()
def stay(x: Tensor, *, factor: int) -> Tensor:
    """What it does."""
    return squared(x) * factor


def test_nothing_that_is_saved_in_a_region_moves_and_a_region_is_a_decorator_too(disk: DiskBackend) -> None:
    assert (stay.__name__, stay.__doc__) == ("stay", "What it does.")
    x, tool = leaf(), disk.offload()
    with tool:
        with eo.no_offload():
            inside = squared(x)
        loss = inside + stay(x, factor=3) + squared(x)
    stats = tool.stats(synchronize=True)
    assert kept(stats) == {"region": 4 * 4 * BIG}
    assert stats.offloaded_bytes == stats.shared_bytes == stats.bytes_out == 4 * BIG
    loss.backward()
    assert torch.equal(x.grad, 40 * x.detach())


def test_a_region_is_of_the_thread_that_entered_it(disk: DiskBackend) -> None:
    x, tool, losses = leaf(), disk.offload(), list[Tensor]()

    def forward() -> None:
        with tool:
            losses.append(squared(x))

    with eo.no_offload():
        on_a_thread(forward)
        forward()
    assert kept(tool.stats(synchronize=True)) == {"region": 2 * 4 * BIG}
    assert tool.stats().bytes_out == 4 * BIG
    with pytest.raises(eo.OffloadError, match="has not entered one"):
        eo.no_offload().__exit__(None, None, None)


def iter_of() -> Iterator[int]:
    yield 1


async def coroutine() -> None: ...


@pytest.mark.parametrize("function", [iter_of, coroutine, torch.nn.Linear], ids=lambda one: one.__name__)
def test_what_runs_after_it_has_returned_is_no_function_to_decorate(function: Any) -> None:
    with pytest.raises(eo.OffloadError, match=rf"{function.__name__} is none: write `with"):
        eo.no_offload()(function)


# -- marks ----------------------------------------------------------------------------------------------------------


def test_what_is_marked_stays_with_every_view_of_it(disk: DiskBackend) -> None:
    x, tool = leaf(), disk.offload()
    with tool:
        y = eo.keep((x * 2)[5:]).view(-1)
        loss = (y * y).sum() + (y[:100] ** 2).sum() + squared(x)
    stats = tool.stats(synchronize=True)
    assert kept(stats) == {"marked": 2 * 4 * (BIG - 5) + 4 * 100}
    assert stats.offloaded_bytes == stats.bytes_out == 4 * BIG
    expected = torch.autograd.grad((2 * x)[5:].square().sum() + (2 * x)[5:105].square().sum() + squared(x), x)
    loss.backward()
    assert_identical(expected[0], x.grad)


@pytest.mark.parametrize(
    ("elements", "fields", "stays"),
    [(64, {"min_bytes": "1MiB"}, {"small": 512}), (BIG, {"keep_last_bytes": "64MiB"}, {"newest": 4 * BIG})],
)
def test_what_is_small_or_new_moves_if_that_is_preferred(
    elements: int, fields: dict[str, Any], stays: dict[str, int], disk: DiskBackend
) -> None:
    x, tool = leaf(elements), disk.offload(**fields)
    with tool:
        loss = squared(x, eo.prefer_offload) + squared(x)
    stats = tool.stats(synchronize=True)
    assert stats.offloaded_bytes == stats.bytes_out == 4 * elements
    assert stats.kept_bytes.items() >= stays.items()
    assert kept(stats).keys() <= stays.keys()
    loss.backward()
    assert torch.equal(x.grad, 16 * x.detach())


def test_a_preference_moves_neither_a_parameter_nor_what_cannot_move_and_the_last_mark_counts(
    disk: DiskBackend,
) -> None:
    x, tool = leaf(), disk.offload(min_bytes="1MiB")
    with tool:
        losses = [eo.prefer_offload(x).square().sum()]
        with eo.no_offload():
            losses += [squared(x, eo.prefer_offload)]
        losses += [squared(x, lambda y: eo.prefer_offload(eo.keep(y)))]
        losses += [squared(x, lambda y: eo.keep(eo.prefer_offload(y)))]
    stats = tool.stats(synchronize=True)
    assert len(losses) == 4
    assert stats.kept_bytes == {"parameter": 4 * BIG, "region": 2 * 4 * BIG, "small": 2 * 4 * BIG}
    assert stats.offloaded_bytes == stats.shared_bytes == 4 * BIG


def test_a_mark_that_comes_before_the_copy_has_started_is_in_force(disk: DiskBackend) -> None:
    x, tool = leaf(), disk.offload(keep_last_bytes=4 * BIG)
    with tool:
        y = x * 2
        loss = (y * y).sum()  # y waits in line
        eo.keep(y)
        loss = loss + squared(x)  # and is due now
    stats = tool.stats(synchronize=True)
    assert kept(stats) == {"marked": 2 * 4 * BIG, "newest": 4 * BIG}
    assert stats.bytes_out == 0
    storage = weakref.ref(y.untyped_storage())
    del y
    assert storage() is not None
    loss.backward()
    assert torch.equal(x.grad, 16 * x.detach())
    del loss
    assert_settled(tool)


def test_a_mark_that_comes_after_the_copy_has_started_holds_for_later_saves_only(disk: DiskBackend) -> None:
    x, tool = leaf(), disk.offload()
    with tool:
        y = x * 2
        loss = (y * y).sum() + squared(x)  # the copy of y starts when the second is saved
        eo.keep(y)
        storage = weakref.ref(y.untyped_storage())
        later = y.square().sum()
    stats = tool.stats(synchronize=True)
    assert kept(stats) == {"marked": 4 * BIG}
    assert stats.offloaded_bytes == stats.shared_bytes == stats.bytes_out == 2 * 4 * BIG
    del y, later
    tool.stats(synchronize=True)
    assert storage() is None, "the source is gone"
    loss.backward()
    assert torch.equal(x.grad, 16 * x.detach())


def test_a_preference_ends_when_the_copy_starts(disk: DiskBackend) -> None:
    x, tool = leaf(), disk.offload(min_bytes="1MiB")
    with tool:
        y = eo.prefer_offload(x * 2)
        loss = (y * y).sum()
        loss = loss + squared(x, eo.prefer_offload)  # when this is saved
        loss = loss + (y * y).sum()
    stats = tool.stats(synchronize=True)
    assert stats.offloaded_bytes == stats.shared_bytes == 2 * 4 * BIG
    assert stats.kept_bytes == {"small": 2 * 4 * BIG}, "which no copy serves that started before it"
    loss.backward()
    assert torch.equal(x.grad, 24 * x.detach())


def test_h11_a_mark_dies_with_its_storage_and_keeps_nothing_alive(disk: DiskBackend) -> None:
    x, tool = leaf(), disk.offload()
    gc.disable()
    try:
        for _ in range(50):
            marked = eo.keep(torch.ones(BIG))
            gone = weakref.ref(marked.untyped_storage())
            del marked
            assert gone() is None
            with tool:
                loss = squared(x)  # of another tensor, very likely at the same address
            loss.backward()
            del loss
    finally:
        gc.enable()
    assert kept(tool.stats(synchronize=True)) == {}
    assert tool.stats().offloaded_bytes == 50 * 4 * BIG


@pytest.mark.filterwarnings("ignore:.*beta state.*", "ignore:.*invariant checks.*")
@pytest.mark.parametrize("mark", [eo.keep, eo.prefer_offload])
@pytest.mark.parametrize("to_layout", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn])
def test_what_has_no_storage_of_its_own_cannot_be_marked(
    mark: Callable[[Tensor], Tensor], to_layout: Callable[[Tensor], Tensor]
) -> None:
    tensor = to_layout(torch.ones(3, 3))
    with pytest.raises(eo.OffloadError, match=f"{tensor.layout} tensor of type Tensor has no storage") as raised:
        mark(tensor)
    assert "mark the plain tensors" in str(raised.value)
    assert raised.value.__cause__ is not None
