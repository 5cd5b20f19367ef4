"""Lightning on many ranks: each strategy without the callback and with it, and ranks that a Trainer starts itself.

python -m tests.ranks.with_lightning DIRECTORY   # these
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import eager_offload as eo
from eager_offload.integrations.lightning import OffloadCallback
from tests.hazards.backends import hooks_are_gone
from tests.hazards.programs import assert_identical
from tests.integrations.lightning_training import Manual, Steps, loader, module_of, trainer_of
from tests.integrations.training import Trained, counted, exact, fields, parameters, watched
from tests.ranks.launch import Ranks


class Sharded(Steps):
    """Each of its layers is sharded over the ranks."""

    def configure_model(self) -> None:
        for layer in self.net.first, *self.net.blocks, self.net.last, self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def sharded() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def trains(ranks: Ranks, steps: type, strategy: Callable[[], Any], batches: int = 6, **settings: Any) -> None:
    """Three steps without and with offload; each rank has its half of the batches."""
    results = []
    offload = eo.Offload(**fields(ranks.directory))
    for callback in None, OffloadCallback(offload):
        module = module_of(steps=steps)
        seen = watched(module.net.blocks[0])
        trainer = trainer_of(ranks.directory, callback, devices=2, strategy=strategy(), **settings)
        trainer.fit(module, loader(batches))
        assert trainer.global_step == (6 if steps is Manual else 3)
        assert trainer.world_size == ranks.size
        assert len(seen) > 0
        assert set(seen) == {(True, callback is not None)}
        results.append(Trained(parameters(trainer.strategy.model)))
    exact(*results, offload)
    offload.close()


def recomputes(ranks: Ranks, steps: type, strategy: Callable[[], Any]) -> None:
    """Three steps without, and by the plan of the first batch."""
    results, calls = [], []
    callback = OffloadCallback(min_bytes=1024, device_budget=1, recompute=True)
    for given in None, callback:
        module = module_of(steps=steps)
        calls.append(counted(module.net))
        with warnings.catch_warnings(record=True):
            trainer = trainer_of(ranks.directory, given, devices=2, strategy=strategy())
            trainer.fit(module, loader(6))
        results.append(list(parameters(trainer.strategy.model).values()))
    assert_identical(*results)
    assert calls[1][True] > calls[0][True], "in backward"
    assert callback.offload.stats().plan is not None
    assert hooks_are_gone()


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    "ddp": partial(trains, steps=Steps, strategy=lambda: "ddp"),
    "ddp-accumulation": partial(trains, steps=Steps, strategy=lambda: "ddp", accumulate_grad_batches=2, batches=12),
    "ddp-manual": partial(trains, steps=Manual, strategy=lambda: DDPStrategy(find_unused_parameters=True)),
    "fully_shard": partial(trains, steps=Sharded, strategy=sharded),
    "ddp-recompute": partial(recomputes, steps=Steps, strategy=lambda: "ddp"),
    "fully_shard-recompute": partial(recomputes, steps=Sharded, strategy=sharded),
}


# -- ranks that a Trainer starts itself -----------------------------------------------------------------------------


class Spawned(Steps, pl.LightningModule):
    """A class that a pickle can name, for processes that are spawned."""


class Telling(OffloadCallback):
    """Tells in files what its ranks moved: their stats go with them."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert hooks_are_gone()
        moved = self.offload.stats(synchronize=True).bytes_out
        Path(trainer.default_root_dir, f"moved.{trainer.global_rank}").write_text(str(moved))


def started_by(strategy: str, directory: Path, callback: OffloadCallback | None) -> dict[str, Any]:
    """The parameters that two ranks of the Trainer's own have trained."""
    module = Spawned()
    trainer_of(directory, callback, devices=2, strategy=strategy).fit(module, loader(6))
    return parameters(module)


def main(directory: Path) -> None:
    """With an ``Offload`` that has trained here before and with fields. Spawned ranks import everything again."""
    signal.alarm(250)
    expected = started_by("ddp_fork", directory, None)
    own = eo.Offload(**fields(directory))
    with own:
        loss = Spawned().loss(next(iter(loader(1))))
    loss.backward()
    assert own.stats(synchronize=True).bytes_out > 0
    saved = own.stats().saved_tensors
    for strategy, given in ("ddp_fork", own), ("ddp_fork", None), ("ddp_spawn", own):
        callback = Telling(given or fields(directory))
        assert_identical(started_by(strategy, directory, callback), expected)
        for moved in [directory / f"moved.{rank}" for rank in range(2)]:
            assert int(moved.read_text()) > 0, strategy
            moved.unlink()
        assert callback.offload.stats().saved_tensors == (saved if given else 0)
    own.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
