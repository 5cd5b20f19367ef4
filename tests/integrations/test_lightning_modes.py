"""Every mode of Lightning's Trainer: the parameters of three steps are those without the callback, bit for bit."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import eager_offload as eo
from eager_offload._torch import top_pack_hook
from eager_offload.integrations.lightning import OffloadCallback

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
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


class SecondOrder(Steps):
    """Its optimizer calls the step several times for each batch."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@functools.cache
def module_class(package: str, steps: type) -> type:
    return type(steps.__name__, (steps, importlib.import_module(package).LightningModule), {})


class Silent(Steps):
    """Does nothing that a compiler could not trace."""

    def note(self, step: str) -> None:
        pass


def loader(batches: int = 3) -> DataLoader:
    data = torch.randn(64 * batches, 32, generator=torch.Generator().manual_seed(0))
    return DataLoader(data, batch_size=64)


def small(tmp_path: Path, **fields: Any) -> eo.Offload:
    return eo.Offload(min_bytes=1024, tier="disk", disk_path=tmp_path, keep_last_bytes=0, **fields)


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
    """A module that has been fitted, by a Trainer of ``package``."""
    torch.manual_seed(0)
    module = module_class(package, steps)(**(options or {}))
    settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0} | QUIET | settings
    trainer = importlib.import_module(package).Trainer(
        default_root_dir=tmp_path, callbacks=[callback] if callback else None, **settings
    )
    trainer.fit(module if wrap is None else wrap(module), loader(batches), loader(1))
    return module


def assert_same_parameters(module: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, module.parameters(), other.parameters()))


MODES: dict[str, dict[str, Any]] = {
    "automatic": {"steps": Steps},
    "manual": {"steps": Manual},
    "lbfgs": {"steps": SecondOrder},
    "accumulation": {"steps": Steps, "accumulate_grad_batches": 2, "batches": 6},
    "no loss": {"steps": WithoutLoss, "batches": 4},
    "validation": {"steps": Steps, "val_check_interval": 1, "num_sanity_val_steps": 1},
    "clipping": {"steps": Steps, "gradient_clip_val": 0.1},
    "bf16 mixed": {"steps": Steps, "precision": "bf16-mixed"},
    "bf16 true": {"steps": Steps, "precision": "bf16-true"},
    "checkpointing": {"steps": Steps, "options": {"recompute": "not reentrant"}},
    "reentrant checkpointing": {"steps": Steps, "options": {"recompute": "reentrant"}},
    "detecting anomalies": {"steps": Steps, "detect_anomaly": True},
}
#: One class serves both packages: the one that most people have runs every mode, the other one those that differ most.
BOTH = {"automatic", "manual"}
CASES = [
    pytest.param(package, mode, marks=[] if package == PACKAGES[0] or mode in BOTH else pytest.mark.long)
    for package in PACKAGES
    for mode in MODES
]


@pytest.mark.parametrize(("package", "mode"), CASES)
def test_parameters_are_the_same_bit_for_bit(package: str, mode: str, tmp_path: Path) -> None:
    expected = fit(package, tmp_path=tmp_path, callback=None, **MODES[mode])
    offload = small(tmp_path)
    fitted = fit(package, tmp_path=tmp_path, callback=OffloadCallback(offload), **MODES[mode])
    assert_same_parameters(fitted, expected)
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
    assert fitted.seen == expected.seen
    assert set(fitted.hooked) == {"training"}
    assert expected.hooked == []
    assert top_pack_hook() is None


@pytest.mark.long
def test_a_compiled_module_offloads_inside_of_its_graphs(tmp_path: Path) -> None:
    compiled = functools.partial(torch.compile, backend="aot_eager")
    expected = fit(PACKAGES[0], Silent, tmp_path, None, wrap=compiled)
    offload = small(tmp_path)
    fitted = fit(PACKAGES[0], Silent, tmp_path, OffloadCallback(offload), wrap=compiled)
    assert_same_parameters(fitted, expected)
    stats = offload.stats(synchronize=True)
    assert stats.compiled_regions > 0
    assert stats.bytes_out > 0


@pytest.mark.long
def test_inductor_and_the_compiler_backend_serve_a_trainer(tmp_path: Path) -> None:
    options = {"min_bytes": 1024, "tier": "disk", "disk_path": str(tmp_path), "keep_last_bytes": 0}
    named = functools.partial(torch.compile, backend="eager_offload", options=options)
    expected = fit(PACKAGES[0], Silent, tmp_path, None, wrap=torch.compile)
    for offload, wrap in (small(tmp_path), torch.compile), (eo.Offload.serving(**options), named):
        callback = OffloadCallback(offload) if wrap is torch.compile else None
        assert_same_parameters(fit(PACKAGES[0], Silent, tmp_path, callback, wrap=wrap), expected)
        assert offload.stats(synchronize=True).bytes_out > 0
        offload.close()
    beside = small(tmp_path)  # of the configuration that the graphs are compiled for: it serves them
    assert_same_parameters(fit(PACKAGES[0], Silent, tmp_path, OffloadCallback(beside), wrap=named), expected)
    assert beside.stats(synchronize=True).bytes_out > 0
