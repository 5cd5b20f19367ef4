"""Lightning on two ranks: each strategy is exact with the callback."""

from __future__ import annotations

from pathlib import Path

import pytest

from eager_offload.integrations.lightning import OffloadCallback
from tests.integrations.lightning_ranks import STRATEGIES
from tests.integrations.lightning_training import PACKAGES, trainer_of
from tests.ranks.launch import ROOT, started, torchrun

MAIN = PACKAGES[0]


def output_of(*program: str, **environment: str) -> str:
    """What two ranks print; both have to end well."""
    with started(torchrun(2, *program), PYTHONPATH=str(ROOT), **environment) as process:
        output = process.communicate(timeout=280)[0]
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.mark.long
def test_every_strategy_is_exact_on_two_ranks(tmp_path: Path) -> None:
    output_of("tests/integrations/lightning_ranks.py", str(tmp_path))
    for name in STRATEGIES:
        assert {(tmp_path / f"{name}.{rank}").is_file() for rank in range(2)} == {True}


def test_fsdp_strategy_is_for_gpus_says_lightning(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="requires a GPU accelerator"):
        trainer_of(MAIN, tmp_path, OffloadCallback(), strategy="fsdp", devices=2)
