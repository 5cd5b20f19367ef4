"""H54: what only looks like what its plan has at that save or unpack is decided as in a step that follows none."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from eager_offload import Offload, OffloadStats
from tests.hazards.backends import Backend, SimulatedBackend, assert_settled, offloader_of
from tests.hazards.functions import custom
from tests.hazards.probes import Allocations
from tests.hazards.programs import Around, Settled, assert_identical, assert_moved, leaf, noise, one_step
from tests.hazards.test_following import deep, follows, knowing, plan_of, with_a_late_share
from tests.hazards.test_streams import Streams
from tests.hazards.wrappers import Dissolving
from tests.threads import collect

SIDE = 16


def scaling(x: Tensor, *saved: Tensor, read: Callable[[Tensor], Tensor] = torch.clone) -> Tensor:
    """``x`` again, whose gradient is multiplied by what ``read`` makes of each that it saves."""
    return custom(x, lambda ctx, gradient: math.prod(map(read, ctx.saved_tensors), start=gradient), *saved)


def unread(saved: Tensor) -> Tensor:
    return torch.ones(saved.size(), device=saved.device)


def two(around: Around, *, in_order: bool = True, before: Callable[[], object] = lambda: None) -> list[Tensor | None]:
    """Two branches, each of which goes backward by itself."""
    x, y = leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=2)
    with around:
        losses = [deep(x, nullcontext(), 3), deep(y, nullcontext(), 3)]
    before()
    for loss in losses if in_order else losses[::-1]:
        loss.backward()
    return [x.grad, y.grad]


# -- of what leaves ---------------------------------------------------------------------------------------------------


def constant(y: Tensor) -> Tensor:
    return noise(SIDE, SIDE)


def small_numbers(y: Tensor) -> Tensor:
    return noise(SIDE, SIDE).mul(40).to(torch.uint8)


def at_an_odd_address(y: Tensor) -> Tensor:
    values = noise(SIDE, SIDE).view(torch.uint8).flatten()
    return torch.frombuffer(bytearray([0, *values.tolist()]), dtype=torch.float32, offset=1).view(SIDE, SIDE)


def parts_of(saved: Tensor) -> Tensor:
    return torch.cat(saved.unbind()) if saved.is_nested else saved


class Case(NamedTuple):
    name: str
    #: How the miss is counted.
    what: str
    #: Makes what takes the place of what ``first`` makes, of a tensor that has been saved.
    later: Callable[[Tensor], Tensor]
    first: Callable[[Tensor], Tensor] = constant
    #: Makes strided floats of either.
    read: Callable[[Tensor], Tensor] = torch.clone


CASES = [
    Case("half of such a storage", "size", lambda y: noise(SIDE, SIDE)[SIDE // 2 :], read=torch.mean),
    Case("as much of a larger storage", "size", lambda y: noise(2 * SIDE, SIDE)[SIDE:]),
    Case("at an odd address", "layout", at_an_odd_address),
    Case("zeros that are nowhere", "layout", lambda y: torch._efficientzerotensor(SIDE, SIDE), read=unread),
    Case(
        "of another class",
        "layout",
        lambda y: Dissolving(noise(SIDE, SIDE), torch.ones(1), ""),
    ),
    Case("a view of a weight", "layout", lambda y: nn.Parameter(noise(SIDE, SIDE)).t(), first=lambda y: y * 3),
    Case("nested", "layout", lambda y: torch.nested.nested_tensor([*noise(SIDE, SIDE).chunk(2)]), read=parts_of),
    Case(
        "quantized",
        "layout",
        lambda y: torch.quantize_per_tensor(noise(SIDE, SIDE), 0.1, 3, torch.quint8),
        first=small_numbers,
        read=lambda saved: saved.dequantize().float(),
    ),
]


def counted(stats: OffloadStats) -> list[object]:
    kept = {reason: nbytes for reason, nbytes in stats.kept_bytes.items() if nbytes}
    return [stats.saved_bytes, stats.offloaded_bytes, stats.shared_bytes, kept, stats.bytes_out, stats.bytes_in]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_h54_what_only_looks_like_what_leaves_is_decided_anew(case: Case, backend: Backend) -> None:
    @one_step
    def step(given: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x = leaf(SIDE, SIDE)
        y = x * 2
        return scaling(y.sin(), given(y), read=case.read).exp(), x

    found = []
    for step_plans in (False, True):
        offload = backend.offload(step_plans=step_plans)
        for given in (case.first, case.first, case.later):
            offload.reset_stats()
            assert_identical(step(nullcontext(), given), step(Settled(offload), given))
        stats = assert_settled(offload)
        found.append(counted(stats))
        assert stats.offloaded_bytes >= 2 * SIDE * SIDE * 4
    assert found[1] == found[0]
    assert (stats.followed_forwards, stats.plan_misses) == (1, {case.what: 1})


def test_h54_what_another_stream_computes_does_not_leave_by_the_plan() -> None:
    """Its copies would be ordered behind what the stream of the forward has computed."""
    with SimulatedBackend() as backend:
        streams = Streams(backend)

        def read(saved: Tensor) -> Tensor:
            values = saved.clone()
            streams.meet()
            return values

        @one_step
        def step(is_aside: bool) -> tuple[Tensor, ...]:
            x = leaf(SIDE, SIDE)
            y = (x * 2).sin()
            z = y
            with streams.aside() if is_aside else nullcontext():
                for _ in range(3):
                    z = scaling(z, noise(SIDE, SIDE) * 2, read=read)
            loss = z.exp().sum()
            streams.meet()
            return loss, x

        follows(backend, step, [False, False, True], 2, {"stream": 1})
        backend.assert_nothing_is_held()


# -- of what shares ---------------------------------------------------------------------------------------------------


def test_h54_bits_of_another_type_are_not_rounded_with_what_they_share(backend: Backend) -> None:
    @one_step
    def step(*, as_complex: bool) -> tuple[Tensor, ...]:
        x, w = leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=2)
        y = x.sin()
        pairs = y.unflatten(1, (-1, 2))
        other = torch.view_as_complex(pairs) if as_complex else pairs
        return (y * w).sum() + (other * other).real.sum(), x, w

    offload = backend.offload(step_plans=True, codec="bf16")
    for _ in range(4):
        _, *rounded = step(Settled(offload), as_complex=False)
        collect()
    with pytest.raises(AssertionError, match="item 0 differs"):
        assert_identical(step(nullcontext(), as_complex=False)[1:], rounded)
    assert_identical(step(nullcontext(), as_complex=True), step(Settled(offload), as_complex=True))
    stats = assert_settled(offload)
    assert stats.followed_forwards > 1
    assert stats.plan_misses == {"codec": 1}
    assert stats.packed_bytes["bf16"] > 0


#: A program, and what has copies that have begun arrive in the midst of it.
Written: TypeAlias = Callable[[Tensor, Callable[[], object]], Tensor]


class _Alias(torch.autograd.Function):
    """The same bytes under another version counter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def written_meanwhile(x: Tensor, arrive: Callable[[], object]) -> Tensor:
    h = x * 2
    y = h.sin().exp().cos()
    arrive()
    h.data.mul_(3)
    return y + h.cos()


