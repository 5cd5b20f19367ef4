"""What the tests of Lightning train: small modules in every manner of optimization, with both packages."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import eager_offload as eo
from eager_offload._torch import top_pack_hook
from eager_offload.integrations.lightning import OffloadCallback
from tests.integrations.moving import fields

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
#: Settings of a Trainer that writes no file and prints nothing.
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}


class Blocks(nn.Module):
    """Saves tensors of some 16 KiB; its second block may be checkpointed."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        self.first, self.second, self.last = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = torch.nn.functional.dropout(torch.relu(self.first(batch)).exp(), 0.1, self.training)
        if self.recompute:
            hidden = checkpoint(self.block, hidden, use_reentrant=self.recompute == "reentrant")
        else:
            hidden = self.block(hidden)
        return self.last(hidden).square().mean()

    def block(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.second(hidden)).tanh()


class Steps:
    """A LightningModule's methods, apart from the package whose class they are for."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net = Blocks(**options)
        self.seen: list[str] = []
        self.hooked: list[str] = []

    def note(self, step: str) -> None:
        self.seen.append(step)
        if top_pack_hook() is not None:
            self.hooked.append(step)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.note("training")
        return self.net(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("validation")
        self.net(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("test")
        self.net(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.note("predict")
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class WithoutLoss(Steps):
    """Has nothing to learn from its second batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class Manual(Steps):
    """Two backwards for each batch, inside of the step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("training")
        optimizer = self.optimizers()
        for part in batch.chunk(2):
            optimizer.zero_grad()
            self.manual_backward(self.net(part))
            optimizer.step()


class Several(Manual):
    """Two optimizers take turns, each with a part of the parameters."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("training")
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch))
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]  # several
        net = self.net
        others = [*net.second.parameters(), *net.last.parameters()]
        return [torch.optim.AdamW(net.first.parameters(), lr=0.01), torch.optim.SGD(others, lr=0.01)]


class SecondOrder(Steps):
    """Its optimizer calls the step several times for each batch."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Silent(Steps):
    """Does nothing that a compiler could not trace."""

    def note(self, step: str) -> None:
        pass


@functools.cache
def _module_class(package: str, steps: type) -> type:
    return type(steps.__name__, (steps, importlib.import_module(package).LightningModule), {})


def module_of(package: str, steps: type, **options: Any) -> Any:
    """A LightningModule of ``package``, with the same parameters each time."""
    torch.manual_seed(0)
    return _module_class(package, steps)(**options)


def trainer_of(package: str, tmp_path: Path, callback: Any = None, **settings: Any) -> Any:
    """A Trainer of ``package`` for one epoch on the CPU."""
    plain = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    trainer = importlib.import_module(package).Trainer
    return trainer(default_root_dir=tmp_path, callbacks=callback, **(plain | QUIET | settings))


def loader(batches: int = 3) -> DataLoader:
    data = torch.randn(64 * batches, 32, generator=torch.Generator().manual_seed(0))
    return DataLoader(data, batch_size=64)


def small(tmp_path: Path) -> eo.Offload:
    """Moves nearly all that :class:`Blocks` saves."""
    return eo.Offload(**fields(tmp_path))


def fit(
    package: str,
    steps: type,
    tmp_path: Path,
    callback: OffloadCallback | None,
    *,
    options: dict[str, Any] | None = None,
    wrap: Any = None,
    batches: int = 3,
    **settings: Any,
) -> Any:
    """A module that has been fitted."""
    module = module_of(package, steps, **(options or {}))
    trainer = trainer_of(package, tmp_path, callback, **settings)
    trainer.fit(module if wrap is None else wrap(module), loader(batches), loader(1))
    return module


def assert_same_parameters(module: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, module.parameters(), other.parameters()))
