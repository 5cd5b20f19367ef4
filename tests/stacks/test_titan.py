"""torchtitan's debug Llama, with its selective checkpoints, and ``OffloadTrainer``: parameters after 4 steps are equal,
on 1, 2 and 4 gloo ranks; nothing is offloaded in validation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import printed_by, python

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
pytestmark = pytest.mark.timeout(900)
_STEPS = Path(__file__).parent / "titan_steps.py"


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [(1, ()), (2, ()), (4, ("tensor_parallel_degree=2",)), (2, ("pipeline_parallel_degree=2",))],
    ids=["one rank", "FSDP2", "FSDP2 and TP", "PP"],
)
def test_parameters_are_equal_and_bytes_move(ranks: int, degrees: tuple[str, ...]) -> None:
    printed = printed_by(_STEPS, str(ranks), *degrees, seconds=840)
    found = {
        (way, int(rank)): one for way, rank, *one in re.findall(r"DIGEST (\S+) (\d+) (\S+) (\d+) (\d+)\n", printed)
    }
    for rank in range(ranks):
        digest, out, back = found["offload", rank]
        assert found["plain", rank] == [digest, "0", "0"]
        assert int(out) > 0 < int(back)
    if ranks == 1:
        ((in_validation, in_training),) = re.findall(r"SAVED offload (\d+) (\d+)\n", printed)
        assert int(in_training) > int(in_validation) == 0


def test_cuda_graphs_are_refused_by_the_name_of_their_switch() -> None:
    ended = python(_STEPS, "graphs")
    assert ended.returncode != 0
    assert "Give --training.disable_cuda_graphs" in ended.stderr


def test_the_command_line_takes_the_fields() -> None:
    assert printed_by(_STEPS, "arguments", "--offload.device_budget", "60GiB").split() == ["OFFLOAD", str(60 << 30)]
