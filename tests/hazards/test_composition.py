"""H22, H23, H24, H29: validation, accumulation, checkpointing, the hooks of others, and several offloads at once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from eager_offload import Offload
from tests.hazards.backends import Backend, assert_settled, hooks_are_gone, lane_of
from tests.hazards.probes import Transfers
from tests.hazards.programs import REGIMES, Regime, Settled, assert_identical, assert_moved, leaf, same_gradients

Around: TypeAlias = AbstractContextManager[Any]

WIDTH, ROWS = 32, 16
#: Bytes of what goes from one block to the next.
BOUNDARY = WIDTH * ROWS * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(count: int = 4) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(count))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


# -- H22 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_h22_nothing_moves_where_nothing_is_saved(mode: Callable[[], AbstractContextManager[Any]], backend: Backend) -> None:
    offload, model = backend.offload(), blocks()
    model.eval()
    with Transfers(backend.runtime) as transfers, offload, mode():
        for block in model:
            block(leaf(ROWS, WIDTH))
    stats = offload.stats()
    assert transfers.out == []
    assert stats.saved_tensors == 0
    assert stats.empty_forwards == 0, "a validation pass is no mistake"


@pytest.mark.parametrize("outside_in", [True, False], ids=["mode outside", "mode inside"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_h22_a_validation_pass_between_steps_changes_nothing(
    mode: Callable[[], AbstractContextManager[Any]], outside_in: bool, backend: Backend
) -> None:
    backend.sources_change = True  # BatchNorm writes to the statistics that it saved the step before

    def program(offload: Around) -> object:
        model, losses = nn.Sequential(*blocks(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)), []
        for seed in range(4):
            model.train()
            with offload:
                loss = model(leaf(ROWS, WIDTH, seed=seed)).square().mean()
            model.eval()
            if outside_in:
                with mode(), offload:
                    losses.append(model(leaf(ROWS, WIDTH, seed=50)).mean().item())
            else:
                with offload, mode():
                    losses.append(model(leaf(ROWS, WIDTH, seed=50)).mean().item())
            loss.backward()  # validation came between forward and backward
        return losses, gradients(model)

    same_gradients(program, backend)


def test_h22_eval_with_gradients_is_a_forward_like_any_other(backend: Backend) -> None:
    def program(offload: Around) -> object:
        model = nn.Sequential(*blocks(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)).eval()
        x = leaf(ROWS, WIDTH)
        with offload:
            y = model(x * 2)
        y.square().sum().backward()
        return x.grad, gradients(model)

    same_gradients(program, backend)


def test_h22_what_was_made_in_inference_mode_is_used_in_training(backend: Backend) -> None:
    def program(offload: Around) -> object:
        with torch.inference_mode():
            frozen = leaf(ROWS, WIDTH, grad=False) * 2
        features, w = frozen.clone(), leaf(ROWS, WIDTH, seed=2)
        with offload:
            y = (w * features).tanh() * features.sin()
        del features, frozen
        y.sum().backward()
        return w.grad

    same_gradients(program, backend)


# -- H23 --------------------------------------------------------------------------------------------------------------


def test_h23_gradient_accumulation(backend: Backend) -> None:
    def program(offload: Around) -> object:
        model = nn.Sequential(*blocks(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            for micro in range(3):
                with offload:
                    loss = model(leaf(ROWS, WIDTH, seed=10 * step + micro)).square().mean() / 3
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    same_gradients(program, backend)


def test_h23_backward_inside_the_context(backend: Backend) -> None:
    def program(offload: Around) -> object:
        model = nn.Sequential(*blocks(2))
        for seed in range(3):
            with offload:
                model(leaf(ROWS, WIDTH, seed=seed)).square().mean().backward()
        return gradients(model)

    same_gradients(program, backend, reloads=False)


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps the results of matrix products and computes everything else again."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(block: nn.Module, x: Tensor, kind: str) -> Tensor:
    if kind == "selective":
        result = checkpoint(
            block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
    else:
        result = checkpoint(block, x, use_reentrant=kind == "reentrant")
    assert isinstance(result, Tensor)
    return result


KINDS = ["reentrant", "non-reentrant", "selective"]


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("kind", KINDS)
def test_h23_checkpointing_inside_the_context(kind: str, inside: bool, backend: Backend) -> None:
    """The inputs of the blocks are offloaded, and only those: what is recomputed is asked for at once."""

    def program(offload: Around) -> object:
        model, x = blocks(), leaf(ROWS, WIDTH)
        with offload:
            h = x * 2
            for block in model:
                h = checkpointed(block, h, kind)
            loss = h.square().mean()
            del h
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return x.grad, gradients(model)

    for stats in same_gradients(program, backend, reloads=not inside, moved=0.0 if inside else 0.9):
        # The four inputs, and what the loss itself saves.
        inputs = 5 * BOUNDARY
        most = inputs + (4 * 3 * BOUNDARY if kind == "selective" else 0)
        assert 0.9 * inputs <= stats.bytes_out <= most, stats
        assert stats.foreign_hooks == 0, "checkpointing is no stranger"


@pytest.mark.parametrize("kind", KINDS)
def test_h23_checkpointing_around_the_context(kind: str, backend: Backend) -> None:
    """What is inside is saved only while it is recomputed, and asked for at once."""

    def program(offload: Around) -> object:
        model, x = blocks(), leaf(ROWS, WIDTH)

        class Offloaded(nn.Module):
            def __init__(self, block: nn.Module) -> None:
                super().__init__()
                self.block = block

            def forward(self, x: Tensor) -> Tensor:
                with offload:
                    result = self.block(x)
                assert isinstance(result, Tensor)
                return result

        h = x * 2
        for block in model:
            h = checkpointed(Offloaded(block), h, kind)
        h.square().mean().backward()
        return x.grad, gradients(model)

    torch.manual_seed(0)
    expected = program(nullcontext())
    for regime in REGIMES:
        offload = backend.offload(**regime.fields)
        torch.manual_seed(0)
        assert_identical(expected, program(regime.around(offload)))
        assert_settled(offload)


def test_h23_a_reentrant_recomputation_is_not_offloaded_a_second_time(backend: Backend) -> None:
    def moved(offload: Offload, kind: str | None, inside: bool) -> int:
        model, x = blocks(), leaf(ROWS, WIDTH)
        with offload:
            h = x * 2
            for block in model:
                h = block(h) if kind is None else checkpointed(block, h, kind)
            loss = h.square().mean()
            del h
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        del loss
        return assert_settled(offload).bytes_out

    everything = moved(backend.offload(), None, inside=False)
    for kind in KINDS[:2]:
        outside, inside = (moved(backend.offload(), kind, inside) for inside in (False, True))
        assert outside == inside, f"{kind}: backward inside the context moved {inside} bytes instead of {outside}"
        assert outside < everything / 2


@pytest.mark.parametrize("kind", KINDS[:2])
def test_h23_nested_checkpoints(kind: str, backend: Backend) -> None:
    def program(offload: Around) -> object:
        model, x = blocks(), leaf(ROWS, WIDTH)

        def pair(first: nn.Module, second: nn.Module) -> Callable[[Tensor], Tensor]:
            return lambda h: checkpointed(second, checkpointed(first, h, kind), kind)

        with offload:
            h = x * 2
            for first, second in ((model[0], model[1]), (model[2], model[3])):
                h = checkpoint(pair(first, second), h, use_reentrant=kind == "reentrant")
            loss = h.square().mean()
        del h
        loss.backward()
        return x.grad, gradients(model)

    same_gradients(program, backend)


def test_h23_checkpointing_with_dropout_and_accumulation(backend: Backend) -> None:
    def program(offload: Around) -> object:
        model, x = blocks(), leaf(ROWS, WIDTH)
        for _ in range(2):
            with offload:
                h = x * 2
                for block in model:
                    h = checkpoint(lambda h, block=block: nn.functional.dropout(block(h), 0.3), h, use_reentrant=False)
                loss = h.square().mean()
            del h
            loss.backward()
        return x.grad, gradients(model)

    same_gradients(program, backend)


# -- H24 --------------------------------------------------------------------------------------------------------------


class Doubling(saved_tensors_hooks):
    """Hooks of somebody else, made the usual way."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor.detach().clone(), lambda tensor: tensor)


