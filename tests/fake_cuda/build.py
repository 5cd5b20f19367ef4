"""Builds the stand-in's one library, once for each source, torch and compiler; needs no torch to be imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
from pathlib import Path

from tests.building import ROOT, built_once, compiler, key_of, no_compiler

#: Under this name Triton and torch look for the driver; preloaded, it is the runtime and the libraries too.
_NAME = "libcuda.so.1"
_SOURCES = Path(__file__).parent / "runtime"
#: In the checkout, where ``make clean`` removes it.
_CACHE = ROOT / ".fake_cuda"
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", f"-Wl,-soname,{_NAME}")
#: Whose functions do nothing where the sources say nothing else.
_LIBRARIES = re.compile(r" U ((?:cublas|cusolver|nccl)\w+)")


def library() -> Path:
    """Returns the library, built if it has not been before for what it is built from; takes some seconds then.

    Raises:
        RuntimeError: this environment has no CUDA build of torch with the headers of its runtime, or no compiler.
    """
    if (reason := no_compiler()) is not None:
        raise RuntimeError(reason)
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise RuntimeError("this environment has no torch; `make fake-gpu` builds one that has")
    packages = Path(torch.origin).parents[1]
    include = packages / "nvidia" / "cu13" / "include"
    if not (include / "crt" / "host_config.h").exists():
        raise RuntimeError(f"{include} has no headers of CUDA 13; `make fake-gpu` builds an environment that has them")

    def build(directory: Path) -> None:
        nothing = directory / "nothing.cpp"
        nothing.write_text(_doing_nothing(packages / "torch" / "lib"))
        sources = [*sorted(_SOURCES.glob("*.cpp")), nothing]
        _run(compiler(), *_FLAGS, f"-I{include}", *map(str, sources), "-o", str(directory / _NAME), "-ldl")

    key = key_of(_SOURCES.iterdir(), importlib.metadata.version("torch"), str(packages), *_FLAGS)
    return built_once(_CACHE, _NAME, key, build)


def _doing_nothing(libraries: Path) -> str:
    """Returns C++ that defines all that torch asks of the libraries of products, solvers and collectives.

    Each function succeeds at once, and gives way to one of its name in the sources.
    """
    wanted: set[str] = set()
    for file in sorted(libraries.glob("libtorch_cuda*.so")):
        wanted.update(_LIBRARIES.findall(_run("nm", "-D", "--undefined-only", str(file))))
    lines = [f"__attribute__((weak)) int {name}(...) {{ return 0; }}" for name in sorted(wanted)]
    return "\n".join(['extern "C" {', *lines, "}", ""])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the stand-in could not be built:\n{done.stderr[-8000:]}")
    return done.stdout
