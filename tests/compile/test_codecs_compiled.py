"""What is packed in compiled code: the same bits, and fewer bytes on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from eager_offload.codecs import BF16, BitMask, BlockFP8, BlockInt, Codec, TensorMeta
from eager_offload.codecs.seeds import SEEDS
from eager_offload.compile import boundary_of, ops
from eager_offload.compile.coding import codec_for, insert_pack, insert_unpack
from tests.codecs.tensors import coded
from tests.compile.compiled import BOTH, Compile, compare, compiler, fresh_compiler, step_of
from tests.compile.split import Split, assert_moves_exactly, config_of, split, with_transfers
from tests.hazards.backends import assert_settled
from tests.hazards.programs import Settled, leaf
from tests.proof.bits import same_bits
from tests.threads import collect


def masked(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Masks that random numbers have made and one that numbers have, and sums over each dimension of what they mask."""
    hidden = F.dropout(F.relu(x @ weight), 0.3)
    hidden = torch.where(hidden > 0.4, hidden, hidden.sin())
    hidden = F.dropout(hidden @ weight, 0.5)
    return hidden.sum(0), (hidden * hidden).mean(1)


def factors(rows: int = 48, width: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).requires_grad_() for size in ((rows, width), (width, width))]


@BOTH
def test_masks_travel_as_bits(backend: str) -> None:
    step = step_of(masked, *factors())
    plain, packed = (compare(step, backend, codec=codec) for codec in ("identity", "lossless"))
    assert not plain.coded_bytes
    (coded,), (travelled,) = packed.coded_bytes.values(), packed.packed_bytes.values()
    assert set(packed.coded_bytes) == {"bitmask"}
    assert coded >= 2 * 48 * 40 * 2, "two steps, of two masks at least"
    assert travelled == coded // 8
    assert packed.bytes_out == plain.bytes_out - coded + travelled
    assert packed.bytes_in == plain.bytes_in - coded + travelled
    assert packed.saved_bytes == plain.saved_bytes
    assert packed.offloaded_bytes == plain.offloaded_bytes


@BOTH
def test_sizes_that_are_known_at_run_time_only_travel_as_they_are(backend: str) -> None:
    stats = compare(step_of(masked, *factors(), dynamic=True), backend, codec="lossless")
    assert not stats.coded_bytes


# -- graphs -----------------------------------------------------------------------------------------------------------


def positive(x: Tensor) -> Tensor:
    return x > 0


