"""``python -m eager_offload run``: a script that says nothing of offloading trains to the same bits and moves bytes."""

from __future__ import annotations

import json
import re
import sys
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
entry = nn.Linear(8, 64)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh())
optimizer, calls = torch.optim.SGD([*entry.parameters(), *model.parameters()], lr=0.1), []
for module in model:
    module.register_forward_pre_hook(lambda *_: calls.append(1))
for step in range(3):
    loss = nn.MSELoss()(model(entry(torch.randn(1024, 8))), torch.zeros(1024, 64))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
model.eval()
print(model(torch.ones(1, 64)).sum().item().hex())
print(len(calls), "forwards", file=sys.stderr)
print(__name__, sys.argv[1:])
sys.exit(7 if "--fail" in sys.argv else 0)
"""
RUN = ("-m", "eager_offload", "run")
SETTINGS = ["--settings", "min_bytes=1KiB", "--settings=keep_last_bytes=0"]
SAID = "eager_offload run: peak saved-tensor memory"


HEAD = """
import hashlib, subprocess, sys, torch
from torch import nn
torch.manual_seed(0)
def wide(): return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 16))
x = torch.randn(128, 16)
"""
#: Scripts that one process runs one after the other, each with what is said of it in the end.
TOLD = {
    "gan": (
        """
class Generator(nn.Module):
    def __init__(self): super().__init__(); self.body, self.head = wide(), nn.Linear(16, 16)
    def forward(self, z): return self.head(self.body(z))
generator, critic = Generator(), wide()
for step in range(5):
    critic(generator(x)).square().mean().backward()
weights = [*generator.parameters(), *critic.parameters()]
print(hashlib.sha256(b"".join(one.grad.numpy().tobytes() for one in weights)).hexdigest())
""",
        SAID,
    ),
    "frozen": (
        "net = wide().eval()\nnet(x).sum().backward()",
        "because the modules that were called .* are in eval mode",
    ),
    "function": (
        "w = torch.ones(16, requires_grad=True)\n(x * w).exp().sum().backward()",
        "because no outermost module was called as module",
    ),
    "hooks": (
        "with torch.autograd.graph.save_on_cpu():\n    wide()(x).sum().backward()",
        "because modules were called under saved-tensor hooks of the script",
    ),
    "launcher": (
        "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 1.1: pass'])",
        "because no module was called in this process .* in processes that it starts",
    ),
    "nothing": ("raise ValueError('before a step')", None),
}
#: A program that runs each of them, one of them also plain.
EACH = """
import contextlib, runpy, sys
from eager_offload.__main__ import main
settings = [word for one in ("min_bytes=0", "keep_last_bytes=0", "tier=disk") for word in ("--settings", one)]
names = sys.argv[1:]
runpy.run_path("gan.py")
for skip in "head", "haed":
    print(main(["run", *settings, "--settings", f"skip={skip}", "gan.py"]))
for name in names:
    with contextlib.suppress(ValueError):
        main(["run", *settings, f"{name}.py"])
"""
FAILING = (
    HEAD
    + """
class Fails(nn.Module):
    def forward(self, x):
        if steps: raise ValueError("in the second step")
        return x
net, steps = nn.Sequential(wide(), nn.Sequential(Fails())), []
for _ in range(2):
    net(x).sum().backward()
    steps.append(1)
"""
)


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
    options = ("--device-budget", "2KiB", "--recompute", "--settings=min_bytes=1KiB")
    planned = python(*RUN, *options, "train.py", "--lr", "3", cwd=directory)
    assert (planned.returncode, planned.stdout) == (0, plain.stdout), planned.stderr
    assert "device_budget=2.0 KiB is too little for this model and batch by the plan" in planned.stderr
    first, then = (int(re.findall(r"(\d+) forwards", one.stderr)[0]) for one in (plain, planned))
    assert then > first, "in backward"
    assert planned.stderr.count("eager_offload: the plan said a peak of") == 1


@pytest.mark.long
def test_the_status_of_a_module_is_its_own_and_settings_come_from_files_and_the_environment(directory: Path) -> None:
    (directory / "offload.json").write_text(json.dumps({"min_bytes": "1TiB"}))
    (directory / "later.toml").write_text("min_bytes = '1KiB'\n")
    files = ("--settings", "offload.json", "--settings=later.toml")
    ended = python(*RUN, *files, "-m", "train", "--fail", cwd=directory, EAGER_OFFLOAD_KEEP_LAST_BYTES="0")
    assert ended.returncode == 7
    assert ended.stdout.endswith("__main__ ['--fail']\n"), ended.stderr
    assert SAID in ended.stderr


def test_a_pattern_matches_in_one_of_several_models_and_each_reason_is_the_true_one(tmp_path: Path) -> None:
    for name, (script, _) in TOLD.items():
        (tmp_path / f"{name}.py").write_text(HEAD + script)
    names = [name for name in TOLD if name != "gan"]
    ended = python("-c", EACH, *names, cwd=tmp_path)
    plain, first, matched, second, unmatched = ended.stdout.splitlines()
    assert plain == first == second, ended.stderr
    assert (matched, unmatched) == ("0", "2")
    assert (
        "skip='haed' is not accepted: it matches no module of any model that was called. Near names: " in ended.stderr
    )
    assert ended.stderr.count("RuntimeWarning: eager_offload: skip='haed'") == 1, "before the end"
    said = [line for line in reversed(ended.stderr.splitlines()) if line.startswith("eager_offload run: ")]
    said = [line for line in said if "skip=" not in line]
    expected = [SAID, SAID, *(text for name in names if (text := TOLD[name][1]) is not None)]
    assert len(said) == len(expected), ended.stderr
    for line, text in zip(said, expected, strict=True):
        assert re.search(text, line), line


def test_the_last_words_of_a_script_that_fails_come_before_ours(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    ended = python(*RUN, "--settings", "min_bytes=1TiB", "train.py", cwd=tmp_path)
    assert ended.returncode == 1
    error, ours = ended.stderr.splitlines()[-2:]
    assert error == "ValueError: in the second step"
    assert ours.startswith("eager_offload run: nothing moved, because of the")
    assert not re.search("eager_offload/(running|__main__).py|runpy", ended.stderr)


def test_a_module_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", "no_such_module"]) == 1
    assert capsys.readouterr().err == f"{sys.executable}: No module named no_such_module\n"


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
        (["--device-budget=lots", "--recompute", "train.py"], "device_budget='lots' is not accepted"),
        (["--recompute", "--settings", "policy=free", "train.py"], 'does not go with policy="free"'),
        (["nowhere.py"], "there is no file 'nowhere.py'"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err
