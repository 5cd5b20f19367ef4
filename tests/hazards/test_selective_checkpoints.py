"""H73: what selective checkpointing saves moves and is counted as any other saved tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from eager_offload import SavedTensorModifiedError, no_offload
from tests.hazards.backends import Backend, assert_settled
from tests.hazards.blocks import BOUNDARY, ROWS, WIDTH, blocks, gradients
from tests.hazards.probes import Gone
from tests.hazards.programs import Around, Settled, assert_identical, exact, leaf, same_gradients
from tests.hazards.wrappers import parts_of, two

aten = torch.ops.aten
MUST, PREFER = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE
AGAIN = CheckpointPolicy.PREFER_RECOMPUTE


def saving(*operators: object, policy: object = MUST, see: Callable[[Tensor], object] = lambda tensor: None) -> Any:
    """A policy that saves what ``operators`` return, those of torch's list that it is given, or all."""

    def policy_fn(context: Any, operator: object, *arguments: object, **named: object) -> object:
        if operators and operator not in operators:
            return AGAIN
        see(context.op_output)
        return policy

    return policy_fn


def selectively(policy: Any, function: Callable[..., Tensor], *inputs: Tensor, **options: bool) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, policy, **options)
    result: Tensor = checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)
    return result


POLICIES = {
    "must": saving(aten.addmm.default, policy=MUST),
    "prefer": saving(aten.addmm.default, policy=PREFER),
    "bool": lambda context, operator, *arguments, **named: operator is aten.addmm.default,
    "list": [aten.addmm.default],
}


def training(policy: Any, around: Around) -> object:
    model, x = blocks(), leaf(ROWS, WIDTH)
    for _ in range(2):
        with around:
            h = x * 2
            for block in model:
                h = selectively(policy, block, h)
            loss = h.square().mean()
        del h
        loss.backward()
    return x.grad, gradients(model)


def test_h73_what_a_policy_saves_moves_and_is_counted(backend: Backend) -> None:
    for stats in same_gradients(partial(training, POLICIES["must"]), backend):
        # Of each block its input and the results of both products, of which the first is twice as wide.
        assert stats.offloaded_bytes + stats.kept_bytes.get("alive", 0) == 2 * (4 * 4 + 1) * BOUNDARY
        assert stats.saved_tensors == 2 * (4 * 3 + 1)


@pytest.mark.parametrize("policy", [*POLICIES][1:])
def test_h73_however_a_policy_says_it(policy: str, users_backend: Backend) -> None:
    offload = users_backend.offload()
    stats = exact(partial(training, POLICIES[policy]), Settled(offload))
    assert stats.saved_tensors == 2 * (4 * 3 + 1)
    assert stats.bytes_out >= (4 * 4) * BOUNDARY


def test_h73_its_memory_goes_and_any_thread_brings_it_back(backend: Backend) -> None:
    results = Gone()

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
    offload, policy = backend.offload(), saving(aten.addmm.default, see=results.see)
    assert_identical(expected, program(Settled(offload), policy, backend.in_thread))
    assert results.seen == 8
    assert assert_settled(offload).reloaded_bytes > 0


def attention(norm: nn.Module, x: Tensor) -> Tensor:
    """Operators that return several tensors, views, numbers and none."""
    q, k, v = norm(x).view(ROWS, 3, 4, -1).permute(1, 2, 0, 3)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    values, places = y.transpose(0, 1).flatten(1).topk(8)
    return torch.cat([values.sin(), y.exp().flatten(1).t()[:4].t().reshape(ROWS, -1)], 1) * places.max()


def test_h73_everything_is_saved(backend: Backend) -> None:
    def program(around: Around) -> object:
        torch.manual_seed(0)
        norm, x = nn.LayerNorm(96), leaf(ROWS, 96)
        with around:
            y = selectively(saving(), attention, norm, x * 2)
            y = selectively(saving(), torch.sin, y).sum()
        y.backward()
        return x.grad, gradients(norm)

    for stats in same_gradients(program, backend):
        assert stats.shared_bytes > 0, "views, and what autograd saves too, leave once"


