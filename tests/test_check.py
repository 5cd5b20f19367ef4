"""``python -m eager_offload check``: the same bits with offload, or which tensor differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import ROOT, python

MINE = "tests.models_to_check"
#: Nearly all that the small models save moves.
MOVES = ("--settings", "min_bytes=1KiB", "--settings", "keep_last_bytes=0")


def check(tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    """The status and what is printed; no file is left."""
    ended = python("-m", "eager_offload", "check", *arguments, cwd=ROOT, TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    return ended.returncode, ended.stdout, ended.stderr


def test_a_model_that_trains_to_the_same_bits(tmp_path: Path) -> None:
    status, out, _ = check(tmp_path, f"{MINE}:right", "--json", "--settings=tier=disk", *MOVES)
    found = json.loads(out)
    assert status == found["status"] == 0
    count = 6 * (1 + 2 * 8)
    assert found["verdict"] == (
        f"equal: {count} losses, gradients and parameters of 6 steps have the same bits with offload"
    )
    assert {name: one["moved_bytes"] > 0 for name, one in found["runs"].items()} == {
        "without": False,
        "with": True,
        "without again": False,
    }
    assert all(one["seconds"] > 0 < one["peak_bytes"] for one in found["runs"].values())


def test_the_first_tensor_that_differs_is_named_with_its_module(tmp_path: Path) -> None:
    status, out, err = check(tmp_path, f"{MINE}:is_another_one_with_offload", "--steps", "1", *MOVES)
    assert status == 1
    assert out.startswith("differs: the loss, step 1 has other bits with offload")
    assert err.splitlines() == ["without: 1 steps ...", "with: 1 steps ...", "without again: 1 steps ..."]


@pytest.mark.long
def test_where_it_cannot_be_told(tmp_path: Path) -> None:
    status, out, _ = check(tmp_path, f"{MINE}:draws_from_the_system", "--steps", "1", *MOVES)
    assert status == 2
    assert out.startswith("cannot tell: two runs without offload differ, first in the loss, step 1.")
    status, out, _ = check(tmp_path, f"{MINE}:right", "--steps", "1", "--settings", "min_bytes=1GiB")
    assert status == 2
    assert out.startswith("cannot tell: nothing moved")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((f"{MINE}:on_meta",), "its model is on meta, and a step has to run"),
        ((f"{MINE}:wrong",), "has no attribute 'wrong'"),
        ((f"{MINE}:right", "--steps", "0"), "--steps 0 is not accepted"),
        ((f"{MINE}:right", "--settings", "min_byte=1"), "min_byte"),
    ],
    ids=["meta", "no function", "no steps", "no field"],
)
def test_what_cannot_run_says_why(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    status, _, err = check(tmp_path, *arguments)
    assert status == 2
    assert said in err
