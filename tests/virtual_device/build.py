"""Builds the extension, once for each source, torch and compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

from tests.building import ROOT, built_once, key_of, no_compiler

_NAME = "eager_offload_virtual_device"
_SOURCES = Path(__file__).parent / "extension"
#: In the checkout, where ``make clean`` removes it.
_CACHE = ROOT / ".virtual_device"
_FLAGS = ("-O1", "-std=c++20", "-fopenmp", "-Wall", "-Wno-sign-compare", "-Wno-interference-size")


def reason_not_to_build() -> str | None:
    """Why the extension cannot be built on this machine; ``None`` where it can."""
    if (reason := no_compiler()) is not None:
        return reason
    if shutil.which("ninja", path=_path()) is None:
        return "ninja is not found; it comes with the extra 'test'"
    if not sys.platform.startswith("linux"):
        return "the virtual device is for Linux"
    return None


def load() -> ModuleType:
    """The extension, built if this source, torch and compiler have not been before; takes half a minute then."""
    key = key_of(_SOURCES.iterdir(), torch.__version__, *_FLAGS)
    target = built_once(_CACHE, f"{_NAME}.so", key, _build)
    spec = importlib.util.spec_from_file_location(_NAME, target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(directory: Path) -> None:
    # In another process: torch loads what it has built.
    done = subprocess.run(
        [sys.executable, "-m", "tests.virtual_device.build", str(directory)],
        cwd=ROOT,
        env={**os.environ, "PATH": _path()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the virtual device could not be built:\n{done.stdout[-8000:]}{done.stderr[-8000:]}")


def _build_here(directory: str) -> None:
    from torch.utils import cpp_extension

    cpp_extension.load(
        _NAME,
        [str(source) for source in sorted(_SOURCES.glob("*.cpp"))],
        extra_cflags=list(_FLAGS),
        extra_ldflags=["-fopenmp"],
        build_directory=directory,
    )


def _path() -> str:
    """Where programs are found: those of this environment first, which need not be activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


if __name__ == "__main__":
    _build_here(sys.argv[1])
