"""Builds the environments of ``environments.toml`` that are not there yet, and runs and times the tests of each.

make stacks                                   all of them
python -m tests.stacks huggingface -k swift   one of them or more, and then arguments for pytest
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
GROUPS: dict[str, Any] = tomllib.loads((_HERE / "environments.toml").read_text())
#: That the tests of all groups may take together, on 2 quiet cores.
SECONDS = 900


def environment(name: str) -> Path:
    """Returns the interpreter of a group's environment, which is built anew where what is asked of it has changed."""
    group, folder = GROUPS[name], _ROOT / f".venv-stacks-{name}"
    python, installed = folder / "bin" / "python", folder / ".installed"
    pins = [_ROOT / "constraints.txt", _HERE / "constraints.txt"]
    wanted = "\n".join([f"{group['requirements']} {group['alone']}", *(one.read_text() for one in pins)])
    if not installed.exists() or installed.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        pip += [f"--constraint={one}" for one in pins]
        subprocess.run([*pip, "-e", ".[test]", *group["requirements"]], check=True, cwd=_ROOT)
        if group["alone"]:
            subprocess.run([*pip, "--no-deps", *group["alone"]], check=True, cwd=_ROOT)
        for tests in folder.glob("lib/python*/site-packages/tests"):  # verl's, which would hide this folder
            shutil.rmtree(tests)
        installed.write_text(wanted)
    return python


def main(arguments: list[str]) -> int:
    names = list(takewhile(GROUPS.__contains__, arguments))
    options = arguments[len(names) :]
    failed, took = 0, dict[str, float]()
    for name in names or GROUPS:
        files = [f"tests/stacks/{file}" for file in GROUPS[name]["tests"]]
        command = [environment(name), "-m", "pytest", *files, *options]
        own = {"TESTS_STACK": name, "TRITON_INTERPRET": "1"}  # Triton's kernels, Liger's for one, run on a CPU then
        start = time.monotonic()
        failed |= subprocess.run(command, cwd=_ROOT, env=os.environ | own, check=False).returncode
        took[name] = time.monotonic() - start
    total = sum(took.values())
    print(*(f"{name:12} {seconds:5.0f} s" for name, seconds in [*took.items(), ("together", total)]), sep="\n")
    if total > SECONDS:
        print(f"The tests took {total:.0f} s together; they may take {SECONDS} s. Installation is not counted.")
        failed |= 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
