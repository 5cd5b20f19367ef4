"""Moves what autograd saves for backward off the device and back just in time, bit for bit."""

from __future__ import annotations

from eager_offload.codecs.policy import CodecPolicy
from eager_offload.config import VERSION, OffloadConfig
from eager_offload.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    OffloadError,
    PlanError,
    PrecisionError,
    SavedTensorModifiedError,
    TransferError,
)
from eager_offload.machine import Machine
from eager_offload.malloc import release_freed_memory
from eager_offload.marks import keep, no_offload, prefer_offload
from eager_offload.offload import Offload
from eager_offload.plan.files import Point
from eager_offload.plan.plan import Plan
from eager_offload.plan.planner import plan
from eager_offload.stats import OffloadStats
from eager_offload.step_plan import StepPlan

__all__ = [
    "CapacityError",
    "CodecPolicy",
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
    "PrecisionError",
    "SavedTensorModifiedError",
    "StepPlan",
    "TransferError",
    "keep",
    "no_offload",
    "plan",
    "prefer_offload",
    "release_freed_memory",
]

__version__ = VERSION
