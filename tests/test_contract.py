"""The public contract for eager code, as a user would hold us to it."""

from __future__ import annotations

import errno
import functools
import gc
import inspect
import os
import pickle
import threading
import typing
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.tiers.disk import DiskTier
from tests.hazards.backends import DiskBackend, assert_balanced, assert_settled, hooks_are_gone, lane_of
from tests.hazards.programs import assert_identical, assert_moved, leaf
from tests.tiers.files import Watched

N = 1 << 14
NBYTES = 4 * N


@pytest.fixture
def disk() -> Iterator[DiskBackend]:
    """Makes offloads to the disk that move everything; nothing may be held in the end."""
    with DiskBackend() as backend:
        yield backend
        backend.assert_nothing_is_held()


def chain(x: Tensor, depth: int = 4) -> Tensor:
    """Saves ``depth`` activations of ``NBYTES`` bytes each, and nothing else."""
    for _ in range(depth):
        x = x.sigmoid()
    return x.sum()


def gradient(x: Tensor, depth: int = 4) -> Tensor:
    """Of ``chain``, without offload."""
    return torch.autograd.grad(chain(x, depth), x)[0]


# -- the surface ----------------------------------------------------------------------------------------------------

PUBLIC = [
    *("CapacityError", "ConfigError", "CorruptionError", "Offload", "OffloadConfig", "OffloadError", "OffloadStats"),
    *("SavedTensorModifiedError", "TransferError", "keep", "no_offload", "prefer_offload"),
]


def test_the_names_of_the_contract_are_there() -> None:
    assert set(PUBLIC) <= set(eo.__all__)
    assert list(eo.__all__) == sorted(eo.__all__)
    star: dict[str, object] = {}
    exec("from eager_offload import *", star)
    assert set(eo.__all__) <= set(star)
    assert eo.__version__.count(".") == 2
    assert (Path(eo.__file__).parent / "py.typed").is_file()


def public_callables() -> Iterator[Any]:
    """Every public function, class, and public method of one, with its name."""
    for name in eo.__all__:
        public = getattr(eo, name)
        yield pytest.param(public, id=name)
        if inspect.isclass(public):
            for attribute, value in vars(public).items():
                if not attribute.startswith("_"):
                    inner = getattr(value, "__func__", getattr(value, "fget", value))
                    if inspect.isfunction(inner):
                        yield pytest.param(inner, id=f"{name}.{attribute}")


@pytest.mark.parametrize("public", list(public_callables()))
def test_everything_public_is_documented_and_typed(public: Any) -> None:
    text = inspect.getdoc(public)
    assert text
    assert text[0].isupper() or text.startswith("``"), "a sentence"
    function = public.__init__ if inspect.isclass(public) else public
    if not inspect.isfunction(function):
        return  # built in
    signature, hints = inspect.signature(function), typing.get_type_hints(function)
    for name, parameter in signature.parameters.items():
        assert name in ("self", "cls") or name in hints, f"{name} has no type"
        assert parameter.annotation is not Any
    assert "return" in hints or public in vars(typing)


def test_sizes_and_errors_are_spelled_out_where_they_occur() -> None:
    for name in ("min_bytes", "max_inflight_bytes", "prefetch_bytes", "keep_last_bytes"):
        assert name in inspect.getsource(eo.OffloadConfig)
    assert "ConfigError" in (inspect.getdoc(eo.Offload) or "")
    assert "OffloadError" in (inspect.getdoc(eo.keep) or "")


# -- entering -------------------------------------------------------------------------------------------------------


def test_a_context_gives_the_object_and_can_be_entered_again(disk: DiskBackend) -> None:
    offload, x = disk.offload(), leaf(N)
    for _ in range(3):
        with offload as entered:
            assert entered is offload
            loss = chain(x)
        loss.backward()
        assert torch.equal(x.grad, gradient(x))
        x.grad = None
    assert hooks_are_gone()
    assert offload.stats(synchronize=True).offloaded_bytes == 3 * 4 * NBYTES


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_h02_many_forwards_before_any_backward(order: list[int], disk: DiskBackend) -> None:
    offload, leaves = disk.offload(), [leaf(N, seed=seed) for seed in range(4)]
    losses: list[Tensor | None] = []
    for x in leaves:
        with offload:
            losses.append(chain(x))
    assert_moved(offload.stats(synchronize=True), 1.0)
    for index in order:
        loss, losses[index] = losses[index], None
        loss.backward()
        assert torch.equal(leaves[index].grad, gradient(leaves[index]))
        del loss
    assert_settled(offload)


