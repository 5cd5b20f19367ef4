"""Every block of code in README and docs does what it shows.

| block | what is tested |
| --- | --- |
| ``python`` | A page's blocks run in order, in one namespace, in a process and a temporary directory of their own, as `__main__`. A hidden setup may come before (``pages.py``). No network and no accelerator is there; a GPU's lines stand behind a condition or in a ``text`` block |
| ``bash`` | Each command exists: targets in the Makefile, modules, scripts, extras. It is not run |
| ``yaml``, ``toml``, ``json`` | They parse; so do the fields of a config under a key ``offload`` or ``eager_offload`` |
| ``text`` | Nothing: output and drawings |

A fence without a language, or with another one, is refused.
"""  # noqa: E501  # rows of a table cannot be broken

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import eager_offload as eo
from tests.docs.pages import PAGES, ROOT, Block, blocks, name
from tests.processes import printed_by

pytestmark = pytest.mark.long

_LANGUAGES = {"python", "bash", "yaml", "toml", "json", "text"}
_WITH_CODE = [pytest.param(page, id=name(page)) for page in PAGES if blocks(page, "python")]
#: Started by others than us, and taken as they are.
_LAUNCHERS = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
#: What a page calls the program of its reader.
_READERS = {"train.py"}
_PLAIN = {"git", "cd", "export", "less", "cat"}

