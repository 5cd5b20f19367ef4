"""What a user says about tensors in compiled code: it breaks no graph, and what moves follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

import eager_offload as eo
from tests.compile.compiled import BOTH, compare, step_of
from tests.compile.split import PARTITIONERS, Split, assert_moves_exactly, config_of, moving, reasons, split

SIZE = 16


def chain(between: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Saves the results of three operators; ``between`` gets that of the first."""

    def program(x: Tensor) -> Tensor:
        y = between(x.sigmoid())
        return y.exp().tanh().sum()

    return program


def inputs() -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).requires_grad_()


def node_of(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if node.name == name)


# -- regions ----------------------------------------------------------------------------------------------------------


def region(x: Tensor) -> Tensor:
    y = x.sigmoid()
    with eo.no_offload():
        y = y.exp()
    return y.tanh().sum()


@eo.no_offload()
def without_offload(x: Tensor) -> Tensor:
    return x.exp()


def decorated(x: Tensor) -> Tensor:
    return without_offload(x.sigmoid()).tanh().sum()


def nested(x: Tensor) -> Tensor:
    y = x.sigmoid()
    with eo.no_offload(), eo.no_offload():
        y = y.exp()
    return y.tanh().sum()


@pytest.mark.parametrize("program", [region, decorated, nested])
@pytest.mark.parametrize("partition", PARTITIONERS)
def test_nothing_that_is_saved_in_a_region_moves(program: Callable[[Tensor], Tensor], partition: str) -> None:
    _, choice = assert_moves_exactly(program, inputs(), partition=partition)
    assert reasons(choice) == {"exp": "region"}
    assert moving(choice) == {"sigmoid", "tanh"}


@BOTH
def test_a_region_around_a_call_of_compiled_code_changes_nothing_and_a_warning_says_so(backend: str) -> None:
    def program(x: Tensor) -> Tensor:
        return (x.sigmoid() @ x).tanh().sum()

    x, offload = inputs(), eo.Offload(min_bytes=0, keep_last_bytes=0)
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    compiled(x).backward()
    expected, x.grad = x.grad, None
    with pytest.warns(RuntimeWarning, match="although it is called in a no_offload"), offload, eo.no_offload():
        loss = compiled(x)
    loss.backward()
    stats = offload.stats(synchronize=True)
    assert torch.equal(x.grad, expected)
    assert stats.demotions["region"] == 1
    assert stats.bytes_out > 0
    offload.close()


# -- marks ------------------------------------------------------------------------------------------------------------


def through_a_view(y: Tensor) -> Tensor:
    eo.keep(y.view(-1))
    return y


@pytest.mark.parametrize("mark", [eo.keep, through_a_view])
def test_what_is_kept_stays_by_itself_or_by_a_view(mark: Callable[[Tensor], Tensor]) -> None:
    one, choice = assert_moves_exactly(chain(mark), inputs())
    assert reasons(choice) == {"sigmoid": "marked"}
    assert not [node for node in one.forward.graph.nodes if "mark" in str(node.target)], "no operator is left behind"


@pytest.mark.parametrize(("field", "reason"), [("min_bytes", "small"), ("keep_last_bytes", "newest")])
def test_what_is_preferred_moves_though_it_is_small_or_new(field: str, reason: str) -> None:
    config = config_of(**{field: "1MiB"})
    _, choice = assert_moves_exactly(chain(eo.prefer_offload), inputs(), config=config)
    assert moving(choice) == {"sigmoid"}
    assert set(reasons(choice).values()) == {reason}


def test_what_belongs_to_others_does_not_move_for_a_mark() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        y = eo.prefer_offload(x).sigmoid()
        eo.prefer_offload(y)
        return y, y.exp().sum()

    _, choice = assert_moves_exactly(program, inputs())
    assert moving(choice) == {"exp"}
    assert set(reasons(choice).values()) <= {"alive", "parameter"}


def unmoved(x: Tensor) -> Tensor:
    with eo.no_offload():
        return x @ x


@BOTH
@pytest.mark.parametrize(("square", "reason"), [(unmoved, "region"), (lambda y: eo.keep(y) @ y, "marked")])
def test_regions_and_marks_count_as_they_do_in_eager_code(
    square: Callable[[Tensor], Tensor], reason: str, backend: str
) -> None:
    def program(x: Tensor) -> Tensor:
        z = square(x @ x)
        return z @ z

    stats = compare(step_of(program, inputs(), fullgraph=True), backend)
    assert stats.kept_bytes[reason] == 2 * SIZE * SIZE * 4


def test_without_a_gradient_marks_and_regions_do_nothing() -> None:
    def program(x: Tensor) -> Tensor:
        with eo.no_offload():
            return eo.keep(x.exp()) + 1

    x = inputs().detach()
    with eo.Offload(tier="disk", min_bytes=0) as offload:
        assert torch.equal(torch.compile(program, backend="aot_eager", fullgraph=True)(x), x.exp() + 1)
    assert offload.stats(synchronize=True).saved_bytes == 0
    offload.close()


# -- notes on nodes ---------------------------------------------------------------------------------------------------


def noted(**notes: object) -> Callable[[Split], None]:
    def change(one: Split) -> None:
        for name, note in notes.items():
            node_of(one.forward.graph, name).meta.update({"should_offload": note} if isinstance(note, bool) else note)

    return change


def chosen(change: Callable[[Split], None], **fields: Any) -> tuple[set[str], dict[str, str]]:
    one, _ = split(chain(lambda y: y), inputs())
    change(one)
    choice = one.choose(config_of(**fields))
    return moving(choice), reasons(choice)


def test_a_node_that_should_move_does() -> None:
    assert chosen(noted(sigmoid=True), min_bytes="1MiB") == ({"sigmoid"}, {"exp": "small", "tanh": "small"})
    assert chosen(noted(exp=True), keep_last_bytes="1MiB") == ({"exp"}, {"sigmoid": "newest", "tanh": "newest"})


def test_checkpoint_policies_are_marks() -> None:
    must = {"recompute": CheckpointPolicy.MUST_CPU_OFFLOAD}
    prefer = {"recompute": CheckpointPolicy.PREFER_CPU_OFFLOAD}
    assert chosen(noted(sigmoid=must, exp=prefer), min_bytes="1MiB")[0] == {"sigmoid"}
    assert chosen(noted(sigmoid=must, exp=prefer), keep_last_bytes="1MiB")[0] == {"sigmoid", "exp"}
