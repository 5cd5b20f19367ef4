"""What is chosen to move: by whose storage a value shares, whatever made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import eager_offload as eo
from eager_offload.compile import Choice, choose_joint
from eager_offload.compile.graphs import nbytes_of, storage_of
from tests.compile.split import Split, assert_moves_exactly, config_of, moving, owner, reasons, split
from tests.programs import leaf


def chosen(function: Callable[..., Any], *inputs: Tensor, **fields: Any) -> tuple[Split, Choice]:
    one, _ = split(function, *inputs)
    return one, one.choose(config_of(**fields))


class Saved(torch.autograd.Function):
    """Returns what it has saved as a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y


def four(x: Tensor) -> Tensor:
    for _ in range(4):
        x = x.sigmoid()
    return x.sum()


def written(x: Tensor, state: Tensor) -> Tensor:
    state.add_(1)
    return (x.exp() * state.sigmoid() * state).sum()


def broadcast(x: Tensor) -> Tensor:
    y = x[0].exp().expand(64, 8)
    return (y * y).sum()


class Case(NamedTuple):
    """A program of 8 by 8 inputs, and which storages move or stay, by what made them."""

    program: Callable[..., Any]
    moves: set[str]
    stays: Mapping[str, str] = MappingProxyType({})
    fields: Mapping[str, Any] = MappingProxyType({})
    inputs: int = 1


