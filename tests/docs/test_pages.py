"""Pages say what the code, the tests and the files of results say."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import eager_offload as eo
from eager_offload import checking
from eager_offload.__main__ import main
from eager_offload.observe.doctor import Diagnosis, SelfTest, to_text, verdict
from eager_offload.planning.machine import Machine
from tests import hazards_page
from tests.docs.pages import ROOT, blocks


def test_every_hazard_is_named_once_with_what_proves_it() -> None:
    numbers = hazards_page.ids()
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) == hazards_page.proofs().keys()
    assert hazards_page.PAGE.read_text() == hazards_page.written(), "python -m tests.hazards_page writes it anew"
    assert all((hazards_page.TESTS / file).is_file() for files in hazards_page.proofs().values() for file in files)


def test_each_wrong_gradient_in_the_wild_names_a_file_that_proves_its_hazard() -> None:
    text, proofs = (ROOT / "docs" / "wrong_gradients.md").read_text(), hazards_page.proofs()
    named = re.findall(r"^\| \[.*\| (H\d\d), `([\w/.]+)` \|$", text, re.MULTILINE)
    assert len(named) == text.count("\n| [") > 0, "each row ends in a hazard and a file"
    assert [file for number, file in named if file not in proofs[number]] == []


@pytest.mark.parametrize(
    ("file", "limit", "quoted"),
    [
        ("hooks", "offloaded, host, 64KiB: us", "that is {:.0f} microseconds for a tensor"),
        ("hooks", "followed, host, 64KiB: us", "{:.0f} in one that repeats"),
        ("hooks", "kept, parameter: us above the pair", "{:.1f} to 1.9 for one that stays"),
        ("hooks", "kept, small: us above the pair", "1.2 to {:.1f} for one that stays"),
        ("cpu_train", "offload, huge pages: time to default malloc", "both, a step took {:.2f} times that of plain"),
        ("cpu_train", "offload, huge pages: memory", "Activation memory was {:.2f} of plain training"),
    ],
)
def test_a_number_of_when_it_pays_is_that_of_the_result_file(file: str, limit: str, quoted: str) -> None:
    limits = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())["limits"]
    (measured,) = (one["measured"] for one in limits if one["what"] == limit)
    assert quoted.format(measured) in " ".join((ROOT / "docs" / "when_it_pays.md").read_text().split())


@pytest.mark.parametrize("file", ["README.md", "docs/index.md", "mkdocs.yml", "CITATION.cff"])
def test_the_version_is_the_library_s_wherever_it_stands(file: str) -> None:
    said = re.findall(r"(?:eager_offload|(?<!-)[Vv]ersion:?) (\d+\.\d+\.\d+)\b", (ROOT / file).read_text())
    assert said == [eo.__version__], file


def test_workflows_run_what_stands_in_the_makefile_and_in_ci() -> None:
    """What a host runs anyone can run, with the Pythons that the package names."""
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = re.findall(r"run: make (?:TORCH=\$\{\{ matrix\.torch \}\} )?(\S+)$", text, re.MULTILINE)
    scripts = re.findall(r"run: (\.ci/\w+)", text)
    assert {"test-full", "gpu", "stacks"} <= set(made) <= targets, "each is a target"
    assert {".ci/run", ".ci/wheel"} == set(scripts)
    assert all(os.access(ROOT / one, os.X_OK) for one in scripts)
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert f"if: matrix.torch == '{pinned[1]}'\n        run: .ci/run" in text
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert re.findall(r"python(3\.\d+)", text) == classified, "the wheel is tried on each"


def shape(text: str) -> str:
    """Returns ``text`` with ``#`` for each number and its unit, and a blank for each gap."""
    text = re.sub(r"\d[\d,.]*(?: ?(?:[KMGT]i)?B\b| (?:ms|us|s)\b)?", "#", text)
    return " ".join(text.split())


