"""What two ranks do under Lightning: each strategy without the callback and with it.

torchrun --nproc-per-node 2 tests/integrations/lightning_ranks.py DIRECTORY   # those of torchrun's ranks
python -m tests.integrations.lightning_ranks DIRECTORY                        # those that start ranks themselves
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from eager_offload._torch import top_pack_hook
from eager_offload.integrations.lightning import OffloadCallback
from tests.integrations.lightning_training import (
    PACKAGES,
    Manual,
    Steps,
    assert_same_parameters,
    loader,
    module_of,
    small,
    trainer_of,
)
from tests.integrations.moving import fields


class Sharded(Steps):
    """Each of its layers is sharded over the ranks."""

    def configure_model(self) -> None:
        for layer in self.net.first, self.net.second, self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


STRATEGIES: dict[str, tuple[type, Any, dict[str, Any]]] = {
    "ddp": (Steps, lambda: "ddp", {}),
    "ddp, accumulation": (Steps, lambda: "ddp", {"accumulate_grad_batches": 2, "batches": 12}),
    "ddp, manual": (Manual, lambda: DDPStrategy(find_unused_parameters=True), {}),
    "fully_shard": (Sharded, lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), {}),
}


def local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().clone()


def fitted(name: str, directory: Path, callback: OffloadCallback | None) -> list[Tensor]:
    """This rank's part of the parameters after three steps."""
    steps, strategy, settings = STRATEGIES[name]
    batches = settings.get("batches", 6)
    settings = {key: value for key, value in settings.items() if key != "batches"}
    module = module_of(PACKAGES[0], steps)
    trainer = trainer_of(PACKAGES[0], directory, callback, devices=2, strategy=strategy(), **settings)
    trainer.fit(module, loader(batches))
    assert trainer.global_step == (6 if steps is Manual else 3)
    assert trainer.world_size == 2
    assert module.hooked == (module.seen if callback else [])
    assert top_pack_hook() is None
    return [local(parameter) for parameter in trainer.strategy.model.parameters()]


class Spawned(Steps, pl.LightningModule):
    """A class that a pickle can name, for processes that are spawned."""


class Telling(OffloadCallback):
    """Tells in files what its ranks moved: their stats go with them."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        moved = self.offload.stats(synchronize=True).bytes_out
        assert top_pack_hook() is None
        assert pl_module.hooked == pl_module.seen == ["training"] * 3
        Path(trainer.default_root_dir, f"moved.{trainer.global_rank}").write_text(str(moved))


#: Spawned ranks import everything again, so there are few of those.
STARTED = [("ddp_fork", "own"), ("ddp_fork", "fields"), ("ddp_spawn", "own")]


def ranks_are_started(directory: Path) -> None:
    """Ranks that a Trainer starts itself, with an ``Offload`` that has trained here before and with fields."""
    expected = started_by("ddp_fork", directory, None)
    assert not torch.equal(expected.net.first.weight, fresh().net.first.weight)
    own = small(directory)
    with own:
        loss = fresh().net(next(iter(loader(1))))
    loss.backward()
    saved = own.stats().saved_tensors
    assert own.stats(synchronize=True).bytes_out > 0
    for strategy, given in STARTED:
        callback = Telling(own if given == "own" else fields(directory))
        assert_same_parameters(started_by(strategy, directory, callback), expected)
        for moved in [directory / f"moved.{rank}" for rank in range(2)]:
            assert int(moved.read_text()) > 0, (strategy, given)
            moved.unlink()
        assert callback.offload.stats().saved_tensors == (saved if given == "own" else 0)
        (directory / f"{strategy}.{given}").touch()
    own.close()


def fresh() -> Spawned:
    torch.manual_seed(0)
    return Spawned()


def started_by(strategy: str, directory: Path, callback: OffloadCallback | None) -> Spawned:
    """A module that two ranks of the Trainer's own have trained."""
    module = fresh()
    trainer_of(PACKAGES[0], directory, callback, devices=2, strategy=strategy).fit(module, loader(6))
    return module


def main() -> None:
    signal.alarm(250)
    directory = Path(sys.argv[1])
    if "RANK" not in os.environ:
        ranks_are_started(directory)
        return
    for name in STRATEGIES:
        expected = fitted(name, directory, None)
        assert any(parameter.numel() for parameter in expected)
        with_disk = small(directory)
        assert all(map(torch.equal, fitted(name, directory, OffloadCallback(with_disk)), expected)), name
        stats = with_disk.stats(synchronize=True)
        assert stats.bytes_out > 0, name
        assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
        with_disk.close()
        (directory / f"{name}.{os.environ['RANK']}").touch()


if __name__ == "__main__":
    main()
