"""What a user says about tensors: regions in which nothing moves, and marks on single storages."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from tests.hazards.backends import DiskBackend
from tests.hazards.programs import assert_identical
from tests.programs import leaf
from tests.threads import on_a_thread

BIG = 1 << 14  # elements: 64 KiB


def squared(x: Tensor, mark: Callable[[Tensor], object] = lambda tensor: None) -> Tensor:
    """``y = 2x`` and ``y * y``: one activation that is saved twice."""
    y = x * 2
    mark(y)
    return (y * y).sum()


@eo.no_offload()
def stay(x: Tensor, *, factor: int) -> Tensor:
    """What it does."""
    return squared(x) * factor


def in_a_region(x: Tensor) -> Tensor:
    with eo.no_offload():
        inside = squared(x)
    return inside + stay(x, factor=3) + squared(x)


def with_every_view(x: Tensor) -> Tensor:
    y = eo.keep((x * 2)[5:]).view(-1)
    return (y * y).sum() + (y[:100] ** 2).sum() + squared(x)


def one_preferred(x: Tensor) -> Tensor:
    return squared(x, eo.prefer_offload) + squared(x)


def what_cannot_move_and_the_last_mark(x: Tensor) -> Tensor:
    loss = eo.prefer_offload(x).square().sum()
    with eo.no_offload():
        loss = loss + squared(x, eo.prefer_offload)
    loss = loss + squared(x, lambda y: eo.prefer_offload(eo.keep(y)))
    return loss + squared(x, lambda y: eo.keep(eo.prefer_offload(y)))


def before_the_copy_has_started(x: Tensor) -> Tensor:
    y = x * 2
    loss = (y * y).sum()  # y waits in line
    eo.keep(y)
    return loss + squared(x)  # and is due now


def after_the_copy_has_started(x: Tensor) -> Tensor:
    y = x * 2
    loss = (y * y).sum() + squared(x)  # the copy of y starts when the second is saved
    eo.keep(y)
    return loss + y.square().sum()  # and this is a later save


def a_preference_ends_when_the_copy_starts(x: Tensor) -> Tensor:
    y = eo.prefer_offload(x * 2)
    loss = (y * y).sum()
    loss = loss + squared(x, eo.prefer_offload)  # when this is saved
    return loss + (y * y).sum()  # which no copy serves that started before it


class Row(NamedTuple):
    """A forward, and how many times the bytes of ``x`` stay for which reason, move, and share what has moved."""

    forward: Callable[[Tensor], Tensor]
    stays: dict[str, float]
    moves: int
    fields: dict[str, Any]
    elements: int = BIG


ROWS = [
    Row(in_a_region, {"region": 4}, 1, {}),
    Row(with_every_view, {"marked": 2 * (1 - 5 / BIG) + 100 / BIG}, 1, {}),
    Row(one_preferred, {"small": 2}, 1, {"min_bytes": "1MiB"}, elements=64),
    Row(one_preferred, {"newest": 1}, 1, {"keep_last_bytes": "64MiB"}),
    Row(what_cannot_move_and_the_last_mark, {"region": 2, "small": 2, "parameter": 1}, 1, {"min_bytes": "1MiB"}),
    Row(before_the_copy_has_started, {"marked": 2, "newest": 1}, 0, {"keep_last_bytes": 4 * BIG}),
    Row(after_the_copy_has_started, {"marked": 1}, 2, {}),
    Row(a_preference_ends_when_the_copy_starts, {"small": 2}, 2, {"min_bytes": "1MiB"}),
]


@pytest.mark.filterwarnings("ignore:eager_offload. nothing moved:RuntimeWarning")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.forward.__name__)
def test_what_is_said_of_tensors_decides_which_of_them_move(row: Row, disk: DiskBackend) -> None:
    x, tool, unit = leaf(row.elements), disk.offload(**row.fields), 4 * row.elements
    with tool:
        loss = row.forward(x)
    stats = tool.stats(synchronize=True)
    assert stats.offloaded_bytes == stats.bytes_out == row.moves * unit
    assert {reason: stats.kept_bytes[reason] / unit for reason in row.stays} == row.stays
    assert stats.kept_bytes.keys() <= {*row.stays, "parameter", "small"}, "those are the leaf and torch's own factors"
    loss.backward()
    del loss
    assert_identical(torch.autograd.grad(row.forward(x), x)[0], x.grad)


def test_a_region_is_a_decorator_that_leaves_a_function_its_name() -> None:
    assert (stay.__name__, stay.__doc__) == ("stay", "What it does.")


def test_a_region_is_of_the_thread_that_entered_it(disk: DiskBackend) -> None:
    x, tool, losses = leaf(BIG), disk.offload(), list[Tensor]()

    def forward() -> None:
        with tool:
            losses.append(squared(x))

    with eo.no_offload():
        on_a_thread(forward)
        forward()
    stats = tool.stats(synchronize=True)
    assert stats.kept_bytes["region"] == 2 * stats.bytes_out == 2 * 4 * BIG
    with pytest.raises(eo.OffloadError, match="has not entered one"):
        eo.no_offload().__exit__(None, None, None)


def iter_of() -> Iterator[int]:
    yield 1


async def coroutine() -> None: ...


@pytest.mark.parametrize("function", [iter_of, coroutine, torch.nn.Linear], ids=lambda one: one.__name__)
def test_what_runs_after_it_has_returned_is_no_function_to_decorate(function: Any) -> None:
    with pytest.raises(eo.OffloadError, match=rf"{function.__name__} is not such a function: write `with"):
        eo.no_offload()(function)


def test_h11_a_mark_dies_with_its_storage_and_keeps_nothing_alive(disk: DiskBackend) -> None:
    x, tool = leaf(BIG), disk.offload()
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
    assert tool.stats(synchronize=True).offloaded_bytes == 50 * 4 * BIG


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