@pytest.mark.parametrize("theirs", [Doubling, save_on_cpu])
def test_h24_hooks_that_hide_ours_are_counted_and_told_of_once(
    theirs: Callable[[], AbstractContextManager[Any]], backend: Backend
) -> None:
    def program(offload: Around) -> object:
        x, results = leaf(ROWS, WIDTH), []
        for _ in range(3):
            with offload:
                h = (x * 2).tanh()
                with theirs():
                    h = h.exp().sin()
                loss = h.cos().sum()
            del h
            loss.backward()
            results.append(x.grad.clone() if x.grad is not None else None)
        return results

    expected, offload = program(nullcontext()), backend.offload()
    with pytest.warns(RuntimeWarning, match="other saved-tensor hooks") as told:
        assert_identical(expected, program(Settled(offload)))
    assert len(told) == 1
    stats = assert_settled(offload)
    assert stats.foreign_hooks == 3
    assert_moved(stats)


def test_h24_a_forward_in_which_nothing_could_be_seen_is_counted_and_told_of_once(backend: Backend) -> None:
    offload, x = backend.offload(), leaf(ROWS, WIDTH)
    push, pop = torch._C._autograd._push_saved_tensors_default_hooks, torch._C._autograd._pop_saved_tensors_default_hooks

    def step() -> None:
        with offload:
            push(lambda tensor: tensor.detach(), lambda tensor: tensor)  # nobody sees it coming this way
            try:
                loss = (x * 2).tanh().exp().sum()
            finally:
                pop()
        loss.backward()

    with pytest.warns(RuntimeWarning, match="no saved tensor could be seen") as told:
        for _ in range(3):
            step()
    assert len(told) == 1
    assert offload.stats().empty_forwards == 3
    with offload:
        loss = (x * 2).tanh().exp().sum()
    loss.backward()
    del loss
    assert_moved(assert_settled(offload))