#: What may be saved of a mask.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda mask: mask,
    "turned": lambda mask: mask.t(),
    "permuted": lambda mask: mask.view(4, 3, 7).permute(2, 0, 1).reshape(-1),
    "expanded": lambda mask: mask[:1].expand(12, 7),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_masks_of_any_strides_come_back(view: str, partition: str) -> None:
    def program(x: Tensor) -> Tensor:
        mask = VIEWS[view](positive(x.sin()))
        return torch.where(mask, x.reshape(-1)[: mask.numel()].reshape(mask.shape) * 2, 0.5)

    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    _, choice = assert_moves_exactly(program, x, config=config_of(codec="lossless"), partition=partition)
    coded = {group.base.name: group for group in choice.groups if isinstance(group.codec, BitMask)}
    assert coded
    for group in coded.values():
        assert group.nbytes == -(-group.base.meta["val"].numel() // 8)


def test_views_of_one_mask_share_what_is_unpacked() -> None:
    def program(x: Tensor) -> Tensor:
        above, below = (x.sin() > 0.1).chunk(2)
        first, second = x.chunk(2)
        return torch.where(above, first, second) + torch.where(below, second.exp(), first)

    _, choice = assert_moves_exactly(
        program, torch.randn(8, 10, requires_grad=True), config=config_of(codec="lossless")
    )
    (group,) = [one for one in choice.groups if one.codec is not None]
    assert len(group.members) == 2
    assert group.nbytes == 10


def test_what_is_gathered_is_counted_as_such() -> None:
    def program(x: Tensor) -> Tensor:
        part = (x + 1)[:, ::8]
        return (part * part).sum()

    stats = compare(step_of(program, torch.randn(16, 64, requires_grad=True)), "aot_eager")
    assert stats.coded_bytes == {"gather": 2 * (15 * 64 + 57) * 4}, "two steps, all that lies between the elements"
    assert stats.packed_bytes == {"gather": stats.offloaded_bytes} == {"gather": 2 * 16 * 8 * 4}


def test_a_mask_is_unpacked_where_it_is_needed() -> None:
    """And not before, where all of it would be there for as long as backward takes."""

    def program(x: Tensor, weight: Tensor) -> Tensor:
        first = F.dropout(x @ weight, 0.5)
        return F.dropout(first @ weight, 0.5) @ weight

    one, _ = split(program, *factors(), change=lambda one: insert(one))
    nodes = list(one.backward.graph.nodes)
    reloads = [place for place, node in enumerate(nodes) if node.target is ops.reload and node.meta["val"].dim() == 1]
    products = [place for place, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default]
    assert len(reloads) == 2
    assert [place < reloads[1] for place in products[:2]] == [True, True]
    for start in reloads:
        spread = next(place for place in range(start, len(nodes)) if nodes[place].target is ops.spread)
        assert nodes[spread].next in nodes[spread].users
    sources = [node.args[0] for node in one.forward.graph.nodes if node.target is ops.offload]
    assert sum(source.meta["val"].dtype is torch.uint8 for source in sources) == 2


def insert(one: Split) -> None:
    one.insert(config_of(codec="lossless"))


def test_only_what_lies_side_by_side_is_packed() -> None:
    mask, policy = torch.zeros(16, 24, dtype=torch.bool), eo.CodecPolicy()
    for value in (mask, mask.t(), mask[2:4], mask.view(4, 4, 24).permute(2, 0, 1)):
        found = codec_for(value, policy)
        assert found.nbytes == value.numel() // 8
    others = (mask[:, ::2], mask[:1].expand(16, 24), mask[:0], mask[0, :1], mask.to(torch.uint8), mask.float())
    assert not any(codec_for(value, policy) for value in others)
    assert codec_for(mask, eo.CodecPolicy(lossless=False)) is None


def test_a_byte_that_is_no_bool_costs_its_neighbours_nothing() -> None:
    given = torch.tensor([0, 2, 1, 0, 255, 0, 0, 1, 0, 7], dtype=torch.uint8).view(torch.bool)
    graph = Graph()
    mask = graph.placeholder("mask")
    mask.meta["val"] = given
    packed = insert_pack(graph, mask, BitMask())
    graph.output(insert_unpack(graph, packed, BitMask(), given))
    back = torch.fx.GraphModule({}, graph)(given)
    assert back.view(torch.uint8).tolist() == [0, 1, 1, 0, 1, 0, 0, 1, 0, 1]


def test_a_joint_graph_packs_too() -> None:
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        hidden = x @ weight
        loss = (torch.where(hidden > 0, hidden, hidden.sin()) @ weight).square().mean()
        return (loss, *torch.autograd.grad(loss, (x, weight)))

    config = config_of(codec="int8")  # such a graph does not say who reads
    given = factors()
    module = make_fx(step, tracing_mode="fake")(*given)
    moved, choice = with_transfers(module, boundary_of(module.graph, num_outputs=1), config)
    assert [group.codec for group in choice.groups if group.codec is not None] == [BitMask()]
    expected = step(*given)
    with torch.no_grad():
        found = moved(*given)
    assert all(map(same_bits, found, expected))


# -- rounded ----------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 24, 48
STOCHASTIC = BlockInt(8, rounding="sr")


def rounding(codec: Codec | None, *consumers: str) -> eo.CodecPolicy:
    return eo.CodecPolicy(lossless=False, rules={} if codec is None else dict.fromkeys(consumers, codec))


def gradients_of(run: Callable[..., Tensor], around: AbstractContextManager[object], *inputs: Tensor) -> list[Tensor]:
    """Of the sum of what ``run`` returns, so that backward is given ones."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    with around:
        loss = run(*leaves).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def compiled_gradients(
    program: Callable[..., Tensor],
    *inputs: Tensor,
    codec: eo.CodecPolicy | str,
    backend: Any = "aot_eager",
    count: int = 1,
) -> tuple[list[list[Tensor]], eo.OffloadStats]:
    """Those of so many runs of what was compiled once, and what the ``Offload`` around them did."""
    with fresh_compiler():
        offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0, codec=codec)
        run = compiler(backend)(program)
        found = [gradients_of(run, offload, *inputs) for _ in range(count)]
        del run
    collect()
    stats = assert_settled(offload)
    offload.close()
    assert stats.bytes_out > 0
    return found, stats


def eager_gradients(program: Callable[..., Tensor], *inputs: Tensor, codec: eo.CodecPolicy) -> list[Tensor]:
    """Those of eager code in a step behind the first of its kind, which is exact."""
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0, codec=codec)
    for _ in range(2):
        found = gradients_of(program, Settled(offload), *inputs)
        collect()
    assert assert_settled(offload).coded_bytes
    offload.close()
    return found


def times(x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the second factor is the first one, as backward was given it."""
    return x.cumsum(-1) * weight  # no partitioner has backward compute a sum of that kind again


@pytest.mark.parametrize(
    ("codec", "backend"),
    [
        *((codec, "aot_eager") for codec in (BF16(), BlockFP8(), BlockInt(8), BlockInt(8, 16), STOCHASTIC)),
        pytest.param(STOCHASTIC, "inductor", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_backward_is_given_what_the_codec_makes_of_it(
    codec: Codec, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = (leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2))
    ((_, exact),), _ = compiled_gradients(times, *inputs, codec="identity", backend=backend)
    before = dict(SEEDS._drawn)
    found, stats = compiled_gradients(times, *inputs, codec=rounding(codec, "MulBackward0"), backend=backend, count=2)
    monkeypatch.setattr(SEEDS, "_drawn", before)
    for _, gradient in found:
        assert torch.equal(gradient, coded(codec, exact, SEEDS.draw()).back), "each run draws anew"
        assert not torch.equal(gradient, exact)
    layout = codec.layout(TensorMeta.of(exact))
    assert stats.coded_bytes == {codec.name: 2 * exact.nbytes}
    assert stats.packed_bytes == {codec.name: 2 * layout.nbytes}
    assert stats.bytes_out == stats.packed_bytes[codec.name]


@pytest.mark.long
@pytest.mark.parametrize("size", [(1025,), (1, 1025), (1024,)], ids=str)
def test_inductor_writes_the_end_of_what_is_unpacked(size: tuple[int, ...]) -> None:
    """It leaves a part of a block out on a CPU, so what has one travels as it is: see the note in rounded.py."""
    codec, inputs = BlockInt(8), (leaf(*size), leaf(*size, seed=2))
    ((_, exact),), _ = compiled_gradients(times, *inputs, codec="identity", backend="inductor")
    rules = rounding(codec, "MulBackward0")
    ((_, gradient),), stats = compiled_gradients(times, *inputs, codec=rules, backend="inductor")
    whole = exact.numel() % codec.block == 0
    assert stats.coded_bytes == ({codec.name: exact.nbytes} if whole else {})
    assert torch.equal(gradient, coded(codec, exact).back if whole else exact)


#: By the name of the one that reads: what to compile, of the first input's sums and of other inputs.
READ: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "MmBackward0": (torch.mm, (leaf(ROWS, WIDTH), leaf(WIDTH, 8))),
    "AddmmBackward0": (F.linear, (leaf(ROWS, WIDTH), leaf(8, WIDTH), leaf(8))),
    "BmmBackward0": (torch.bmm, (leaf(3, ROWS, WIDTH), leaf(3, WIDTH, 8))),
    "BaddbmmBackward0": (lambda x, w, b: torch.baddbmm(b, x, w), (leaf(3, 24, 48), leaf(3, 48, 8), leaf(8))),
    "MulBackward0": (torch.mul, (leaf(ROWS, WIDTH), leaf(WIDTH))),
    "ConvolutionBackward0": (F.conv2d, (leaf(2, 3, 16, 16), leaf(4, 3, 3, 3))),
    "GeluBackward0": (F.gelu, (leaf(ROWS, WIDTH),)),
    "SiluBackward0": (F.silu, (leaf(ROWS, WIDTH),)),
    "SoftmaxBackward0": (lambda x, w: (x.softmax(-1) + 1) @ w, (leaf(ROWS, WIDTH), leaf(WIDTH, 8))),
    "NativeLayerNormBackward0": (
        lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b) ** 3,
        (leaf(ROWS, WIDTH), leaf(WIDTH), leaf(WIDTH)),
    ),
    "NativeGroupNormBackward0": (lambda x, w: F.group_norm(x, 4, w) ** 3, (leaf(4, 16, 24), leaf(16))),
    "NativeBatchNormBackward0": (
        lambda x, w: F.batch_norm(x, None, None, w, training=True) ** 3,
        (leaf(ROWS, WIDTH), leaf(WIDTH)),
    ),
}


@pytest.mark.parametrize("consumer", READ)
def test_a_rule_rounds_what_it_rounds_in_eager_code(consumer: str) -> None:
    function, inputs = READ[consumer]

    def program(x: Tensor, *others: Tensor) -> Tensor:
        return function(x.cumsum(-1), *others)

    policy = rounding(BlockInt(8), consumer)
    expected = eager_gradients(program, *inputs, codec=policy)
    (found,), stats = compiled_gradients(program, *inputs, codec=policy)
    assert set(stats.coded_bytes) == {"int8"}
    assert all(map(same_bits, found, expected))
    assert not all(map(same_bits, found, gradients_of(program, nullcontext(), *inputs)))


def test_views_of_any_strides_are_rounded() -> None:
    """A transpose is all of its storage; one with holes is packed in place of being gathered."""

    def program(x: Tensor, wide: Tensor, one: Tensor, two: Tensor) -> Tensor:
        return (x.cumsum(-1).t() * one).sum() + (wide.cumsum(-1)[:, ::8] * two).sum()

    inputs = (leaf(ROWS, 64), leaf(ROWS, 8 * 64), leaf(64, ROWS), leaf(ROWS, 64))
    exact = gradients_of(program, nullcontext(), *inputs)
    codec = BlockInt(8)
    (found,), stats = compiled_gradients(program, *inputs, codec=rounding(codec, "MulBackward0"))
    assert torch.equal(found[2], coded(codec, exact[2].t().contiguous()).back.t())
    assert torch.equal(found[3], coded(codec, exact[3]).back)
    assert set(stats.coded_bytes) == {"int8"}


def test_the_users_draws_stay_as_they_are_and_backward_twice_sees_the_same_numbers() -> None:
    inputs = (leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2))
    state = torch.get_rng_state()
    with fresh_compiler():
        offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0, codec="int8")
        with offload:
            loss = compiler("aot_eager")(times)(*inputs).sum()
        first, second = (torch.autograd.grad(loss, inputs[1], retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
        assert offload.stats(synchronize=True).packed_bytes["int8_sr"] > 0
        offload.close()
    assert torch.equal(state, torch.get_rng_state())


Program = Callable[[Tensor, Tensor], Tensor]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def _shared(first: Program, second: Program) -> Program:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        hidden = x.cumsum(-1)
        return first(hidden, weight).sum() + second(hidden, weight).sum()

    return program


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(F.layer_norm(x.cumsum(-1), (WIDTH,)), (WIDTH,)) @ weight


def _checkpointed(x: Tensor, weight: Tensor) -> Tensor:
    return cast(Tensor, checkpoint(lambda h: (h * weight).sin() * weight, x.cumsum(-1), use_reentrant=False))


#: What is rounded, by the codecs' names: where products have 8 bits, others BF16.
SHARED: dict[str, tuple[Program, set[str]]] = {
    "the strictest": (_shared(torch.mm, torch.mul), {"bf16"}),
    "one without a rule": (_shared(torch.mm, torch.div), set()),
    "a log-softmax": (lambda x, w: torch.log_softmax(x.cumsum(-1), -1) + 1, set()),
    "a loss": (lambda x, w: F.mse_loss(x.cumsum(-1), w), set()),
    "attention": (lambda x, w: F.scaled_dot_product_attention(*(x.cumsum(-1)[None, None] @ w,) * 3), {"int8"}),
    "a difference": (lambda x, w: (x.cumsum(-1) + -1000.0) * w, set()),
    "what a mask leaves": (lambda x, w: x.cumsum(-1) * (w > 0) * w, set()),
    "norms of norms": (_normed, {"bf16", "int8"}),
    "a function of the user's": (lambda x, w: _Product.apply(x.cumsum(-1), w), set()),
    "a checkpoint": (_checkpointed, set()),
    "integers": (lambda x, w: w[x.cumsum(-1)[:, 0].to(torch.int64).clamp(0, 5)] * 2, set()),
    "a part of a storage": (lambda x, w: x.cumsum(-1).view(2, -1)[0] * w.view(2, -1)[1], set()),
    "its own bits": (lambda x, w: x.cumsum(-1).view(torch.int32).sign() * w[0, 0], set()),
}


@pytest.mark.parametrize("case", SHARED)
def test_what_is_rounded_follows_from_all_that_read_it(case: str) -> None:
    program, expected = SHARED[case]
    inputs = (leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH, seed=2))
    policy = eo.CodecPolicy.named("bf16").rule("MmBackward0", "int8").rule("BmmBackward0", "int8")
    (found,), stats = compiled_gradients(program, *inputs, codec=policy)
    assert set(stats.coded_bytes) == expected
    exact = gradients_of(program, nullcontext(), *inputs)
    assert all(map(same_bits, found, exact)) == (not expected)


def under_autocast(x: Tensor, batch: Tensor, *weights: Tensor) -> Tensor:
    """Products of ``bfloat16``, whose factors are casts of inputs and one that is none."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(F.linear(x.cumsum(-1), weights[0]), weights[1]) + F.linear(batch, weights[2])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("train", [True, False])
def test_casts_of_weights_and_batches_are_exact(backend: str, train: bool) -> None:
    """The first product's input is rounded, which the gradient of its weight alone is computed of."""
    inputs = [leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2)]
    weights = [leaf(WIDTH, WIDTH, seed=seed) for seed in (3, 4, 5)]
    held = [weight.detach() for weight in weights[1:]]

    def program(*given: Tensor) -> Tensor:
        return under_autocast(*given) if train else under_autocast(*given, *held)

    given = [*inputs, *(weights if train else weights[:1])]
    policy = rounding(BlockInt(8), "MmBackward0", "AddmmBackward0")
    ((exact,), plain), ((found,), stats) = (
        compiled_gradients(program, *given, codec=codec, backend=backend) for codec in ("identity", policy)
    )
    rounded = [not same_bits(*pair) for pair in zip(found, exact, strict=True)]
    assert rounded == [False, False, True, *[True, False][: 2 * train]]
    assert stats.coded_bytes == {"int8": (1 + train) * ROWS * WIDTH * 2}
    assert 0 < stats.packed_bytes["int8"] < stats.bytes_out < plain.bytes_out
    assert stats.offloaded_bytes == plain.offloaded_bytes


