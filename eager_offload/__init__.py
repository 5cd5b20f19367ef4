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
    from eager_offload.planning.files import Point
    from eager_offload.planning.machine import Machine
    from eager_offload.planning.plan import Plan
    from eager_offload.planning.planner import plan
    from eager_offload.stats import OffloadStats
    from eager_offload.tiers.host import release_freed_memory

__all__ = [
    "CapacityError",
    "ConfigError",
    "CorruptionError",
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
    "no_offload",
    "plan",
    "prefer_offload",
    "release_freed_memory",
]

__version__ = VERSION

#: The public names by module. `offload` comes first, because it defines the operators of compiled code.
_HOMES = {
    "offload": ("Offload",),
    "config": ("OffloadConfig",),
    "errors": (
        *("CapacityError", "ConfigError", "CorruptionError", "OffloadError", "PlanError"),
        *("SavedTensorModifiedError", "TransferError"),
    ),
    "planning.machine": ("Machine",),
    "tiers.host": ("release_freed_memory",),
    "marks": ("keep", "no_offload", "prefer_offload"),
    "planning.files": ("Point",),
    "planning.plan": ("Plan",),
    "planning.planner": ("plan",),
    "stats": ("OffloadStats",),
    "core.step_table": ("StepTable",),
}

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Imports the library when one of its names is first asked for, or one of its modules."""
        if name in __all__:
            for home, names in _HOMES.items():
                module = importlib.import_module(f"{__name__}.{home}")
                globals().update({one: getattr(module, one) for one in names})
            return globals()[name]
        if not name.startswith("__") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
