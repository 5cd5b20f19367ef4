"""H04, H05, H07: different views of one storage, their strides, and one tensor that several operators save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.hazards.backends import Backend, assert_settled, offloader_of, saves_of
from tests.hazards.functions import saving
from tests.hazards.probes import Transfers
from tests.hazards.programs import REGIMES, Around, Settled, assert_moved, leaf, named, one_step, same_gradients

SIDE = 64
KIB = 1 << 10
#: Bytes of a square of float32.
SQUARE = SIDE * SIDE * 4


class Views(NamedTuple):
    name: str
    of: Callable[[Tensor, Tensor], Tensor]
    is_taken_once: bool = False


VIEWS = [
    Views("a matrix and its transpose", lambda h, w: h.t() @ h, True),
    Views("a transpose of a square saved first", lambda h, w: (h.t() * w) + (h * w), True),
    Views("both halves", lambda h, w: h[: SIDE // 2] @ w + h[SIDE // 2 :] @ w.exp()),
    Views("overlapping slices", lambda h, w: (h[:40] * w[:40]).sum() + (h[20:60] * w[:40]).sum(), True),
    Views("a shift by one element", lambda h, w: h.view(-1)[1:] * h.view(-1)[:-1], True),
    Views("a shift by one row", lambda h, w: h[1:] @ w * (h[:-1] @ w).sigmoid()),
    Views("an expanded row", lambda h, w: (h[:1].expand(SIDE, SIDE) * w).sum() + (h * w).sum()),
    Views("a diagonal and all of it", lambda h, w: (h.diagonal() * w.diagonal()).sum() + (h * w).sum()),
    Views("columns", lambda h, w: torch.stack([h[:, i] * w[:, i] for i in range(SIDE)])),
    Views("strided by two", lambda h, w: h[::2] * w[::2] + h[1::2] * w[1::2]),
    Views(
        "three ways to look at it",
        lambda h, w: h.view(16, 256).exp().sum() + (h.view(-1) * w.view(-1)).sum() + (h @ w).sum(),
    ),
    Views("as strided windows", lambda h, w: (h.view(-1).unfold(0, 8, 4) ** 2).sum() + (h * w).sum()),
    Views("chunks of a fused projection", lambda h, w: (lambda q, k, v: (q @ k.t()).softmax(-1) @ v)(*h.chunk(3, 1))),
    Views("a reversed view", lambda h, w: (h.flip(0) * w).sum() + (h.t().t() * w).sum()),
]


@pytest.mark.parametrize("case", VIEWS, ids=named)
def test_h04_different_views_of_one_storage(case: Views, backend: Backend) -> None:
    """Where the first view is of most of it, the storage is taken once, whatever its views."""

    @one_step
    def program() -> tuple[Tensor, ...]:
        x, w = leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=2)
        return case.of(x * 2, w), x, w

    for stats in same_gradients(program, backend):
        if case.is_taken_once:
            assert stats.offloaded_tensors == 1, stats
            assert stats.shared_bytes > 0
            assert stats.bytes_out == SQUARE


def test_h04_what_is_saved_of_a_storage_that_has_left_is_right(backend: Backend) -> None:
    """Views that are saved after the copy of the whole has started, or arrived."""

    def program(offload: Around) -> object:
        x, w = leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=2)
        with offload:
            h = x * 2
            first = (h * w).sum()
        with offload:
            second = (h.t() @ w).sum() + (h[1:] * w[1:]).sum() + (h[3] * w[3]).sum()
        del h
        second.backward(retain_graph=True)
        first.backward()
        return x.grad, w.grad

    same_gradients(program, backend)


class Shape(NamedTuple):
    name: str
    #: Makes the view of a base of 32 by 32 by 16 float32 elements.
    of: Callable[[Tensor], Tensor]
    #: Most bytes that it may move.
    most: int


BASE = 32 * 32 * 16 * 4

SHAPES = [
    Shape("contiguous", lambda b: b, BASE),
    Shape("transposed", lambda b: b.transpose(0, 2), BASE),
    Shape("permuted", lambda b: b.permute(2, 0, 1), BASE),
    Shape("channels last", lambda b: b.view(4, 8, 32, 16).contiguous(memory_format=torch.channels_last), BASE),
    Shape("channels last 3d", lambda b: b.view(2, 8, 8, 8, 16).contiguous(memory_format=torch.channels_last_3d), BASE),
    Shape("broadcast from one element", lambda b: b[:1, :1, :1].expand(32, 32, 16), 4),
    Shape("broadcast from a row", lambda b: b[0, 0].expand(32, 32, 16), 64),
    Shape("broadcast in the middle", lambda b: b[:, :1].expand(32, 32, 16), 32 * 16 * 4),
    Shape("one slice of many", lambda b: b[3], 32 * 16 * 4),
    Shape("the last slice", lambda b: b[-1], 32 * 16 * 4),
    Shape("one row", lambda b: b[5, 7], 64),
    Shape("one element", lambda b: b[5, 7, 3], 4),
    Shape("one column", lambda b: b[:, 0, 0], 32 * 4),
    Shape("a corner", lambda b: b[:8, :8, :8], 8 * 8 * 8 * 4),
    Shape("every eighth", lambda b: b[::8, :, ::2], 4 * 32 * 8 * 4),
    Shape("a diagonal", lambda b: b.diagonal(), 32 * 16 * 4),
    Shape("off by one element", lambda b: b.reshape(-1)[1:], BASE),
    Shape("an odd slice off by one", lambda b: b.reshape(-1)[101:333], 232 * 4),
    Shape("overlapping windows", lambda b: b.reshape(-1)[:256].unfold(0, 16, 4), 256 * 4),
    Shape("overlapping windows of everything", lambda b: b.reshape(-1).unfold(0, 16, 4), BASE),
    Shape("a stride of zero beside gaps", lambda b: b[::2, :1, ::4].expand(16, 32, 4), 16 * 4 * 4),
    Shape("a size of one with an odd stride", lambda b: b.as_strided((1, 32, 4), (7, 16, 1)), 32 * 16 * 4),
]


@pytest.mark.parametrize("case", SHAPES, ids=named)
def test_h05_size_and_stride_come_back_as_they_were(case: Shape, backend: Backend) -> None:
    @one_step
    def program() -> Sequence[object]:
        seen = []
        return saving(leaf(4), case.of(leaf(32, 32, 16, seed=3, grad=False)), seen=seen), seen

    for stats in same_gradients(program, backend):
        assert stats.bytes_out <= case.most, "more moved than the view's own bytes"
        assert stats.bytes_in <= stats.bytes_out


@pytest.mark.parametrize("case", SHAPES, ids=named)
def test_h05_kernels_that_sum_in_the_order_of_strides_stay_exact(case: Shape, backend: Backend) -> None:
    @one_step
    def program() -> tuple[Tensor, ...]:
        x = leaf(32, 32, 16, seed=3)
        view = case.of(x * 1.5)
        return (view.sin() * view).sum() + view.double().norm() + view.softmax(-1).norm(), x

    same_gradients(program, backend, regimes=REGIMES[1:3])


def attention() -> tuple[Tensor, ...]:
    """Saves its input three times, q, k, v and the probabilities: five squares; the leaves stand behind its result."""
    x, *weights = (leaf(SIDE, SIDE, seed=seed) for seed in (1, 2, 3, 4))
    h = x * 2
    q, k, v = (h @ w for w in weights)
    return (q @ k.t()).softmax(-1) @ v, x, *weights


def test_h07_one_tensor_saved_by_three_consumers_leaves_once(backend: Backend) -> None:
    @one_step
    def program() -> tuple[Tensor, ...]:
        x, *weights = (leaf(SIDE, SIDE, seed=seed) for seed in (1, 2, 3, 4))
        h = x * 2
        return sum((h @ w).sum() for w in weights), x, *weights

    for stats in same_gradients(program, backend):
        assert stats.offloaded_tensors == 1
        assert stats.shared_bytes == 2 * SQUARE
        assert stats.bytes_out == SQUARE
    for stats in same_gradients(program, backend, regimes=REGIMES[:1]):
        assert stats.bytes_in == SQUARE, "three unpacks in a row share one reload"


def test_h07_attention_is_exact_and_shares_its_input(backend: Backend) -> None:
    for stats in same_gradients(one_step(attention), backend):
        assert stats.shared_bytes >= 2 * SQUARE
        assert stats.bytes_out == 5 * SQUARE


def test_h07_nothing_stays_because_it_is_shared_and_one_copy_comes_back_at_a_time(backend: Backend) -> None:
    offload = backend.offload(prefetch_bytes=1 << 20)

    def program() -> None:
        with Settled(offload):
            y, *_ = attention()
        assert offloader_of(offload).resident_bytes == 0
        assert all(saved.origin() is None for saved in saves_of(offload).storages())
        loss = y.sum()
        for index in range(3):
            loss.backward(retain_graph=index < 2)

    with Transfers(backend.runtime) as transfers:
        program()
        offload.stats(synchronize=True)
    assert transfers.back, "nothing came back"
    assert transfers.most_targets_of_one_slot == 1
    assert_moved(assert_settled(offload))
