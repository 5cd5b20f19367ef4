"""What is chosen to move: by whose storage a value shares, whatever made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import eager_offload as eo
from eager_offload.compile import Choice, choose_joint
from eager_offload.compile.graphs import outputs_of, storage_of
from tests.compile.split import Split, assert_moves_exactly, config_of, moving, owner, reasons, split
from tests.hazards.programs import leaf


def chosen(function: Callable[..., Any], *inputs: Tensor, **fields: Any) -> tuple[Split, Choice]:
    one, _ = split(function, *inputs)
    return one, one.choose(config_of(**fields))


def test_an_intermediate_moves() -> None:
    _, choice = chosen(lambda x: x.sigmoid().exp().sum(), leaf(8, 8))
    assert moving(choice) == {"sigmoid", "exp"}
    assert not choice.kept


def test_inputs_and_parameters_and_their_views_stay() -> None:
    weight = torch.nn.Parameter(leaf(8, 8).detach())

    def program(x: Tensor) -> Tensor:
        y = x.sin() @ weight.t()
        return (y @ weight[1:].t()).cos().sum()

    one, choice = chosen(program, leaf(8, 8))
    inputs = {node.name for node in one.forward.graph.find_nodes(op="placeholder")}
    views = [node for node in one.saved() if node.op != "placeholder" and owner(node) in inputs]
    assert views
    assert {reasons(choice)[owner(node)] for node in views} == {"parameter"}
    assert moving(choice)
    assert not moving(choice) & inputs


def test_outputs_and_what_aliases_them_stay() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = x.exp(), x.sigmoid()
        return y.view(-1), (z * 2).sum()

    _, choice = chosen(program, leaf(8, 8))
    assert reasons(choice)["exp"] == "alive"
    assert moving(choice) == {"sigmoid"}


def test_an_output_of_the_backward_stays() -> None:
    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.exp()
            ctx.save_for_backward(y)
            return y.sum()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return y

    _, choice = chosen(Saved.apply, leaf(8, 8))
    assert reasons(choice) == {"exp": "alive"}
    assert not choice.groups


def test_a_mutated_input_stays() -> None:
    def program(x: Tensor, state: Tensor) -> Tensor:
        state.add_(1)
        return (x.exp() * state.sigmoid() * state).sum()

    one, choice = chosen(program, leaf(8, 8), leaf(8, 8).detach())
    written, *_ = outputs_of(one.forward.graph)
    assert reasons(choice) == {written.name: "alive"}
    assert moving(choice) == {"exp", "sigmoid"}


def test_views_of_one_storage_move_as_one() -> None:
    def program(x: Tensor) -> Tensor:
        q, k, v = (x @ x).split(8, -1)
        return (q * k.exp() * v).sum()

    x = leaf(24, 24)
    _, choice = assert_moves_exactly(program, x)
    shared = max(choice.groups, key=lambda group: len(group.members))
    assert len(shared.members) > 1
    assert shared.base.name == "mm"
    assert shared.nbytes == 24 * 24 * 4
    assert not shared.gathered


def test_what_is_not_contiguous_moves() -> None:
    def program(x: Tensor) -> Tensor:
        return (x.exp().transpose(1, 2).sigmoid() * x.sin().permute(2, 0, 1).cos().permute(1, 0, 2)).sum()

    _, choice = assert_moves_exactly(program, leaf(4, 8, 6).detach().transpose(1, 2).clone().requires_grad_())
    assert any(not node.meta["val"].is_contiguous() for group in choice.groups for node in group.members)


def test_a_member_of_several_results_moves() -> None:
    def program(x: Tensor) -> Tensor:
        values, _ = x.exp().sort(-1)
        return values.sigmoid().sum()

    _, choice = assert_moves_exactly(program, leaf(8, 32))
    assert {"getitem", "getitem_1"} & moving(choice)


def test_a_small_part_of_a_storage_travels_alone() -> None:
    def program(x: Tensor) -> Tensor:
        y = (x + 1).exp_()[:, ::8]
        return (y * y).sum()

    def cut(x: Tensor) -> Tensor:
        y = (x + 1)[:, ::8]
        return (y * y).sum()

    x = leaf(16, 64)
    _, choice = assert_moves_exactly(cut, x)
    (alone,) = choice.groups
    assert alone.gathered
    assert alone.nbytes == x.nbytes // 8
    assert_moves_exactly(program, x)


def test_a_dense_part_of_a_storage_travels_as_it_lies() -> None:
    def program(x: Tensor) -> Tensor:
        y = (x + 1)[4:6]
        return (y * y).sum()

    x = leaf(16, 64)
    _, choice = assert_moves_exactly(program, x)
    (alone,) = choice.groups
    assert not alone.gathered
    assert alone.nbytes == x.nbytes // 8


def test_a_part_that_begins_anywhere_takes_the_storage_along() -> None:
    """What comes back has to lie as it lay: here three elements behind what compilers take for granted."""

    def program(x: Tensor) -> Tensor:
        y = (x + 1)[:, 3::8]
        return (y * y).sum()

    x = leaf(16, 64)
    _, choice = assert_moves_exactly(program, x)
    (whole,) = choice.groups
    assert whole.base.name == "add"
    assert whole.nbytes == x.nbytes


def test_views_are_made_anew_over_what_begins_its_storage() -> None:
    """Anything else may come back with another offset, and the place of a view is counted from the beginning."""

    def program(x: Tensor) -> Tensor:
        whole = torch.view_as_complex(x.exp()) * (1 + 0.5j)
        part = torch.view_as_real(whole[2:60]).view(-1)
        return (part[:80].sigmoid() * part[:80] * part[20:100].cos()).sum()

    _, choice = assert_moves_exactly(program, leaf(64, 2))
    views = [group for group in choice.groups if storage_of(group.base) == _named(choice, "view_as_real")]
    assert len(views) == 2, "nothing with elements of theirs spans them and begins the storage"
    assert all(group.members == (group.base,) for group in views)


def _named(choice: Choice, name: str) -> object:
    graph = choice.groups[0].base.graph
    return storage_of(next(node for node in graph.nodes if node.name.startswith(name)))


def test_what_is_counted_from_the_beginning_of_a_storage_that_nothing_covers_stays() -> None:
    def program(x: Tensor) -> Tensor:
        part = torch.view_as_real((torch.view_as_complex(x.exp()) * (1 + 0.5j))[4:])
        return (part.as_strided((60, 2), (2, 1), 4).sin().exp() * part.cos()).sum()

    _, choice = assert_moves_exactly(program, leaf(64, 2), partition="min_cut")
    assert "layout" in reasons(choice).values()
    assert not any(group.counted for group in choice.groups)


def test_a_broadcast_stays_as_small_as_it_is() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.exp().expand(64, 8)
        return (y * y).sum()

    x = leaf(8)
    _, choice = chosen(program, x)
    assert all(group.nbytes <= x.nbytes for group in choice.groups)
    _, choice = chosen(program, x, min_bytes=64)
    assert set(reasons(choice).values()) == {"small"}


def test_what_is_small_stays() -> None:
    def program(x: Tensor) -> Tensor:
        return (x.exp().sum(-1).sigmoid() * x.sum(-1).sin()).sum()

    _, choice = chosen(program, leaf(8, 64), min_bytes=1024)
    assert moving(choice) == {"exp"}
    assert "small" in reasons(choice).values()


def test_what_backward_asks_for_first_stays() -> None:
    def program(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x.sigmoid()
        return x.sum()

    _, choice = chosen(program, leaf(8, 8), keep_last_bytes=8 * 8 * 4)
    assert [name for name, reason in reasons(choice).items() if reason == "newest"] == ["sigmoid_3"]
    assert moving(choice) == {"sigmoid", "sigmoid_1", "sigmoid_2"}


def test_everything_that_is_saved_moves_or_has_a_reason() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y, (y.sigmoid() * x.sin()).sum()

    one, choice = chosen(program, leaf(8, 8))
    members = [node for group in choice.groups for node in group.members]
    assert set(members) | set(choice.kept) == set(one.saved())
    assert not set(members) & set(choice.kept)
    assert len(members) == len(set(members))


def test_a_graph_that_has_forgotten_its_views_is_refused() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = (x.exp().view(-1) * 2).sigmoid().sum()
        return loss, torch.autograd.grad(loss, x)[0]

    module = make_fx(program, tracing_mode="real")(leaf(8, 8))
    boundary = next(node for node in module.graph.nodes if node.name == "ones_like")
    with pytest.raises(eo.OffloadError, match="fake"):
        choose_joint(module.graph, boundary, config_of())


def test_a_storage_that_a_graph_writes_to_stays() -> None:
    """Not from AOTAutograd, whose graphs write to nothing; but ``make_fx`` takes down what a program does."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        y.copy_(x.sin())
        y.add_(1)
        loss = (y.sigmoid() * y).sum()
        return loss, torch.autograd.grad(loss, x)[0]

    module = make_fx(program, tracing_mode="fake")(leaf(8, 8))
    boundary = next(node for node in module.graph.nodes if node.name == "ones_like")
    choice = choose_joint(module.graph, boundary, config_of())
    written = {name for name, reason in reasons(choice).items() if reason == "alive"}
    assert written
    assert choice.groups
    assert not written & moving(choice)


_library = torch.library.Library("eager_offload_test_select", "DEF")  # type: ignore[no-untyped-call]
_library.define("same(Tensor x) -> Tensor")
_library.impl("same", lambda x: x, "CompositeExplicitAutograd")
torch.library.register_autograd("eager_offload_test_select::same", lambda context, one: one.clone(), lib=_library)


def test_h35_what_an_operator_hands_back_undeclared_stays() -> None:
    """Compilers take it for memory of its own, and compute into it; as they would have done with nothing offloaded."""

    def program(x: Tensor) -> Tensor:
        given = x.sin()
        taken = given.exp() * given
        back = torch.ops.eager_offload_test_select.same(given)
        return (back.cos() * taken).sum()

    # torch itself tells of such an operator: by a warning, and where CI is set by an error.
    with torch._functorch.config.patch(error_on_custom_op_aliasing=False):
        _, choice = chosen(program, leaf(8, 8))
    assert reasons(choice)["sin"] == "alive"
    assert moving(choice)
