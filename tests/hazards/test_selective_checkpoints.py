"""H23, H73, H74: checkpoints around the context, and policies of selective checkpointing.

What a policy saves is a saved tensor as any other. What one offloads is taken from where it rests in place of being
computed again, and nobody can tell but by the time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from eager_offload import no_offload
from tests.hazards.backends import Backend, DiskBackend, assert_settled, hooks_are_gone
from tests.hazards.probes import Gone
from tests.hazards.programs import REGIMES, Around, Regime, Settled, assert_identical, same_gradients
from tests.programs import Run, leaf
from tests.programs.checkpoints import around_the_context, saving, selectively
from tests.programs.parts.blocks import BOUNDARY, ROWS, WIDTH, blocks, gradients

aten = torch.ops.aten


@pytest.mark.filterwarnings("ignore:eager_offload. nothing moved:RuntimeWarning")
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


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD])
def test_h73_higher_order_operators(policy: CheckpointPolicy, users_backend: Backend) -> None:
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
            y = selectively(saving(compiled, policy=policy), lambda x: Region.apply(x).sin(), x * 2).sum()
            assert before == {name: modes[name] for name in before}
        y.backward()
        return x.grad

    for stats in same_gradients(program, users_backend):
        assert stats.saved_bytes == 2 * BOUNDARY


OFFLOADS = pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD])


@torch.library.custom_op("eager_offload_hazards::drop", mutates_args=())
def drop(x: Tensor) -> Tensor:
    """Draws random numbers and says nothing of it, as attention of other libraries does."""
    return x * (torch.rand(x.size(), device=x.device) < 0.5)


drop.register_autograd(
    lambda ctx, gradient: gradient * (ctx.saved_tensors[0] != 0),
    setup_context=(lambda ctx, inputs, output: ctx.save_for_backward(output)),
)


def dropped(x: Tensor) -> Tensor:
    return aten.native_dropout(x, 0.5, True)[0]  # that of CUDA, in one operator


@OFFLOADS
@pytest.mark.parametrize("random", [dropped, drop, lambda x: x * torch.rand_like(x)])
def test_h74_random_numbers_are_drawn_again(
    random: Callable[[Tensor], Tensor], policy: CheckpointPolicy, users_backend: Backend
) -> None:
    """Taken from where it rests, a result draws none: the next operator would draw what this one drew."""

    def block(w: Tensor, x: Tensor) -> Tensor:
        return F.dropout(random(torch.tanh(x @ w)).sin(), 0.5).exp()

    def program(around: Around) -> object:
        x, w = leaf(ROWS, WIDTH), leaf(WIDTH, WIDTH, seed=2)
        with around:
            y = selectively(saving(policy=policy), block, w, x * 2).sum()
        y.backward()
        return x.grad, w.grad

    for stats in same_gradients(program, users_backend):
        assert stats.offloaded_bytes >= 3 * BOUNDARY, "what draws nothing is taken"


@OFFLOADS
def test_h74_statistics_are_updated_as_often_as_without(policy: CheckpointPolicy, users_backend: Backend) -> None:
    def program(around: Around) -> object:
        x, model = leaf(ROWS, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        with torch.no_grad():
            model[0].weight.copy_(leaf(WIDTH, WIDTH, seed=2))
        with around:
            y = selectively(saving(policy=policy), model, x * 2).square().sum()
        y.backward()
        norm = model[1]
        return x.grad, gradients(model), norm.running_mean, norm.running_var, norm.num_batches_tracked

    for stats in same_gradients(program, users_backend):
        assert stats.offloaded_bytes >= 2 * BOUNDARY


def _twice(y: Tensor, x: Tensor) -> None:
    y.sum().backward(retain_graph=True)
    y.sum().backward()


def _two_losses(y: Tensor, x: Tensor) -> None:
    y.exp().sum().backward(retain_graph=True)
    y.square().sum().backward()


def _double(y: Tensor, x: Tensor) -> None:
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (gradient.square().sum() + y.sum()).backward()


@OFFLOADS
@pytest.mark.parametrize("backward", [_twice, _two_losses])
def test_h74_a_second_backward_computes_again(
    backward: Callable[[Tensor, Tensor], None], policy: CheckpointPolicy, users_backend: Backend
) -> None:
    """torch has each backward compute again what these policies offload."""
    _goes_backward(backward, policy, users_backend)


@OFFLOADS
def test_h74_double_backward_computes_again(policy: CheckpointPolicy, disk: DiskBackend) -> None:
    """On a CPU: another thread numbers the nodes of a device, where torch itself adds gradients in no fixed order."""
    _goes_backward(_double, policy, disk)


def _goes_backward(backward: Callable[[Tensor, Tensor], None], policy: CheckpointPolicy, backend: Backend) -> None:
    def program(around: Around) -> object:
        x, w = leaf(ROWS, WIDTH), leaf(WIDTH, WIDTH, seed=2)
        offloaded = saving(aten.mm.default, aten.tanh.default, policy=policy)
        with around:
            y = selectively(offloaded, lambda x: ((x @ w).tanh() @ w).tanh().sin(), x)
        backward(y, x)
        return x.grad, w.grad

    for stats in same_gradients(program, backend):
        assert stats.offloaded_bytes >= 4 * BOUNDARY


WRITES: dict[str, Callable[[Tensor], object]] = {
    "method": lambda y: y.data.mul_(0.5),
    "view": lambda y: y.data[: ROWS // 2].mul_(0.5),
    "out": lambda y: torch.mul(y.data, 0.5, out=y.data),
    "list": lambda y: torch._foreach_mul_([y.data], 0.5),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("write", WRITES)
@OFFLOADS
def test_h74_a_result_that_is_written_through_its_data(
    policy: CheckpointPolicy, write: str, users_backend: Backend
) -> None:
    """No version tells of it, so it alone is computed again."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        WRITES[write](y)
        for _ in range(6):
            y = y.sin() @ w
        return y.exp()

    def program(around: Around) -> object:
        x, w = leaf(ROWS, WIDTH), leaf(WIDTH, WIDTH, seed=2)
        with around:
            z = selectively(saving(aten.mm.default, aten.sin.default, policy=policy), lambda x: forward(x, w), x * 2)
        z.sum().backward()
        return x.grad, w.grad

    for stats in same_gradients(program, users_backend):
        assert stats.offloaded_bytes >= 12 * BOUNDARY
