"""H22, H23: validation between steps, gradient accumulation, and checkpointing inside and around the context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.hazards.backends import Backend, assert_settled, hooks_are_gone
from tests.hazards.blocks import BOUNDARY, ROWS, WIDTH, blocks, gradients
from tests.hazards.probes import Transfers
from tests.hazards.programs import REGIMES, Around, assert_identical, assert_moved, leaf, same_gradients


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_h22_nothing_moves_where_nothing_is_saved(mode: Callable[[], Around], backend: Backend) -> None:
    offload, model = backend.offload(), blocks()
    model.eval()
    with Transfers(backend.runtime) as transfers, offload, mode():
        for block in model:
            block(leaf(ROWS, WIDTH))
    stats = offload.stats()
    assert transfers.out == []
    assert stats.saved_tensors == 0
    assert stats.empty_forwards == 0, "a validation pass is no mistake"


@pytest.mark.sampled(3, quick=True)
@pytest.mark.parametrize("outside_in", [True, False], ids=["mode outside", "mode inside"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_h22_a_validation_pass_between_steps_changes_nothing(
    mode: Callable[[], Around], outside_in: bool, backend: Backend
) -> None:
    backend.sources_change = True  # BatchNorm writes to the statistics that it saved the step before

    def program(offload: Around) -> object:
        model, losses = nn.Sequential(*blocks(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)), []
        for seed in range(4):
            model.train()
            with offload:
                loss = model(leaf(ROWS, WIDTH, seed=seed)).square().mean()
            model.eval()
            first, second = (mode(), offload) if outside_in else (offload, mode())
            with first, second:
                losses.append(model(leaf(ROWS, WIDTH, seed=50)).mean().item())
            loss.backward()  # validation came between forward and backward
        return losses, gradients(model)

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


def checkpointed(block: Callable[[Tensor], Tensor], x: Tensor, kind: str) -> Tensor:
    selective = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if kind == "selective" else {}
    return checkpoint(block, x, use_reentrant=kind == "reentrant", **selective)


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

    # A reentrant recomputation inside the context is seen, and stays: it is asked for at once.
    least = (0.0 if kind == "reentrant" else 0.7) if inside else 0.9
    for stats in same_gradients(program, backend, reloads=not inside, moved=least):
        # The four inputs, and what the loss itself saves, unless it is asked for before anything else is saved.
        inputs = (4 if inside else 5) * BOUNDARY
        most = inputs + (4 * 3 * BOUNDARY if kind == "selective" else 0)
        # On a device of its own speed, a copy may not have begun when backward asks for it.
        late = stats.kept_bytes.get("newest", 0) if torch.accelerator.is_available() else 0
        assert 0.9 * inputs <= stats.bytes_out + late, stats
        assert 0 < stats.bytes_out <= most, stats
        assert stats.foreign_hooks == 0, "checkpointing is no stranger"


@pytest.mark.parametrize("kind", KINDS)
def test_h23_checkpointing_around_the_context(kind: str, backend: Backend) -> None:
    """A reentrant one runs what is inside with nothing to save, and again in backward, where all is needed at once."""

    def program(offload: Around) -> object:
        model, x = blocks(), leaf(ROWS, WIDTH)

        def offloaded(block: nn.Module, x: Tensor) -> Tensor:
            with offload:
                return block(x)

        h = x * 2
        for block in model:
            h = checkpointed(partial(offloaded, block), h, kind)
        h.square().mean().backward()
        return x.grad, gradients(model)

    torch.manual_seed(0)
    expected = program(nullcontext())
    for regime in REGIMES:
        offload = backend.offload(**regime.fields)
        torch.manual_seed(0)
        assert_identical(expected, program(regime.around(offload)))
        stats = assert_settled(offload)
        if kind != "reentrant":
            assert_moved(stats)
        assert hooks_are_gone()
