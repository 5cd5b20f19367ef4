"""axolotl: a plugin and the fields of an ``OffloadConfig`` in its YAML.

    plugins: [eager_offload.integrations.axolotl.EagerOffloadPlugin]
    eager_offload: {device_budget: 60GiB}

``eager_offload`` may be left out or ``{}`` for the defaults and ``EAGER_OFFLOAD_*``; ``false`` offloads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, model_validator

from eager_offload import OffloadConfig
from eager_offload.integrations.calls import missing
from eager_offload.integrations.transformers import OffloadTrainerCallback

try:
    from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found]  # has no types
except ImportError as error:
    raise missing("axolotl", error) from error

__all__ = ["EagerOffloadArgs", "EagerOffloadPlugin"]


class EagerOffloadArgs(BaseModel):
    """A base of axolotl's configuration, to which it adds one field."""

    eager_offload: dict[str, Any] | bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (given := data.get("eager_offload")) is not False:
            OffloadConfig.from_given(given if isinstance(given, Mapping) else None, {})  # or an error of the field
            # axolotl takes these values of gradient_checkpointing for activation_offloading, after this validator
            if data.get("activation_offloading") or data.get("gradient_checkpointing") in ("offload", "offload_disk"):
                said = "activation_offloading beside EagerOffloadPlugin is not accepted: both use saved-tensor hooks. "
                raise ValueError(said + "Leave activation_offloading out, or set eager_offload: false")
        return data


class EagerOffloadPlugin(BasePlugin):  # type: ignore[misc]  # has no types
    """Gives axolotl's trainer an :class:`~eager_offload.integrations.transformers.OffloadTrainerCallback`."""

    callbacks: Sequence[OffloadTrainerCallback] = ()

    def get_input_args(self) -> str:
        return f"{__name__}.{EagerOffloadArgs.__name__}"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> Sequence[OffloadTrainerCallback]:
        given = dict(cfg.eager_offload) if isinstance(cfg.eager_offload, Mapping) else None
        self.callbacks = [] if cfg.eager_offload is False else [OffloadTrainerCallback(given)]
        return self.callbacks

    def post_train(self, cfg: Any, model: Any) -> None:
        for callback in self.callbacks:
            callback.remove()
