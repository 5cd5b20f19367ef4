"""The demo program, from its command line to its picture."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the demo's extra is not installed")
pytest.importorskip("matplotlib", reason="the demo's extra is not installed")

from rich.console import Console

import train_lm
from tests.processes import python

from lm.meter import Sample
from lm.processes import WorkerFailedError, run_all
from lm.result import Result, hash_losses

pytestmark = pytest.mark.long

PROGRAM = Path(train_lm.__file__)
TINY = ["--layers", "2", "--width", "64", "--heads", "2", "--sequence", "128", "--batch", "4", "--steps", "2"]
WINDOWS = ["--min-bytes", "4KiB", "--max-inflight-bytes", "256KiB", "--prefetch-bytes", "256KiB"]
MODES = ["none", "checkpoint", "offload", "offload+checkpoint"]


def run(mode: str = "none", losses: tuple[float, ...] = (5.5, 5.25)) -> Result:
    return Result(
        mode=mode,
        losses=list(losses),
        step_seconds=[1.0, 3.0],
        model_bytes=100 << 20,
        peak_bytes=300 << 20,
        offloaded_bytes=0,
        stall_seconds=0.0,
        parameters_hash="a" * 64,
        losses_hash=hash_losses(list(losses)),
        samples=[Sample(seconds=0.5, nbytes=200 << 20)],
    )


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


def run_script(script: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[Result]]:
    """What the screen shows and what comes back when ``script`` takes the place of the demo's own program."""
    program = directory / "program.py"
    program.write_text(script)
    monkeypatch.setattr(sys, "argv", [str(program)])
    console = Console(width=100, file=io.StringIO(), record=True)
    results = run_all(["none"], 2, "RSS", console)
    return console.export_text(), results


def test_a_run_that_fails_ends_the_demo_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerFailedError, match=r"(?s)'none' failed \(exit status 3\).*no room"):
        run_script("import sys; print('no room', file=sys.stderr); sys.exit(3)", tmp_path, monkeypatch)


def test_news_and_warnings_of_a_run_reach_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run().save(tmp_path / "made.json")
    script = f"""
import shutil, sys
from lm.processes import tell
tell(nbytes=123 << 20)
tell(step=2, loss=1.25)
print("mind the gap", file=sys.stderr)
shutil.copy({str(tmp_path / "made.json")!r}, sys.argv[-1])
"""
    monkeypatch.setenv("PYTHONPATH", str(PROGRAM.parent))
    screen, results = run_script(script, tmp_path, monkeypatch)
    assert results == [run()]
    for shown in ("2/2", "loss 1.250", "123 MiB", "none: mind the gap"):
        assert shown in screen


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
