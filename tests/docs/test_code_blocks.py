"""Every block of code in README and docs does what it shows.

| block | what is tested |
| --- | --- |
| ``python`` | A page's blocks run in order, in one namespace, in a process and a temporary directory of their own, as `__main__`. A hidden setup may come before (``pages.py``). No network and no accelerator is there; a GPU's lines stand behind a condition or in a ``text`` block |
| ``bash`` | What it starts exists: targets in the Makefile, modules, scripts, extras. It is not run |
| ``yaml``, ``toml``, ``json`` | They parse; so do the fields of a config under a key ``offload`` or ``eager_offload`` |
| ``text`` | Output and drawings. A report of the stats has the lines of the one that the page prints |

A fence without a language, or with another one, is refused.
"""  # noqa: E501  # rows of a table cannot be broken

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import eager_offload as eo
from tests.docs.pages import PAGES, ROOT, blocks, name, prose
from tests.processes import printed_by, python

pytestmark = pytest.mark.long

_READ: dict[str, Callable[[str], Any]] = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}
#: What a page calls the program of its reader.
_READERS = {"train.py"}

# Each page in a fork of a process that has imported torch's compiler and the frameworks, which takes most of the time.
# Each block is compiled under its page and line, so that tracebacks and `inspect` find it there.
_RUNNER = """
import contextlib, gc, importlib, json, os, sys, types

for name in ("_inductor.compile_fx", "_dynamo"):
    importlib.import_module(f"torch.{name}")
for name in ("accelerate", "lightning", "transformers.trainer", "trl.trainer.sft_trainer"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.collect()
gc.freeze()  # or each fork would copy what its collector looks through
for directory, blocks in json.load(open(sys.argv[1])):
    if os.fork() == 0:
        break
    with open(f"{directory}/../status", "w") as status:
        status.write(str(os.waitstatus_to_exitcode(os.wait()[1])))
else:
    sys.exit()
os.chdir(directory)
output = os.open("../output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
os.dup2(output, 1)
os.dup2(output, 2)
page = sys.modules["__main__"] = types.ModuleType("__main__")
for file, line, code in blocks:
    exec(compile("\\n" * (line - 1) + code, file, "exec"), page.__dict__)
"""


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """Runs the blocks of the pages that are to be tested; the directory of each has its output and its status."""
    tests = [item for item in request.session.items if "ran" in getattr(item, "fixturenames", ())]
    directories = {item.callspec.params["page"]: tmp_path_factory.mktemp("page") for item in tests}
    listed = []
    for page, directory in directories.items():
        (directory / "work").mkdir()
        code = [(str(page), block.line, block.code) for block in blocks(page, "python")]
        listed.append((str(directory / "work"), code))
    (file := tmp_path_factory.mktemp("pages") / "blocks.json").write_text(json.dumps(listed))
    ended = python("-c", _RUNNER, file, seconds=800, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return directories


@pytest.mark.timeout(900)  # the first waits for all pages
@pytest.mark.xdist_group("pages")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks_run_in_order(page: Path, ran: dict[Path, Path]) -> None:
    output = (ran[page] / "output").read_text()
    assert (ran[page] / "status").read_text() == "0", output[-6000:]
    shown = "".join(code for _, _, code in blocks(page, "text") if code.startswith("peak saved-tensor memory"))
    # A report that a page shows is the one that it prints: each line's name, and the bytes that no machine changes.
    for line in re.findall(r"^(saved .*|[a-z]+ )", shown, re.MULTILINE):
        assert f"\n{line}" in f"\n{output}", f"{name(page)} does not print {line!r}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_other_blocks_are_what_they_say(page: Path) -> None:
    assert "```" not in prose(page), "a fence is not closed as it was opened"
    assert "<!-- setup" not in prose(page), "a setup is not closed as it was opened"
    for line, language, code in blocks(page):
        try:
            if language == "bash":
                assert_is_there(code, page)
            elif language in _READ:
                check_fields(_READ[language](code))
            else:
                assert language in ("python", "text")
        except Exception as error:
            raise AssertionError(f"{name(page)}:{line}: {error}") from error


def assert_is_there(code: str, page: Path) -> None:
    """What a bash block starts: targets of the Makefile, extras, modules and files."""
    code = re.sub(r"(^|\s)#[^\n]*", "", code)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"\bmake ([a-z-]+)", code)} <= {*targets}
    extras = ",".join(re.findall(r"(?:eager_offload|\.)\[(.*?)\]", code))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*filter(None, extras.split(","))} <= known.keys()
    assert [one for one in re.findall(r"python3? -m ([\w.]+)", code) if not importlib.util.find_spec(one)] == []
    # A file without a folder may be one that the page speaks of.
    files = {*re.findall(r"(?<![\w/])[\w./-]+\.(?:py|yaml)\b", code)} - _READERS
    mentioned = re.findall(r"(?<![\w/])[\w.-]+\.(?:py|yaml)\b", prose(page))
    assert [file for file in files if file not in mentioned and not (ROOT / file).is_file()] == []


def check_fields(parsed: Any) -> None:
    """What stands under our name in a file is accepted as a config."""
    assert parsed, "nothing in it"
    for key, value in parsed.items() if isinstance(parsed, dict) else ():
        if key in ("offload", "eager_offload") and isinstance(value, dict):
            eo.OffloadConfig.from_dict(value)
        elif isinstance(value, dict):
            check_fields(value)


@pytest.mark.timeout(300)
def test_the_cells_of_the_notebook_run_in_order_and_it_holds_no_outputs(tmp_path: Path) -> None:
    """On a CPU its model is small; its losses are those without offload, and bytes move."""
    pytest.importorskip("matplotlib", reason="the demo's extra is not installed")
    notebook = json.loads((ROOT / "examples" / "offload_on_a_gpu.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * len(cells)
    (script := tmp_path / "cells.py").write_text("\n".join("".join(cell["source"]) for cell in cells))
    printed = printed_by(script, cwd=tmp_path, MPLBACKEND="Agg", OMP_NUM_THREADS="1")
    assert "the same losses: True" in printed
    assert re.search(r"^moved out +[1-9]", printed, re.MULTILINE), printed
