"""The demo program, from its command line to its picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the demo's extra is not installed")
pytest.importorskip("matplotlib", reason="the demo's extra is not installed")


import train_lm
from tests.processes import python

pytestmark = pytest.mark.long

PROGRAM = Path(train_lm.__file__)
TINY = ["--layers", "2", "--width", "64", "--heads", "2", "--sequence", "128", "--batch", "4", "--steps", "2"]
WINDOWS = ["--min-bytes", "4KiB", "--max-inflight-bytes", "256KiB", "--prefetch-bytes", "256KiB"]
MODES = ["none", "checkpoint", "offload", "offload+checkpoint"]


def test_four_runs_agree_bit_for_bit_and_leave_a_picture_and_numbers(tmp_path: Path) -> None:
    ended = python(PROGRAM, *TINY, *WINDOWS, "--output", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "equal bit for bit" in ended.stdout
    assert "standard library" in ended.stdout
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert numbers["equal"] is True
    assert [made["mode"] for made in numbers["runs"]] == MODES * 2, "in turn"
    assert len({made["parameters_hash"] for made in numbers["runs"]}) == 1
    assert len({made["losses_hash"] for made in numbers["runs"]}) == 1
    for made in numbers["runs"]:
        assert len(made["losses"]) == len(made["step_seconds"]) == 2
        assert made["peak_bytes"] >= made["model_bytes"] > 0
        assert (made["offloaded_bytes"] > 0) == ("offload" in made["mode"])
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--modes", "none,nothing"], "'nothing' is not one of none, checkpoint"),
        (["--width", "100", "--heads", "8"], "--width 100 is not a multiple of --heads 8"),
        (["--min-bytes", "many"], "min_bytes='many' is not accepted"),
        (["--tier", "tape"], "tier='tape' is not accepted"),
        (["--steps", "0"], "argument --steps"),
    ],
)
def test_a_bad_option_is_named_before_anything_runs(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        train_lm.parse(arguments)
    assert raised.value.code == 2
    assert says in capsys.readouterr().err
