"""Makes the table in ``docs/models.md`` anew, in about three minutes: ``python -m tests.real_models``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.real_models import table
from tests.real_models.training import CASES, measured


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.real_models", description=__doc__).parse_args()
    torch.set_num_threads(1)  # with more, sums over threads differ from run to run, with offload and without
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for case in CASES:
            lines.append(table.line(case, measured(case, Path(directory))))
            print(lines[-1], flush=True)
    table.write(lines)
    print(f"{len(lines)} lines in {table.PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
