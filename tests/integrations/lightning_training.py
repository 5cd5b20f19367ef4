"""What the tests of Lightning train: small modules in every manner of optimization, with both packages."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from eager_offload.integrations.lightning import OffloadCallback
from tests.integrations.training import WIDTH, Model, Trained, cached_loss, trained

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
#: Settings of a Trainer that writes no file and prints nothing.
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}


class Steps:
    """A LightningModule's methods, apart from the package whose class they are for."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.net = Model(recompute)

    def loss(self, batch: Tensor, *_: Any) -> Tensor:
        return self.net(batch).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    validation_step = test_step = predict_step = loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Cached(Steps):
    """Runs its forwards again in backward."""

    def loss(self, batch: Tensor, *_: Any) -> Tensor:
        return cached_loss(self.net, batch) if self.training else super().loss(batch)


class Entered(Steps):
    """Calls a small module before its net."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Tensor, *_: Any) -> Tensor:
        return self.net(self.entry(batch)).square().mean()


class InParts(Steps):
    """Calls the parts of its net, none of which has half of the parameters."""

    def loss(self, batch: Tensor, *_: Any) -> Tensor:
        for part in (self.net.first, *self.net.blocks, self.net.last):
            batch = part(batch)
        return batch.square().mean()


class WithoutLoss(Steps):
    """Has nothing to learn from its second batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return None if batch_idx == 1 else loss


class Manual(Steps):
    """Two backwards for each batch, inside of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for part in batch.chunk(2):
            self.learn(self.optimizers(), part)

    def learn(self, optimizer: Any, part: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(self.loss(part))
        optimizer.step()


class Several(Manual):
    """Two optimizers take turns, each with a part of the parameters."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.learn(optimizer, batch)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        others = [*self.net.blocks.parameters(), *self.net.last.parameters()]
        return [torch.optim.AdamW(self.net.first.parameters(), lr=0.01), torch.optim.SGD(others, lr=0.01)]


class SecondOrder(Steps):
    """Its optimizer calls the step several times for each batch."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@functools.cache
def _module_class(package: str, steps: type) -> type:
    return type(steps.__name__, (steps, importlib.import_module(package).LightningModule), {})


def module_of(package: str = PACKAGES[0], steps: type = Steps, **options: Any) -> Any:
    """A LightningModule of ``package``, with the same parameters each time."""
    return _module_class(package, steps)(**options)


def trainer_of(path: Path, callback: Any = None, package: str = PACKAGES[0], **settings: Any) -> Any:
    """A Trainer of ``package`` for one epoch on the CPU, which logs every step."""
    plain = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    trainer = importlib.import_module(package).Trainer
    return trainer(default_root_dir=path, callbacks=callback, **(plain | QUIET | settings))


def loader(batches: int = 3) -> DataLoader:
    data = torch.randn(64 * batches, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(data, batch_size=64)


def fit(
    path: Path,
    callback: OffloadCallback | None,
    steps: type = Steps,
    *,
    package: str = PACKAGES[0],
    module: Any = None,
    options: dict[str, Any] | None = None,
    wrap: Any = lambda module: module,
    batches: int = 3,
    **settings: Any,
) -> Trained:
    """What became of fitting a module.

    Args:
        wrap: what is done with the module before, such as compiling it.
    """
    module = module or module_of(package, steps, **(options or {}))
    trainer = trainer_of(path, callback, package, **settings)
    after = trained(module, lambda: trainer.fit(wrap(module), loader(batches), loader(1)))
    figures = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("offload/")}
    return Trained(after, logged=[figures] if figures else [], owner=trainer, model=module)


class WithCallback:
    """A Trainer that has the callback."""

    block = "net.blocks.1"
    given = OffloadCallback

    def model(self) -> nn.Module:
        return module_of()

    def train(self, path: Path, callback: Any, model: nn.Module | None = None, evaluates: bool = False) -> Trained:
        return fit(path, callback, module=model, val_check_interval=1, limit_val_batches=int(evaluates))

    def end(self, callback: OffloadCallback) -> None:
        """Nothing is left to do."""
