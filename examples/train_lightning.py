"""Trains a small transformer under Lightning with ``OffloadCallback``, on one device or on many.

    python examples/train_lightning.py                                  # one process
    torchrun --nproc-per-node 2 examples/train_lightning.py             # two ranks: DDP
    torchrun --nproc-per-node 2 examples/train_lightning.py --sharded   # two ranks: FSDP2, ``fully_shard``

On GPUs the same lines train on GPUs; without any they train on the CPU, where saved tensors go to disk. It prints what
was offloaded and a digest of the parameters, which is the same with ``EAGER_OFFLOAD=0``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from eager_offload.integrations.lightning import OffloadCallback


class Transformer(pl.LightningModule):
    """Learns to say what it is told."""

    def __init__(self, width: int, layers: int, sharded: bool) -> None:
        super().__init__()
        self.sharded = sharded
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def configure_model(self) -> None:
        if self.sharded:
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: Tensor, batch_idx: int) -> None:
        self.print(f"step {batch_idx + 1}: loss {outputs['loss'].item():.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def digest(model: nn.Module) -> str:
    """Of every bit of the parameters that this rank has."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        found.update(local.detach().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sharded", action="store_true", help="shard the model over the ranks (FSDP2)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--min-bytes", default="64KiB", help="a smaller saved tensor stays")
    arguments = parser.parse_args()

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.sharded:
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    else:
        strategy = "ddp" if ranks > 1 else "auto"
    pl.seed_everything(0)
    model = Transformer(arguments.width, arguments.layers, arguments.sharded)
    tokens = torch.randint(256, (8 * ranks * arguments.steps, 256))
    # Small, so that a small model has something to offload; the defaults are for large ones.
    callback = OffloadCallback(min_bytes=arguments.min_bytes, keep_last_bytes=0)
    with tempfile.TemporaryDirectory() as directory:
        trainer = pl.Trainer(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            num_nodes=max(ranks // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1),
            strategy=strategy,
            callbacks=callback,
            max_steps=arguments.steps,
            log_every_n_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=directory,
        )
        trainer.fit(model, torch.utils.data.DataLoader(tokens, batch_size=8))
    stats = callback.offload.stats(synchronize=True)
    print(f"rank {trainer.global_rank} of {trainer.world_size} on {trainer.strategy.root_device}")
    print(f"rank {trainer.global_rank}: offloaded {stats.bytes_out / 2**20:.1f} MiB, parameters {digest(model)}")


if __name__ == "__main__":
    main()