# Each page in a fork of a process that has torch already. Each block is compiled under its page and line, so that
# tracebacks and `inspect` find it there.
_RUNNER = """
import json, os, sys, types
import torch

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
    wanted = [
        item.callspec.params["page"] for item in request.session.items if "ran" in getattr(item, "fixturenames", ())
    ]
    directories = {page: tmp_path_factory.mktemp("page") for page in wanted}
    listed = []
    for page, directory in directories.items():
        (directory / "work").mkdir()
        blocks_of_page = [(str(page), block.line, block.code) for block in blocks(page, "python")]
        listed.append((str(directory / "work"), blocks_of_page))
    (pages := tmp_path_factory.mktemp("pages") / "blocks.json").write_text(json.dumps(listed))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EAGER_OFFLOAD")}
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-c", _RUNNER, str(pages)],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return directories


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in PAGES])
def test_code_fits_a_narrow_page(page: Path) -> None:
    """Without a bar to scroll beside the text. Output is as wide as it is, and what is hidden has no width."""
    shown = [block for block in blocks(page, *_LANGUAGES - {"text"}) if not block.hidden]
    assert [line for block in shown for line in block.code.splitlines() if len(line) > 72] == []


@pytest.mark.timeout(900)  # the first waits for all pages
@pytest.mark.xdist_group("pages")
@pytest.mark.parametrize("page", _WITH_CODE)
def test_python_blocks_run_in_order(page: Path, ran: dict[Path, Path]) -> None:
    assert (ran[page] / "status").read_text() == "0", (ran[page] / "output").read_text()[-6000:]


def commands(block: Block) -> list[list[str]]:
    """The words of each command, without comments, prompts, redirections and settings of variables."""
    code = block.code.replace("\\\n", " ")
    found = []
    for line in re.split(r"\n|&&|\|\||[|;]", re.sub(r"(^|\s)#[^\n]*", "", code)):
        words = shlex.split(line.removeprefix("$ "))
        while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0], re.DOTALL):
            words.pop(0)
        if words:
            found.append(words)
    return found


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def extras(requirement: str) -> set[str]:
    listed = re.search(r"\[(.*)\]", requirement)
    return {one.strip() for one in listed[1].split(",")} if listed else set()


def assert_is_there(words: list[str], written: set[str]) -> None:
    """One command; ``written`` are the files that the page speaks of elsewhere."""
    program, *rest = words
    if program == "make":
        asked = {word for word in rest if "=" not in word and not word.startswith("-")}
        assert asked <= targets(), f"no such target: {asked - targets()}"
    elif program in ("pip", "uv"):
        known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
        asked = set[str]().union(*(extras(word) for word in rest if re.match(r"(eager_offload|\.)\[", word)))
        assert asked <= known, f"no such extra: {asked - known}"
    elif program in _LAUNCHERS:
        assert importlib.util.find_spec(_LAUNCHERS[program].partition(".")[0]), f"{program} is not installed"
        assert_scripts(rest, written)
    elif program in ("python", "python3"):
        if rest[:1] == ["-m"]:
            assert importlib.util.find_spec(rest[1]), f"no such module: {rest[1]}"
        assert_scripts(rest, written)
    else:
        assert program in _PLAIN, f"it is not said what {program!r} is: add it to this test, or say `text`"


def assert_scripts(words: list[str], written: set[str]) -> None:
    """A file with a folder is one of ours; any other may be one that the page speaks of, such as ``train.py``."""
    for script in (word for word in words if word.endswith((".py", ".yaml"))):
        assert script in written | _READERS or (ROOT / script).is_file(), f"no such file: {script}"


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in PAGES])
def test_other_blocks_are_what_they_say(page: Path) -> None:
    prose = re.sub(r"^```bash.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    written = set(re.findall(r"(?<![\w/])[\w.-]+\.(?:py|yaml|yml)\b", prose))
    for block in blocks(page):
        assert block.language in _LANGUAGES, f"{block}: ```{block.language} is none of {sorted(_LANGUAGES)}"
        try:
            if block.language == "bash":
                for words in commands(block):
                    assert_is_there(words, written)
            elif block.language in ("yaml", "json", "toml"):
                read = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}[block.language]
                check_fields(read(block.code))
        except Exception as error:
            raise AssertionError(f"{block}: {error}") from error


def check_fields(parsed: Any) -> None:
    """What stands under our name in a file is accepted as a config."""
    assert parsed, "nothing in it"
    for key, value in parsed.items() if isinstance(parsed, dict) else ():
        if key in ("offload", "eager_offload") and isinstance(value, dict):
            eo.OffloadConfig.from_dict(value)
        elif isinstance(value, dict):
            check_fields(value)


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in PAGES])
def test_no_fence_and_no_setup_is_overlooked(page: Path) -> None:
    text = page.read_text()
    for block in blocks(page):
        text = text.replace(block.code, "", 1) if block.code in text else text
    fences = len(re.findall(r"^[ \t]*```", text, re.MULTILINE))
    setups = text.count("<!-- setup")
    assert (fences + 2 * setups) // 2 == len(blocks(page)), "a fence or a setup is not closed as it was opened"


def own_modules() -> list[str]:
    """The modules of this repository that some page starts with ``python -m``, each with the command that it is given
    if it has several."""
    started = {
        " ".join(words[2:4]) if words[2] == "eager_offload" and len(words) > 3 else words[2]
        for page in PAGES
        for block in blocks(page, "bash")
        for words in commands(block)
        if words[0].startswith("python") and words[1:2] == ["-m"]
    }
    return sorted(module for module in started if (ROOT / re.split("[. ]", module)[0]).is_dir())


@pytest.mark.parametrize("module", own_modules())
def test_modules_that_pages_start_tell_their_options(module: str) -> None:
    if module == "tests.real_models":
        pytest.importorskip("transformers")
    assert printed_by("-m", *module.split(), "--help").startswith("usage:"), (
        "it went to work when it was asked for its options"
    )


def test_modules_are_found_in_pages() -> None:
    assert {"eager_offload doctor", "eager_offload report"} <= set(own_modules())


def test_setups_are_hidden_and_fences_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n<!-- setup\nx = 1\n-->\n\n```python\ny = x\n```\n\n- a\n\n    ```python\n    z = y\n    ```\n\n"
        "````text\n```python\nno\n```\n````\n"
    )
    assert [(b.line, b.language, b.code) for b in blocks(page)] == [
        (4, "python", "x = 1\n"),
        (8, "python", "y = x\n"),
        (14, "python", "z = y\n"),
        (18, "text", "```python\nno\n```\n"),
    ]
