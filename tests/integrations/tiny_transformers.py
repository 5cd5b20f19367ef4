"""Small models and data for the tests of Transformers' trainers, made here and downloaded nowhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import eager_offload as eo
from eager_offload.integrations.transformers import OffloadTrainerCallback, OffloadTrainerMixin
from tests.integrations.moving import fields

VOCABULARY = 64


class Tokens(Dataset[dict[str, Tensor]]):
    """Random sequences; each is what it is in every run."""

    def __init__(self, number: int = 12, length: int = 32) -> None:
        self._tokens = torch.randint(VOCABULARY, (number, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[position], "labels": self._tokens[position]}


def llama(**changes: Any) -> PreTrainedModel:
    """Two layers of width 32, the same in every run."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **(sizes | changes))
    return LlamaForCausalLM(config)


def checkpointing(**options: Any) -> dict[str, Any]:
    """Arguments that switch gradient checkpointing on, by the name that this version has for it."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": options or None}


def arguments(path: Path, **changes: Any) -> TrainingArguments:
    """Three steps of four sequences on the CPU, each logged, nothing saved."""
    return TrainingArguments(**settings(path, **changes))


def settings(path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(path / "out"),
        "use_cpu": True,
        "report_to": [],
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        **changes,
    }


class MixedTrainer(OffloadTrainerMixin, Trainer):
    pass


def offloading(
    way: str,
    path: Path,
    model: torch.nn.Module | None = None,
    callbacks: list[TrainerCallback] | None = None,
    offload: eo.Offload | None = None,
    **changes: Any,
) -> tuple[Trainer, eo.Offload]:
    """A trainer that offloads one way or the other, and what it does it with, which is not closed when it is done."""
    offload = offload or eo.Offload(**fields(path))
    given: dict[str, Any] = {"args": arguments(path, **changes), "train_dataset": Tokens(), "eval_dataset": Tokens(4)}
    options = {"log_metrics": "all"}
    if way == "mixin":
        trainer = MixedTrainer(model or llama(), **given, callbacks=callbacks, offload=offload, offload_options=options)
        return trainer, offload
    callback = OffloadTrainerCallback(offload, **options)
    return Trainer(model or llama(), **given, callbacks=[callback, *(callbacks or [])]), offload


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two models have the same parameters, bit for bit, whatever wrappers their names tell of."""
    return len(first) == len(second) > 0 and all(map(torch.equal, first.values(), second.values()))


def trained(trainer: Trainer) -> dict[str, Tensor]:
    """The parameters after training, which changed them."""
    before = parameters(trainer.model)
    trainer.train()
    after = parameters(trainer.model)
    assert not same(before, after)
    return after