def test_nested_and_several_at_once(disk: DiskBackend) -> None:
    first, second, x = disk.offload(), disk.offload(), leaf(N)
    with first:
        a = chain(x, 1)
        with first:
            b = chain(x, 2)
            with second:
                c = chain(x, 3)
            d = chain(x, 4)
        e = chain(x, 5)
    (a + b + c + d + e).backward()
    expected = leaf(N)
    sum(chain(expected, depth) for depth in range(1, 6)).backward()
    assert torch.equal(x.grad, expected.grad)
    assert first.stats(synchronize=True).saved_bytes == (1 + 2 + 4 + 5) * NBYTES
    assert second.stats(synchronize=True).saved_bytes == 3 * NBYTES
    del a, b, c, d, e
    for offload in (first, second):
        assert_moved(assert_settled(offload), 1.0)


def test_h29_one_object_in_several_threads(disk: DiskBackend) -> None:
    offload, results = disk.offload(), dict[int, Tensor]()
    meet = threading.Barrier(3, timeout=60)

    def work(seed: int) -> None:
        x = leaf(N, seed=seed)
        for _ in range(3):
            meet.wait()
            with offload:
                meet.wait()
                loss = chain(x)
            x.grad = None
            loss.backward()
        results[seed] = x.grad

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        assert torch.equal(results[seed], gradient(leaf(N, seed=seed)))
    assert assert_settled(offload).offloaded_bytes == 3 * 3 * 4 * NBYTES


def test_leaving_in_a_thread_that_did_not_enter_is_an_error_and_harms_nobody(disk: DiskBackend) -> None:
    offload, x, caught = disk.offload(), leaf(N), list[BaseException]()

    def leave() -> None:
        try:
            offload.__exit__(None, None, None)
        except eo.OffloadError as error:
            caught.append(error)

    with offload:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        loss = chain(x)
    assert "in a thread that did not enter it" in str(caught[0])
    loss.backward()
    assert torch.equal(x.grad, gradient(x))
    with pytest.raises(eo.OffloadError, match="did not enter"):
        offload.__exit__(None, None, None)
    del loss
    assert_moved(assert_settled(offload), 1.0)


def test_backward_runs_inside_the_context_outside_it_and_in_another_thread(disk: DiskBackend) -> None:
    offload, x = disk.offload(), leaf(N)
    with offload:
        chain(x).backward()
    inside, x.grad = x.grad, None
    with offload:
        loss = chain(x)
    disk.in_thread(loss.backward)
    assert torch.equal(inside, gradient(x))
    assert torch.equal(x.grad, gradient(x))
    del loss
    assert_moved(assert_settled(offload), 1.0)


def test_evaluation_costs_nothing(disk: DiskBackend) -> None:
    offload, x = disk.offload(), leaf(N)
    with offload, torch.no_grad():
        chain(x)
    with offload, torch.inference_mode():
        chain(x)
    assert offload.stats(synchronize=True).saved_tensors == 0


# -- closing --------------------------------------------------------------------------------------------------------


def spill_files() -> int:
    """How many files without a name this process has open."""
    return sum("(deleted)" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd))


def is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


on_linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files by /proc")


@on_linux
def test_closing_gives_files_back_and_may_be_repeated(disk: DiskBackend) -> None:
    before, x = spill_files(), leaf(N)
    offload = disk.offload()
    assert spill_files() == before + 1
    with offload:
        chain(x).backward()
    offload.close()
    assert spill_files() == before
    offload.close()
    stats = offload.stats(synchronize=True)
    assert stats.saved_bytes == 4 * NBYTES, "what was counted stays"
    assert stats.disk_bytes_peak > 0
    assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes


@on_linux
def test_graphs_that_are_alive_across_a_close_are_still_right(disk: DiskBackend) -> None:
    before, x, y = spill_files(), leaf(N), leaf(N, seed=2)
    offload = disk.offload()
    with offload:
        loss, dropped = chain(x), chain(y, 3)
    assert_moved(offload.stats(synchronize=True), 1.0)
    offload.close()
    assert spill_files() == before + 1, "what is alive keeps what it needs"
    with offload:
        again = chain(y)
    again.backward()
    assert torch.equal(y.grad, gradient(y)), "using it again opens it again"
    loss.backward()
    assert torch.equal(x.grad, gradient(x))
    del loss, dropped
    stats = offload.stats(synchronize=True)
    assert stats.offloaded_bytes == (4 + 3 + 4) * NBYTES
    assert stats.released_bytes == 3 * NBYTES
    assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
    del again
    offload.close()
    assert spill_files() == before


def test_closing_while_a_forward_runs_keeps_its_gradients(disk: DiskBackend) -> None:
    offload, x = disk.offload(keep_last_bytes=NBYTES), leaf(N)
    with offload:
        h = x.sigmoid().sigmoid()
        offload.close()
        loss = h.sigmoid().sigmoid().sum()
    loss.backward()
    assert torch.equal(x.grad, gradient(x))
    del loss, h
    stats = offload.stats(synchronize=True)
    assert_balanced(stats)
    assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
    assert stats.saved_bytes == 4 * NBYTES
    assert stats.bytes_out > 0


