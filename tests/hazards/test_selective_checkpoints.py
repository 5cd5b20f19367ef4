"""H22, H23, H73: validation, and checkpoints around the context; what a policy saves is a saved tensor as any other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import no_offload
from tests.hazards.backends import Backend, assert_settled, hooks_are_gone
from tests.hazards.probes import Gone, Transfers
from tests.hazards.programs import REGIMES, Around, Regime, Settled, assert_identical, leaf, same_gradients
from tests.programs import Run
from tests.programs.checkpoints import around_the_context, saving, selectively
from tests.programs.parts.blocks import BOUNDARY, ROWS, WIDTH, blocks, gradients

aten = torch.ops.aten


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_h22_nothing_moves_where_nothing_is_saved(mode: Callable[[], Around], users_backend: Backend) -> None:
    offload, model = users_backend.offload(), blocks().eval()
    with Transfers(users_backend.runtime) as transfers, offload, mode():
        for block in model:
            block(leaf(ROWS, WIDTH))
    stats = offload.stats()
    # Nor is a validation pass a mistake.
    assert (transfers.sources, stats.saved_tensors, stats.empty_forwards) == ([], 0, 0)


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_h23_reentrant_checkpointing_around_the_context(regime: Regime, backend: Backend) -> None:
    """What is inside runs with nothing to save, and again in backward, where all is needed at once."""
    offload = backend.offload(**regime.fields)
    assert_identical(*(around_the_context(Run(one), "reentrant") for one in (nullcontext(), regime.around(offload))))
    assert assert_settled(offload).saved_tensors > 0
    assert hooks_are_gone()


def test_h73_its_memory_goes_and_any_thread_brings_it_back(backend: Backend) -> None:
    results, offload = Gone(), backend.offload()

    def program(around: Around, policy: Any, on_thread: Callable[[Callable[[], object]], object]) -> object:
        model, x = blocks(), leaf(ROWS, WIDTH)
        with around:
            h = x * 2
            for block in model:
                h = selectively(policy, block, h)
            loss = h.sum()
        del h
        results.wait()
        on_thread(loss.backward)
        return x.grad, gradients(model)

    expected = program(nullcontext(), [aten.addmm.default], lambda backward: backward())
    policy = saving(aten.addmm.default, see=results.see)
    assert_identical(expected, program(Settled(offload), policy, backend.in_thread))
    assert results.seen == 8
    assert assert_settled(offload).reloaded_bytes > 0


def test_h73_regions_errors_and_the_innermost_offload(backend: Backend) -> None:
    policy, outer, inner = saving(aten.sin.default), backend.offload(), backend.offload(min_bytes=BOUNDARY)

    def fails(x: Tensor) -> Tensor:
        x.sin().cos()
        raise LookupError

    def program(first: Around, second: Around) -> object:
        x = leaf(ROWS, WIDTH)
        with first:
            with pytest.raises(LookupError):
                selectively(policy, fails, x * 2)
            with no_offload():
                h = selectively(policy, lambda x: x.sin().cos(), x * 2)
            with second:
                h = selectively(policy, lambda h: h[:1].sin().sum() + h.sin().cos(), h).sum()
        h.backward()
        return x.grad

    assert_identical(program(nullcontext(), nullcontext()), program(Settled(outer), Settled(inner)))
    assert assert_settled(outer).kept_bytes["region"] == 2 * BOUNDARY
    stats = assert_settled(inner)
    assert (stats.offloaded_bytes, stats.kept_bytes["small"]) == (2 * BOUNDARY, WIDTH * 4)


def test_h73_higher_order_operators(users_backend: Backend) -> None:
    """torch has rules for its own modes alone, by their very class; and lets none of ours be taken for one."""
    wrap = pytest.importorskip("torch._higher_order_ops.wrap")
    if not hasattr(wrap, "InductorCompiledCallable"):
        pytest.skip("this torch has no such operator")
    compiled, modes = torch.ops.higher_order.inductor_compiled_code, vars(torch.utils.checkpoint)
    run = wrap.InductorCompiledCallable(lambda inputs: [inputs[0].exp()])
    before = {name: mode for name, mode in modes.items() if name.startswith(("_CachingTorch", "_CachedTorch"))}

    class Region(torch.autograd.Function):
        """Compiled code, as Inductor wraps it: a higher-order operator."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            (y,) = compiled(run, [x])
            ctx.save_for_backward(y)
            return y.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * ctx.saved_tensors[0]

    def program(around: Around) -> object:
        x = leaf(ROWS, WIDTH)
        with around:
            y = selectively(saving(compiled), lambda x: Region.apply(x).sin(), x * 2).sum()
            assert before == {name: modes[name] for name in before}
        y.backward()
        return x.grad

    for stats in same_gradients(program, users_backend):
        assert stats.saved_bytes == 2 * BOUNDARY
