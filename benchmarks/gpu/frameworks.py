"""Training under Accelerate, Lightning and Transformers, with our integration and without: bytes move, losses stay."""

from __future__ import annotations

import gc
import itertools
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.common import GIB
from benchmarks.gpu.bits import be_deterministic
from benchmarks.gpu.results import Job
from benchmarks.gpu.train import LARGE, SMALL, SMALL_WINDOWS
from benchmarks.models import Llama, Shape

RATE, STEPS = 1e-4, 7


class Stamped(nn.Module):
    """A decoder that writes down when each forward begins, and with which loss it ends."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.llama = Llama(shape)
        self.begins: list[torch.cuda.Event] = []
        self.losses: list[Tensor] = []

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        self.begins.append(torch.cuda.Event(enable_timing=True))
        self.begins[-1].record()
        loss = self.llama(tokens)
        self.losses.append(loss.detach())
        return {"loss": loss}


@dataclass(frozen=True)
class Loop:
    """What a framework's loop trains, and where it may write; ``offload``: for the integration."""

    model: Stamped
    data: list[Tensor]
    offload: eo.Offload | None
    folder: str


def accelerate(loop: Loop) -> None:
    from accelerate import Accelerator

    from eager_offload.integrations.accelerate import OffloadPlugin

    accelerator = Accelerator(mixed_precision="bf16")
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=RATE)
    prepared, optimizer = accelerator.prepare(loop.model, optimizer)
    if loop.offload is not None:
        OffloadPlugin(loop.offload).prepare(accelerator, prepared)
    for tokens in loop.data:
        accelerator.backward(prepared(tokens.to(accelerator.device))["loss"])
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()


def lightning(loop: Loop) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from eager_offload.integrations.lightning import OffloadCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = loop.model

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            loss: Tensor = self.model(tokens)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    for name in ("lightning.pytorch", "lightning.fabric"):  # without the banners that say which accelerators there are
        logging.getLogger(name).setLevel(logging.ERROR)
    trainer = Trainer(
        devices=1,
        precision="bf16-mixed",
        max_steps=len(loop.data),
        logger=False,
        callbacks=[] if loop.offload is None else [OffloadCallback(loop.offload)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=loop.folder,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(loop.data, batch_size=None))


def transformers(loop: Loop) -> None:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from eager_offload.integrations.transformers import OffloadTrainerMixin

    class Integrated(OffloadTrainerMixin, Trainer):
        offload_config = loop.offload

    trainer = (Trainer if loop.offload is None else Integrated)(
        model=loop.model,
        args=TrainingArguments(
            output_dir=loop.folder,
            bf16=True,
            max_steps=len(loop.data),
            per_device_train_batch_size=1,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        ),
        train_dataset=[{"tokens": tokens} for tokens in loop.data],
        data_collator=lambda rows: rows[0],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def framework(job: Job, train: Callable[[Loop], None]) -> None:
    """Trains without our integration and with it. Raises SystemExit if losses differ or nothing moves."""
    be_deterministic()
    without, ours = (_measure(job, train, offload) for offload in (None, eo.Offload(**_fields(job))))
    for name, found in {"without": without, "ours": ours}.items():
        job.add(what="framework", name=f"{job.stage}, {name}", same=found["losses"] == without["losses"], **found)
    if ours["losses"] != without["losses"] or not ours["out_gib"]:
        raise SystemExit("other losses, or nothing moved")


def _fields(job: Job) -> dict[str, Any]:
    return SMALL_WINDOWS if job.small else {}


def _measure(job: Job, train: Callable[[Loop], None], offload: eo.Offload | None) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    shape = SMALL if job.small else replace(LARGE, layers=6)
    generator, length = torch.Generator().manual_seed(0), 1024 if job.small else 8192
    data = [torch.randint(shape.vocabulary, (2, length + 1), generator=generator) for _ in range(STEPS)]
    model = Stamped(shape)
    with tempfile.TemporaryDirectory() as folder:
        train(Loop(model, data, offload, folder))
    torch.cuda.synchronize()
    laps = [start.elapsed_time(stop) / 1e3 for start, stop in itertools.pairwise(model.begins)][2:]
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "step": median(laps),
        "steps": laps,
        "losses": [float(loss) for loss in model.losses],
        "out_gib": 0.0 if offload is None else offload.stats(synchronize=True).bytes_out / STEPS / GIB,
    }
