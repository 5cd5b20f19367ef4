"""What a user says about tensors in compiled code: it breaks no graph, and what moves follows it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import eager_offload as eo
from tests.compile.compiled import BOTH, compare, step_of
from tests.compile.split import PARTITIONERS, assert_moves_exactly, config_of, moving, reasons, split
from tests.programs import leaf

SIZE = 16


def chain(between: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Saves the results of three operators; ``between`` gets that of the first."""

    def program(x: Tensor) -> Tensor:
        y = between(x.sigmoid())
        return y.exp().tanh().sum()

    return program


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


def through_a_view(y: Tensor) -> Tensor:
    eo.keep(y.view(-1))
    return y


def of_others(x: Tensor) -> tuple[Tensor, Tensor]:
    y = eo.prefer_offload(x).sigmoid()
    eo.prefer_offload(y)
    return y, y.exp().sum()


class Case(NamedTuple):
    """A program, what moves of what it saves, and why the rest stays."""

    program: Callable[[Tensor], Any]
    moves: set[str]
    stays: dict[str, str]
    fields: dict[str, Any] = {}  # noqa: RUF012  # nobody changes it


CASES = {
    "a region": Case(region, {"sigmoid", "tanh"}, {"exp": "region"}),
    "a decorated function": Case(decorated, {"sigmoid", "tanh"}, {"exp": "region"}),
    "a region in a region": Case(nested, {"sigmoid", "tanh"}, {"exp": "region"}),
    "what is kept": Case(chain(eo.keep), {"exp", "tanh"}, {"sigmoid": "marked"}),
    "what is kept by a view": Case(chain(through_a_view), {"exp", "tanh"}, {"sigmoid": "marked"}),
    "what is preferred though small": Case(
        *(chain(eo.prefer_offload), {"sigmoid"}, {"exp": "small", "tanh": "small"}, {"min_bytes": "1MiB"})
    ),
    "what is preferred though new": Case(
        *(chain(eo.prefer_offload), {"sigmoid"}, {"exp": "newest", "tanh": "newest"}, {"keep_last_bytes": "1MiB"})
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("partition", PARTITIONERS)
def test_what_moves_is_what_was_asked_for(case: Case, partition: str) -> None:
    one, choice = assert_moves_exactly(
        case.program, leaf(SIZE, SIZE), partition=partition, config=config_of(**case.fields)
    )
    assert moving(choice) == case.moves
    assert reasons(choice) == case.stays
    assert not [node for node in one.forward.graph.nodes if "mark" in str(node.target)], "no operator is left behind"


def test_what_belongs_to_others_does_not_move_for_a_mark() -> None:
    _, choice = assert_moves_exactly(of_others, leaf(SIZE, SIZE))
    assert moving(choice) == {"exp"}
    assert set(reasons(choice).values()) <= {"alive", "parameter"}


def test_a_region_around_a_call_of_compiled_code_changes_nothing_and_a_warning_says_so() -> None:
    def program(x: Tensor) -> Tensor:
        return (x.sigmoid() @ x).tanh().sum()

    x, offload = leaf(SIZE, SIZE), eo.Offload(min_bytes=0, keep_last_bytes=0)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    compiled(x).backward()
    expected, x.grad = x.grad, None
    with pytest.warns(RuntimeWarning, match="although it is called in a no_offload"), offload, eo.no_offload():
        loss = compiled(x)
    loss.backward()
    stats = offload.stats(synchronize=True)
    assert torch.equal(x.grad, expected)
    assert stats.fallbacks["region"] == 1
    assert stats.bytes_out > 0
    offload.close()


def unmoved(x: Tensor) -> Tensor:
    with eo.no_offload():
        return x @ x


@pytest.mark.parametrize(("square", "reason"), [(unmoved, "region"), (lambda y: eo.keep(y) @ y, "marked")])
def test_regions_and_marks_count_as_they_do_in_eager_code(square: Callable[[Tensor], Tensor], reason: str) -> None:
    def program(x: Tensor) -> Tensor:
        z = square(x @ x)
        return z @ z

    stats = compare(step_of(program, leaf(SIZE, SIZE), fullgraph=True), "aot_eager")
    assert stats.kept_bytes[reason] == 2 * SIZE * SIZE * 4


def test_without_a_gradient_marks_and_regions_do_nothing() -> None:
    def program(x: Tensor) -> Tensor:
        with eo.no_offload():
            return eo.keep(x.exp()) + 1

    x = leaf(SIZE, SIZE).detach()
    with eo.Offload(tier="disk", min_bytes=0) as offload:
        assert torch.equal(torch.compile(program, backend="aot_eager", fullgraph=True)(x), x.exp() + 1)
    assert offload.stats(synchronize=True).saved_bytes == 0
    offload.close()


# -- selective checkpointing that is to send values to the CPU --------------------------------------------------------

POLICIES = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
MUST, PREFER = ({"recompute": policy} for policy in POLICIES)


@pytest.mark.parametrize(
    ("notes", "fields", "moves"),
    [
        ({"sigmoid": {"should_offload": True}}, {"min_bytes": "1MiB"}, {"sigmoid"}),
        ({"exp": {"should_offload": True}}, {"keep_last_bytes": "1MiB"}, {"exp"}),
        ({"exp": {"should_offload": False}}, {}, {"sigmoid", "tanh"}),
        ({"sigmoid": MUST, "exp": PREFER}, {"min_bytes": "1MiB"}, {"sigmoid"}),
        ({"sigmoid": MUST, "exp": PREFER}, {"keep_last_bytes": "1MiB"}, {"sigmoid", "exp"}),
    ],
)
def test_notes_on_nodes_and_checkpoint_policies_are_marks(
    notes: dict[str, dict[str, object]], fields: dict[str, Any], moves: set[str]
) -> None:
    one, _ = split(chain(lambda y: y), leaf(SIZE, SIZE))
    for node in one.forward.graph.nodes:
        node.meta.update(notes.get(node.name, {}))
    assert moving(one.choose(config_of(**fields))) == moves


def contexts(policy: CheckpointPolicy) -> Callable[..., Any]:
    """Contexts in which what products make has ``policy``."""

    def decide(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return policy if operator is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, decide)


class Block(nn.Module):
    def __init__(self, policy: CheckpointPolicy) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
        self.contexts = contexts(policy)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=self.contexts)


@BOTH
@pytest.mark.parametrize("policy", POLICIES)
def test_values_of_a_compiled_checkpoint_move_by_its_policy(backend: str, policy: CheckpointPolicy) -> None:
    step = step_of(Block(policy), leaf(SIZE, SIZE), fullgraph=True)
    stats = compare(step, backend, as_eager=False, keep_last_bytes="1MiB")
    assert stats.bytes_out >= 2 * SIZE * SIZE * 4, "what both products make"
    assert not stats.kept_bytes.get("alive")
