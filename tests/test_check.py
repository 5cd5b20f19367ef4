"""``python -m eager_offload check``: the same bits with offload, or which tensor differs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from eager_offload.__main__ import main
from tests.processes import ROOT

Printed = pytest.CaptureFixture[str]

#: Nearly all that the small models save moves.
MOVES = "--settings=min_bytes=1KiB", "--settings=keep_last_bytes=0"


@pytest.fixture(autouse=True)
def in_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs the command where it finds the models; no file of it may be left."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


def check(model: str, *arguments: str) -> int:
    return main(["check", f"tests.models_to_check:{model}", *arguments])


def test_a_model_that_trains_to_the_same_bits(capsys: Printed) -> None:
    status = check("has_a_buffer", "--json", "--settings=tier=disk", *MOVES)
    found = json.loads(capsys.readouterr().out)
    assert status == found["status"] == 0
    count = 6 * (1 + 2 * 8 + 1)
    assert found["verdict"] == (
        f"equal: {count} losses, gradients, parameters and buffers of 6 steps have the same bits with offload"
    )
    moved = {name: one["moved_bytes"] > 0 for name, one in found["runs"].items()}
    assert moved == {"without": False, "with": True, "without again": False}
    assert all(one["seconds"] > 0 < one["peak_bytes"] for one in found["runs"].values())


def test_the_first_tensor_that_differs_is_named_with_its_module(capsys: Printed) -> None:
    assert check("has_other_gradients_with_offload", "--steps=1", *MOVES) == 1
    out, err = capsys.readouterr()
    named = "the gradient of 'weight' of 4 (Looks)"
    assert out.startswith(f"differs: {named}, step 1 has other bits with offload")
    assert err.splitlines() == [f"{name}: 1 steps ..." for name in ("without", "with", "without again")]


@pytest.mark.long
def test_a_model_that_differs_by_itself_tells_nothing(capsys: Printed) -> None:
    assert check("draws_from_the_system", "--steps=1", *MOVES) == 2
    said = capsys.readouterr().out
    assert said.startswith("cannot tell: two runs without offload differ, first in the loss, step 1.")


@pytest.mark.long
def test_where_nothing_moves_equal_bits_tell_nothing(capsys: Printed) -> None:
    assert check("right", "--steps=1", "--settings=min_bytes=1GiB") == 2
    assert capsys.readouterr().out.startswith("cannot tell: nothing moved")


@pytest.mark.long
def test_a_model_that_trains_by_a_plan(capsys: Printed) -> None:
    assert check("right", "--steps=4", "--device-budget=700KiB", "--recompute", MOVES[0]) == 0
    assert capsys.readouterr().out.startswith("equal: ")
    assert check("right", "--steps=1", "--device-budget=1KiB", MOVES[0]) == 2
    assert "no plan fits in 1KiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("is_killed",), "could not run: the process 'without' ended with signal 9 (Killed)"),
        pytest.param(("on_meta",), "its model is on meta, and a step has to run", marks=pytest.mark.long),
        (("right", "--steps=0"), "--steps 0 is not accepted"),
        (("right", "--recompute"), "--recompute needs --device-budget"),
        (("right", "--settings=min_byte=1"), "min_byte"),
    ],
    ids=["killed", "meta", "no steps", "no budget", "no field"],
)
def test_what_cannot_run_says_why(arguments: tuple[str, ...], said: str, capsys: Printed) -> None:
    assert check(*arguments) == 2
    assert said in capsys.readouterr().err
