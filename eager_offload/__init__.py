"""Moves saved tensors off the device and back just before backward needs them, bit for bit.

The import of this package imports nothing else, torch included, so that commands answer at once. The first use of one
of its names imports the library.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from eager_offload.version import VERSION

if TYPE_CHECKING:
    from eager_offload.config import OffloadConfig
    from eager_offload.core.step_table import StepTable
    from eager_offload.eager.held import HeldTensor
    from eager_offload.errors import (
        CapacityError,
        ConfigError,
        CorruptionError,
        OffloadError,
        PlanError,
        SavedTensorModifiedError,
        TransferError,
    )
    from eager_offload.marks import keep, no_offload, prefer_offload
    from eager_offload.offload import Offload
    from eager_offload.planning.figures import Point
    from eager_offload.planning.longest import Longest, LongestRow, longest
    from eager_offload.planning.machine import Machine
    from eager_offload.planning.plan import Plan
    from eager_offload.planning.planner import plan
    from eager_offload.stats import OffloadStats
    from eager_offload.tiers.host import release_freed_memory

__all__ = [
    "CapacityError",
    "ConfigError",
    "CorruptionError",
    "HeldTensor",
    "Longest",
    "LongestRow",
    "Machine",
    "Offload",
    "OffloadConfig",
    "OffloadError",
    "OffloadStats",
    "Plan",
    "PlanError",
    "Point",
    "SavedTensorModifiedError",
    "StepTable",
    "TransferError",
    "keep",
    "longest",
    "no_offload",
    "plan",
    "prefer_offload",
    "release_freed_memory",
]

__version__ = VERSION

#: The modules of the public names. `offload` comes first, because it defines the operators of compiled code.
_HOMES = (
    *("offload", "config", "errors", "planning.machine", "tiers.host", "marks", "planning.figures", "planning.plan"),
    *("planning.planner", "planning.longest", "stats", "core.step_table", "eager.held"),
)

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Imports the library when one of its names is first asked for, or one of its modules."""
        if name in __all__:
            for home in _HOMES:
                found = vars(importlib.import_module(f"{__name__}.{home}"))
                globals().update({one: found[one] for one in __all__ if one in found})
            return globals()[name]
        if not name.startswith("__") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
