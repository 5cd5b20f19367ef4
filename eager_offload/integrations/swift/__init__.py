"""Adds ``eager_offload`` to ms-swift's callbacks.

    plugin=$(python -c "from importlib.util import find_spec as f; print(f('eager_offload.integrations.swift').origin)")
    swift sft ... --external_plugins $plugin --callbacks eager_offload

Settings come from ``EAGER_OFFLOAD_*``. ms-swift prepends the plugin's folder to ``sys.path``, so this module has a
folder of its own: next to ``trl.py`` it would hide TRL.
"""

from __future__ import annotations

from typing import Any

from eager_offload.integrations.calls import missing
from eager_offload.integrations.transformers import OffloadTrainerCallback

try:
    from swift.callbacks import callbacks_map  # type: ignore[import-not-found]  # has no types
except ImportError as error:
    raise missing("swift", error) from error

__all__ = ["OffloadCallback"]


class OffloadCallback(OffloadTrainerCallback):
    """:class:`~eager_offload.integrations.transformers.OffloadTrainerCallback` with the signature of ms-swift's."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__()


callbacks_map["eager_offload"] = OffloadCallback
