"""The same training in the loops of three frameworks: offload put in by hand, by the integration, or not at all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.llama import Config, Llama

__all__ = ["LOOPS", "Habit", "Settings", "Stamped", "batches"]

#: AdamW's, in every loop.
RATE = 1e-4


class Habit(StrEnum):
    """How offload comes into a loop."""

    NONE = "none"
    #: ``with offload:`` by hand, where the framework lets a user write it.
    BY_HAND = "by hand"
    INTEGRATION = "integration"
    #: TRL's context around the whole training step, as its ``activation_offloading=True`` puts it.
    TRL = "TRL"


class Stamped(nn.Module):
    """A decoder that writes down when each forward begins, and with which loss it ends."""

    def __init__(self, config: Config, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.llama = Llama(config) if run is None else Llama(config, run)
        self.begins: list[Any] = []
        self.losses: list[Tensor] = []

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        self.begins.append(_mark(tokens.device))
        loss = self.llama(tokens)
        self.losses.append(loss.detach())
        return {"loss": loss}

    def take(self) -> tuple[list[float], list[float]]:
        """Seconds from each forward to the next, and every loss, since the last call."""
        begins, losses = self.begins, [float(loss) for loss in self.losses]
        self.begins, self.losses = [], []
        if begins and not isinstance(begins[0], float):
            begins[-1].synchronize()
            return [first.elapsed_time(second) / 1e3 for first, second in pairwise(begins)], losses
        return [second - first for first, second in pairwise(begins)], losses


@dataclass(frozen=True)
class Settings:
    """Of one run of a loop."""

    steps: int
    device: torch.device
    #: Where a framework may write; nothing is meant to be written.
    folder: Path
    #: Of ``torch.autocast``, by the framework; ``None`` for float32.
    bf16: bool = False
    #: Options of Accelerate's FSDP2 plugin; ``None`` without it.
    fsdp2: dict[str, Any] | None = None


def batches(number: int, shape: tuple[int, int], vocabulary: int) -> list[Tensor]:
    """Random tokens, the same in each run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, shape, generator=generator) for _ in range(number)]


def accelerate(
    model: Stamped, data: list[Tensor], habit: Habit, offload: eo.Offload | None, settings: Settings
) -> None:
    """A loop of the user's own around ``Accelerator``."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import FSDPModule

    plugin = None
    if settings.fsdp2 is not None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            **settings.fsdp2,
        )
    accelerator = Accelerator(
        cpu=settings.device.type == "cpu", mixed_precision="bf16" if settings.bf16 else "no", fsdp_plugin=plugin
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    if plugin is not None and not isinstance(prepared, FSDPModule):
        raise RuntimeError(f"Accelerate did not shard the model on {settings.device.type}")
    ours = None
    if habit is Habit.INTEGRATION:
        from eager_offload.integrations.accelerate import OffloadPlugin

        assert offload is not None
        ours = OffloadPlugin(offload)
        ours.prepare(accelerator, prepared)
    for tokens in data[: settings.steps]:
        with _by_hand(habit, offload):
            loss = prepared(tokens.to(accelerator.device))["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if ours is not None:
            accelerator.log(ours.metrics())
    accelerator.free_memory()


def lightning(model: Stamped, data: list[Tensor], habit: Habit, offload: eo.Offload | None, settings: Settings) -> None:
    """``lightning.pytorch`` with automatic optimization; the integration logs after every step."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers.logger import DummyLogger

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            with _by_hand(habit, offload):
                loss: Tensor = self.model(tokens)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    callbacks = []
    if habit is Habit.INTEGRATION:
        from eager_offload.integrations.lightning import OffloadCallback

        callbacks = [OffloadCallback(offload)]
    trainer = Trainer(
        accelerator="cpu" if settings.device.type == "cpu" else "auto",
        devices=1,
        precision="bf16-mixed" if settings.bf16 else "32-true",
        max_steps=settings.steps,
        logger=DummyLogger(),
        log_every_n_steps=1,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=settings.folder,
    )
    with _quiet():
        trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=None))


def transformers(
    model: Stamped,
    data: list[Tensor],
    habit: Habit,
    offload: eo.Offload | None,
    settings: Settings,
    *,
    by_callback: bool = False,
) -> None:
    """``transformers.Trainer``, which logs after every step; the integration is its mixin, or its callback."""
    from transformers import PrinterCallback, Trainer, TrainingArguments
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()

    class Plain(Trainer):
        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            with _by_hand(habit, offload):
                return super().compute_loss(*arguments, **named)

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            with _trl() if habit is Habit.TRL else nullcontext():
                return super().training_step(*arguments, **named)

    kind: type[Trainer] = Plain
    callbacks: list[Any] = []
    if habit is Habit.INTEGRATION and by_callback:
        from eager_offload.integrations.transformers import OffloadTrainerCallback

        callbacks = [OffloadTrainerCallback(offload)]
    elif habit is Habit.INTEGRATION:
        from eager_offload.integrations.transformers import OffloadTrainerMixin

        class Integrated(OffloadTrainerMixin, Trainer):
            offload_config = offload

        kind = Integrated
    trainer = kind(
        model=model,
        args=TrainingArguments(
            output_dir=str(settings.folder),
            use_cpu=settings.device.type == "cpu",
            bf16=settings.bf16,
            max_steps=settings.steps,
            per_device_train_batch_size=1,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            max_grad_norm=0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        ),
        train_dataset=[{"tokens": tokens} for tokens in data],
        data_collator=lambda rows: rows[0],
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


LOOPS: dict[str, Callable[[Stamped, list[Tensor], Habit, eo.Offload | None, Settings], None]] = {
    "Accelerate": accelerate,
    "Lightning": lightning,
    "Transformers": transformers,
    "Transformers, callback": partial(transformers, by_callback=True),
}


def _by_hand(habit: Habit, offload: eo.Offload | None) -> AbstractContextManager[object]:
    if habit is not Habit.BY_HAND:
        return nullcontext()
    assert offload is not None
    return offload


def _trl() -> AbstractContextManager[object]:
    from trl.models.activation_offloading import OffloadActivations

    made: AbstractContextManager[object] = OffloadActivations()
    return made


def _mark(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the banners that say which accelerators there are."""
    import logging

    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
