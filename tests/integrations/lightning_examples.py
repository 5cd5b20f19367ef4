"""Runs Lightning's examples on two ranks, with offload and without; what each rank prints is in DIRECTORY/NAME.RANK.

The ranks are forked off a process that has Lightning already, by torchrun's own agent: one import for all runs.

    python -m tests.integrations.lightning_examples DIRECTORY
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import sys
import uuid
from pathlib import Path

import lightning.pytorch  # noqa: F401  # for all ranks
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.ranks.launch import ROOT

#: What is run by which name: the arguments, and whether ``EAGER_OFFLOAD=0``.
RUNS = {
    "ddp": (["train_lightning.py"], False),
    "ddp without": (["train_lightning.py"], True),
    "sharded": (["train_lightning.py", "--sharded", "--steps=2", "--layers=2"], False),
    "sharded without": (["train_lightning.py", "--sharded", "--steps=2", "--layers=2"], True),
    "fabric": (["train_fabric.py"], False),
    "fabric without": (["train_fabric.py", "--without"], False),
}


def live(directory: Path, name: str) -> None:
    """What a rank does."""
    signal.alarm(100)
    torch.set_num_threads(1)
    (script, *arguments), off = RUNS[name]
    path = str(ROOT / "examples" / script)
    sys.argv = [path, *arguments]
    if off:
        os.environ["EAGER_OFFLOAD"] = "0"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    (directory / f"{name}.{os.environ['RANK']}").write_text(printed.getvalue())


def main() -> None:
    signal.alarm(250)
    directory = Path(sys.argv[1])
    for name in RUNS:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method="fork",
            local_addr="localhost",
        )
        elastic_launch(config, live)(directory, name)


if __name__ == "__main__":
    main()