@on_linux
def test_an_object_that_is_collected_leaves_its_graphs_alive_and_its_files_go_with_them() -> None:
    before, x = spill_files(), leaf(N)
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)
    with offload:
        loss = chain(x)
    assert_moved(offload.stats(synchronize=True), 1.0)
    gone = weakref.ref(offload)
    del offload
    gc.collect()
    assert gone() is None
    assert spill_files() == before + 1
    loss.backward()
    assert torch.equal(x.grad, gradient(x))
    del loss
    gc.collect()
    assert spill_files() == before


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (eo.OffloadError, (RuntimeError,)),
        (eo.ConfigError, (eo.OffloadError, ValueError)),
        (eo.CapacityError, (eo.OffloadError,)),
        (eo.TransferError, (eo.OffloadError,)),
        (eo.CorruptionError, (eo.OffloadError,)),
        (eo.SavedTensorModifiedError, (eo.OffloadError,)),
    ],
)
def test_errors_are_of_the_kinds_that_the_contract_names(
    kind: type[eo.OffloadError], bases: tuple[type[Exception], ...]
) -> None:
    for base in bases:
        assert issubclass(kind, base)


def test_errors_travel_between_processes() -> None:
    error = eo.TransferError("lost", errno=errno.EIO, tier="disk", nbytes=77)
    error.add_note("on node 3")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is eo.TransferError
    assert (str(again), again.errno, again.tier, again.nbytes) == ("lost", errno.EIO, "disk", 77)
    assert again.__notes__ == ["on node 3"]
    for kind in (eo.ConfigError, eo.CapacityError, eo.CorruptionError, eo.SavedTensorModifiedError):
        assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"


@pytest.fixture
def watched(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[eo.Offload, Watched]]]:
    """Makes an ``Offload`` on a disk whose calls a test can make fail."""
    monkeypatch.setattr("eager_offload.eager.lanes.DiskTier", functools.partial(DiskTier, file_type=Watched))

    def make(**fields: Any) -> tuple[eo.Offload, Watched]:
        return disk.offload(**fields), Watched.opened[-1]

    yield make
    Watched.opened.clear()


Make = Callable[..., tuple[eo.Offload, Watched]]


