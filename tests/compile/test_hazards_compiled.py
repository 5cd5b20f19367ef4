"""What may go wrong around compiled code: results are exact, or an error says what happened, and nothing is left."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload.compile import insert
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
)
from tests.hazards.backends import DiskBackend, assert_settled, hooks_are_gone
from tests.hazards.programs import assert_identical
from tests.programs import leaf
from tests.programs.compiled import NOTED, note
from tests.threads import on_threads

Around = AbstractContextManager[object]
Results = list[Tensor | None]


def pair() -> tuple[Tensor, Tensor]:
    return leaf(8, 8, seed=1), leaf(8, 8, seed=2)


def trained(run: Callable[..., Tensor], around: Around) -> Results:
    """The loss and the gradients of a function of two tensors."""
    x, weight = pair()
    with around:
        loss = run(x, weight).sum()
    loss.backward()
    return [loss.detach(), x.grad, weight.grad]


def step_of(function: Callable[..., Tensor]) -> Step:
    return lambda compile, around: trained(compile(function), around)


deep_step = step_of(deep)


#: Whether the operator raises when it is called next.
ARMED: list[bool] = []


@torch.library.custom_op("eager_offload_hazards::spring", mutates_args=())
def spring(x: Tensor) -> Tensor:
    """A copy, whose gradient is one too; raises once in either when it was set."""
    if ARMED:
        ARMED.clear()
        raise KeyError("sprung")
    return x.clone()


spring.register_fake(torch.empty_like)
spring.register_autograd(lambda context, gradient: spring(gradient))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_h10_an_exception_in_the_middle_of_a_graph_leaves_nothing(where: str, offload: eo.Offload) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return deep(spring(deep(x, weight)), weight)

    def sprung(run: Callable[..., Tensor]) -> None:
        x, weight = pair()
        if where == "forward":
            ARMED.append(True)
        with offload:
            loss = run(x, weight).sum()
        ARMED.append(True)
        loss.backward()

    with fresh_compiler():
        expected = trained(torch.compile(function, backend="aot_eager"), nullcontext())
    with fresh_compiler():
        run = torch.compile(function, backend="aot_eager")
        assert same_results(trained(run, offload), expected)
        for _ in range(2):
            with pytest.raises(KeyError, match="sprung"):
                sprung(run)
            assert hooks_are_gone()
            # torch keeps the nodes of a backward that failed until a later one: this.
            assert same_results(trained(run, offload), expected)
        assert assert_settled(offload).bytes_in > 0


@pytest.mark.filterwarnings("ignore:eager_offload. no room for:RuntimeWarning")
def test_h26_without_room_values_stay_and_are_counted() -> None:
    stats = compare(deep_step, "aot_eager", moves=False, disk_budget=4096)
    assert stats.bytes_out < stats.saved_bytes
    assert stats.kept_bytes["budget"] > 0


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


def test_h29_threads_with_an_offload_each_are_independent(disk: DiskBackend) -> None:
    with fresh_compiler():
        expected = results_of(deep_step, compiler("aot_eager"), nullcontext())
        offloads = [disk.offload() for _ in range(3)]
        run, begin = torch.compile(deep, backend="aot_eager"), threading.Barrier(len(offloads))
        assert same_results(trained(run, offloads[0]), expected)  # compiled once, here
        before = offloads[0].stats(synchronize=True).bytes_in

        def work(number: int) -> Results:
            begin.wait(60)
            return trained(run, offloads[number])

        for found in on_threads(len(offloads), work):
            assert same_results(found, expected)
        del found
        moved = [assert_settled(offload).bytes_in for offload in offloads]
        assert moved == [2 * before, before, before]


def test_h29_nested_offloads_each_do_what_is_saved_inside_of_them(disk: DiskBackend) -> None:
    other = disk.offload(min_bytes=1)

    def step(compile: Compile, around: Around) -> Results:
        (x, weight), run = pair(), compile(deep)
        with around:
            hidden = run(x, weight)
            with other if isinstance(around, eo.Offload) else nullcontext():
                hidden = run(hidden, weight)
            loss = run(hidden, weight).sum()
        loss.backward()
        return [loss, x.grad, weight.grad]

    stats = compare(step, "aot_eager", regions=4, as_eager=False)
    inner = assert_settled(other)
    assert inner.compiled_regions == 2
    assert 2 * inner.bytes_in == stats.bytes_in > 0


def deep_within(contexts: Callable[[Around], Sequence[Around]]) -> Step:
    """A step whose forward runs in what ``contexts`` makes of the one that it is given, the outermost in front."""

    def step(compile: Compile, around: Around) -> Results:
        (x, weight), run = pair(), compile(deep)
        with ExitStack() as stack:
            for one in contexts(around):
                stack.enter_context(one)
            loss = run(x, weight).sum()
        loss.backward()
        return [loss, x.grad, weight.grad]

    return step


def test_h24_inside_other_hooks_what_the_graph_moves_is_not_theirs() -> None:
    seen: dict[bool, list[int]] = {True: [], False: []}

    def noting(around: Around) -> Around:
        def note(tensor: Tensor) -> Tensor:
            seen[isinstance(around, eo.Offload)].append(tensor.nbytes)
            return tensor

        return saved_tensors_hooks(note, lambda tensor: tensor)

    compare(deep_within(lambda around: [noting(around), around]), "aot_eager")
    assert not seen[True]
    assert seen[False], "else the test says nothing"


@pytest.mark.usefixtures("threads_stay")
def test_h09_h25_nothing_grows_over_many_steps_of_which_some_have_no_backward(offload: eo.Offload) -> None:
    with fresh_compiler():
        run, seen = torch.compile(deep, backend="aot_eager"), set[tuple[int, ...]]()
        for number in range(200):
            if number % 4:
                trained(run, offload)
            else:
                with offload:
                    run(*pair())
            if number >= 20:
                stats = assert_settled(offload)
                seen.add((stats.disk_bytes_peak, stats.resident_bytes_peak, threading.active_count()))
        assert len(seen) == 1, seen
        assert stats.released_bytes == stats.offloaded_bytes // 4 > 0


# -- what a compiler does with a graph --------------------------------------------------------------------------------


def returned(given: Tensor, result: Tensor) -> Tensor:
    return result


def written_into(given: Tensor, result: Tensor) -> Tensor:
    return torch.slice_scatter(given, result[:2], 0, 0, 2) + result


@BOTH
@pytest.mark.parametrize("after", [returned, written_into])
def test_h35_a_region_that_is_compiled_once_for_all_blocks(backend: str, after: Callable[..., Tensor]) -> None:
    """What shares memory is not known there: all that the graph saves stays, and the compiler's own bits with it."""

    def step(compile: Compile, around: Around) -> Results:
        blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))

        @torch.compiler.nested_compile_region
        def call(block: nn.Module, x: Tensor) -> Tensor:
            return block(x)

        def whole(x: Tensor) -> Tensor:
            for block in blocks:
                given = x.sin()
                x = after(given, call(block, given))
            return x.exp()

        x, run = leaf(4, 8), compile(whole, fullgraph=True)
        with around:
            loss = run(x).sum()
        loss.backward()
        return [loss, x.grad, *(weight.grad for weight in blocks.parameters())]

    stats = compare(step, backend, moves=False, as_eager=False)
    assert (stats.bytes_out, stats.compiled_regions) == (0, 0)
    assert stats.kept_bytes["region"] > 0


