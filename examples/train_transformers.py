"""Trains a small random Llama with Transformers' Trainer on two ranks, and moves its activations away meanwhile.

    torchrun --nproc-per-node 2 examples/train_transformers.py
    EAGER_OFFLOAD=0 torchrun --nproc-per-node 2 examples/train_transformers.py        # the same without offload
    torchrun --nproc-per-node 2 examples/train_transformers.py --activation_checkpointing --max_steps 10

Without an accelerator the ranks run on the CPU and offload to a disk; with some, each rank has its own. ``python
examples/train_transformers.py`` is one rank. All of ``TrainingArguments`` are accepted. The last line has a hash of the
parameters, which is the same with offload and without.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from eager_offload.integrations.transformers import OffloadTrainerMixin

ON_CPU = not torch.accelerator.is_available()
DEFAULTS = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": ON_CPU,
    # Of several ranks. The model's device is not asked which it is, and one rank has none.
    **({"ddp_backend": "gloo"} if ON_CPU and "WORLD_SIZE" in os.environ else {}),
}
VOCABULARY, LENGTH = 512, 256


class OffloadTrainer(OffloadTrainerMixin, Trainer):
    """A Trainer of your own would have the mixin in front of it just so."""


class Tokens(Dataset[dict[str, Tensor]]):
    """Random sequences, the same in every run."""

    def __init__(self, number: int = 64) -> None:
        self._tokens = torch.randint(VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[position], "labels": self._tokens[position]}


def main(output_dir: str) -> None:
    given = [f"--{name}={value}" for name, value in {"output_dir": output_dir, **DEFAULTS}.items()]
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*given, *sys.argv[1:]])

    torch.manual_seed(0)
    width = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **width))

    # A model of this size has small tensors, and few of them: without these two all of it would stay where it is.
    offload = {"min_bytes": "64KiB", "keep_last_bytes": 0}
    trainer = OffloadTrainer(model, arguments, train_dataset=Tokens(), offload=offload)
    trainer.train()

    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    moved = trainer.offload.stats().bytes_out if trainer.offload else 0
    # One text, in one piece: the ranks write to the same terminal.
    sys.stdout.write(f"rank {arguments.process_index}: moved {moved} bytes, parameters {digest.hexdigest()[:16]}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:  # for what is not saved; --output_dir names another
        main(directory)
