"""What may go wrong around compiled code: results are exact, or an error says what happened, and nothing is left."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import eager_offload as eo
from eager_offload.tiers.disk import DiskSlot
from tests.compile.compiled import (
    BOTH,
    Compile,
    Step,
    compare,
    compiler,
    deep,
    fresh_compiler,
    results_of,
    same_results,
    step_of,
)
from tests.compile.test_codecs_compiled import factors, masked
from tests.hazards.backends import DiskBackend, assert_settled, hooks_are_gone
from tests.hazards.programs import leaf


def deep_within(contexts: Callable[[AbstractContextManager[object]], Sequence[AbstractContextManager[object]]]) -> Step:
    """A step whose forward runs in what ``contexts`` makes of the one that it is given, the outermost in front."""

    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        x, weight = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
        run = compile(deep)
        with ExitStack() as stack:
            for one in contexts(around):
                stack.enter_context(one)
            loss = run(x, weight).sum()
        loss.backward()
        return [loss, x.grad, weight.grad]

    return step


deep_step = deep_within(lambda around: [around])
masked_step = step_of(masked, *factors())


@pytest.fixture
def trap() -> Iterator[Callable[[], None]]:
    """An operator that raises once, when it was set."""
    library = torch.library.Library("eager_offload_trap", "FRAGMENT")
    library.define("spring(Tensor x) -> Tensor")
    armed: list[bool] = []

    def spring(x: Tensor) -> Tensor:
        if armed:
            armed.clear()
            raise KeyError("sprung")
        return x.clone()

    library.impl("spring", spring, "CompositeExplicitAutograd")
    torch.library.register_fake("eager_offload_trap::spring", torch.empty_like, lib=library)

    def backward(context: Any, gradient: Tensor) -> Tensor:
        return torch.ops.eager_offload_trap.spring(gradient)

    torch.library.register_autograd("eager_offload_trap::spring", backward, lib=library)
    yield lambda: armed.append(True)
    library._destroy()


@BOTH
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_h10_an_exception_in_the_middle_of_a_graph_leaves_nothing(
    backend: str, where: str, trap: Callable[[], None], offload: eo.Offload
) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        hidden: Tensor = torch.ops.eager_offload_trap.spring(deep(x, weight))
        return deep(hidden, weight)

    def step(run: Any, around: AbstractContextManager[object], spring: bool) -> list[Tensor | None]:
        x, weight = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
        if spring and where == "forward":
            trap()
        with around:
            loss = run(x, weight).sum()
        if spring:
            trap()
        loss.backward()
        return [loss.detach(), x.grad, weight.grad]

    with fresh_compiler():
        expected = step(torch.compile(function, backend=backend), nullcontext(), False)
    with fresh_compiler():
        run = torch.compile(function, backend=backend)
        assert same_results(step(run, offload, False), expected)
        for _ in range(2):
            with pytest.raises(KeyError, match="sprung"):
                step(run, offload, True)
            assert hooks_are_gone()
            # torch keeps the nodes of a backward that failed until a later one: this.
            assert same_results(step(run, offload, False), expected)
        assert assert_settled(offload).bytes_in > 0


@BOTH
def test_h09_graphs_that_are_dropped_leave_nothing(backend: str, offload: eo.Offload) -> None:
    with fresh_compiler():
        run = torch.compile(deep, backend=backend)
        weight = leaf(8, 8, seed=2)
        for _ in range(20):
            with offload:
                run(leaf(8, 8), weight)
        stats = assert_settled(offload)
        assert stats.offloaded_bytes == stats.released_bytes > 0


@BOTH
def test_h26_without_room_values_stay_and_are_counted(backend: str) -> None:
    stats = compare(deep_step, backend, moves=False, tier="disk", disk_budget=4096)
    assert stats.bytes_out < stats.saved_bytes
    assert stats.kept_bytes["budget"] > 0


@pytest.mark.parametrize(
    ("step", "codec", "n"),
    [*((deep_step, "identity", n) for n in (0, 1, 2, 4)), *((masked_step, "lossless", n) for n in (0, 2))],
)
def test_h27_a_write_that_fails_leaves_the_value_where_it_was(
    step: Step, codec: str, n: int, monkeypatch: pytest.MonkeyPatch, disk: DiskBackend
) -> None:
    write, calls = DiskSlot.write, Counter[str]()

    def failing(slot: DiskSlot, source: Tensor) -> None:
        calls["write"] += 1
        if calls["write"] > n:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(slot, source)

    with fresh_compiler():
        expected = results_of(step, compiler("aot_eager"), nullcontext())
        offload = disk.offload(codec=codec)
        with monkeypatch.context() as patch:
            patch.setattr(DiskSlot, "write", failing)
            assert same_results(results_of(step, compiler("aot_eager"), offload), expected)
        stats = assert_settled(offload)
        assert calls["write"] > n
        assert stats.kept_bytes["failed"] > 0
        assert stats.demotions


def test_h27_a_read_that_fails_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch, offload: eo.Offload) -> None:
    def failing(slot: DiskSlot, target: Tensor) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with fresh_compiler():
        with monkeypatch.context() as patch:
            patch.setattr(DiskSlot, "read", failing)
            with pytest.raises(eo.TransferError) as caught:
                deep_step(compiler("aot_eager"), offload)
        assert caught.value.errno == errno.EIO
        del caught
        expected = results_of(deep_step, compiler("aot_eager"), nullcontext())
        assert same_results(results_of(deep_step, compiler("aot_eager"), offload), expected)
        assert_settled(offload)


@BOTH
def test_h29_threads_with_an_offload_each_are_independent(backend: str, disk: DiskBackend) -> None:
    with fresh_compiler():
        expected = results_of(deep_step, compiler(backend), nullcontext())
        offloads = [disk.offload() for _ in range(3)]
        run, caught, results = (
            torch.compile(deep, backend=backend),
            list[BaseException](),
            dict[int, list[Tensor | None]](),
        )
        begin = threading.Barrier(len(offloads))

        def work(number: int) -> None:
            try:
                x, weight = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
                begin.wait(60)
                with offloads[number]:
                    loss = run(x, weight).sum()
                loss.backward()
                results[number] = [loss.detach(), x.grad, weight.grad]
            except BaseException as error:
                caught.append(error)

        with offloads[0]:  # compiled once, here
            run(leaf(8, 8, seed=1), leaf(8, 8, seed=2)).sum().backward()
        before = offloads[0].stats(synchronize=True).bytes_in
        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(offloads))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not caught, caught
        for number, offload in enumerate(offloads):
            assert same_results(results[number], expected)
            results.pop(number)
            moved = assert_settled(offload).bytes_in - (before if number == 0 else 0)
            assert moved == before


def test_h28_a_child_of_fork_offloads_by_itself(offload: eo.Offload) -> None:
    with fresh_compiler():
        expected = results_of(deep_step, compiler("aot_eager"), nullcontext())
        assert same_results(results_of(deep_step, compiler("aot_eager"), offload), expected)
        child = os.fork()
        if child == 0:
            try:
                leaf(2, 2).sum().backward()
            except RuntimeError:
                os._exit(3)
            try:
                fine = same_results(results_of(deep_step, compiler("aot_eager"), offload), expected)
                os._exit(0 if fine and offload.stats(synchronize=True).bytes_in > 0 else 1)
            finally:
                os._exit(2)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert same_results(results_of(deep_step, compiler("aot_eager"), offload), expected)
        assert_settled(offload)
    if code == 3:
        pytest.skip("autograd of this torch has threads for devices by now, and refuses backward in a forked child")
    assert code == 0


@BOTH
def test_h29_nested_offloads_each_do_what_is_saved_inside_of_them(backend: str, disk: DiskBackend) -> None:
    other = disk.offload(min_bytes=1)

    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        x, weight = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
        run = compile(deep)
        with around:
            hidden = run(x, weight)
            with other if isinstance(around, eo.Offload) else nullcontext():
                hidden = run(hidden, weight)
            loss = run(hidden, weight).sum()
        loss.backward()
        return [loss, x.grad, weight.grad]

    stats = compare(step, backend, regions=4, as_eager=False)
    inner = assert_settled(other)
    assert inner.compiled_regions == 2
    assert 2 * inner.bytes_in == stats.bytes_in > 0


@BOTH
@pytest.mark.filterwarnings("ignore:eager_offload")
def test_h24_other_hooks_inside_hide_the_graph_and_are_counted(backend: str) -> None:
    step = deep_within(lambda around: [around, save_on_cpu()])
    stats = compare(step, backend, moves=False, as_eager=False)
    assert stats.foreign_hooks == 2


@BOTH
def test_h24_inside_other_hooks_what_the_graph_moves_is_not_theirs(backend: str) -> None:
    seen: dict[bool, list[int]] = {True: [], False: []}

    def noting(around: AbstractContextManager[object]) -> AbstractContextManager[object]:
        def note(tensor: Tensor) -> Tensor:
            seen[isinstance(around, eo.Offload)].append(tensor.nbytes)
            return tensor

        return saved_tensors_hooks(note, lambda tensor: tensor)

    compare(deep_within(lambda around: [noting(around), around]), backend)
    assert not seen[True]
    assert seen[False], "else the test says nothing"


def test_h25_nothing_grows_over_many_steps(offload: eo.Offload) -> None:
    with fresh_compiler():
        run = torch.compile(deep, backend="aot_eager")
        weight, seen = leaf(8, 8, seed=2), set[tuple[int, ...]]()
        for number in range(200):
            with offload:
                loss = run(leaf(8, 8), weight).sum()
            loss.backward()
            del loss
            if number >= 20:
                stats = assert_settled(offload)
                seen.add((stats.disk_bytes_peak, stats.resident_bytes_peak, threading.active_count()))
        assert len(seen) == 1, seen
