"""What the builds of the tests' C++ share: a compiler, a key for what was built from what, and one build at a time."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def no_compiler() -> str | None:
    """Returns why C++ cannot be compiled on this machine; ``None`` where it can."""
    if shutil.which(compiler()) is None:
        return f"no C++ compiler: {compiler()} is not found; install one, or name it in CXX"
    return None


def built_once(cache: Path, name: str, key: str, build: Callable[[Path], None]) -> Path:
    """Returns the file ``name`` that ``build`` makes in the directory that it is given, once for each ``key``.

    A build that is killed leaves nothing that looks whole, and of several processes one builds.
    """
    target = cache / key / name
    if not target.exists():
        cache.mkdir(exist_ok=True)
        with _locked(cache / "lock"):
            for left in cache.glob("tmp*"):  # by a build that was killed
                shutil.rmtree(left)
            if not target.exists():
                made = cache / f"tmp-{key}"
                made.mkdir()
                build(made)
                target.parent.mkdir(exist_ok=True)
                os.replace(made / name, target)
                shutil.rmtree(made)
    return target


def key_of(sources: Iterable[Path], *more: str) -> str:
    """Returns a key that changes with the sources, the interpreter, the compiler and whatever else is given."""
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    for part in (sys.version, version, *more):
        digest.update(part.encode())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock of the system, which goes with the process that held it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