#: What a product saves of a weight.
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "a cast": lambda w: w.bfloat16(),
    "a cast and back": lambda w: w.bfloat16().float(),
    "a cast of a view": lambda w: w.t()[:, 8:].bfloat16(),
    "a part of a cast": lambda w: w.bfloat16().chunk(2, 1)[1].contiguous(),
    "a copy": lambda w: w.t().clone(memory_format=torch.contiguous_format),
    "padded": lambda w: F.pad(w, (0, 4)),
}


@pytest.mark.parametrize("case", COPIES)
def test_what_is_a_copy_of_an_input_is_exact(case: str) -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        factor = COPIES[case](weight)
        return x.cumsum(-1).to(factor.dtype) @ factor

    inputs = leaf(ROWS, WIDTH), leaf(WIDTH, WIDTH, seed=2).detach()
    config = config_of(codec=rounding(BlockInt(8), "MmBackward0"))
    _, choice = assert_moves_exactly(program, *inputs, config=config)
    assert not any(group.codec for group in choice.groups)


def test_statistics_are_exact_where_a_partitioner_has_forward_divide_them() -> None:
    """It saves what backward alone needs of them, if that is as small."""

    def program(x: Tensor, weight: Tensor) -> Tensor:
        hidden = F.layer_norm(x.cumsum(-1) @ weight + x, (WIDTH,))
        return F.layer_norm(F.gelu(hidden @ weight) + hidden, (WIDTH,)) @ weight

    def nothing(module: torch.fx.GraphModule, inputs: Sequence[object]) -> Any:
        return make_boxed_func(module.forward)

    decomposing = aot_autograd(
        fw_compiler=nothing,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    inputs = (leaf(ROWS, WIDTH), leaf(WIDTH, WIDTH))
    _, stats = compiled_gradients(program, *inputs, codec="bf16", backend=decomposing)
    assert stats.coded_bytes["bf16"] % (ROWS * WIDTH * 4) == 0


# -- hazards ----------------------------------------------------------------------------------------------------------


def retained(compile: Compile, around: AbstractContextManager[object]) -> Sequence[Tensor | None]:
    x, weight = factors()
    run = compile(masked)
    with around:
        results = run(x, weight)
    loss = sum(one.square().sum() for one in results)
    loss.backward(retain_graph=True)
    loss.backward()
    return [*results, x.grad, weight.grad]


@BOTH
def test_h12_a_retained_graph_is_unpacked_twice(backend: str) -> None:
    assert compare(retained, backend, codec="lossless").coded_bytes


@pytest.mark.parametrize("budget", [1, 4096])
def test_h26_without_room_what_was_packed_stays(budget: int) -> None:
    stats = compare(step_of(masked, *factors()), "aot_eager", moves=False, codec="lossless", disk_budget=budget)
    assert stats.kept_bytes["budget"] > 0
