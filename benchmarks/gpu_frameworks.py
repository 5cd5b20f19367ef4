"""Memory and time of one decoder under three frameworks on an accelerator: ours, and what they bring themselves.

    python -m benchmarks.gpu_frameworks
    python -m benchmarks.gpu_frameworks --device cpu --quick      # does it run? The numbers mean nothing

bf16 by the framework's own mixed precision, AdamW, random tokens, one accelerator. Every row is a process of its own;
the losses of a row with ours must equal those of its base, bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import eager_offload as eo
from benchmarks.common import Report, command_line, drive, parse
from benchmarks.gpu_train import LARGE, QUICK, Point, laps, mark, measured, peak_bytes, rows_of, why
from benchmarks.models import Llama, Run, Shape
from benchmarks.peers import checkpointed, plain

#: AdamW's, in every loop.
RATE = 1e-4


class Stamped(nn.Module):
    """A decoder that writes down when each forward begins, and with which loss it ends."""

    def __init__(self, shape: Shape, run: Run) -> None:
        super().__init__()
        self.llama = Llama(shape, run)
        self.begins: list[Any] = []
        self.losses: list[Tensor] = []

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        self.begins.append(mark(tokens.device))
        loss = self.llama(tokens)
        self.losses.append(loss.detach())
        return {"loss": loss}


@dataclass(frozen=True)
class Job:
    """What a loop trains."""

    model: Stamped
    data: list[Tensor]
    device: torch.device
    #: For the integration; ``None`` without it.
    offload: eo.Offload | None
    row: Row

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"


def accelerate(job: Job, folder: str) -> None:
    """A loop of the user's own around ``Accelerator``."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import FSDPModule

    from eager_offload.integrations.accelerate import OffloadPlugin

    plugin = None
    if job.row.fsdp2 is not None:
        wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap, **job.row.fsdp2)
    accelerator = Accelerator(cpu=job.on_cpu, mixed_precision="no" if job.on_cpu else "bf16", fsdp_plugin=plugin)
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=RATE)
    prepared, optimizer = accelerator.prepare(job.model, optimizer)
    if plugin is not None and not isinstance(prepared, FSDPModule):
        raise RuntimeError(f"Accelerate did not shard the model on {job.device.type}")
    if job.offload is not None:
        OffloadPlugin(job.offload).prepare(accelerator, prepared)
    for tokens in job.data:
        accelerator.backward(prepared(tokens.to(accelerator.device))["loss"])
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()


def lightning(job: Job, folder: str) -> None:
    """``lightning.pytorch`` with automatic optimization."""
    from lightning.pytorch import LightningModule, Trainer

    from eager_offload.integrations.lightning import OffloadCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            loss: Tensor = self.model(tokens)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    for name in ("lightning.pytorch", "lightning.fabric"):  # without the banners that say which accelerators there are
        logging.getLogger(name).setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="cpu" if job.on_cpu else "auto",
        devices=1,
        precision="32-true" if job.on_cpu else "bf16-mixed",
        max_steps=len(job.data),
        logger=False,
        callbacks=[] if job.offload is None else [OffloadCallback(job.offload)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(job.data, batch_size=None))


