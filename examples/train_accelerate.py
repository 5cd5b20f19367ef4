"""Trains a small language model with Accelerate; what autograd saves moves away and back. Two processes:

    accelerate launch --config_file examples/accelerate.yaml examples/train_accelerate.py
    torchrun --nproc_per_node 2 examples/train_accelerate.py

Both run as they stand on accelerators, one for each process, and without any on the CPU; ``python
examples/train_accelerate.py`` is one process. ``EAGER_OFFLOAD=0`` in front trains without offload, to the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator
from torch.utils.data import DataLoader

from eager_offload.integrations.accelerate import OffloadPlugin

from lm.data import batches, read_text
from lm.model import LanguageModel

ON_CPU = not torch.accelerator.is_available()
LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = (4, 128, 4, 128, 4) if ON_CPU else (8, 2048, 16, 1024, 4)


def main(options: argparse.Namespace) -> None:
    """Trains, evaluates, and says what moved."""
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=2)
    # The fields of a file; OffloadPlugin(min_bytes="64KiB") is the same in code, EAGER_OFFLOAD_MIN_BYTES in the shell.
    plugin = OffloadPlugin(**yaml.safe_load(options.offload.read_text()))

    torch.manual_seed(0)
    model = LanguageModel(LAYERS, WIDTH, HEADS, SEQUENCE, checkpointing=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    micro_batches = (options.steps + 1) * accelerator.gradient_accumulation_steps * accelerator.num_processes
    windows = batches(read_text(), count=BATCH * micro_batches, batch=1, sequence=SEQUENCE, seed=0)
    loader = DataLoader([(one.inputs[0], one.targets[0]) for one in windows], batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model = plugin.prepare(accelerator, model)  # on what accelerator.prepare returned

    data, step = iter(loader), 0
    while step < options.steps:
        inputs, targets = next(data)
        with accelerator.accumulate(model):  # `, plugin.offload` too, where a loss is computed outside of the model
            loss = model(inputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            figures = {"loss": loss.item()} | plugin.metrics()
            accelerator.log(figures, step=step)
            moved = figures.get("offload/moved_mib", 0)
            accelerator.print(f"step {step}: loss {loss.item():.9f}, {moved:.1f} MiB moved")

    model.eval()
    with torch.no_grad():  # nothing moves here
        losses = [model(inputs, targets) for inputs, targets in data]
    loss = accelerator.gather(torch.stack(losses)).mean()
    digest = hashlib.sha256()
    for weight in accelerator.get_state_dict(model).values():  # of shards too, whole on the main process
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    accelerator.print(f"evaluation: loss {loss.item():.9f}; SHA-256 of the parameters {digest.hexdigest()[:12]}")
    total = accelerator.reduce(torch.tensor(plugin.offload.stats(synchronize=True).bytes_out, device=loss.device))
    accelerator.print(f"{accelerator.num_processes} processes moved {total.item() / 2**20:.1f} MiB")
    plugin.close()
    accelerator.wait_for_everyone()  # gloo's threads abort a process that ends before they are done with an exchange
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    here = Path(__file__).parent
    parser.add_argument(
        "--offload", type=Path, default=here / "accelerate_offload.yaml", help="fields of OffloadConfig"
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    main(parser.parse_args())
