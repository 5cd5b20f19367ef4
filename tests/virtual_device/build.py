"""Builds the extension, once for each source, torch and compiler."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

_NAME = "eager_offload_virtual_device"
_SOURCES = Path(__file__).parent / "extension"
#: In the checkout, where ``make clean`` removes it.
_CACHE = Path(__file__).resolve().parents[2] / ".virtual_device"
_FLAGS = ("-O1", "-std=c++20", "-fopenmp", "-Wall", "-Wno-sign-compare", "-Wno-interference-size")


def reason_not_to_build() -> str | None:
    """Why the extension cannot be built on this machine; ``None`` where it can."""
    compiler = _compiler()
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler} is not found; install one, or name it in CXX"
    if shutil.which("ninja", path=_path()) is None:
        return "ninja is not found; it comes with the extra 'test'"
    if not sys.platform.startswith("linux"):
        return "the virtual device is for Linux"
    return None


def load() -> ModuleType:
    """The extension, built if this source, torch and compiler have not been before; takes half a minute then."""
    target = _CACHE / _key() / f"{_NAME}.so"
    if not target.exists():
        _CACHE.mkdir(exist_ok=True)
        with _lock(_CACHE / "lock"):
            for left in _CACHE.glob("tmp*"):  # by a build that was killed
                shutil.rmtree(left)
            if not target.exists():
                _build(target)
    spec = importlib.util.spec_from_file_location(_NAME, target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(target: Path) -> None:
    # Elsewhere first: a build that is killed leaves nothing that looks whole. In another process: torch loads what it
    # has built.
    with tempfile.TemporaryDirectory(dir=_CACHE) as directory:
        done = subprocess.run(
            [sys.executable, "-m", "tests.virtual_device.build", directory],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "PATH": _path()},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the virtual device could not be built:\n{done.stdout[-8000:]}{done.stderr[-8000:]}")
        target.parent.mkdir(exist_ok=True)
        os.replace(Path(directory) / target.name, target)


def _build_here(directory: str) -> None:
    from torch.utils import cpp_extension

    cpp_extension.load(
        _NAME,
        [str(source) for source in sorted(_SOURCES.glob("*.cpp"))],
        extra_cflags=list(_FLAGS),
        extra_ldflags=["-fopenmp"],
        build_directory=directory,
    )


def _key() -> str:
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    compiler = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    for part in (torch.__version__, sys.version, compiler, *_FLAGS):
        digest.update(part.encode())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _path() -> str:
    """Where programs are found: those of this environment first, which need not be activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process builds; a lock of the system goes with the process that held it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    _build_here(sys.argv[1])
