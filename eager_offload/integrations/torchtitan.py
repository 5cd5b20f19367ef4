"""A torchtitan trainer with a field ``offload`` in its config. Add to your config registry

    def my_llama3_8b():
        return OffloadTrainer.Config.of(llama3_8b())

and train with ``--config my_llama3_8b --offload.device_budget 60GiB --training.disable_cuda_graphs``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from eager_offload import ConfigError, Offload, OffloadConfig
from eager_offload.integrations.calls import missing
from eager_offload.integrations.metrics import summarize

try:
    from torchtitan.trainer import Trainer  # type: ignore[import-not-found]  # not among the development requirements
except ImportError as error:
    raise missing("torchtitan", error) from error

__all__ = ["OffloadTrainer"]


class OffloadTrainer(Trainer):  # type: ignore[misc]  # Trainer is Any if torchtitan is not installed
    """Offloads tensors saved in training, also in pipelines, but not in validation. Refuses CUDA graphs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]  # likewise
        offload: OffloadConfig = field(default_factory=OffloadConfig.from_env)

        @classmethod
        def of(cls, config: Any) -> OffloadTrainer.Config:
            """Returns a copy of ``config``, a ``Trainer.Config``, with the additional field ``offload``."""
            return cls(**{one.name: getattr(config, one.name) for one in fields(config) if one.init})

    def __init__(self, config: Config) -> None:
        if config.offload.enabled and not config.training.disable_cuda_graphs:
            said = "training.disable_cuda_graphs=False is not accepted: a captured graph of forward and backward "
            raise ConfigError(said + "replays without the offloading. Give --training.disable_cuda_graphs")
        super().__init__(config)
        self.offload, inner = Offload(config.offload), vars(self)["train_context"]

        @contextmanager
        def train_context() -> Iterator[None]:
            with inner(), self.offload:
                yield

        self.train_context = train_context  # the validator already holds the original context

    def close(self) -> None:
        try:
            super().close()
        finally:
            summarize(self.offload)
            self.offload.close()
