"""Runs a program of this environment's Python over the stand-in, from the root of the checkout."""

from __future__ import annotations

import os
import sys

from tests.building import ROOT
from tests.fake_cuda import BIG, LIBRARY
from tests.fake_cuda.build import library


def main() -> None:
    arguments = sys.argv[1:]
    big = arguments[:1] == ["--big"]
    if arguments[big:] in ([], ["--help"]):
        sys.exit("python -m tests.fake_cuda [--big] program.py | -m module | -c code")
    try:
        found = library()
    except RuntimeError as error:
        sys.exit(f"python -m tests.fake_cuda: {error}")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        LIBRARY: str(found),
        "LD_PRELOAD": str(found),
        # Where others look for the driver, to load it and to link with it.
        "LD_LIBRARY_PATH": str(found.parent),
        "TRITON_LIBCUDA_PATH": str(found.parent),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
    }
    os.execve(sys.executable, [sys.executable, *arguments[big:]], os.environ | environment | (BIG if big else {}))


if __name__ == "__main__":
    main()
