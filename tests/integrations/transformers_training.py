"""What the tests of Transformers' trainers train: small models and data, made here and downloaded nowhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import eager_offload as eo
from eager_offload.integrations.transformers import OffloadTrainerCallback, OffloadTrainerMixin
from tests.integrations.training import Trained, trained

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


def settings(path: Path, **changes: Any) -> dict[str, Any]:
    """Arguments for three steps of four sequences on the CPU, each logged, nothing saved."""
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
    """The mixin in front of the trainer."""


class ForMixin:
    """What a trainer with the mixin is given, by the arguments of a callback; ``offload`` is that of the last one."""

    def __init__(self, config: Any = None, **options: Any) -> None:
        own = ("log_metrics", "trace_step", "trace_path", "recompute")
        self.options = {name: options.pop(name) for name in own if name in options}
        self.config = eo.OffloadConfig.from_given(config, options) if options else config
        self.offload: eo.Offload | None = None


def trainer_of(
    path: Path,
    given: OffloadTrainerCallback | ForMixin | None = None,
    model: nn.Module | None = None,
    *,
    callbacks: Any = (),
    kind: type[Trainer] = Trainer,
    **changes: Any,
) -> Trainer:
    """A trainer that offloads in the way of ``given``."""
    options: dict[str, Any] = {"args": TrainingArguments(**settings(path, **changes)), "callbacks": [*callbacks]}
    options |= {"train_dataset": Tokens(), "eval_dataset": Tokens(4)}
    if isinstance(given, OffloadTrainerCallback):
        options["callbacks"].insert(0, given)
    elif given is not None:
        kind = MixedTrainer
        options |= {"offload": given.config, "offload_options": given.options}
    trainer = kind(model or llama(), **options)
    if isinstance(given, ForMixin):
        given.offload = trainer.offload
    return trainer


def run(trainer: Trainer) -> Trained:
    """What became of a training."""
    after = trained(trainer.model, trainer.train)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    figures = [{name: entry[name] for name in entry if name.startswith("offload/")} for entry in steps]
    losses = [entry["loss"] for entry in steps]
    return Trained(after, losses, [one for one in figures if one], trainer, trainer.model)


class WithCallback:
    """A trainer that is given a callback."""

    block = "model.layers.1"
    given: Any = OffloadTrainerCallback

    def model(self) -> nn.Module:
        return llama()

    def train(self, path: Path, given: Any, model: nn.Module | None = None, evaluates: bool = False) -> Trained:
        changes = {"eval_strategy": "steps", "eval_steps": 1} if evaluates else {}
        return run(trainer_of(path, given, model, **changes))

    def end(self, given: Any) -> None:
        given.remove()  # after training that failed


class WithMixin(WithCallback):
    """A trainer of a class with the mixin."""

    given = ForMixin

    def end(self, given: Any) -> None:
        """Nothing is left to do."""