@BOTH
@pytest.mark.parametrize("inside", [False, True])
def test_h72_compiled_autograd_changes_nothing(backend: str, inside: bool) -> None:
    def step(compile: Compile, around: Around) -> Results:
        """Eager code saves too; what unpacks it breaks no graph of the backward."""
        (x, weight), run = pair(), compile(deep)
        compiled_backward = torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True))
        with ExitStack() as stack:
            with around:
                loss = run(x, weight).exp().sin().sum()
                if inside:
                    with compiled_backward:
                        loss.backward()
            if not inside:
                stack.enter_context(compiled_backward)
                loss.backward()
        return [loss, x.grad, weight.grad]

    compare(step, backend)


# -- transforms -------------------------------------------------------------------------------------------------------


def transformed(x: Tensor, w: Tensor) -> Tensor:
    """What is computed before a transform and after it is saved by the same graph."""
    h = (x @ w).tanh().exp()
    return (grad(lambda x: (x.sin() * x.exp()).square().sum())(h) @ w).sin() * h


def bans() -> str | None:
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()


def test_h43_a_graph_that_is_run_as_it_was_traced_imposes_the_ban_whenever_it_runs(offload: eo.Offload) -> None:
    with fresh_compiler():
        compiled = torch.compile(transformed, backend="eager", fullgraph=True)
        expected = trained(compiled, nullcontext())
        for _ in range(2):
            assert_identical(expected, trained(compiled, offload))
            assert bans() is None
        assert offload.stats(synchronize=True).bytes_out > 0