@pytest.mark.filterwarnings("error")
def test_h24_ours_inside_theirs_is_the_right_order_and_says_nothing(backend: Backend) -> None:
    def program(offload: Around) -> object:
        x = leaf(ROWS, WIDTH)
        with Doubling():
            before = (x * 2).tanh()
            with offload:
                h = before.exp().sin().exp()
            loss = h.cos().sum()
        del h, before
        loss.backward()
        return x.grad

    for stats in same_gradients(program, backend):
        assert stats.foreign_hooks == stats.empty_forwards == 0


@pytest.mark.filterwarnings("error")
def test_h24_checkpoints_and_our_own_hooks_are_no_strangers(backend: Backend) -> None:
    offload, another = backend.offload(), backend.offload()
    model, x = blocks(2), leaf(ROWS, WIDTH)
    with another:
        h = (x * 2).tanh()
        with offload:
            h = checkpoint(model[0], h, use_reentrant=False)
            with another:
                h = checkpoint(model[1], h.sin(), use_reentrant=True)
            loss = h.exp().sum()
    loss.backward()
    del loss, h
    for one in (offload, another):
        stats = assert_settled(one)
        assert_moved(stats)
        assert stats.foreign_hooks == stats.empty_forwards == 0


def test_h24_the_watch_on_others_ends_with_the_context(backend: Backend) -> None:
    original, offload = saved_tensors_hooks.__enter__, backend.offload()
    with offload, backend.offload():
        assert saved_tensors_hooks.__enter__ is not original
    assert saved_tensors_hooks.__enter__ is original
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Doubling():
            leaf(4).exp()
    assert offload.stats().foreign_hooks == 0


# -- H29 --------------------------------------------------------------------------------------------------------------


def run_together(backend: Backend, jobs: list[Callable[[], object]]) -> list[object]:
    """Runs each job in a thread of its own; they start their work at the same moment."""
    start, results = threading.Barrier(len(jobs)), [None] * len(jobs)  # type: list[Any]

    def run(index: int) -> None:
        start.wait(60)
        results[index] = jobs[index]()

    threads = [
        threading.Thread(target=lambda index=index: backend.in_thread(lambda: run(index))) for index in range(len(jobs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("regime", REGIMES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "one for both"])
def test_h29_two_threads(shared: bool, regime: Regime, backend: Backend) -> None:
    models = [nn.Sequential(Block(), Block()) for _ in range(2)]
    states = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]

    def job(index: int, offload: Around) -> Callable[[], object]:
        def work() -> object:
            model = models[index]
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), states[index], strict=True):
                    parameter.copy_(value)
                    parameter.grad = None
            losses = []
            for step in range(4):
                with offload:
                    loss = model(leaf(ROWS, WIDTH, seed=100 * index + step)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            return losses, [gradient.clone() for gradient in gradients(model) if gradient is not None]

        return work

    expected = [job(index, nullcontext())() for index in range(2)]
    offloads = [backend.offload(**regime.fields)] * 2 if shared else [backend.offload(**regime.fields) for _ in range(2)]
    actual = run_together(backend, [job(index, regime.around(offloads[index])) for index in range(2)])
    assert_identical(expected, actual)
    for offload in offloads:
        assert_moved(assert_settled(offload))
    assert hooks_are_gone()


def test_h29_different_offloads_inside_one_another(backend: Backend) -> None:
    def program(outer: Around, inner: Around) -> object:
        x = leaf(ROWS, WIDTH)
        with outer:
            h = (x * 2).tanh().exp()
            with inner:
                h = h.sin().exp()
                with outer:
                    h = h.cos().exp()
                h = h.tanh().sin()
            loss = h.cos().exp().sum()
        del h
        loss.backward()
        return x.grad

    expected = program(nullcontext(), nullcontext())
    for regime in REGIMES:
        outer, inner = backend.offload(**regime.fields), backend.offload(**regime.fields)
        assert_identical(expected, program(regime.around(outer), regime.around(inner)))
        for stats in (assert_settled(outer), assert_settled(inner)):
            assert_moved(stats)
            assert stats.foreign_hooks == 0


def test_h29_one_thread_waits_for_the_disk_and_the_other_goes_on(backend: Backend) -> None:
    slow, fast = backend.offload(), backend.offload()
    x, y = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
    with backend.gate() as gate:
        with slow:
            loss = (x * 2).tanh().exp().sum()

        def other() -> None:
            with fast:
                another = (y * 2).tanh().exp().sum()
            another.backward()

        backend.in_thread(other)
        assert y.grad is not None
        assert lane_of(fast).resident_bytes <= 2 * BOUNDARY
        gate.open()
    loss.backward()
    del loss
    assert torch.equal(x.grad, torch.autograd.grad((x * 2).tanh().exp().sum(), x)[0])
    assert_moved(assert_settled(slow))
    assert_moved(assert_settled(fast))
