"""What a policy allows is rounded in eager code, from the second step of its kind on, and nothing else ever is."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload import CodecPolicy, Offload, OffloadStats, PrecisionError, TransferError
from eager_offload._torch import weak_storage
from eager_offload.codecs import BF16, BlockFP8, BlockInt, Codec, TensorMeta
from eager_offload.codecs.seeds import SEEDS
from eager_offload.eager.handles import SavedView
from eager_offload.eager.saving import SavedTensors
from eager_offload.step_plan import StepPlan
from eager_offload.tiers.disk import DiskSlot
from tests.codecs.tensors import coded
from tests.hazards.backends import Backend, DiskBackend, Gate, assert_settled, offloader_of
from tests.hazards.programs import Settled, assert_identical, leaf
from tests.hazards.test_following import with_a_late_share
from tests.hazards.wrappers import two as wrapped_two
from tests.threads import collect

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 32, 64
BYTES = ROWS * WIDTH * 4


@pytest.fixture(params=[False, True], ids=["decided", "followed"])
def plans(request: pytest.FixtureRequest) -> bool:
    """Whether steps follow a plan of an earlier one."""
    return bool(request.param)


def product(around: Any, inner: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> list[Tensor]:
    """The gradient of the second factor is the first one, as backward was given it, where ``inner`` says no other."""
    x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
    with around:
        h = x.sin()
        loss = inner(h, weight).sum()
    del h
    loss.backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [x.grad, weight.grad]


def steps(offload: Offload, program: Callable[[Any], Any], count: int) -> list[Any]:
    """So many steps, each of which has left whole before its backward."""
    found = []
    for _ in range(count):
        found.append(program(Settled(offload)))
        collect()
    return found


def exact_steps(backend: Backend, program: Callable[[Any], Any], count: int = 4, **fields: Any) -> OffloadStats:
    """Asserts that ``program`` has the same bits in each of so many steps."""
    fields = {"codec": "int8", **fields}
    torch.manual_seed(0)
    expected = program(nullcontext())
    offload = backend.offload(**fields)
    for step in range(count):
        torch.manual_seed(0)
        assert_identical(expected, program(Settled(offload)), f"step {step}")
        collect()
    stats = assert_settled(offload)
    assert stats.bytes_out > 0
    offload.close()
    return stats


def rounded_saves(plan: StepPlan | None) -> list[tuple[str, int]]:
    """Who made what a plan rounds, and its bytes."""
    return [(save.coded.maker, save.nbytes) for save in plan.saves if save.coded is not None]


# -- rounded ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [BF16(), BlockFP8(), BlockInt(8), BlockInt(8, 16)], ids=str)
def test_the_first_step_is_exact_and_later_ones_have_what_the_codec_makes_of_it(
    backend: Backend, plans: bool, codec: Codec
) -> None:
    exact = product(nullcontext())
    expected = coded(codec, exact[1]).back
    offload = backend.offload(codec=CodecPolicy().rule("MulBackward0", codec), step_plans=plans)
    first, *others = steps(offload, product, 5)
    assert_identical(exact, first)
    for other in others:
        assert torch.equal(other[1], expected)
        assert not torch.equal(other[1], exact[1])
        assert torch.equal(other[0], exact[0]), "the sine's own save has no rule"
    stats = assert_settled(offload)
    layout = codec.layout(TensorMeta.of(exact[1]))
    assert stats.coded_bytes == {codec.name: 4 * BYTES}
    assert stats.packed_bytes == {codec.name: 4 * layout.nbytes}
    assert stats.followed_forwards == (3 if plans else 0)
    assert stats.bytes_out == stats.offloaded_bytes - 4 * (BYTES - layout.nbytes)
    assert not stats.plan_misses


def test_stochastic_rounding_draws_anew_and_its_mean_is_exact(users_backend: Backend, plans: bool) -> None:
    count = 64
    exact = product(nullcontext())[1].double()
    step = BlockInt(8).error_bound(TensorMeta.of(exact.float()), float(exact.abs().max())) * 2

    def off(codec: Codec) -> tuple[Tensor, Tensor]:
        offload = users_backend.offload(codec=CodecPolicy().rule("MulBackward0", codec), step_plans=plans)
        found = torch.stack([found[1] for found in steps(offload, product, count + 1)][1:])
        assert assert_settled(offload).coded_bytes == {codec.name: count * BYTES}
        return found, (found.double().mean(0) - exact).abs()

    state = torch.get_rng_state()
    found, bias = off(BlockInt(8, rounding="sr"))
    assert torch.equal(state, torch.get_rng_state()), "the user's draws stay as they are"
    assert not any(torch.equal(one, two) for one, two in itertools.pairwise(found))
    assert float(bias.max()) < 5 * step / 2 / count**0.5
    assert float(off(BlockInt(8))[1].max()) > 5 * step / 2 / count**0.5, "else the test says nothing"


def test_every_offload_draws_anew_and_a_program_with_one_seed_draws_the_same(
    users_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draws(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [found[1] for found in steps(users_backend.offload(codec="int8", step_plans=False), product, 3)[1:]]

    def program(*seeds: int) -> list[Tensor]:
        monkeypatch.setattr(SEEDS, "_drawn", {})  # as in a process of its own
        return [found for seed in seeds for found in draws(seed)]

    found = program(1, 1, 2, 1)
    for one, two in itertools.combinations(found, 2):
        assert not torch.equal(one, two)
    assert_identical(found, program(1, 1, 2, 1))
    assert_identical(found[4:6], program(2))


def test_backward_twice_sees_the_same_numbers(backend: Backend, plans: bool) -> None:
    def twice(around: Any, *, holds: bool = False) -> list[Tensor]:
        x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
        with around:
            h = x.sin()
            loss = (h * weight).sum()
        held = h if holds else None
        del h
        first = torch.autograd.grad(loss, weight, retain_graph=True)
        alive = torch.autograd.grad(loss, weight, retain_graph=True)
        del held  # what was alive until now is not served from here on
        return [*first, *alive, *torch.autograd.grad(loss, weight)]

    offload = backend.offload(codec="int8", step_plans=plans)
    found = [*steps(offload, twice, 4), *steps(offload, lambda around: twice(around, holds=True), 1)]
    exact = found[0][0]
    for step, gradients in enumerate(found):
        assert torch.equal(gradients[0], exact) == (step == 0)
        assert torch.equal(gradients[0], gradients[1]), step
        assert torch.equal(gradients[0], gradients[2]), step
    assert assert_settled(offload).packed_bytes["int8_sr"] > 0


@pytest.mark.parametrize("fails", [False, True])
def test_on_the_way_out_there_is_what_was_packed_alone(
    plans: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source goes when it is packed; who asks before it has arrived is given that, and so is who asks later."""
    with DiskBackend() as backend:
        offload = backend.offload(codec="int8", step_plans=plans)
        exact = product(nullcontext())[1]
        steps(offload, product, 3)
        x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
        with nullcontext() if not fails else pytest.warns(RuntimeWarning, match="offloading failed"):
            with backend.gate() as gate:
                if fails:
                    monkeypatch.setattr(DiskSlot, "write", failing_behind(gate))
                with offload:
                    h = x.sin()
                    loss, source = (h * weight).sum(), weak_storage(h.untyped_storage())
                    del h
                gate.wait_until_reached()
                assert source() is None
                nbytes = offload.stats().packed_bytes["int8_sr"] // 2
                offloader = offloader_of(offload)
                assert offloader.resident_bytes == offloader.inflight_bytes == nbytes < BYTES / 3
                (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
                gate.open()
            stats = offload.stats(synchronize=True)
        (second,) = torch.autograd.grad(loss, weight)
        assert not torch.equal(first, exact)
        assert torch.equal(first, second)
        assert stats.kept_bytes.get("failed", 0) == fails * BYTES
        assert stats.coded_bytes["int8_sr"] == (3 - fails) * BYTES
        del loss
        backend.assert_nothing_is_held()


def failing_behind(gate: Gate) -> Callable[..., None]:
    def write(slot: DiskSlot, source: Tensor) -> None:
        gate.pass_through()
        raise TransferError("no", errno=5, tier="disk", nbytes=source.nbytes)

    return write


def test_what_did_not_arrive_is_rounded_for_whom_it_may_be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskBackend() as backend:
        offload = backend.offload(codec="int8", step_plans=False)
        steps(offload, product, 3)
        with backend.gate() as gate:
            gate.open()
            monkeypatch.setattr(DiskSlot, "write", failing_behind(gate))
            with (
                pytest.warns(RuntimeWarning, match="offloading failed"),
                pytest.raises(PrecisionError, match="DivBack"),
            ):
                product(Settled(offload), torch.div)


def test_a_graph_of_a_backward_has_the_same_numbers_as_that(backend: Backend) -> None:
    def double(around: Any) -> list[Tensor]:
        x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
        with around:
            h = x.sin()
            y = (h * weight).square().sum()
            (gradient,) = torch.autograd.grad(y, weight, create_graph=True)
            loss = (gradient * gradient).sum()
        del h, y
        loss.backward()
        return [gradient.detach(), *(one.grad for one in (x, weight) if one.grad is not None)]

    exact = double(nullcontext())
    offload = backend.offload(codec="bf16", step_plans=False)
    for found in steps(offload, double, 3):
        assert len(found) == 3
        for one, two in zip(found, exact, strict=True):
            assert float((one - two).abs().max() / two.abs().max()) < 0.02
    stats = assert_settled(offload)
    # Where a thread of autograd's saves what the forward of another has saved, that is exact.
    assert stats.coded_bytes.get("bf16", 0) > 0 or torch.accelerator.is_available()
    assert stats.bytes_out > 0


def test_views_of_any_strides_are_rounded(backend: Backend) -> None:
    """A transpose is a whole storage; one with holes is packed in place of being gathered."""

    def views(around: Any) -> list[Any]:
        x, wide = leaf(ROWS, WIDTH), leaf(ROWS, 8 * WIDTH)
        one, two = leaf(WIDTH, ROWS, seed=3), leaf(ROWS, WIDTH, seed=4)
        with around:
            turned, sparse = x.sin().t(), wide.sin()[:, ::8]
            loss = (turned * one).sum() + (sparse * two).sum()
        del turned, sparse
        loss.backward()
        return [one.grad, two.grad]

    exact = views(nullcontext())
    offload = backend.offload(codec="bf16", step_plans=False)
    for found in steps(offload, views, 3)[1:]:
        for one, two in zip(found, exact, strict=True):
            assert torch.equal(one, two.bfloat16().float())
            assert not torch.equal(one, two)
    stats = assert_settled(offload)
    assert stats.coded_bytes["bf16"] > 0
    assert stats.coded_bytes["gather"] == 8 * BYTES - 4 * 7, "the first step gathers"


# -- who reads --------------------------------------------------------------------------------------------------------


def test_another_consumer_is_an_error_and_exact_from_then_on(backend: Backend, plans: bool) -> None:
    expected = product(nullcontext(), torch.div)
    offload = backend.offload(codec="int8", step_plans=plans)
    steps(offload, product, 4)
    with pytest.raises(PrecisionError, match=r"DivBackward0 asks for .* made by SinBackward0, .* codec int8_sr has"):
        product(Settled(offload), torch.div)
    collect()
    for found in steps(offload, lambda around: product(around, torch.div), 4):
        assert_identical(expected, found)
    stats = assert_settled(offload)
    assert stats.bytes_out > 0
    assert stats.packed_bytes["int8_sr"] > 0


def test_code_in_python_is_no_consumer(users_backend: Backend) -> None:
    """A program that looks at a node, and would be shown other numbers than it saved."""
    offload = users_backend.offload(codec="int8", step_plans=False)
    steps(offload, product, 3)
    x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
    with Settled(offload):
        y = x.sin() * weight
    with pytest.raises(PrecisionError, match="code in Python asks for"):
        _ = y.grad_fn._saved_self
    del y


def test_what_is_asked_for_by_another_reader_stays_before_its_copy_may_start(
    users_backend: Backend, plans: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is saved, in another thread say, between the look at who asks and the unpack."""
    (expected,) = product(nullcontext(), torch.div)[1:]
    offload = users_backend.offload(codec="int8", step_plans=plans)
    steps(offload, product, 3)
    before = offload.stats(synchronize=True).bytes_out
    real, kept = SavedTensors._check_reader, []

    def then_saves_on(self: SavedTensors, view: SavedView) -> None:
        real(self, view)
        if view.storage.rounds and not kept:
            with torch.enable_grad():
                kept.append((leaf(ROWS, WIDTH, seed=5).exp() * 2).exp())
            offload.stats(synchronize=True)

    x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
    with offload:
        h = x.sin()
        loss = torch.div(h, weight).sum()
        del h
        monkeypatch.setattr(SavedTensors, "_check_reader", then_saves_on)
        (found,) = torch.autograd.grad(loss, weight)
    assert kept, "else the test says nothing"
    assert offload.stats(synchronize=True).bytes_out > before
    assert torch.equal(found, expected)
    kept.clear()
    del loss
    assert_settled(offload)


def test_a_storage_that_others_read_too_is_exact(backend: Backend) -> None:
    def shared(h: Tensor, weight: Tensor) -> Tensor:
        return h * weight + h.exp() + h.cos()

    stats = exact_steps(backend, lambda around: product(around, shared))
    assert stats.coded_bytes == {}


def test_a_storage_is_packed_for_its_strictest_consumer(backend: Backend, plans: bool) -> None:
    def both(h: Tensor, weight: Tensor) -> Tensor:
        return h * weight + (h @ leaf(WIDTH, WIDTH, seed=3)).square()

    exact = product(nullcontext(), both)[1]
    policy = CodecPolicy().rule("MulBackward0", "int8").rule("MmBackward0", "bf16")
    offload = backend.offload(codec=policy, step_plans=plans)
    for found in steps(offload, lambda around: product(around, both), 4)[1:]:
        assert torch.equal(found[1], exact.bfloat16().float())
    assert set(assert_settled(offload).coded_bytes) == {"bf16"}


@pytest.mark.parametrize("has_left", [False, True])
def test_a_save_that_was_not_expected_is_exact(backend: Backend, plans: bool, has_left: bool) -> None:
    """Where the copy has started, it takes the storage anew; else that travels as it is for all."""

    def before(h: Tensor, weight: Tensor) -> Tensor:
        y = h * weight
        return y + (leaf(ROWS, WIDTH, seed=3) * 2).exp().square() if has_left else y

    def grown(h: Tensor, weight: Tensor) -> Tensor:
        return before(h, weight) + h.cos()

    exact = product(nullcontext(), grown)
    offload = backend.offload(codec="int8", step_plans=plans)
    steps(offload, lambda around: product(around, before), 4)
    found = product(Settled(offload), grown)
    assert torch.equal(found[0], exact[0]), "the cosine's"
    assert torch.equal(found[1], exact[1]) != has_left
    assert assert_settled(offload).packed_bytes["int8_sr"] > 0


@pytest.mark.parametrize("mask", [True, False])
def test_a_mask_is_packed_bit_for_bit_and_what_is_none_is_exact(users_backend: Backend, mask: bool) -> None:
    """Which of the two it is, a look at the values says; neither requires grad."""

    def noisy(around: Any) -> list[Any]:
        x, noise = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2, grad=False)
        if mask:
            noise = (noise > 0).float() * 1.25
        with around:
            y = x.sin() * noise
        del noise
        y.sum().backward()
        return [x.grad]

    if torch.accelerator.is_available():
        pytest.skip("only a CPU looks at values")
    stats = exact_steps(users_backend, noisy, codec="bf16", step_plans=False)
    assert set(stats.packed_bytes) == ({"bitmask"} if mask else set())


# -- exact whatever the policy says -----------------------------------------------------------------------------------


def attention(around: Any) -> list[Any]:
    q, k, v = (leaf(2, 4, 16, 32, seed=seed) for seed in (1, 2, 3))
    with around:
        y = F.scaled_dot_product_attention(q.sin(), k.sin(), v.sin())
        loss = y.square().sum()
    del y
    loss.backward()
    return [q.grad, k.grad, v.grad]


def classes(around: Any) -> list[Any]:
    """A loss, with targets of integers and a log-softmax, and an embedding."""
    table, tokens = leaf(50, 32), torch.arange(256) % 50
    with around:
        loss = F.cross_entropy(F.embedding(tokens, table).sin(), tokens % 32)
    loss.backward()
    return [table.grad]


def statistics(around: Any) -> list[Any]:
    """Of norms over two elements each, which are as large as half of their input; the input is read by others too."""
    x, weight = leaf(256, 2), leaf(2, seed=2)
    g, scale = leaf(128, 4, 2), leaf(4, seed=3)
    with around:
        h, i = x * 1, g * 1
        y = F.layer_norm(h, (2,), weight).sum() + h.cos().sum()
        y = (
            y
            + F.group_norm(i, 2, scale).sum()
            + F.batch_norm(i, None, None, scale, training=True).sum()
            + i.cos().sum()
        )
    del h, i
    y.backward()
    return [x.grad, weight.grad, g.grad, scale.grad]


def parameters(around: Any) -> list[Any]:
    """And their transposes; the input is read by others too."""
    torch.manual_seed(3)
    linear, x = nn.Linear(WIDTH, WIDTH), leaf(ROWS, WIDTH)
    with around:
        h = x.sin()
        loss = (linear(h).exp() + h.cos()).sum()
    del h
    loss.backward()
    return [x.grad, linear.weight.grad]


def frozen(around: Any) -> list[Any]:
    """Casts of weights that are not trained, as autocast makes them, and of a batch."""
    x, weight = leaf(ROWS, WIDTH), leaf(WIDTH, WIDTH, seed=2)
    fixed, batch = leaf(WIDTH, WIDTH, seed=3, grad=False), leaf(ROWS, WIDTH, seed=4, grad=False)
    with around:
        h = F.linear(x.sin().bfloat16(), fixed.bfloat16())
        loss = (h.float() + batch.bfloat16().float() @ weight.exp()).cos().sum()
    del h
    loss.backward()
    return [x.grad, weight.grad]


def recomputed(around: Any) -> list[Any]:
    """What a checkpoint saves is an input of forward."""
    x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)

    def inner(h: Tensor) -> Tensor:
        return (h * weight).exp()

    with around:
        y = checkpoint(inner, x.sin(), use_reentrant=False)
        y = checkpoint(inner, y.sin(), use_reentrant=True).sum()
    y.backward()
    return [x.grad, weight.grad]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x - x + 2) + x


def functions(around: Any) -> list[Any]:
    x = leaf(ROWS, WIDTH)
    with around:
        loss = Twice.apply(x.sin()).sum()  # type: ignore[no-untyped-call]
    loss.backward()
    return [x.grad]


@pytest.mark.parametrize("program", [attention, classes, statistics, parameters, frozen, recomputed, functions])
@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_what_has_to_be_exact_is(backend: Backend, plans: bool, program: Any, codec: str) -> None:
    if program is attention and torch.accelerator.is_available():
        pytest.skip("the virtual device has no attention of its own: there are products, which have rules")
    stats = exact_steps(backend, program, codec=codec, step_plans=plans)
    assert {"int8_sr", "bf16"}.isdisjoint(stats.coded_bytes)


def test_what_is_inside_a_wrapper_is_exact(users_backend: Backend) -> None:
    def wrapped(around: Any) -> list[Any]:
        x, weight = (
            wrapped_two(lambda number, at=at: leaf(ROWS, WIDTH, seed=number + at, grad=False)) for at in (1, 3)
        )
        x.requires_grad_()
        weight.requires_grad_()
        with around:
            loss = (x.sin() * weight).sum()
        loss.backward()
        return [one.grad.a for one in (x, weight)]  # type: ignore[union-attr]

    stats = exact_steps(users_backend, wrapped)
    assert stats.coded_bytes == {}


def test_a_block_has_what_the_table_says(users_backend: Backend) -> None:
    """Of a block of a transformer, by who made it: inputs of norms, products and GELU; what attention made is exact."""
    if torch.accelerator.is_available():
        pytest.skip("the virtual device has no attention of its own: it consists of products there")
    torch.manual_seed(0)
    norm, fused, out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
    wide, narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    x = leaf(2, ROWS, WIDTH)

    def block(around: Any) -> None:
        with around:
            h = x * 1
            q, k, v = fused(norm(h)).view(2, ROWS, 3, 4, 16).permute(2, 0, 3, 1, 4)
            y = h + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, ROWS, WIDTH))
            loss = narrow(F.gelu(wide(norm(y)))).sum()
        del h, q, k, v, y
        loss.backward()

    offload = users_backend.offload(codec="int8", step_plans=True)
    steps(offload, block, 4)
    one = 2 * BYTES
    assert sorted(rounded_saves(offload.step_plan())) == [
        ("AddBackward0", one),
        ("MulBackward0", one),
        *[("ViewBackward0", one)] * 2,
        *[("ViewBackward0", 4 * one)] * 2,
    ]
    assert_settled(offload)


# -- as with any other ------------------------------------------------------------------------------------------------


def test_a_change_in_place_is_found(backend: Backend, plans: bool) -> None:
    backend.sources_change = True
    offload = backend.offload(codec="int8", step_plans=plans)
    steps(offload, product, 3)
    x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
    with Settled(offload):
        h = x.sin()
        loss = (h * weight).sum()
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(eo.SavedTensorModifiedError):
        loss.backward()
    del h, loss


def test_no_offload_leaves_it_exact(users_backend: Backend) -> None:
    def region(around: Any) -> list[Any]:
        with eo.no_offload():
            pass
        x, weight, other = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2), leaf(ROWS, WIDTH, seed=3)
        with around:
            with eo.no_offload():
                y = x.sin() * weight
            loss = (y + other.exp().cos()).sum()
        loss.backward()
        return [weight.grad]

    exact_steps(users_backend, region)


# -- followed --------------------------------------------------------------------------------------------------------


def test_what_repeats_elements_is_not_rounded_with_what_was_not_saved(users_backend: Backend) -> None:
    """It has as many bytes as its storage, of which it is a part: the rest would have a part in the scales."""

    def step(around: Any, *, part: bool) -> list[Tensor]:
        x, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)
        with around:
            y = x.sin()
            h = torch.cat([y[:, :1], y[:, 1:] * 1e3], 1)
            loss = ((h[:, :1] if part else h).expand(ROWS, WIDTH) * weight).sum()
        del y, h
        loss.backward()
        assert weight.grad is not None
        return [weight.grad]

    offload = users_backend.offload(codec=CodecPolicy().rule("MulBackward0", "int8"), step_plans=True)
    for _ in range(4):
        step(Settled(offload), part=False)
        collect()
    assert offload.stats().packed_bytes
    assert_identical(step(nullcontext(), part=True), step(Settled(offload), part=True))
    stats = assert_settled(offload)
    assert stats.followed_forwards > 1
    assert stats.plan_misses == {"maker": 1}


def two_readers(around: Any, second: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return product(around, lambda y, weight: (y * weight).sum() + second(y).sum())


BOTH_READ = CodecPolicy().rule("MulBackward0", "bf16").rule("GeluBackward0", "bf16")


def test_what_shares_a_followed_storage_in_another_way_finds_it_exact(users_backend: Backend) -> None:
    def otherwise(y: Tensor) -> Tensor:
        return y.view(ROWS, WIDTH).sin()

    offload = users_backend.offload(codec=BOTH_READ, step_plans=True)
    for _ in range(4):
        two_readers(Settled(offload), F.gelu)
        collect()
    assert offload.stats().packed_bytes
    assert_identical(two_readers(nullcontext(), otherwise), two_readers(Settled(offload), otherwise))
    stats = assert_settled(offload)
    assert stats.followed_forwards > 1
    assert stats.plan_misses == {"maker": 1}


@pytest.mark.filterwarnings("ignore:eager_offload. the step plan that was given does not fit")
def test_what_has_no_maker_is_no_share_of_what_is_rounded_whatever_its_plan_says(users_backend: Backend) -> None:
    """The plan was changed by hand: none that is recorded has a maker for what needs no gradient."""

    def second(given: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda y: given(y) * leaf(ROWS, WIDTH, seed=3)

    def apart(y: Tensor) -> Tensor:
        return leaf(ROWS, WIDTH, seed=4, grad=False)

    recorded = users_backend.offload(codec=BOTH_READ, step_plans=True)
    steps(recorded, lambda around: two_readers(around, second(apart)), 4)
    plan = recorded.step_plan()
    ((owner, coded),) = ((number, save.coded) for number, save in enumerate(plan.saves) if save.coded is not None)
    changed = with_a_late_share(plan, owner, len(plan.saves) - 1)
    *others, last = changed.saves
    saves = (*others, dataclasses.replace(last, coded=coded))
    offload = users_backend.offload(codec=BOTH_READ, plan=dataclasses.replace(changed, saves=saves))
    for given in (apart, Tensor.detach):
        expected = two_readers(nullcontext(), second(given))
        assert_identical(expected, two_readers(Settled(offload), second(given)))
        collect()
    stats = assert_settled(offload)
    assert (stats.followed_forwards, stats.plan_misses) == (1, {"maker": 1})
    assert stats.bytes_out > 0


@pytest.mark.parametrize("other", [torch.atan2, torch.mul], ids=["another model", "the same"])
def test_a_plan_that_was_given_rounds_once_a_step_has_shown_who_reads(
    other: Callable[[Tensor, Tensor], Tensor], users_backend: Backend, tmp_path: Path
) -> None:
    """Both save the same from the same operators; a rule allows one of them to be given other numbers."""
    codec, fits = CodecPolicy().rule("MulBackward0", "bf16"), other is torch.mul
    recorded = users_backend.offload(codec=codec, step_plans=True)
    rounded = steps(recorded, product, 4)[-1]
    plan = recorded.step_plan()
    assert rounded_saves(plan)
    plan.save(tmp_path / "plan.json")
    offload = users_backend.offload(codec=codec, plan=StepPlan.load(tmp_path / "plan.json"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first, *later = steps(offload, lambda around: product(around, other), 4)
    assert_identical(product(nullcontext(), other), first)
    for found in later:
        assert_identical(rounded if fits else first, found)
    assert ["differs from it (reader)" in str(one.message) for one in told] == ([] if fits else [True])
    stats = assert_settled(offload)
    assert stats.plan_misses == ({} if fits else {"reader": 1})
    assert stats.followed_forwards == 3 or not fits
    assert bool(stats.packed_bytes) == fits
    assert stats.bytes_out > 0


def test_after_a_precision_error_the_step_is_exact_whatever_was_recorded(users_backend: Backend) -> None:
    offload = users_backend.offload(codec=BOTH_READ, step_plans=True)
    two_readers(Settled(offload), F.gelu)
    collect()
    with pytest.raises(PrecisionError, match="SinBackward0 asks for"):
        two_readers(Settled(offload), torch.sin)  # which is recorded, and rounds
    collect()
    expected = two_readers(nullcontext(), torch.sin)
    for _ in range(3):
        assert_identical(expected, two_readers(Settled(offload), torch.sin))
        collect()
    assert assert_settled(offload).followed_forwards > 0
