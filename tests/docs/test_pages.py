"""Pages say what the code, the tests and the files of results say."""

from __future__ import annotations

import json
import os
import re

import pytest

import eager_offload as eo
from tests import hazards_page
from tests.docs.pages import ROOT


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
        ("cpu_train", "offload, huge pages: time to default malloc", "both took {:.2f} of one without"),
        ("cpu_train", "offload, huge pages: memory", "at {:.2f} of the activation memory"),
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
