"""What is packed in compiled code: the same bits, and fewer bytes on the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

import eager_offload as eo
from eager_offload.codecs import BitMask, TensorMeta
from eager_offload.codecs.names import ROUNDING
from eager_offload.compile import boundary_of, ops
from eager_offload.compile.coding import codec_for, insert_pack, insert_unpack
from tests.codecs.tensors import COPIES, Summed, coded
from tests.compile.compiled import BOTH, compare, compiler, fresh_compiler, step_of
from tests.compile.split import Split, assert_moves_exactly, config_of, split, with_transfers
from tests.hazards.backends import assert_settled
from tests.programs import leaf
from tests.proof.bits import same_bits
from tests.threads import collect


def masked(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Masks that random numbers have made and one that numbers have, and sums over each dimension of what they mask."""
    hidden = F.dropout(F.relu(x @ weight), 0.3)
    hidden = torch.where(hidden > 0.4, hidden, hidden.sin())
    hidden = F.dropout(hidden @ weight, 0.5)
    return hidden.sum(0), (hidden * hidden).mean(1)


def factors() -> list[Tensor]:
    return [leaf(48, 40), leaf(40, 40, seed=2)]


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


def test_sizes_that_are_known_at_run_time_only_travel_as_they_are() -> None:
    assert not compare(step_of(masked, *factors(), dynamic=True), "aot_eager", codec="lossless").coded_bytes


# -- graphs -----------------------------------------------------------------------------------------------------------


