"""Three steps of a model in one of the ways in which people train, and what an ``Offload`` did with what they saved."""

from __future__ import annotations

import gc
import itertools
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import peft
import torch
from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

from eager_offload import Offload, OffloadStats
from eager_offload.integrations.transformers import OffloadTrainerMixin
from tests.hazards.backends import assert_settled
from tests.hazards.programs import assert_identical
from tests.real_models.models import ARCHITECTURES, SEQUENCES, Architecture, Batch, padded_words

Around: TypeAlias = AbstractContextManager[Any]

STEPS = 3
#: A 16th of a hidden state, as the default, 1 MiB, is of one of 2,048 tokens at a width of 4,096 in bfloat16.
MIN_BYTES = "16KiB"


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    name: str
    #: Fields of the model's configuration.
    config: dict[str, Any] = field(default_factory=dict)
    #: Whether its checkpoints are reentrant; ``None`` for no checkpoints.
    reentrant: bool | None = None
    adapts: bool = False
    autocast: bool = False
    padded: bool = False
    #: Whether the loop has a name for all that the model returned while backward runs.
    holds: bool = False
    #: Whether Transformers' ``Trainer`` has the loop.
    trainer: bool = False


PLAIN = Variant("plain")
CHECKPOINTING = Variant("checkpointing", reentrant=False)
REENTRANT = Variant("checkpointing, reentrant", reentrant=True)
LORA = Variant("LoRA", adapts=True)
LORA_CHECKPOINTING = Variant("LoRA, checkpointing", adapts=True, reentrant=False)
WRITTEN_OUT = Variant('attn_implementation="eager"', {"attn_implementation": "eager"})
BFLOAT16 = Variant("bfloat16 autocast", autocast=True)
PADDED = Variant("padded batch", padded=True)
HELD = Variant("outputs held", holds=True)
HELD_WITHOUT_CACHE = Variant("outputs held, use_cache=False", {"use_cache": False}, holds=True)
TRAINER = Variant("Trainer", trainer=True)
TRAINER_CHECKPOINTING = Variant("Trainer, checkpointing", reentrant=False, trainer=True)


class Case(NamedTuple):
    """One line of the table."""

    architecture: Architecture
    variant: Variant

    def __str__(self) -> str:
        return f"{self.architecture.name}: {self.variant.name}".replace(" ", "_")


_EVERY = (PLAIN, CHECKPOINTING, LORA)
_MORE = {
    "Llama": (REENTRANT, LORA_CHECKPOINTING, WRITTEN_OUT, BFLOAT16, PADDED, HELD, HELD_WITHOUT_CACHE, TRAINER),
    "Qwen3-MoE": (BFLOAT16,),
    "Gemma 3": (PADDED,),
    "GPT-2": (HELD, HELD_WITHOUT_CACHE, TRAINER_CHECKPOINTING),
    "T5": (REENTRANT,),
    "ViT": (TRAINER,),
    "Whisper": (WRITTEN_OUT, HELD, HELD_WITHOUT_CACHE),
}
CASES = [
    Case(architecture, variant)
    for name, architecture in ARCHITECTURES.items()
    for variant in (*_EVERY, *_MORE.get(name, ()))
]


class Settled(Offload):
    """Waits at exit until everything has left: whatever backward needs has to be brought back, in every run alike."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stats(synchronize=True)


class OffloadTrainer(OffloadTrainerMixin, Trainer):
    """A trainer that offloads."""


def measured(case: Case, directory: Path) -> OffloadStats:
    """What an ``Offload`` did in three steps.

    Asserts that it agrees with a run without it in every bit of losses and parameters, that bytes moved and came back,
    and that nothing is held at the end.
    """
    expected = trained(case, nullcontext())
    offload = Settled(tier="disk", disk_path=str(directory), min_bytes=MIN_BYTES, keep_last_bytes=0)
    try:
        try:
            assert_identical(expected, trained(case, offload), str(case))
        except AssertionError:  # is it we who change bits?
            assert_identical(expected, trained(case, nullcontext()), f"{case}, twice without offload")
            raise
        gc.collect()  # the trainer and the adapters are in cycles, and hold the last loss
        stats = assert_settled(offload)
    finally:
        offload.close()
    assert stats.bytes_out > 0, "nothing left"
    assert stats.bytes_in > 0, "nothing came back"
    assert stats.demotions == {}
    assert stats.foreign_hooks == stats.empty_forwards == 0
    return stats


def trained(case: Case, around: Around) -> list[Tensor]:
    """Three steps of AdamW; returns the losses and the parameters."""
    torch.manual_seed(0)
    model = _model(case)
    train = _trained_by_trainer if case.variant.trainer else _trained_by_loop
    return [*train(case, model, around), *(parameter.detach() for parameter in model.parameters())]


def _model(case: Case) -> PreTrainedModel:
    variant = case.variant
    model = case.architecture.build(**variant.config)
    if variant.adapts:
        adapters = peft.LoraConfig(r=8, target_modules=list(case.architecture.adapted))
        if variant.reentrant is not None:
            model.enable_input_require_grads()
        model = peft.get_peft_model(model, adapters)
    if variant.reentrant is not None and not variant.trainer:
        model.gradient_checkpointing_enable({"use_reentrant": variant.reentrant})
    return model.train()


def _batch(case: Case) -> Batch:
    return padded_words() if case.variant.padded else case.architecture.batch()


def _trained_by_loop(case: Case, model: PreTrainedModel, around: Around) -> list[Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(STEPS):
        batch = _batch(case)
        with around, torch.autocast("cpu", torch.bfloat16, enabled=case.variant.autocast):
            outputs = model(**batch)
        loss = outputs.loss
        if not case.variant.holds:
            del outputs, batch
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        outputs = batch = loss = None
    return losses


def _trained_by_trainer(case: Case, model: PreTrainedModel, around: Around) -> list[Tensor]:
    samples = list(itertools.chain.from_iterable(map(_samples, (_batch(case) for _ in range(STEPS)))))
    with tempfile.TemporaryDirectory() as directory:
        trainer = OffloadTrainer(
            model,
            TrainingArguments(
                directory,
                max_steps=STEPS,
                per_device_train_batch_size=SEQUENCES,
                use_cpu=True,
                gradient_checkpointing=case.variant.reentrant is not None,
                gradient_checkpointing_kwargs={"use_reentrant": case.variant.reentrant},
                logging_steps=1,
                disable_tqdm=True,
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=samples,
            offload=around if isinstance(around, Offload) else False,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def _samples(batch: Batch) -> list[Batch]:
    return [{name: value[index] for name, value in batch.items()} for index in range(SEQUENCES)]
