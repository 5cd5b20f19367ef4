"""Makes ``table.md`` and the table in ``docs/models.md`` anew, in three minutes: ``python -m tests.real_models``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from tests.real_models import table
from tests.real_models.training import CASES, measured

if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tests.real_models", description=__doc__).parse_args()
    torch.set_num_threads(1)  # with more, sums over threads differ from run to run, with offload and without
    with tempfile.TemporaryDirectory() as directory:
        table.write((case, measured(case, Path(directory))) for case in CASES)