#: What is computed of a mask of 12 by 7, and whether it is saved twice.
MASKS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "whole": (lambda mask, x: torch.where(mask, x * 2, 0.5), 1),
    "turned": (lambda mask, x: torch.where(mask.t(), x.t() * 2, 0.5), 1),
    "permuted": (lambda mask, x: torch.where(mask.view(4, 3, 7).permute(2, 0, 1).reshape(-1), x.view(-1) * 2, 0.5), 1),
    "expanded": (lambda mask, x: torch.where(mask[:1].expand(12, 7), x * 2, 0.5), 1),
    "halves": (lambda mask, x: torch.where(mask[:6], x[:6], 1) + torch.where(mask[6:], x[6:].exp(), x[:6]), 2),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_of_any_strides_come_back_and_views_share_what_is_unpacked(case: str) -> None:
    of, members = MASKS[case]
    _, choice = assert_moves_exactly(lambda x: of(x.sin() > 0.1, x), leaf(12, 7), config=config_of(codec="lossless"))
    (group,) = [one for one in choice.groups if isinstance(one.codec, BitMask)]
    assert group.nbytes == -(-group.base.meta["val"].numel() // 8)
    assert len(group.members) == members


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

    one, _ = split(program, *factors(), change=insert)
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
    mask = torch.zeros(16, 24, dtype=torch.bool)
    for value in (mask, mask.t(), mask[2:4], mask.view(4, 4, 24).permute(2, 0, 1)):
        found = codec_for(value, "lossless", may_be_rounded=True)
        assert found.nbytes == value.numel() // 8
    others = (mask[:, ::2], mask[:1].expand(16, 24), mask[:0], mask[0, :1], mask.to(torch.uint8), mask.float())
    assert not any(codec_for(value, "lossless", may_be_rounded=True) for value in others)
    assert codec_for(mask, "identity", may_be_rounded=True) is None


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

    module = make_fx(step, tracing_mode="fake")(*factors())
    # Such a graph does not say what requires grad.
    moved, choice = with_transfers(module, boundary_of(module.graph, num_outputs=1), config_of(codec="int8"))
    assert [group.codec for group in choice.groups if group.codec is not None] == [BitMask()]
    expected = step(*factors())
    with torch.no_grad():
        assert all(map(same_bits, moved(*factors()), expected))


# -- rounded ----------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 24, 64


def gradients_of(run: Callable[..., Tensor], around: AbstractContextManager[object], *inputs: Tensor) -> list[Tensor]:
    """Of the sum of what ``run`` returns, so that backward is given ones."""
    leaves = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
    with around:
        loss = run(*leaves).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def compiled_gradients(
    program: Callable[..., Tensor], *inputs: Tensor, codec: str, backend: Any = "aot_eager", **fields: Any
) -> tuple[list[Tensor], eo.OffloadStats]:
    """Those of two runs of what was compiled once, which are alike, and what the ``Offload`` around them did."""
    with fresh_compiler():
        offload = eo.Offload(tier="disk", keep_last_bytes=0, codec=codec, **{"min_bytes": 0, **fields})
        run = compiler(backend)(program)
        found, again = (gradients_of(run, offload, *inputs) for _ in range(2))
        del run
    collect()
    stats = assert_settled(offload)
    offload.close()
    assert stats.bytes_out > 0
    assert all(map(same_bits, found, again))
    return found, stats


def times(x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the second factor is the first one, as backward was given it."""
    return x.cumsum(-1) * weight  # no partitioner has backward compute a sum of that kind again


@pytest.mark.parametrize("codec", ROUNDING)
def test_backward_is_given_what_the_codec_makes_of_it(codec: str) -> None:
    inputs = (leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2))
    (_, exact), _ = compiled_gradients(times, *inputs, codec="identity")
    (_, gradient), stats = compiled_gradients(times, *inputs, codec=codec)
    assert torch.equal(gradient, coded(ROUNDING[codec], exact).back)
    assert not torch.equal(gradient, exact)
    layout = ROUNDING[codec].layout(TensorMeta.of(exact))
    assert stats.coded_bytes == {codec: 2 * exact.nbytes}
    assert stats.packed_bytes == {codec: 2 * layout.nbytes}
    assert stats.bytes_out == stats.packed_bytes[codec]


@pytest.mark.long
@pytest.mark.parametrize("size", [(1025,), (1, 1025), (1024,)], ids=str)
def test_inductor_writes_the_end_of_what_is_unpacked(size: tuple[int, ...]) -> None:
    """It leaves a part of a block out on a CPU, so what has one travels as it is: see the note in rounded.py."""
    inputs = (leaf(*size), leaf(*size, seed=2))
    (_, exact), _ = compiled_gradients(times, *inputs, codec="identity", backend="inductor")
    (_, gradient), stats = compiled_gradients(times, *inputs, codec="int8", backend="inductor")
    whole = exact.numel() % 64 == 0
    assert set(stats.coded_bytes) == ({"int8"} if whole else set())
    assert torch.equal(gradient, coded(ROUNDING["int8"], exact).back if whole else exact)


def test_views_of_any_strides_are_rounded() -> None:
    """A transpose is all of its storage; one with holes is packed in place of being gathered."""

    def program(x: Tensor, wide: Tensor, one: Tensor, two: Tensor) -> Tensor:
        return (x.cumsum(-1).t() * one).sum() + (wide.cumsum(-1)[:, ::8] * two).sum()

    inputs = (leaf(ROWS, 64), leaf(ROWS, 8 * 64), leaf(64, ROWS), leaf(ROWS, 64))
    exact = gradients_of(program, nullcontext(), *inputs)
    found, stats = compiled_gradients(program, *inputs, codec="int8")
    assert torch.equal(found[2], coded(ROUNDING["int8"], exact[2].t().contiguous()).back.t())
    assert torch.equal(found[3], coded(ROUNDING["int8"], exact[3]).back)
    assert set(stats.coded_bytes) == {"int8"}


Program = Callable[[Tensor, Tensor], Tensor]


def _inside(function: Program) -> Program:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        with eo.codec("int8"):
            return function(x, weight)

    return program


def _shared(x: Tensor, weight: Tensor) -> Tensor:
    hidden = x.cumsum(-1)
    with eo.codec("int8"):
        inside = hidden * weight
    return inside + hidden * weight.sin()


def _again(x: Tensor, weight: Tensor) -> Tensor:
    """A partitioner has backward compute the sum again, which is read outside."""
    with eo.codec("int8"):
        hidden = x.cumsum(-1) + 1
    return hidden * weight


def _under_no_grad(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = x.sin().cumsum(-1)
    with eo.codec("int8"):
        return hidden * weight + x


def _nested(x: Tensor, weight: Tensor) -> Tensor:
    y = x.cumsum(-1) * weight
    with eo.codec("identity"):
        return y + x.cumsum(0) * weight.sin()


def _stays(x: Tensor, weight: Tensor) -> Tensor:
    with eo.codec("int8"), eo.no_offload():
        y = x.cumsum(-1) * weight
    return y + x.cumsum(0).exp()


def _integers(x: Tensor, weight: Tensor) -> Tensor:
    return weight[x.cumsum(-1)[:, 0].to(torch.int64).clamp(0, 5)] * 2


def _in_a_function(x: Tensor, weight: Tensor) -> Tensor:
    with eo.codec("int8"):
        return Summed.apply(x, weight)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        sine = x.sin()
        ctx.save_for_backward(sine)
        return sine * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (sine,) = ctx.saved_tensors
        return gradient * sine, gradient * sine


def _again_in_a_function(x: Tensor, weight: Tensor) -> Tensor:
    """A partitioner saves the sum, and has backward compute again what the function has saved."""
    with eo.codec("int8"):
        return Sine.apply(x.cumsum(-1), weight)


def _behind_a_function(x: Tensor, weight: Tensor) -> Tensor:
    with eo.codec("int8"):
        return Summed.apply(x, weight).cumsum(0) * weight


#: What is rounded by the region: the program, and whether anything is.
REGIONS: dict[str, tuple[Program, bool]] = {
    "saved outside too": (_shared, False),
    "computed again for a reader outside": (_again, False),
    "computed again for a reader inside": (_inside(lambda x, weight: (x.cumsum(-1) + 1).exp() * weight), True),
    "detached": (_inside(lambda x, weight: x.cumsum(-1).detach() * weight), False),
    "made under no_grad": (_under_no_grad, False),
    "an exact region inside": (_inside(_nested), True),
    "integers": (_inside(_integers), False),
    "a part of a storage": (_inside(lambda x, w: x.cumsum(-1).view(2, -1)[0] * w.view(2, -1)[1]), False),
    "what is not to move": (_stays, False),
    "made in a custom function": (_in_a_function, False),
    "computed again in a custom function": (_again_in_a_function, False),
    "made of what a custom function returns": (_behind_a_function, True),
    "like what requires grad": (_inside(lambda x, w: w * torch.zeros_like(x.cumsum(-1)).cumsum(-1).cos()), False),
}


@pytest.mark.parametrize("case", REGIONS)
def test_what_is_rounded_follows_from_all_that_read_it(case: str) -> None:
    program, is_rounded = REGIONS[case]
    inputs = (leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH, seed=2))
    found, stats = compiled_gradients(program, *inputs, codec="identity")
    assert ("int8" in stats.coded_bytes) == is_rounded
    exact = gradients_of(program, nullcontext(), *inputs)
    assert all(map(same_bits, found, exact)) == (not is_rounded)


def test_what_is_smaller_than_min_bytes_is_exact_though_it_moves() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        return eo.prefer_offload(x.cumsum(-1)) * weight

    inputs = (leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2))
    found, stats = compiled_gradients(program, *inputs, codec="int8", min_bytes=1 << 20)
    assert stats.coded_bytes == {}
    assert all(map(same_bits, found, gradients_of(program, nullcontext(), *inputs)))


def under_autocast(x: Tensor, batch: Tensor, *weights: Tensor) -> Tensor:
    """Products of ``bfloat16``, whose factors are casts of inputs and one that is none."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(F.linear(x.cumsum(-1), weights[0]), weights[1]) + F.linear(batch, weights[2])


@pytest.mark.parametrize("train", [True, False])
def test_casts_of_weights_and_batches_are_exact(train: bool) -> None:
    """The inputs of both products are rounded, which the gradients of their weights alone are computed of."""
    inputs = [leaf(ROWS, WIDTH), leaf(ROWS, WIDTH, seed=2, grad=False)]
    weights = [leaf(WIDTH, WIDTH, seed=seed, grad=train or seed == 3) for seed in (3, 4, 5)]
    given = [*inputs, *weights]
    (exact, plain), (found, stats) = (
        compiled_gradients(under_autocast, *given, codec=codec) for codec in ("identity", "int8")
    )
    rounded = [not same_bits(*pair) for pair in zip(found, exact, strict=True)]
    assert rounded == [False, True, *[True, False][: 2 * train]]
    assert stats.coded_bytes == {"int8": 2 * (1 + train) * ROWS * WIDTH * 2}
    assert 0 < stats.packed_bytes["int8"] < stats.bytes_out < plain.bytes_out
    assert stats.offloaded_bytes == plain.offloaded_bytes


@pytest.mark.parametrize("case", COPIES)
@pytest.mark.parametrize("grad", [True, False])
def test_what_is_a_copy_of_an_input_is_exact(case: str, grad: bool) -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        factor = COPIES[case](weight)
        return x.to(factor.dtype) @ factor

    inputs = leaf(ROWS, WIDTH), leaf(WIDTH, WIDTH, seed=2, grad=grad)
    _, choice = assert_moves_exactly(program, *inputs, config=config_of(codec="int8"))
    assert not any(group.codec for group in choice.groups)


@pytest.mark.parametrize("notes", [True, False])
def test_a_node_that_lost_its_notes_is_exact_where_modules_are_named(notes: bool) -> None:
    """A pass that replaces nodes may write none of what a tracer has, and so nothing says which module they are of."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.named = torch.nn.Identity()

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return self.named(x.cumsum(-1) * weight)

    def partition(joint: torch.fx.GraphModule, inputs: Any, **named: Any) -> Any:
        for node in joint.graph.nodes:
            if node.meta.get("partitioner_tag") == "is_backward" and not notes:
                kept = ("val", "tensor_meta", "partitioner_tag", "seq_nr", "original_aten")
                node.meta = {name: value for name, value in node.meta.items() if name in kept}
        return default_partition(joint, inputs, **named)

    def as_it_is(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return graph

    backend = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)
    inputs = (leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH, seed=2))
    for codec in ({"*": "int8", "named": "identity"}, {"*": "int8"}):
        model = Model()
        offload = eo.Offload(tier="disk", keep_last_bytes=0, min_bytes=0, codec=codec)
        offload.skip_in(model)
        with fresh_compiler(), offload:
            torch.compile(model, backend=backend)(*inputs).sum()
        stats = offload.stats(synchronize=True)
        assert stats.bytes_out > 0
        assert ("int8" in stats.coded_bytes) == (notes or "named" not in codec)
        offload.close()
