"""Accelerate on two ranks: DDP and FSDP2; mixed, accumulated, compiled, checkpointed, and when a forward fails."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.compiler_caches import NO_GRAPHS
from tests.integrations.accelerate_ranks import RANKS, SCENARIOS
from tests.ranks.launch import started

pytestmark = pytest.mark.long

Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Facts] | str:
    """Each rank's facts of all scenarios, which run in one pair of ranks; or what the ranks said when they failed."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.integrations.accelerate_ranks", str(folder), *SCENARIOS]
    with started(command, **NO_GRAPHS) as ranks:
        try:
            reported = ranks.communicate(timeout=280)[0]
        except subprocess.TimeoutExpired:
            return "the ranks took too long and were ended"
    if ranks.returncode:
        return reported[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture
def ranks(ended: list[Facts] | str, scenario: str) -> list[dict[str, Any]]:
    """The facts of ``scenario``, a dict for each rank."""
    assert isinstance(ended, list), ended
    return [facts[scenario] for facts in ended]


def all_of(*prefixes: str, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "scenario", [name for name in SCENARIOS if name.startswith(prefixes) and not name.endswith(but)]
    )


@all_of("ddp", "fsdp2", but=("fails",))
def test_training_changes_no_bit_of_any_rank_nor_of_what_is_saved(ranks: list[dict[str, Any]], scenario: str) -> None:
    for facts in ranks:
        assert facts["equal"]
        assert facts["states equal"]
        assert facts["metrics"]["offload/moved_mib"] == facts["bytes out"] / 2**20 > 0, "those of the rank"
        assert facts["strategy"] == scenario.partition("-")[0]
        assert (facts["compiled regions"] > 0) == scenario.endswith(("compiled", "regions"))


@all_of("ddp-mixed", "fsdp2-mixed")
def test_no_parameter_is_moved_however_it_was_gathered(ranks: list[dict[str, Any]], scenario: str) -> None:
    """Three steps of two forwards: 64 rows into each layer, 2 bytes a number; and what is saved of them besides."""
    weights = 2 * (32 * 128 + 128 * 32)
    for facts in ranks:
        assert facts["kept"]["parameter"] == 3 * 2 * 2 * weights
        inputs = 32 + 2 * (32 + 128 + 128 + 32) + 32
        moved = facts["offloaded"] + facts["kept"].get("alive", 0)
        assert moved >= 3 * 2 * 64 * 2 * inputs


@all_of("ddp-fails", "fsdp2-fails")
def test_whatever_ends_a_forward_no_hook_is_left(ranks: list[dict[str, Any]], scenario: str) -> None:
    for facts in ranks:
        assert facts["RuntimeError"]
        assert facts["KeyboardInterrupt"]
        assert facts["equal"]
        assert facts["bytes out"] > 0


@all_of("fsdp2-checkpointing", "fsdp2-their-offload")
def test_the_main_rank_is_warned_of_what_hides_saved_tensors(ranks: list[dict[str, Any]], scenario: str) -> None:
    assert [facts["reported"] for facts in ranks] == ([0, 0] if scenario == "fsdp2-checkpointing" else [1, 0])
