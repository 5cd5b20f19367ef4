"""Trains a small network with Lightning Fabric: a plain ``with offload:`` around forward.

    python examples/train_fabric.py                           # one process
    torchrun --nproc-per-node 2 examples/train_fabric.py      # two ranks: DDP

On GPUs the same lines train on GPUs; without any they train on the CPU, where saved tensors go to disk. It prints what
was offloaded and a digest of the parameters, which is the same with ``--without``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from contextlib import nullcontext

import torch
from lightning.fabric import Fabric
from torch import nn

import eager_offload as eo


def digest(model: nn.Module) -> str:
    """Of every bit of the parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=2, help="batches of each step")
    parser.add_argument("--without", action="store_true", help="do not offload")
    arguments = parser.parse_args()

    fabric = Fabric(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy="ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "auto",
    )
    fabric.launch()
    fabric.seed_everything(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(256, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = torch.randn(512 * arguments.accumulate * arguments.steps * fabric.world_size, 256)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=512))

    # Small, so that a small model has something to offload; the defaults are for large ones.
    offload = eo.Offload(min_bytes="64KiB", keep_last_bytes=0)
    for index, batch in enumerate(loader):
        accumulating = (index + 1) % arguments.accumulate != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            with nullcontext() if arguments.without else offload:
                loss = model(batch).square().mean()
            fabric.backward(loss)
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
            fabric.print(f"step {(index + 1) // arguments.accumulate}: loss {loss.item():.6f}")

    moved = offload.stats(synchronize=True).bytes_out
    print(f"rank {fabric.global_rank} of {fabric.world_size} on {fabric.device}")
    print(f"rank {fabric.global_rank}: offloaded {moved / 2**20:.1f} MiB, parameters {digest(model)}")


if __name__ == "__main__":
    main()