def test_h27_a_write_that_fails_keeps_what_it_could_not_move_and_is_told_once(watched: Make) -> None:
    (offload, file), x = watched(), leaf(N)
    file.on_write = OSError(errno.EIO, os.strerror(errno.EIO))

    def step() -> None:
        with offload:
            loss = chain(x)
        offload.stats(synchronize=True)
        x.grad = None
        loss.backward()
        assert torch.equal(x.grad, gradient(x))

    with pytest.warns(RuntimeWarning, match=r"offloading failed.*stays on cpu.*Input/output error"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    stats = assert_settled(offload)
    assert stats.kept_bytes == {"failed": 8 * NBYTES}
    assert stats.demotions == {"write_failed": 8}
    assert stats.offloaded_bytes == stats.bytes_out == stats.bytes_in == 0
    file.on_write = None
    with offload:
        loss = chain(x)
    assert offload.stats(synchronize=True).offloaded_bytes == 4 * NBYTES, "it moves again once the disk does"
    loss.backward()


def test_h27_what_a_failed_write_leaves_behind_needs_no_garbage_collector(watched: Make) -> None:
    (offload, file), x = watched(), leaf(N)
    file.on_write = OSError(errno.EIO, os.strerror(errno.EIO))
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(), offload:
            warnings.simplefilter("ignore")
            h = x
            for _ in range(4):
                h = h.sigmoid()
                storages.append(weakref.ref(h.untyped_storage()))
            loss = h.sum()
            offload.stats(synchronize=True)
        del h
        assert all(storage() is not None for storage in storages)
        del loss
        assert [storage() for storage in storages] == [None] * 4
        assert set(lane_of(offload).census()) == {0}
    finally:
        gc.enable()
    assert offload.stats().kept_bytes == {"failed": 4 * NBYTES}


def test_h27_a_read_that_fails_is_raised_from_backward_and_a_second_try_may_succeed(watched: Make) -> None:
    (offload, file), x = watched(prefetch_bytes=0), leaf(N)
    with offload:
        loss = chain(x)
    assert_moved(offload.stats(synchronize=True), 1.0)
    file.on_read = OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(eo.TransferError, match=f"could not read {NBYTES} bytes") as raised:
        loss.backward(retain_graph=True)
    assert (raised.value.errno, raised.value.tier, raised.value.nbytes) == (errno.EIO, "disk", NBYTES)
    assert x.grad is None
    file.on_read = None
    loss.backward()
    assert torch.equal(x.grad, gradient(x))
    del raised, loss
    assert_settled(offload)


def test_what_comes_back_changed_is_never_used(watched: Make) -> None:
    (offload, file), x = watched(verify=True), leaf(N)
    with offload:
        loss = chain(x, 1)
    assert_moved(offload.stats(synchronize=True), 1.0)
    file.overwrite(100, b"\xff\xff\xff\xff")
    with pytest.raises(eo.CorruptionError, match="checksum does not match"):
        loss.backward()
    assert x.grad is None


def test_h01_a_change_in_place_raises_in_the_words_of_autograd(disk: DiskBackend) -> None:
    offload = disk.offload()
    messages = []
    for around in (nullcontext(), offload):
        x = leaf(N)
        with around:
            y = x.sigmoid()
            loss = y.sum()
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            loss.backward()
        messages.append(str(raised.value).split(", which is")[0].split(" instead")[0])
        assert isinstance(raised.value, eo.SavedTensorModifiedError) == (around is offload)
        del loss, y, raised
    assert messages[0].split("[")[1].split("]")[0] == messages[1].split("[")[1].split("]")[0]
    assert offload.stats(synchronize=True).bytes_out == NBYTES


# -- reasons --------------------------------------------------------------------------------------------------------


def small(x: Tensor) -> tuple[Tensor, int]:
    return x[: N // 8].sigmoid().sum(), NBYTES // 8


def parameter(x: Tensor) -> tuple[Tensor, int]:
    return x.square().sum() + x.view(2, -1).square().sum(), 2 * NBYTES


def device(x: Tensor) -> tuple[Tensor, int]:
    return x.to("meta").sigmoid().sum(), NBYTES


def layout(x: Tensor) -> tuple[Tensor, int]:
    sparse = torch.eye(64).to_sparse()
    return torch.sparse.mm(sparse, x.view(64, -1)).sum(), 64 * 64 * 4  # as a sparse tensor counts its bytes


def marked(x: Tensor) -> tuple[Tensor, int]:
    return eo.keep(x * 2).square().sum() + eo.keep(x * 3).square().sum(), 2 * NBYTES


def region(x: Tensor) -> tuple[Tensor, int]:
    with eo.no_offload():
        return chain(x, 3), 3 * NBYTES


def newest(x: Tensor) -> tuple[Tensor, int]:
    return chain(x, 9), 2 * NBYTES


def alive(x: Tensor) -> tuple[Tensor, int]:
    factor, h = torch.full((N,), 1.5), x
    for _ in range(7):
        h = (h * factor).sigmoid()
    return h.sum(), (7 - 3) * NBYTES


def budget(x: Tensor) -> tuple[Tensor, int]:
    return chain(x, 9), 4 * NBYTES


def failed(x: Tensor) -> tuple[Tensor, int]:
    Watched.opened[-1].on_write = OSError(errno.EIO, "broken")
    return chain(x, 2), 2 * NBYTES


REASONS: list[tuple[Callable[[Tensor], tuple[Tensor, int]], dict[str, Any]]] = [
    (small, {"min_bytes": NBYTES}),
    (parameter, {}),
    (device, {}),
    (layout, {}),
    (marked, {}),
    (region, {}),
    (newest, {"keep_last_bytes": 2 * NBYTES}),
    (alive, {}),
    (budget, {"disk_budget": 5 * NBYTES}),
    (failed, {}),
]


@pytest.mark.filterwarnings("ignore:eager_offload", "ignore:Sparse")
@pytest.mark.parametrize(("program", "fields"), [pytest.param(p, f, id=p.__name__) for p, f in REASONS])
def test_each_reason_to_stay_is_counted_where_it_occurs(
    program: Callable[[Tensor], tuple[Tensor, int]], fields: dict[str, Any], watched: Make
) -> None:
    (offload, _), x = watched(**fields), leaf(N)
    with offload:
        loss, expected = program(x)
        moving = chain(x, 0 if program in (newest, budget, failed) else 2)
    stats = offload.stats(synchronize=True)
    assert stats.kept_bytes.get(program.__name__) == expected
    assert_balanced(stats)
    (loss + moving).backward() if not loss.is_meta else moving.backward()
    actual, x.grad = x.grad, None
    Watched.opened[-1].on_write = None
    again, _ = program(x)
    moving = chain(x, 0 if program in (newest, budget, failed) else 2)
    (again + moving).backward() if not again.is_meta else moving.backward()
    assert_identical(x.grad, actual)
    del loss, moving, again
    stats = assert_settled(offload)
    assert (stats.bytes_out > 0) == (program is not failed)
    assert set(stats.kept_bytes) <= {program.__name__}
