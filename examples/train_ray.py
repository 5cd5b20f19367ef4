"""Ray Train's ``TorchTrainer`` with offload: Ray starts the workers, and each makes an ``Offload`` of its own.

    python examples/train_ray.py
    python examples/train_ray.py --compare

Needs ``pip install 'ray[train]'``. Starts a Ray of its own on this machine. At the end ``ray.shutdown()`` stops
it, its processes are waited for, and its folder goes; the token that Ray writes to ``~/.ray`` stays. On a cluster
``ray.init("auto")`` joins the Ray that is there, which goes on.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import psutil
import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model

from lm.model import LanguageModel
from lm.ranks import Rank, parse, train_ranks


def train(rank: Rank) -> None:
    options = rank.options
    model = LanguageModel(options.layers, options.width, options.heads, options.sequence, checkpointing=False)
    parallel = prepare_model(model)  # on the worker's device, and in DistributedDataParallel
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    for batch in rank.data(seed=rank.number):
        optimizer.zero_grad()
        with rank.forward():
            loss = parallel(batch.inputs, batch.targets)
        loss.backward()
        rank.note(loss, (parameter.grad for parameter in parallel.parameters()))
        optimizer.step()


def worker(config: dict[str, Any]) -> list[str]:
    """Trains in a worker, for which Ray has made the process group."""
    return train_ranks(train, argparse.Namespace(**config))


if __name__ == "__main__":
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--workers", type=int, default=2)
    options = parse(__doc__, more)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(num_cpus=options.workers, include_dashboard=False, _temp_dir=folder)
        try:
            trainer = TorchTrainer(
                worker,
                train_loop_config=vars(options),
                scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
                run_config=ray.train.RunConfig(storage_path=folder),
            )
            print(*trainer.fit().return_value, sep="\n")
        finally:
            started = psutil.Process().children(recursive=True)
            ray.shutdown()
            psutil.wait_procs(started, timeout=30)  # they write into the folder until they have ended
