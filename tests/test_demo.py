"""The demo program, from its command line to its picture."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the demo's extra is not installed")
pytest.importorskip("matplotlib", reason="the demo's extra is not installed")

from rich.console import Console

import train_lm
from tests.processes import python

from lm.data import batches, read_text
from lm.meter import Sample
from lm.processes import WorkerFailedError, run_all
from lm.report import differences, table
from lm.result import Result, hash_losses, hash_parameters

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


def test_the_same_seed_gives_the_same_batches_and_targets_follow_inputs() -> None:
    text = read_text()
    assert len(text.content) >= 1 << 20
    first, again = (batches(text, count=2, batch=3, sequence=16, seed=7) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert torch.equal(one.inputs[:, 1:], one.targets[:, :-1])
        assert bytes(one.inputs[0].tolist()) in text.content


def test_too_little_text_is_an_error_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("pass\n")
    with pytest.raises(SystemExit, match=r"5 bytes of \*\.py files, and at least 1,048,576") as raised:
        read_text(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_installed_packages_are_no_part_of_the_text(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "site-packages/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_text(tmp_path, least=1).content == b"a.pyb.py"


def test_a_loss_that_differs_in_its_last_bit_is_reported_with_its_step() -> None:
    changed = run("offload", losses=(5.5, math.nextafter(5.25, 6)))
    assert differences([run(), changed]) == ["the losses of 'offload' are not those of 'none', from step 2 on"]
    assert differences([run(), run("offload")]) == []


def test_parameters_that_differ_are_reported() -> None:
    changed = dataclasses.replace(run("checkpoint"), parameters_hash="b" * 64)
    assert differences([run(), changed]) == ["the final parameters of 'checkpoint' are not those of 'none'"]


def test_one_changed_bit_changes_the_hash_of_the_parameters() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    before = hash_parameters(model)
    assert hash_parameters(model) == before
    with torch.no_grad():
        model.bias.view(torch.int32)[2] ^= 1
    assert hash_parameters(model) != before


def test_the_table_fits_eighty_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    large = [dataclasses.replace(run(mode), peak_bytes=130_000 << 20, offloaded_bytes=1 << 40) for mode in MODES * 2]
    console.print(table(large))
    lines = console.export_text().splitlines()
    assert all(any(line.strip().startswith(mode + " ") for line in lines) for mode in MODES)
    assert "130,000" in "".join(lines)


def test_the_table_has_medians_of_each_mode_with_half_of_the_spread() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    slower = dataclasses.replace(run(), step_seconds=[2.0, 4.0], peak_bytes=304 << 20)
    console.print(table([run(), run("offload"), slower, run("offload")]))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["none", "302", "±2", "202", "1.00", "2.50", "±0.50", "1.00", "0", "0.00"] in lines
    assert ["offload", "300", "±0", "200", "0.99", "2.00", "±0.00", "0.80", "0", "0.00"] in lines


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
