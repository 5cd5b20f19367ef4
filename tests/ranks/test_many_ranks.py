"""torch's own ways to train on several ranks: bits are those without offload, and no byte of a weight moves.

Each scenario is a function in a module beside this one, which asserts all that in every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.releases import wrong_before

#: Some of each kind.
QUICK = (
    "node.budgets_are_divided",
    "node.one_spill_file_a_rank",
    "ddp.bits_are_those_without_offload",
    "ddp.parameters_that_are_not_used",
    "fsdp.what_moves_is_what_moves_in_one_process",
    "fsdp.mixed_precision",
    "tensor_parallel.a_divided_loss",
    "pipelines.one_forward_one_backward",
    "pipelines.interleaved",
    "plans.different_budgets_agree",
)
TWO = (
    "ddp.bits_are_those_without_offload",
    "ddp.gradients_that_are_views_of_buckets",
    "ddp.accumulation_with_no_sync",
    "ddp.parameters_that_are_not_used",
    "ddp.a_static_graph",
    "ddp.a_static_graph_with_checkpoints_of_both_kinds",
    "ddp.batch_norm_over_all_ranks",
    "ddp.autocast",
    "fsdp.bits_are_those_without_offload",
    "fsdp.what_moves_is_what_moves_in_one_process",
    "fsdp.weights_that_stay_gathered_until_backward",
    "fsdp.mixed_precision",
    "fsdp.gradient_checkpointing",
    "fsdp.frozen_weights_beside_trained_ones",
    "tensor_parallel.bits_are_those_without_offload",
    "tensor_parallel.a_divided_sequence",
    "tensor_parallel.a_divided_loss",
    "tensor_parallel.gradient_checkpointing",
    "pipelines.gpipe",
    "pipelines.one_forward_one_backward",
    "pipelines.interleaved",
    "pipelines.breadth_first",
    "pipelines.interleaved_zero_bubble",
    "pipelines.v_shaped_zero_bubble",
    "plans.different_budgets_agree",
    "plans.an_error_of_one_is_an_error_of_all",
    "plans.different_models_are_an_error_of_all",
)
#: A rank that has two neighbouring stages.
SENDS_TO_ITSELF = wrong_before((2, 12), "pipelines begin with messages to all neighbours, and gloo has none to oneself")
COMPILED = ("fsdp.compiled_blocks", "fsdp.blocks_compiled_in_place")
FOUR = (
    "node.budgets_are_divided",
    "node.one_spill_file_a_rank",
    "ddp.bits_are_those_without_offload",
    "fsdp.bits_are_those_without_offload",
    "fsdp.mixed_precision",
    "tensor_parallel.a_divided_loss",
    "tensor_parallel.together_with_fsdp",
    "pipelines.one_forward_one_backward",
    "pipelines.interleaved",
)


def assert_passed(directory: Path, scenario: str, number: int) -> None:
    found = [directory / f"{scenario}.{rank}" for rank in range(number)]
    errors = [f"rank {rank}:\n{one.read_text()}" for rank, one in enumerate(found) if one.exists() and one.read_text()]
    assert not errors, "\n".join(errors)
    assert all(one.exists() for one in found), f"the ranks ended before:\n{(directory / 'output').read_text()[-4000:]}"


@pytest.mark.short
@pytest.mark.xdist_group("two ranks")
@pytest.mark.parametrize("scenario", QUICK)
def test_h06_two_ranks(scenario: str, launched: Callable[[int, Sequence[str], bool], Path]) -> None:
    assert_passed(launched(2, QUICK, False), scenario, 2)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("two ranks in every regime")
@pytest.mark.parametrize(
    "scenario", [pytest.param(one, marks=[SENDS_TO_ITSELF] * one.endswith("v_shaped_zero_bubble")) for one in TWO]
)
def test_h06_two_ranks_in_every_regime(scenario: str, launched: Callable[[int, Sequence[str], bool], Path]) -> None:
    assert_passed(launched(2, TWO, True), scenario, 2)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("two ranks that compile")
@pytest.mark.parametrize("scenario", COMPILED)
def test_h06_two_ranks_that_compile(scenario: str, launched: Callable[[int, Sequence[str], bool], Path]) -> None:
    assert_passed(launched(2, COMPILED, False), scenario, 2)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("four ranks")
@pytest.mark.parametrize("scenario", FOUR)
def test_h06_four_ranks(scenario: str, launched: Callable[[int, Sequence[str], bool], Path]) -> None:
    assert_passed(launched(4, FOUR, False), scenario, 4)
