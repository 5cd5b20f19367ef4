"""The settings that an ``Offload`` takes from a plan, and their conflicts with the user's settings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from eager_offload.config import OffloadConfig, OffloadFields, shown, variable_of
from eager_offload.errors import ConfigError
from eager_offload.planning.machine import Machine
from eager_offload.stats import PlanPredictions

#: The fields that a plan sets if they are ``"auto"``, and all fields that it depends on.
_WINDOWS = ("max_inflight_bytes", "prefetch_bytes")
_PLANNED = ("min_bytes", *_WINDOWS, "keep_last_bytes", "skip", "only")


class PlanSettings(PlanPredictions):
    """The settings and predictions that an ``Offload`` takes from a plan; sizes in bytes, times in seconds."""

    config: OffloadConfig
    device_budget: int
    machine: Machine
    fraction: float

    @property
    def is_small(self) -> bool:
        raise NotImplementedError

    @property
    def moved_bytes(self) -> int:
        raise NotImplementedError


def settings_of(
    plan: PlanSettings, config: OffloadConfig | Mapping[str, Any] | None, fields: OffloadFields
) -> OffloadConfig:
    """Returns the settings of ``plan``, overridden by the user's ``config`` and ``fields``.

    Raises:
        ConfigError: a setting of the user's contradicts the plan.
    """
    planned = {name: getattr(plan.config, name) for name in _PLANNED}
    if not isinstance(config, OffloadConfig):  # an OffloadConfig overrides the environment
        known = {**planned, "device_budget": plan.device_budget, "policy": plan.policy}
        variables = OffloadConfig.from_env()
        for name, given in variables.changed().items():
            if name in known and given not in ("auto", known[name]):
                raise ConfigError(
                    f"{variable_of(name)}={variables.shown(name)} in the environment does not go with plan=..., which "
                    f"was made for {name}={shown(known[name])!r}: unset the variable, or plan again"
                )
    if config is None:
        config = plan.config
    elif isinstance(config, Mapping):
        config = OffloadConfig.from_dict(config, plan.config)
    found = OffloadConfig.from_given(config, fields)
    auto = {name: planned[name] for name in _WINDOWS if getattr(found, name) == "auto"}
    found = OffloadConfig.from_dict(auto, found) if auto else found
    for name, value in planned.items():
        if getattr(found, name) != value:
            other = "" if name == "keep_last_bytes" else f", or plan with config={{{name!r}: ...}}"
            raise ConfigError(
                f"{name}={found.shown(name)!r} does not go with plan=..., which was made for "
                f"{name}={plan.config.shown(name)!r}: leave it out{other}"
            )
    if found.device_budget is not None:
        raise ConfigError("plan=... does not go with device_budget: both decide what moves. Leave one of them out")
    if found.is_free:
        raise ConfigError('plan=... does not go with policy="free": both decide what moves. Leave one of them out')
    return OffloadConfig.from_dict(_what_stays(plan), found)


def fraction_of(plan: PlanSettings) -> float | None:
    """Returns the fraction of the movable bytes that ``plan`` offloads; ``None`` if a setting decides.

    On a CPU a budget would bound the memory of the whole process, and a plan knows only the step's. So its fraction is
    used there.
    """
    is_cpu = torch.accelerator.current_accelerator(check_available=True) is None
    return plan.fraction if is_cpu and plan.policy == "least" else None


def _what_stays(plan: PlanSettings) -> dict[str, Any]:
    """Returns the fields that decide which bytes of a step are kept.

    With a fraction, ``keep_last_bytes`` applies to steps without a table: none of their bytes are kept, or all if the
    plan moves nothing.
    """
    if plan.policy == "max":
        return {}
    if plan.policy == "free":
        return {"policy": "free"}
    if fraction_of(plan) is not None:
        return {"keep_last_bytes": 0 if plan.moved_bytes else sys.maxsize}
    return {"device_budget": plan.device_budget}
