"""Lightning on two ranks: each strategy is exact with the callback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eager_offload.integrations.lightning import OffloadCallback
from tests.integrations.lightning_ranks import STARTED, STRATEGIES
from tests.integrations.lightning_training import PACKAGES, trainer_of
from tests.ranks.launch import ROOT, started, torchrun

MAIN = PACKAGES[0]


def ended_well(*command: str) -> None:
    with started(command, PYTHONPATH=str(ROOT)) as process:
        output = process.communicate(timeout=280)[0]
    assert process.returncode == 0, output[-4000:]


@pytest.mark.long
def test_every_strategy_is_exact_on_two_ranks(tmp_path: Path) -> None:
    ended_well(*torchrun(2, "tests/integrations/lightning_ranks.py", str(tmp_path)))
    for name in STRATEGIES:
        assert {(tmp_path / f"{name}.{rank}").is_file() for rank in range(2)} == {True}


@pytest.mark.long
def test_ranks_that_a_trainer_starts_have_an_offload_each(tmp_path: Path) -> None:
    ended_well(sys.executable, "-m", "tests.integrations.lightning_ranks", str(tmp_path))
    for strategy, given in STARTED:
        assert (tmp_path / f"{strategy}.{given}").is_file()


def test_fsdp_strategy_is_for_gpus_says_lightning(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="requires a GPU accelerator"):
        trainer_of(MAIN, tmp_path, OffloadCallback(), strategy="fsdp", devices=2)
