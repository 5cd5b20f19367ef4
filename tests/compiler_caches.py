"""What the tests let a compiler keep: machine code, from one run to the next; graphs for ranks alone.

A kernel's machine code is found by its whole source and says nothing of our passes. Each run has a directory of its
own, which begins with what the runs before it have compiled. What a run adds is kept only if all of its tests have
passed: one that was killed may leave half a file. Where all caches are forced off, Inductor makes the C++ compiler's
precompiled header anew for every graph, which takes five times as long as the rest.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

#: Graphs are compiled here and now, and not found where another test, or an earlier run, has left them.
NO_GRAPHS = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0",  # the sizes that earlier processes have seen
}
_DIRECTORY = "TORCHINDUCTOR_CACHE_DIR"
_NOTHING = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
#: In the checkout, where ``make clean`` removes it.
_KEPT = Path(__file__).resolve().parents[1] / ".compiled"
#: Random programs add to it in each run. A directory that has more bytes begins anew with those of the last run.
_MOST = 1 << 29
_DAY = 86400.0


def keep_no_graphs() -> None:
    """For this process and those that it starts, before torch is imported."""
    os.environ.update(NO_GRAPHS)


def environment_with_graphs() -> dict[str, str]:
    """For a process that tests what is kept, or that shares it with others."""
    return {name: value for name, value in os.environ.items() if name not in {*NO_GRAPHS, _NOTHING}}


def move_machine_code() -> Callable[[bool], None] | None:
    """Names a new directory for it, for this process and those that it starts, before torch is imported.

    Returns:
        What ends the run, told whether all tests have passed; ``None`` where the environment, or the process
        that started this one, has named a directory.
    """
    if _DIRECTORY in os.environ:
        return None
    kept = _KEPT / _what_it_depends_on()
    kept.mkdir(parents=True, exist_ok=True)
    for left in _KEPT.glob("run-*"):  # by a run that was killed
        if time.time() - left.stat().st_mtime > _DAY:
            shutil.rmtree(left, ignore_errors=True)
    os.environ[_DIRECTORY] = found = tempfile.mkdtemp(prefix="run-", dir=_KEPT)
    _link(kept, Path(found))

    def end(passed: bool) -> None:
        if passed:
            if sum(file.stat().st_size for file in kept.glob("??/*")) > _MOST:
                shutil.rmtree(kept, ignore_errors=True)
            _link(Path(found), kept)
        shutil.rmtree(found, ignore_errors=True)

    return end


def give_machine_code(directory: Path) -> dict[str, str]:
    """The environment of processes that keep their graphs in ``directory``, where they find the run's machine code."""
    if _DIRECTORY in os.environ:
        _link(Path(os.environ[_DIRECTORY]), directory)
    return {**environment_with_graphs(), _DIRECTORY: str(directory)}


def take_machine_code(directory: Path) -> None:
    """What processes have added in ``directory`` is the run's; they have to have ended well."""
    if _DIRECTORY in os.environ:
        _link(directory, Path(os.environ[_DIRECTORY]))


def _link(source: Path, target: Path) -> None:
    """Gives ``target`` the machine code of ``source`` that it lacks, each file whole or not at all."""
    for file in source.glob("??/*"):  # graphs stand in directories with longer names
        place = target / file.parent.name / file.name
        if place.exists() or not file.is_file():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        # Elsewhere first: another run may do the same at the same time.
        part = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            os.link(file, part)
        except OSError:  # another file system
            shutil.copy2(file, part)
        os.replace(part, place)


def _what_it_depends_on() -> str:
    """Of what a kernel's source and the compiler's flags do not say."""
    compiler = os.environ.get("CXX", "g++")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
        processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")][:1]
    except OSError:
        version, processor = "", [platform.processor()]
    parts = [importlib.metadata.version("torch"), platform.python_version(), version, *processor]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