def test_h73_what_is_changed_raises_as_torch_does(backend: Backend) -> None:
    backend.sources_change = True

    def program(around: Around, **options: bool) -> object:
        x = leaf(ROWS, WIDTH)
        with around:
            y = selectively(saving(aten.sin.default), lambda x: x.sin().mul_(2).cos(), x * 2, **options).sum()
        if hasattr(around, "stats"):
            around.stats(synchronize=True)
        y.backward()
        return x.grad

    for error, around in ((RuntimeError, nullcontext()), (SavedTensorModifiedError, backend.offload())):
        with pytest.raises(error, match="cached during selective activation checkpoint has been mutated"):
            program(around)
        gc.collect()
    stats = exact(partial(program, allow_cache_entry_mutation=True), backend.offload())
    assert stats.kept_bytes == {"region": BOUNDARY}, "what is meant is what is there when backward asks"
    assert stats.bytes_out > 0


def test_h73_a_graph_that_is_dropped_gives_it_back(backend: Backend) -> None:
    offload, x = backend.offload(), leaf(ROWS, WIDTH)
    gc.disable()
    try:
        for settled in (False, True):
            with Settled(offload) if settled else offload:
                y = selectively(saving(aten.sin.default), lambda x: x.sin().cos(), x * 2).sum()
            del y
            assert assert_settled(offload).saved_tensors > 0
    finally:
        gc.enable()


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("outer", [[aten.mm.default], []], ids=["both save", "the inner one saves"])
def test_h73_a_checkpoint_in_another(outer: list[Any], inside: bool, backend: Backend) -> None:
    def program(around: Around) -> object:
        w, x = leaf(WIDTH, WIDTH, seed=2), leaf(ROWS, WIDTH)

        def layer(h: Tensor) -> Tensor:
            return (h.cos() @ w).sin()

        def layers(h: Tensor) -> Tensor:
            return layer(selectively([aten.mm.default], layer, layer(h)))

        with around:
            y = selectively(outer, layers, x * 2).square().sum()
            if inside:
                y.backward()
        if not inside:
            y.backward()
        return x.grad, w.grad

    # What is computed again, in backward, is asked for at once.
    for stats in same_gradients(program, backend, moved=0.3 if inside else 0.9, reloads=not inside):
        assert stats.saved_bytes <= (5 if outer else 3) * BOUNDARY + WIDTH * WIDTH * 4


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


def test_h73_wrappers_of_tensors(backend: Backend) -> None:
    def program(around: Around) -> object:
        x, w = (two(lambda seed, first=first: leaf(16, 16, seed=seed + first)) for first in (0, 4))
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        with around:
            y = selectively(saving(aten.mm.default, aten.t.default), lambda x: (x @ w).sin().t().cos() @ w, x * 2)
            y = y.sin().sum()
        y.backward()
        return parts_of(x.grad), parts_of(w.grad)

    same_gradients(program, backend)


class Region(torch.autograd.Function):
    """Compiled code, as Inductor wraps it: a higher-order operator."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        (y,) = torch.ops.higher_order.inductor_compiled_code(run, [x])
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient * ctx.saved_tensors[0]


def test_h73_higher_order_operators(users_backend: Backend) -> None:
    """torch has rules for its own modes alone, by their very class; and lets none of ours be taken for one."""
    wrap = pytest.importorskip("torch._higher_order_ops.wrap")
    if not hasattr(wrap, "InductorCompiledCallable"):
        pytest.skip("this torch has no such operator")
    run = wrap.InductorCompiledCallable(lambda inputs: [inputs[0].exp()])
    modes = torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode

    def program(around: Around) -> object:
        x = leaf(ROWS, WIDTH)
        with around:
            policy = saving(torch.ops.higher_order.inductor_compiled_code)
            y = selectively(policy, lambda x: Region.apply(run, x).sin(), x * 2).sum()
            found = torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode
            assert found == modes
        y.backward()
        return x.grad

    for stats in same_gradients(program, users_backend):
        assert stats.saved_bytes == 2 * BOUNDARY
