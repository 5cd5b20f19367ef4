"""torchtitan's debug Llama, with its selective checkpoints, and ``OffloadTrainer``: parameters after 4 steps are equal,
on 1, 2 and 4 gloo ranks."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.processes import printed_by, python

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
_STEPS = Path(__file__).parent / "titan_steps.py"


def _digests(way: str, ranks: int, degrees: tuple[str, ...]) -> list[list[str]]:
    """Trains on so many ranks; returns of each the digest of its parameters, and the bytes that left and came back."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    with ThreadPoolExecutor(ranks) as pool:
        printed = pool.map(lambda rank: printed_by(_STEPS, way, port, str(rank), str(ranks), *degrees), range(ranks))
        return [text[text.index("DIGEST ") :].split()[1:4] for text in printed]


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [(1, ()), (2, ()), (4, ("tensor_parallel_degree=2",)), (2, ("pipeline_parallel_degree=2",))],
    ids=["one rank", "FSDP2", "FSDP2 and TP", "PP"],
)
def test_parameters_are_equal_and_bytes_move(ranks: int, degrees: tuple[str, ...]) -> None:
    expected, found = (_digests(way, ranks, degrees) for way in ("plain", "offload"))
    assert [one[0] for one in found] == [one[0] for one in expected]
    assert all(int(out) > 0 and int(back) > 0 for _, out, back in found)
    assert all(one[1:] == ["0", "0"] for one in expected)


def test_cuda_graphs_are_refused_by_the_name_of_their_switch() -> None:
    ended = python(_STEPS, "graphs", "0", "0", "1")
    assert ended.returncode != 0
    assert "Give --training.disable_cuda_graphs" in ended.stderr


def test_the_command_line_takes_the_fields() -> None:
    assert printed_by(_STEPS, "arguments", "--offload.device_budget", "60GiB").split() == ["OFFLOAD", str(60 << 30)]
