"""``python -m eager_offload run``: a script that says nothing of offloading trains to the same bits and moves bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eager_offload.__main__ import main
from tests.processes import python

SCRIPT = """
import sys

import torch
from torch import nn

import beside  # what stands beside a script can be imported from it

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = nn.MSELoss()(model(torch.randn(1024, 64)), torch.zeros(1024, 64))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
model.eval()
print(model(torch.ones(1, 64)).sum().item().hex())
print(__name__, sys.argv[1:])
sys.exit(7 if "--fail" in sys.argv else 0)
"""
RUN = ("-m", "eager_offload", "run")
SETTINGS = ["--settings", "min_bytes=1KiB", "--settings=keep_last_bytes=0"]
SAID = "eager_offload run: peak saved-tensor memory"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With ``train.py`` in it."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_a_script_prints_the_same_and_it_says_what_it_did(directory: Path) -> None:
    plain = python("train.py", "--lr", "3", cwd=directory)
    assert plain.stdout.endswith("__main__ ['--lr', '3']\n"), plain.stderr
    offloaded = python(*RUN, *SETTINGS, "train.py", "--lr", "3", cwd=directory)
    assert (offloaded.returncode, offloaded.stdout) == (0, plain.stdout), offloaded.stderr
    assert SAID in offloaded.stderr


@pytest.mark.long
def test_the_status_of_a_module_is_its_own_and_settings_come_from_files_and_the_environment(directory: Path) -> None:
    (directory / "offload.json").write_text(json.dumps({"min_bytes": "1TiB"}))
    (directory / "later.toml").write_text("min_bytes = '1KiB'\n")
    files = ("--settings", "offload.json", "--settings=later.toml")
    ended = python(*RUN, *files, "-m", "train", "--fail", cwd=directory, EAGER_OFFLOAD_KEEP_LAST_BYTES="0")
    assert ended.returncode == 7
    assert ended.stdout.endswith("__main__ ['--fail']\n"), ended.stderr
    assert SAID in ended.stderr


@pytest.mark.long
def test_a_run_that_moves_nothing_says_why(directory: Path) -> None:
    ended = python(*RUN, "train.py", cwd=directory)
    assert ended.returncode == 0
    assert "nothing moved, because of the" in ended.stderr


@pytest.mark.long
def test_two_ranks_of_torchrun_each_offload_and_one_speaks(directory: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = python(*launcher, *RUN, *SETTINGS, "train.py", cwd=directory)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(SAID) == 1
    lines = [line for line in ended.stdout.splitlines() if line.startswith("0x")]
    assert (len(lines), len(set(lines))) == (8, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: "),
        (["--other", "train.py"], "usage: "),
        (["--settings", "min_byte=4", "train.py"], "unknown field 'min_byte'"),
        (["--settings", "min_bytes=lots", "train.py"], "min_bytes='lots' is not accepted"),
        (["--settings", "nowhere.json", "train.py"], "--settings='nowhere.json' is not accepted"),
        (["nowhere.py"], "there is no file 'nowhere.py'"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err