def transformers(job: Job, folder: str) -> None:
    """``transformers.Trainer``; the integration is its mixin, and TRL's context is around the whole training step."""
    from transformers import PrinterCallback, Trainer, TrainingArguments
    from transformers.utils import logging as transformers_logging

    from eager_offload.integrations.transformers import OffloadTrainerMixin

    transformers_logging.set_verbosity_error()

    class Peer(Trainer):
        def training_step(self, *arguments: Any, **named: Any) -> Any:
            if not job.row.trl:
                return super().training_step(*arguments, **named)
            from trl.models.activation_offloading import OffloadActivations

            with OffloadActivations():
                return super().training_step(*arguments, **named)

    class Integrated(OffloadTrainerMixin, Trainer):
        offload_config = job.offload

    trainer = (Peer if job.offload is None else Integrated)(
        model=job.model,
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=job.on_cpu,
            bf16=not job.on_cpu,
            max_steps=len(job.data),
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
        train_dataset=[{"tokens": tokens} for tokens in job.data],
        data_collator=lambda rows: rows[0],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


@dataclass(frozen=True)
class Row:
    """A framework, how memory is saved in it, and the row that computes the same without."""

    loop: Callable[[Job, str], None]
    base: str = ""
    ours: bool = False
    trl: bool = False
    checkpointing: bool = False
    #: Options of Accelerate's FSDP2 plugin; ``None`` without FSDP2.
    fsdp2: dict[str, Any] | None = None


_CHECKPOINTS = {"activation_checkpointing": True}
ROWS = {
    "Accelerate": Row(accelerate),
    "Accelerate, ours": Row(accelerate, "Accelerate", ours=True),
    "Accelerate FSDP2": Row(accelerate, fsdp2={}),
    "Accelerate FSDP2, ours": Row(accelerate, "Accelerate FSDP2", ours=True, fsdp2={}),
    "Accelerate FSDP2, its checkpointing": Row(accelerate, "Accelerate FSDP2", fsdp2=_CHECKPOINTS),
    "Accelerate FSDP2, its checkpointing and offload": Row(
        accelerate, "Accelerate FSDP2", fsdp2={**_CHECKPOINTS, "activation_checkpointing_offload": True}
    ),
    "Lightning": Row(lightning),
    "Lightning, ours": Row(lightning, "Lightning", ours=True),
    "Transformers": Row(transformers),
    "Transformers, ours": Row(transformers, "Transformers", ours=True),
    "Transformers, checkpointing": Row(transformers, "Transformers", checkpointing=True),
    "Transformers, ours and checkpointing": Row(
        transformers, "Transformers, checkpointing", ours=True, checkpointing=True
    ),
    "Transformers, TRL's OffloadActivations": Row(transformers, "Transformers", trl=True),
}


def work(name: str, options: argparse.Namespace) -> Iterator[Point]:
    """Trains by the row called ``name``; the first two steps are left out of the times."""
    row, device, (sequence,) = ROWS[name], torch.device(options.device), options.sequences
    if row.fsdp2 is not None:
        _be_the_only_rank()
    torch.manual_seed(0)
    shape = QUICK if options.quick else LARGE
    model = Stamped(shape, checkpointed if row.checkpointing else plain)
    generator = torch.Generator().manual_seed(0)
    batch = options.batch, sequence + 1
    data = [torch.randint(shape.vocabulary, batch, generator=generator) for _ in range(options.steps + 3)]
    offload = eo.Offload() if row.ours else None
    before, failure = psutil.Process().memory_info().rss, None
    try:
        with tempfile.TemporaryDirectory() as folder:
            row.loop(Job(model, data, device, offload, row), folder)
    except (ImportError, RuntimeError, AssertionError, ValueError) as error:  # a framework's own, or no memory
        failure = why(error)
    stats = None if offload is None else asdict(offload.stats(synchronize=True))
    yield Point(
        name,
        sequence,
        failure,
        peak_bytes(device),
        psutil.Process().memory_info().rss - before,
        laps(model.begins)[2:],
        losses=[float(loss) for loss in model.losses],
        bytes_out=0 if stats is None else stats["bytes_out"],
        stats=stats,
    )


def _be_the_only_rank() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def run(report: Report, options: argparse.Namespace) -> tuple[object, object]:
    points = measured("gpu_frameworks", options)
    rows = rows_of(points, {name: row.base for name, row in ROWS.items()})
    for point, row in zip(points, rows, strict=True):
        if ROWS[point.variant].ours:  # it is missed where ours failed, moved nothing, or has other losses
            right = point.bytes_out > 0 and row.get("same losses", False)
            base = ROWS[point.variant].base
            report.at_least(f"{point.variant}: bytes moved, losses are those of {base}", float(right), 1)
    return points, rows


def main() -> int:
    parser = command_line(__doc__, workers=True, variants=ROWS, batch=2, steps=5)
    parser.add_argument("--device", help="in place of the accelerator; cpu only tries the plumbing, with --quick")
    parser.add_argument("--sequences", type=int, nargs=1, default=[8192], metavar="TOKENS")
    return drive("gpu_frameworks", parse(parser, sequences=[64]), run, work=work)


if __name__ == "__main__":
    sys.exit(main())