CASES = {
    "intermediates": Case(lambda x: x.sigmoid().exp().sum(), {"sigmoid", "exp"}),
    "an alias of an output": Case(
        lambda x: ((y := x.exp()).view(-1), (x.sigmoid() * 2).sum() + 0 * y.sum()), {"sigmoid"}, {"exp": "alive"}
    ),
    "an output of the backward": Case(Saved.apply, set(), {"exp": "alive"}),
    "an input that is changed": Case(written, {"exp", "sigmoid"}, {"add": "alive"}, inputs=2),
    "a broadcast": Case(broadcast, set(), {"exp": "small"}, {"min_bytes": 64}),
    "small ones": Case(
        lambda x: (x.exp().sum(-1).sigmoid() * x.sum(-1).sin()).sum(),
        {"exp"},
        {"sigmoid": "small", "sum_2": "small", "sin": "small"},
        {"min_bytes": 128},
    ),
    "the newest": Case(
        four, {"sigmoid", "sigmoid_1", "sigmoid_2"}, {"sigmoid_3": "newest"}, {"keep_last_bytes": 8 * 8 * 4}
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_moves_and_why_the_rest_stays(case: Case) -> None:
    inputs = [leaf(8, 8), leaf(8, 8).detach()][: case.inputs]
    one, choice = chosen(case.program, *inputs, **case.fields)
    assert moving(choice) == case.moves
    own = {node.name for node in one.forward.graph.find_nodes(op="placeholder")}
    assert {name: reason for name, reason in reasons(choice).items() if name not in own} == case.stays
    members = [node for group in choice.groups for node in group.members]
    assert set(members) | set(choice.kept) == set(one.saved()), "each has a place or a reason"
    assert len(members) + len(choice.kept) == len(one.saved())


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


def third_parts(x: Tensor) -> Tensor:
    q, k, v = (x @ x).split(x.shape[1] // 4, -1)[:3]
    return (q * k.exp() * v).sum()


def squared(part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def program(x: Tensor) -> Tensor:
        y = part(x + 1)
        return (y * y).sum()

    return program


class Transfer(NamedTuple):
    """A program of an input of 16 by 64, and what the largest of its transfers is."""

    program: Callable[[Tensor], Tensor]
    base: str
    part: int = 1
    """Of the storage, one in so many bytes travels."""
    gathered: bool = False
    members: int = 1


TRANSFERS = {
    "views of one storage": Transfer(lambda x: third_parts(x.t() @ x), "mm_1", members=2),
    "every eighth column": Transfer(squared(lambda x: x[:, ::8]), "slice_1", 8, gathered=True),
    "two rows": Transfer(squared(lambda x: x[4:6]), "slice_1", 8),
    # What comes back has to lie as it lay: here three elements behind what compilers take for granted.
    "columns from the fourth on": Transfer(squared(lambda x: x[:, 3::8]), "add"),
}


@pytest.mark.parametrize("case", TRANSFERS.values(), ids=TRANSFERS.keys())
def test_what_shares_a_storage_travels_as_little_as_it_may(case: Transfer) -> None:
    _, choice = assert_moves_exactly(case.program, leaf(16, 64))
    largest = max(choice.groups, key=lambda group: len(group.members))
    assert largest.base.name == case.base
    assert largest.nbytes == nbytes_of(largest.base.meta["val"]) // case.part
    assert (largest.gathered, len(largest.members)) == (case.gathered, case.members)


def test_views_are_made_anew_over_what_begins_its_storage() -> None:
    """Anything else may come back with another offset, and the place of a view is counted from the beginning."""

    def program(x: Tensor) -> Tensor:
        whole = torch.view_as_complex(x.exp()) * (1 + 0.5j)
        part = torch.view_as_real(whole[2:60]).view(-1)
        return (part[:80].sigmoid() * part[:80] * part[20:100].cos()).sum()

    _, choice = assert_moves_exactly(program, leaf(64, 2))
    graph = choice.groups[0].base.graph
    shared = storage_of(next(node for node in graph.nodes if node.name.startswith("view_as_real")))
    views = [group for group in choice.groups if storage_of(group.base) == shared]
    assert len(views) == 2, "nothing with elements of theirs spans them and begins the storage"
    assert all(group.members == (group.base,) for group in views)


def test_what_is_counted_from_the_beginning_of_a_storage_that_nothing_covers_stays() -> None:
    def program(x: Tensor) -> Tensor:
        part = torch.view_as_real((torch.view_as_complex(x.exp()) * (1 + 0.5j))[4:])
        return (part.as_strided((60, 2), (2, 1), 4).sin().exp() * part.cos()).sum()

    _, choice = assert_moves_exactly(program, leaf(64, 2), partition="min_cut")
    assert "layout" in reasons(choice).values()
    assert not any(group.counted for group in choice.groups)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_graph_of_make_fx_says_what_shares_memory_or_is_refused(mode: str) -> None:
    """AOTAutograd's graphs write to nothing; ``make_fx`` takes down what a program does."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        y.copy_(x.sin())
        y.view(-1).add_(1)
        loss = (y.sigmoid() * y).sum()
        return loss, torch.autograd.grad(loss, x)[0]

    graph = make_fx(program, tracing_mode=mode)(leaf(8, 8)).graph
    boundary = next(node for node in graph.nodes if node.name == "ones_like")
    if mode == "real":
        with pytest.raises(eo.OffloadError, match="fake"):
            choose_joint(graph, boundary, config_of())
        return
    choice = choose_joint(graph, boundary, config_of())
    changed = {name for name, reason in reasons(choice).items() if reason == "alive"}
    assert changed
    assert choice.groups
    assert not changed & moving(choice)


_library = torch.library.Library("eager_offload_test_select", "DEF")  # type: ignore[no-untyped-call]
_library.define("same(Tensor x) -> Tensor")
_library.impl("same", lambda x: x, "CompositeExplicitAutograd")
torch.library.register_autograd("eager_offload_test_select::same", lambda context, one: one.clone(), lib=_library)


@pytest.mark.filterwarnings("ignore:eager_offload_test_select:UserWarning")  # torch's own, of such operators
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


# -- models -----------------------------------------------------------------------------------------------------------

WIDTH, HEADS = 64, 4


class Loss(nn.Module):
    """A tower to a number, whose graph is a whole step."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def test_a_budget_of_a_graph_is_held_by_as_little_as_it_takes_and_free_moves_what_is_hidden() -> None:
    halves, _ = split(Loss(), torch.randn(4096, WIDTH))
    windows = {"min_bytes": "4KiB", "max_inflight_bytes": "1MiB", "prefetch_bytes": "1MiB", "tier": "host"}

    def decided(**fields: Any) -> Choice:
        choice = halves.choose(eo.OffloadConfig(**windows, **fields))
        assert choice.outcome is not None
        assert sum(group.nbytes for group in choice.groups) == sum(map(bool, choice.outcome.moves)) << 20
        return choice

    nothing, everything = (decided(device_budget=budget).outcome for budget in (1 << 40, 1))
    assert nothing is not None
    assert everything is not None
    assert not any(nothing.moves)
    # What is on its way fills a window on either side of what the graph itself needs.
    assert everything.peak_bytes <= nothing.peak_bytes - (len(everything.moves) - 3 << 20)
    for share in (1, 2, 3):
        budget = nothing.peak_bytes - (share << 20)
        choice = decided(device_budget=budget)
        assert choice.outcome is not None
        assert choice.outcome.peak_bytes <= budget
        assert 0 < sum(group.nbytes for group in choice.groups) < everything.moved_bytes