@pytest.mark.filterwarnings("ignore:eager_offload. other saved-tensor hooks:RuntimeWarning")
def test_h43_an_error_under_hooks_of_others_forbids_nothing_afterwards(offload: eo.Offload) -> None:
    theirs = saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    with fresh_compiler():
        compiled = torch.compile(transformed, backend="aot_eager")
        with pytest.raises(eo.OffloadError, match="torch does not allow saved-tensor hooks here"), offload, theirs:
            compiled(*pair())
        assert hooks_are_gone()
        assert bans() is None
        torch._dynamo.reset()
        expected = trained(compiled, nullcontext())
        assert_identical(expected, trained(compiled, offload))
        trained(lambda x, w: (x @ w).exp().sin(), offload)
        assert offload.stats(synchronize=True).bytes_out > 0


# -- whatever plain torch.compile takes -------------------------------------------------------------------------------


@BOTH
def test_h45_effects_happen_in_order_and_once(backend: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        hidden = (x @ w).sin().exp()
        note(hidden.detach())
        hidden = (hidden @ w).sigmoid()
        note(hidden.detach())
        return hidden.sin() @ hidden

    NOTED.clear()
    with torch._functorch.config.patch(unlift_effect_tokens=True):
        compare(step_of(function), backend)
    runs = 5 if backend == "aot_eager" else 4  # twice without and twice with an Offload, and in eager code
    first, second = NOTED[0::2], NOTED[1::2]
    assert (first, second) == ([first[0]] * runs, [second[0]] * runs), "once in each run"
    assert first[0] != second[0]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_h45_a_reentrant_checkpoint_around_a_compiled_block(inside: bool) -> None:
    """What it saves itself is its input; its recomputation is seen where backward runs inside."""

    def step(compile: Compile, around: Around) -> Results:
        (x, w), run = pair(), compile(deep)
        with around:
            loss = checkpoint(run, x * 1, w, use_reentrant=True).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [loss, x.grad, w.grad]

    stats = compare(step, "aot_eager", moves=inside)
    assert stats.bytes_out > 0
    assert stats.kept_bytes["parameter"] > 0


def test_h45_a_graph_that_moves_nothing_says_what_it_keeps() -> None:
    moved = compare(deep_step, "aot_eager")
    kept = compare(deep_step, "aot_eager", moves=False, min_bytes=1 << 20)
    assert (kept.bytes_out, kept.compiled_regions) == (0, 0)
    assert kept.kept_bytes["small"] >= moved.offloaded_bytes > 0
    assert kept.saved_bytes == moved.saved_bytes == sum(kept.kept_bytes.values())


def test_h45_a_pass_that_fails_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise IndexError("a defect")

    moved = compare(deep_step, "aot_eager")
    monkeypatch.setattr(insert, "insert_into_pair", fails)
    with pytest.warns(RuntimeWarning, match="a compiled graph is not offloaded.*IndexError: a defect"):
        stats = compare(deep_step, "aot_eager", moves=False)
    assert stats.bytes_out == 0
    assert stats.kept_bytes["failed"] == stats.saved_bytes == moved.saved_bytes > 0


def test_h45_an_error_is_the_one_that_there_is_without(offload: eo.Offload) -> None:
    def twice(around: Around) -> str:
        x, w = pair()
        with fresh_compiler():
            with around:
                result = torch.compile(deep, backend="aot_eager")(x, w)
            with pytest.raises(RuntimeError) as caught:
                torch.autograd.grad(torch.autograd.grad(result.sum(), x, create_graph=True)[0].sum(), w)
        message = str(caught.value)
        del caught  # it holds this frame, which holds it, and the graph
        return message

    assert twice(offload) == twice(nullcontext())
    assert offload.stats(synchronize=True).bytes_out > 0