def sample(page: str, begins: str) -> list[str]:
    """Returns the lines of the output on a page that begins so."""
    (code,) = (one.code for one in blocks(ROOT / "docs" / page, "text") if one.code.startswith(begins))
    return code.splitlines()


def assert_printed(lines: list[str], printed: str) -> None:
    """Each line of a sample is one that was printed, in this order, but for numbers; ``...`` stands for any."""
    shapes = iter(map(shape, printed.splitlines()))
    for line in filter(None, map(shape, lines)):
        if line != "...":
            begins = line.removesuffix(" ...")
            assert any(one.startswith(begins) if begins != line else one == line for one in shapes), line


def test_the_plan_that_a_page_shows_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the page's model is its")
    code, *_ = (one.code for one in blocks(ROOT / "docs" / "plan.md", "python") if "def llama" in one.code)
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    for name, size in (sizes | {"num_key_value_heads": "8, num_attention_heads=8"}).items():
        code = re.sub(rf"{name}=[\d_]+", f"{name}={size}", code)
    (tmp_path / "my_model.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "my_model:llama", "--device", "h100", "--device-budget", "640MiB", "--front"]) == 0
    assert_printed(sample("plan.md", "fits in"), capsys.readouterr().out)


def test_the_longest_sequences_that_a_page_shows_are_printed() -> None:
    shown, rows = sample("plan.md", "The longest"), []
    for line in shown[2:]:
        way, length, peak, _, step, _, _, _ = line.split()
        rows.append(eo.LongestRow(way, int(length.replace(",", "")), round(float(peak) * (1 << 30)), float(step)))
    (budget,) = (float(one) for one in re.findall(r"fits in ([\d.]+) GiB on h100", shown[0]))
    card = Machine("h100", flops=6e14, single_flops=1e14, memory=1e12, out=5e10, back=5e10)
    assert str(eo.Longest(tuple(rows), round(budget * (1 << 30)), card, 128, 1 << 24)).splitlines() == shown


def test_what_the_page_shows_of_the_doctor_and_of_check_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = Machine("cpu", flops=1e11, single_flops=1e11, memory=1e10, out=5e9, back=5e9)
    tests = [SelfTest("cpu", equal=True, moved_bytes=1)]
    found = verdict({"cpu": cpu}, tests, {"tier": "disk", "disk_path": "/tmp"})
    text = to_text(Diagnosis(3, 1.0, {}, {"cpu": cpu}, None, None, [], tests, [], found))
    shown = "\n".join(sample("doctor_and_report.md", "verdict"))  # where long lines are broken
    assert shape(shown) == shape(text[text.index("verdict") :])
    run = {"seconds": 1.0, "peak_bytes": 1 << 30, "moved_bytes": 0, "again": 0, "steps": [{"the loss": "a"}]}
    runs: dict[str, dict[str, Any]] = {"with": run | {"moved_bytes": 1 << 20}}
    monkeypatch.setattr(checking, "_run", lambda name, *_: runs.get(name, run))
    assert checking.main(["mine:model"]) == 0
    assert_printed(sample("doctor_and_report.md", "equal:"), capsys.readouterr().out)


def test_a_budgets_line_in_the_stats_is_the_quoted_one() -> None:
    (quoted,) = re.findall(r"^> `(.*)`$", (ROOT / "docs" / "budget.md").read_text(), re.MULTILINE)
    sizes = [round(float(one) * (1 << 20)) for one in re.findall(r"([\d.]+) MiB", quoted)]
    fields = dict(zip(("device_budget", "device_memory_peak", "keep_last_bytes"), sizes, strict=True))
    assert quoted in " ".join(str(dataclasses.replace(eo.OffloadStats(), **fields)).split())


def test_the_error_quoted_in_the_settings_is_raised() -> None:
    (quoted,) = re.findall(r"# (tier='ssd'.*)", (ROOT / "docs" / "settings.md").read_text())
    with pytest.raises(eo.ConfigError, match=f"^{re.escape(quoted)}$"):
        eo.OffloadConfig(tier="ssd")  # type: ignore[arg-type]  # not one of the two
