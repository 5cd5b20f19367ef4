"""What two ranks do under Lightning: each strategy without the callback and with it.

torchrun --nproc-per-node 2 tests/integrations/lightning_ranks.py DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from eager_offload._torch import top_pack_hook
from eager_offload.integrations.lightning import OffloadCallback
from tests.integrations.lightning_training import PACKAGES, Manual, Steps, loader, module_of, small, trainer_of


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


def main() -> None:
    signal.alarm(250)
    directory, rank = Path(sys.argv[1]), os.environ["RANK"]
    for name in STRATEGIES:
        expected = fitted(name, directory, None)
        assert any(parameter.numel() for parameter in expected)
        with_disk = small(directory)
        assert all(map(torch.equal, fitted(name, directory, OffloadCallback(with_disk)), expected)), name
        stats = with_disk.stats(synchronize=True)
        assert stats.bytes_out > 0, name
        assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
        with_disk.close()
        (directory / f"{name}.{rank}").touch()


if __name__ == "__main__":
    main()