def without_gradient(x: Tensor, arrive: Callable[[], object]) -> Tensor:
    """The second operator may fill it yet, as ``rrelu`` does with its noise."""
    mask = torch.full((SIDE, SIDE), 2.0)
    return scaling(scaling(x * 2, mask), x * 3, mask)


def of_another_version_counter(x: Tensor, arrive: Callable[[], object]) -> Tensor:
    """``hypot_`` saves what it reads, computes, and saves what is there then, in a version of the same number."""
    h = (x * 2).add_(1)
    y, alias = scaling(x * 3, h, read=unread), _Alias.apply(h)
    return y + alias.hypot_(noise(SIDE, SIDE))


def of_a_later_version(x: Tensor, arrive: Callable[[], object]) -> Tensor:
    """The same in two versions of one counter: the first save has a handle for as long, and nothing asks for it."""
    h = (x * 2).add_(1)
    y = scaling(x * 3, h, read=unread)
    result = h.hypot_(noise(SIDE, SIDE))
    result.register_hook(lambda gradient: (gradient, y)[0])
    return result


@pytest.mark.parametrize(
    ("program", "number", "recorded"),
    [
        (written_meanwhile, 3, written_meanwhile),
        (without_gradient, 2, without_gradient),
        (of_another_version_counter, 2, of_another_version_counter),
        (of_a_later_version, 2, of_another_version_counter),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_h54_a_storage_that_has_begun_to_leave_is_not_shared_whatever_its_plan_says(
    program: Written, number: int, recorded: Written, backend: Backend
) -> None:
    """Save ``number`` of the program is of the storage that its first save has begun to copy.

    Args:
        recorded: has the same saves, and the plan that is changed.
    """

    def step(offload: Offload, program: Written) -> list[Tensor | None]:
        x = leaf(SIDE, SIDE)
        with Settled(offload):
            loss = program(x, lambda: offload.stats(synchronize=True)).sum()
        loss.backward()
        return [loss.detach(), x.grad]

    backend.sources_change = True
    plan = plan_of(backend, lambda around: step(around.offload, recorded))
    alone = backend.offload(step_plans=False)
    offload = backend.offload(step_plans=True, plan=with_a_late_share(plan, 0, number))
    with pytest.warns(RuntimeWarning, match="does not fit this model"):
        assert_identical(step(alone, program), step(offload, program))
    stats = assert_settled(offload)
    assert (stats.followed_forwards, stats.plan_misses) == (1, {"share": 1})
    assert counted(stats) == counted(assert_settled(alone))
    assert_moved(stats)


# -- of what stays ----------------------------------------------------------------------------------------------------


def test_h54_a_parameter_that_an_operator_has_changed_is_not_held_by_what_saves_it(backend: Backend) -> None:
    """It has a node then, which owns the handle: a cycle that no collector sees, and that only backward would break."""

    def step(around: Around, goes_backward: bool) -> list[Tensor | None]:
        x, w = leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=2)
        frozen, other = (nn.Parameter(noise(SIDE, SIDE), requires_grad=False) for _ in range(2))
        with around:
            frozen.mul_(w)
            y = (x * 2).sin() * other * other
            loss = (y + frozen.exp_()).sum()
        storages.append(weakref.ref(frozen.untyped_storage()))
        del y, frozen
        if goes_backward:
            loss.backward()
        return [loss.detach(), x.grad, w.grad]

    storages: list[Callable[[], object]] = []
    stats = follows(backend, step, [True, True, False], 2, {})
    assert [storage() for storage in storages] == [None] * 6
    assert stats.kept_bytes["parameter"] == 3 * 3 * SIDE * SIDE * 4


# -- what ends the following ------------------------------------------------------------------------------------------


@contextmanager
def being_captured(offload: Offload, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if it were so: the saves inside, that is, of one forward, go into a graph."""
    offloader = offloader_of(offload)
    with patch.context() as inside:
        inside.setattr(offloader, "can_capture", True)
        inside.setattr(offloader.runtime, "is_capturing", lambda device: True)
        yield


@contextmanager
def crashed(offload: Offload, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after an interrupt in the midst of a call."""
    offloader_of(offload).crash()
    yield


@pytest.mark.parametrize(
    ("what", "begin", "kept"),
    [
        ("capture", being_captured, {"region": 3}),
        ("interrupt", crashed, {"failed": 6}),
        ("trace", lambda offload, patch: offload.trace(os.devnull), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_h54_what_begins_in_the_middle_of_a_forward_ends_the_following(
    what: str,
    begin: Callable[[Offload, pytest.MonkeyPatch], Around],
    kept: dict[str, int],
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(around: Around, middle: Around) -> list[Tensor | None]:
        x, y, z = (leaf(SIDE, SIDE, seed=seed) for seed in range(3))
        with around:
            first = deep(x, nullcontext(), 3)
            with middle:
                second = deep(y, nullcontext(), 3)
            third = deep(z, nullcontext(), 3)
        for loss in (first, second, third):
            loss.backward()
        return [x.grad, y.grad, z.grad]

    offload = knowing(backend, lambda around: step(around, nullcontext()))
    expected = step(nullcontext(), nullcontext())
    assert_moved(offload.stats(synchronize=True))
    assert_identical(expected, step(Settled(offload), begin(offload, monkeypatch)))
    stats = offload.stats(synchronize=True)
    assert (stats.followed_forwards, stats.plan_misses) == (2, {what: 1})
    assert {reason: stats.kept_bytes.get(reason) for reason in kept} == {
        reason: tensors * SIDE * SIDE * 4 for reason, tensors in kept.items()
    }
    assert_identical(expected, step(Settled(offload), nullcontext()))


@pytest.mark.parametrize("what", ["memory", "order"])
def test_h54_a_device_without_room_for_a_reload_is_a_miss_where_there_was_none(
    what: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_once() -> None:
        Allocations(backend.runtime, monkeypatch, lambda number: number == 1)

    offload, expected = knowing(backend, two), two(nullcontext())
    assert_identical(expected, two(Settled(offload), in_order=what != "order", before=refuse_once))
    stats = assert_settled(offload)
    assert (stats.followed_forwards, stats.plan_misses) == (2, {what: 1})
    assert_moved(stats)
    assert stats.bytes_in > 0


def test_h54_a_wish_that_the_newest_leave_comes_before_a_plan(backend: Backend) -> None:
    size = SIDE * SIDE * 4

    @one_step
    def step(is_preferred: bool) -> tuple[Tensor, ...]:
        x = leaf(SIDE, SIDE)
        y = deep(x, nullcontext(), 3) * x
        z = y * 2
        if is_preferred:
            eo.prefer_offload(z)
        return z.sin(), x

    stats = follows(backend, step, [False, False, True], 2, {"marks": 1}, 0.6, keep_last_bytes=size)
    assert stats.kept_bytes["newest"] == 2 * size, "of the first two"


# -- what is asked when a copy is to start ----------------------------------------------------------------------------


def nothing(h: Tensor) -> None:
    pass


def given_up(h: Tensor) -> None:
    h.untyped_storage().resize_(0)


@pytest.mark.parametrize(("change", "reason"), [(eo.keep, "marked"), (given_up, "layout")], ids=["a mark", "no memory"])
def test_h54_what_comes_between_a_save_and_its_copy_is_seen(
    change: Callable[[Tensor], object], reason: str, backend: Backend
) -> None:
    def step(around: Around, change: Callable[[Tensor], object]) -> object:
        x = leaf(SIDE, SIDE)
        with around:
            h = x * 2
            y, values = h.sin(), h.detach().clone()
            change(h)
            loss = y.exp().cos().sum()
        if h.untyped_storage().nbytes() < values.nbytes:
            h.untyped_storage().resize_(values.nbytes)
            h.data.copy_(values)
        del h, y
        loss.backward()
        return x.grad

    stats = follows(backend, step, [nothing, nothing, change], 2, {}, 0.8)
    assert stats.kept_bytes[reason] == SIDE * SIDE * 4


def test_h54_what_backward_has_come_to_before_its_copy_is_to_start_stays(backend: Backend) -> None:
    """The last save leaves with the context at the earliest."""

    def step(around: Around, goes_back: bool) -> object:
        x = leaf(SIDE, SIDE)
        with around:
            loss = deep(x, nullcontext(), 3)
            if goes_back:
                loss.backward(retain_graph=True)
        if not goes_back:
            loss.backward()
        return x.grad

    stats = follows(backend, step, [False, False, True], 2, {}, 0.6)
    assert stats.kept_bytes["newest"] >= SIDE * SIDE * 4
    assert stats.bytes_out == stats.saved_bytes - stats.kept_bytes["newest"]


def test_h54_the_window_holds_for_what_leaves_by_a_plan(backend: Backend) -> None:
    window = 2 * SIDE * SIDE * 4
    stats = follows(backend, lambda around, _: two(around), range(3), 2, {}, max_inflight_bytes=window)
    assert 0 < stats.inflight_bytes_peak <= window


# -- backward ---------------------------------------------------------------------------------------------------------


def test_h54_a_backward_after_an_interrupt_follows_no_plan(backend: Backend) -> None:
    offload, expected = knowing(backend, two), two(nullcontext())
    assert_moved(offload.stats(synchronize=True))
    assert_identical(expected, two(Settled(offload), before=lambda: offloader_of(offload).crash()))
    assert offload.stats().plan_misses == {"interrupt": 1}
    assert_identical(expected, two(Settled(offload)))


def test_h54_what_the_plan_expects_next_comes_back_early_and_once(backend: Backend) -> None:
    size, offload = SIDE * SIDE * 4, backend.offload(step_plans=True)
    for _ in range(3):
        offload.reset_stats()
        x, y = leaf(SIDE, SIDE), leaf(SIDE, SIDE, seed=2)
        with Settled(offload):
            first, second = deep(x, nullcontext(), 3), deep(y, nullcontext(), 3)
        second.backward()
        early = offload.stats(synchronize=True).bytes_in
        first.backward()
        assert_identical(two(nullcontext()), [x.grad, y.grad])
        del first, second
    stats = assert_settled(offload)
    assert (stats.followed_forwards, stats.plan_misses) == (1, {})
    assert (stats.bytes_out, early, stats.bytes_in) == (6 * size, 6 * size, 6 * size)
