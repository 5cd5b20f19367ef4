"""What leaves and comes back of the corpus's programs, in bytes: each storage once, its own bytes and no weight."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from eager_offload import Offload, OffloadStats
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.probes import Transfers
from tests.hazards.programs import REGIMES, Around, Settled, assert_identical, same_gradients
from tests.programs import Run, corpus, leaf
from tests.programs.layouts import KINDS, SHAPES
from tests.programs.parts.blocks import BOUNDARY, WIDTH
from tests.programs.parts.functions import saving
from tests.programs.parts.wrappers import KINDS as WRAPPERS

PROGRAMS = {program.name: program for program in corpus()}
SQUARE, ROW, MIB = 64 * 64 * 4, 16 * 4, 1 << 20


def leaves_once(stats: OffloadStats, tensors: int, shared: int) -> bool:
    """Whether so many squares leave, and others that are saved are ``shared`` squares of those."""
    return (stats.offloaded_tensors, stats.bytes_out) == (tensors, tensors * SQUARE) and (
        shared * SQUARE <= stats.shared_bytes
    )


def as_kept(stats: OffloadStats, reason: str | None, count: int) -> bool:
    """Whether ``count`` tensors of a kind move, or stay for their reason; a tensor that moves stands beside them."""
    if reason is None:
        return stats.offloaded_tensors == 1 + count
    return stats.offloaded_tensors == 1 and (reason in stats.kept_bytes or reason == "small")


def inputs_leave(stats: OffloadStats, inside: bool, most: int) -> bool:
    """Whether the inputs of four blocks leave, what the loss saves, and ``most`` others; nothing a second time."""
    inputs = (4 if inside else 5) * BOUNDARY
    # On a device of its own speed, a copy may not have begun when backward asks for it.
    late = stats.kept_bytes.get("newest", 0) if torch.accelerator.is_available() else 0
    return 0.9 * inputs - late <= stats.bytes_out <= inputs + most and stats.foreign_hooks == 0


def shared_in_wrappers(stats: OffloadStats, inside: int) -> bool:
    nbytes = inside * 16 * 16 * 4
    counts = stats.bytes_out, stats.offloaded_tensors, stats.shared_bytes
    return counts == (nbytes, inside, 4 * nbytes) and "alive" not in stats.kept_bytes


#: By the beginning of programs' names: what holds in each regime.
CHECKS: dict[str, Callable[[OffloadStats], bool]] = {
    "H04-a-matrix-and-its-transpose": partial(leaves_once, tensors=1, shared=1),
    "H04-a-transpose-of-a-square-saved-first": partial(leaves_once, tensors=1, shared=1),
    "H04-overlapping-slices": partial(leaves_once, tensors=1, shared=0.5),
    "H04-a-shift-by-one-element": partial(leaves_once, tensors=1, shared=0.5),
    "H07-three-consumers": partial(leaves_once, tensors=1, shared=1.5),
    "H07-attention": partial(leaves_once, tensors=5, shared=1.5),
    # Once for both saves; twice where it is changed in between, with what it is multiplied by.
    "H07-saves-of-what-has-left": partial(leaves_once, tensors=1, shared=1),
    "H01-a-change-between-two-saves": partial(leaves_once, tensors=3, shared=0),
    "H06": lambda stats: stats.kept_bytes["parameter"] > 0,
    # Both casts stay. Both inputs travel in two bytes, and what goes into tanh: the casts would double that.
    "H06-the-cast": lambda stats: (
        stats.kept_bytes["parameter"] >= 2 * 2 * 32 * 64
        and stats.bytes_out <= 2 * (16 * 32 + 16 * 64 + 16 * 64) + 4 * 16 * 32
    ),
    "H08-read-three-times-in-one-backward-and-held": lambda stats: stats.bytes_in <= stats.bytes_out,
    **{f"H12-{name}": partial(as_kept, reason=kind[0], count=len(kind[1])) for name, kind in KINDS.items()},
    **{
        f"H13-{wrapper.name.replace(' ', '-')}-saved-by": partial(shared_in_wrappers, inside=wrapper.inside)
        for wrapper in WRAPPERS
    },
    "H13-H21": lambda stats: stats.bytes_out >= 0.9 * (17 + 9 + 17) * (2 + 2 * 2) * ROW,
    # The first graph and one more at a time have room: slots are used again.
    "H03-an-earlier-graph-waits": lambda stats: stats.disk_bytes_peak + stats.host_bytes_peak < stats.bytes_out / 2,
    "H20": lambda stats: stats.bytes_in <= 2 * stats.bytes_out,  # a wrong hint costs a reload, not many
    **{
        f"H23-{kind}{'-backward-inside' * inside}": partial(inputs_leave, inside=inside, most=most)
        for kind, most in (("reentrant", 0), ("non-reentrant", 0), ("selective", 4 * 3 * BOUNDARY))
        for inside in (False, True)
    },
    "H67-a-weight-of-any-layout-kept-as-layout": lambda stats: stats.kept_bytes["layout"] > 0,
    "H67-a-weight-of-any-layout-kept-as-parameter": lambda stats: stats.kept_bytes["parameter"] > 0,
    # Of each block its input and the results of both products, of which the first is twice as wide.
    "H73-a-policy": lambda stats: (
        stats.offloaded_bytes + stats.kept_bytes.get("alive", 0) == 2 * (4 * 4 + 1) * BOUNDARY
        and stats.saved_tensors == 2 * (4 * 3 + 1)
    ),
    "H73-a-change-that-is-allowed": lambda stats: stats.kept_bytes["region"] == BOUNDARY,
    "H73-everything": lambda stats: stats.shared_bytes > 0,  # views, and what autograd saves too, leave once
    "H73-both": lambda stats: stats.saved_bytes <= 5 * BOUNDARY + WIDTH * WIDTH * 4,
    "H73-the-inner": lambda stats: stats.saved_bytes <= 3 * BOUNDARY + WIDTH * WIDTH * 4,
}


def check_of(name: str) -> Callable[[OffloadStats], bool] | None:
    return CHECKS.get(max((begun for begun in CHECKS if name.startswith(begun)), key=len, default=""))


@pytest.mark.filterwarnings("ignore")  # torch's own, of layouts and hooks
@pytest.mark.parametrize("name", [*filter(check_of, PROGRAMS)])
def test_what_is_counted(name: str, users_backend: Backend) -> None:
    users_backend.sources_change = True
    program, check = PROGRAMS[name], check_of(name)
    run = lambda around: program(Run(around))  # noqa: E731
    for stats in same_gradients(run, users_backend, moved=program.moved, reloads=False, **program.fields):
        assert check(stats), stats


def test_every_check_is_of_a_program() -> None:
    assert [begun for begun in CHECKS if not any(name.startswith(begun) for name in PROGRAMS)] == []


@pytest.mark.parametrize("shapes", SHAPES)
def test_h05_a_view_moves_its_own_bytes_only(shapes: str, users_backend: Backend) -> None:
    for number, of in enumerate(SHAPES[shapes]):
        offload, own = users_backend.offload(), of(torch.arange(32 * 32 * 16).view(32, 32, 16)).unique().numel() * 4
        with Settled(offload):
            y = saving(leaf(4), of(leaf(32, 32, 16, grad=False)), seen=[]).sum()
        y.backward()
        del y
        stats = assert_settled(offload)
        assert 0 < stats.bytes_in <= stats.bytes_out <= own + 64, f"view {number}"


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if name.startswith("H06")])
def test_h06_no_copy_reads_a_weight(name: str, backend: Backend) -> None:
    function, inputs = PROGRAMS[name].step()
    weights = [one for one in inputs if isinstance(one, Tensor) and one.requires_grad]
    weights += [weight for one in inputs if isinstance(one, nn.Module) for weight in one.parameters()]
    with Transfers(backend.runtime) as transfers:
        with backend.offload():
            y = function(*inputs)
        y.sum().backward()
        assert transfers.sources
        assert not [weight.shape for weight in weights if transfers.read(weight.untyped_storage())]


def test_h07_what_every_layer_saves_leaves_when_forward_is_over(backend: Backend) -> None:
    """In the first step the library does not know that it is saved again."""

    def masked(around: Around) -> Tensor:
        x = leaf(32, 32)
        with around:
            mask = leaf(32, 32, seed=2, grad=False)
            y = x + 1.0
            for _ in range(8):
                y = (y * mask).sin()
            storage = weakref.ref(mask.untyped_storage())
            del mask
        if isinstance(around, Offload):
            around.stats(synchronize=True)
            assert storage() is None
        return torch.autograd.grad(y.sum(), x)[0]

    offload, expected = backend.offload(step_tables=True), masked(nullcontext())
    for step in range(1, 4):
        assert_identical(expected, masked(offload))
        stats, copies = offload.stats(synchronize=True), (3 + 8) + (step - 1) * (1 + 8)
        assert stats.kept_bytes == {}
        assert stats.bytes_out == copies * 32 * 32 * 4, "the mask three times at first, then after its last save"
        assert stats.shared_bytes == (2 * step * 8 - copies) * 32 * 32 * 4


@pytest.mark.filterwarnings("ignore:eager_offload. nothing moved:RuntimeWarning")
@pytest.mark.parametrize("saves", [4, 9, 10, 11, 32])
def test_h49_a_step_that_saves_hardly_more_than_what_stays_is_not_moved_once_it_is_known(
    saves: int, backend: Backend
) -> None:
    def step(around: Around) -> object:
        x = leaf(64, 64)
        with around:
            y = x
            for _ in range(saves):
                y = y.exp().neg()
            loss = y.sum()
        if isinstance(around, Offload):
            around.stats(synchronize=True)  # else a copy that has not begun when backward comes is cancelled
        loss.backward()
        return loss.detach(), x.grad

    line, moved, expected = 8, [], step(nullcontext())
    offload = backend.offload(keep_last_bytes="auto", prefetch_bytes=line * SQUARE, step_tables=True)
    for _ in range(4):
        offload.reset_stats()
        assert_identical(expected, step(offload))
        stats = offload.stats(synchronize=True)
        moved.append(stats.bytes_out)
        assert stats.without_offload_bytes_peak == saves * SQUARE
        assert stats.device_bytes_peak <= saves * SQUARE, "never more than without offload"
    assert moved[0] == max(saves - line, 0) * SQUARE
    assert (moved[1:] == [0, 0, 0]) == (saves <= line * 5 / 4)


def test_h07_h08_one_copy_of_each_comes_back_at_a_time_and_a_retained_graph_accumulates_nothing(
    backend: Backend,
) -> None:
    offload, (function, inputs) = backend.offload(prefetch_bytes=SQUARE), PROGRAMS["H07-attention"].step()
    with Settled(offload):
        loss = function(*inputs).sum()
    peaks = []
    for _ in range(20):
        loss.backward(retain_graph=True)
        stats = offload.stats(synchronize=True)
        peaks.append((stats.resident_bytes_peak, stats.host_bytes_peak, stats.disk_bytes_peak))
    assert len(set(peaks[1:])) == 1, peaks
    assert 0 < peaks[0][0] <= 5 * SQUARE
    del loss
    assert assert_settled(offload).bytes_in > 0


@pytest.mark.parametrize(("share", "retained"), [(0.1, False), (0.3, True), (0.6, False)])
def test_h50_an_unknown_order_reads_hardly_more_than_is_asked_for(
    share: float, retained: bool, users_backend: Backend
) -> None:
    saves, size = 96, 16 * 16 * 4

    def program(around: Around) -> object:
        leaves = [leaf(16, 16, seed=seed) for seed in range(saves)]
        with around:
            losses = [x.exp().sum() for x in leaves]
        for index in torch.randperm(saves, generator=torch.Generator().manual_seed(1)).tolist():
            losses[index].backward(retain_graph=retained)
        return [x.grad for x in leaves]

    window = int(share * saves * size)
    for stats in same_gradients(program, users_backend, regimes=REGIMES[:1], prefetch_bytes=window):
        assert stats.reloaded_bytes == saves * size
        assert stats.bytes_in <= 1.15 * stats.reloaded_bytes


def test_h50_what_both_halves_of_a_backward_need_comes_back_once(users_backend: Backend) -> None:
    def program(around: Around) -> object:
        x, weights = leaf(32, 32), [leaf(32, 32, seed=seed) for seed in range(1, 7)]
        with around:
            h = x
            for w in weights:
                h = (h + w).tanh()
            loss = h.sum()
        del h
        return [*torch.autograd.grad(loss, x, retain_graph=True), *torch.autograd.grad(loss, weights)]

    for stats in same_gradients(program, users_backend, regimes=REGIMES[:1], prefetch_bytes="1MiB"):
        assert stats.bytes_in == stats.bytes_out == 6 * 32 * 32 * 4


# -- distinct storages: H78 -------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Iterable[Tensor]]] = {
    "unbind": lambda x: x.unbind(0),
    "unbind along another dimension": lambda x: x.unbind(1),
    "chunk": lambda x: x.chunk(4, 1),
    "split": lambda x: x.split([8, 24, 32]),
    "expand": lambda x: [x[None].expand(3, 64, 64), x[:, :1].expand(64, 64)],
    "overlap": lambda x: [x[:48], x[16:], x.flatten()[1:65], x.as_strided((8, 8), (65, 2))],
    "transpose": lambda x: [x, x.t(), x.view(-1)],
}


def viewed(around: Around, views: Callable[[Tensor], Iterable[Tensor]]) -> tuple[Tensor, Tensor]:
    """The loss of a step that saves views of one storage, and what it is to be differentiated by."""
    x = leaf(64, 64)
    with around:
        loss = x.exp().mean()  # a storage beside it
        for view in views(x * 1.0):
            loss = loss + (view * view).sum()
    return loss, x


class DistinctStorages(torch.autograd.graph.saved_tensors_hooks):
    """The truth: bytes of the storages that autograd saves, each once."""

    def __init__(self, least: int = 1) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # which keeps them, so that no other has their names
        self._least = least
        super().__init__(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        if not (tensor.is_leaf and tensor.requires_grad):
            self._storages[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(size for one in self._storages.values() if (size := one.nbytes()) >= self._least)


def assert_distinct(backend: Backend, views: Callable[[Tensor], Iterable[Tensor]], **fields: Any) -> OffloadStats:
    offload, truth = backend.offload(**fields), DistinctStorages(max(fields.get("min_bytes", 0), 1))
    loss, x = viewed(truth, views)
    (expected,) = torch.autograd.grad(loss, x)
    for _ in range(2):
        loss, x = viewed(offload, views)
        assert_identical(expected, torch.autograd.grad(loss, x)[0])
        stats = offload.stats(synchronize=True)
        assert stats.without_offload_bytes_peak == truth.nbytes
        del loss
    return stats


@pytest.mark.filterwarnings("ignore:eager_offload. nothing moved:RuntimeWarning")
@pytest.mark.parametrize("views", VIEWS)
def test_h78_views_count_their_storage_once(views: str, backend: Backend) -> None:
    assert assert_distinct(backend, VIEWS[views]).bytes_out > 0
    kept = assert_distinct(backend, VIEWS[views], keep_last_bytes=MIB)
    assert kept.kept_bytes["newest"] > 0
    assert kept.device_bytes_peak == kept.without_offload_bytes_peak


def test_h78_small_views_that_stay_count_the_storage_that_they_hold(backend: Backend) -> None:
    stats = assert_distinct(backend, VIEWS["unbind"], min_bytes=2 * 64 * 4)
    assert stats.kept_bytes["small"] == 2 * 2 * SQUARE, "both factors, in two steps"
    assert stats.bytes_out == 2 * SQUARE, "of exp"
    assert stats.without_offload_bytes_peak == stats.device_bytes_peak == 2 * SQUARE


PART = st.tuples(*[st.integers(1, 8)] * 2, *[st.integers(0, 9)] * 2, st.integers(0, 2000)).map(
    lambda one: lambda x: x.as_strided(one[:2], one[2:4], one[4])
)


@given(st.lists(st.one_of(PART, st.sampled_from([*VIEWS.values()])), min_size=1, max_size=6))
@settings(derandomize=True, max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_h78_what_would_be_held_without_offload_is_the_truth(disk: Backend, parts: list[Any]) -> None:
    def views(x: Tensor) -> Iterable[Tensor]:
        for part in parts:
            yield from [found] if isinstance(found := part(x), Tensor) else found

    assert assert_distinct(disk, views).bytes_out > 0


def test_h78_forwards_that_wait_for_one_backward_add_up_and_nested_ones_do_not(backend: Backend) -> None:
    offload, truth = backend.offload(), DistinctStorages()
    loss, x = viewed(truth, VIEWS["chunk"])
    (expected,) = torch.autograd.grad(loss, x)
    for _ in range(3):
        waiting = [viewed(offload, VIEWS["chunk"]) for _ in range(3)]
        for loss, x in waiting:
            assert_identical(expected, torch.autograd.grad(loss, x)[0])
        del waiting, loss
    assert offload.stats(synchronize=True).without_offload_bytes_peak == 3 * truth.nbytes
    offload.reset_stats()
    with offload:
        loss, x = viewed(offload, VIEWS["chunk"])
    assert_identical(expected, torch.autograd.grad(loss, x)[0])
    stats = offload.stats(synchronize=True)
    assert stats.without_offload_bytes_peak == truth.nbytes
    assert stats.bytes_out > 0
