"""A plan as far as an ``Offload`` takes it: what it was made for, and the settings that follow from it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from eager_offload.config import OffloadConfig, OffloadFields, shown, variable_of
from eager_offload.errors import ConfigError
from eager_offload.planning.machine import Machine
from eager_offload.stats import PlanPredictions

#: The fields that a plan has worked out where they are left to ``"auto"``, and all that it has been made for.
_WINDOWS = ("max_inflight_bytes", "prefetch_bytes")
_PLANNED = ("min_bytes", *_WINDOWS, "keep_last_bytes", "skip", "only")


class PlanSettings(PlanPredictions):
    """A plan as settings of an ``Offload``, which go with its predictions; sizes in bytes, times in seconds."""

    config: OffloadConfig
    device_budget: int
    machine: Machine
    fraction: float

    @property
    def is_small(self) -> bool:
        """Whether beside parameters the step saves nothing that is as large as ``min_bytes``."""
        raise NotImplementedError

    @property
    def moved_bytes(self) -> int:
        raise NotImplementedError


def settings_of(
    plan: PlanSettings, config: OffloadConfig | Mapping[str, Any] | None, fields: OffloadFields
) -> OffloadConfig:
    """The settings of ``plan``, with those that a user gives beside it.

    Raises:
        ConfigError: one of them contradicts the plan.
    """
    planned = {name: getattr(plan.config, name) for name in _PLANNED}
    if not isinstance(config, OffloadConfig):  # beside which no variable is asked
        known = {**planned, "device_budget": plan.device_budget, "policy": plan.policy}
        variables = OffloadConfig.from_env()  # of which a plan has heeded the others
        for name, given in variables.changed().items():
            if name in known and given not in ("auto", known[name]):
                raise ConfigError(
                    f"{variable_of(name)}={variables.shown(name)} in the environment does not go with plan=..., which "
                    f"was made for {name}={shown(known[name])!r}: unset the variable, or plan anew"
                )
    if config is None:
        config = plan.config
    elif isinstance(config, Mapping):
        config = OffloadConfig.from_dict(config, plan.config)
    found = OffloadConfig.from_given(config, fields)
    # A plan has worked out what the windows come to.
    auto = {name: planned[name] for name in _WINDOWS if getattr(found, name) == "auto"}
    found = OffloadConfig.from_dict(auto, found) if auto else found
    for name, value in planned.items():
        if getattr(found, name) != value:
            # A plan says itself what stays.
            other = "" if name == "keep_last_bytes" else f", or plan with config={{{name!r}: ...}}"
            raise ConfigError(
                f"{name}={found.shown(name)!r} does not go with plan=..., which was made for "
                f"{name}={plan.config.shown(name)!r}: leave it out{other}"
            )
    if found.device_budget is not None:
        raise ConfigError("plan=... does not go with device_budget, which says what moves: leave one of them out")
    if found.is_free:
        raise ConfigError('plan=... does not go with policy="free", which says what moves: leave one of them out')
    return OffloadConfig.from_dict(_what_stays(plan), found)


def fraction_of(plan: PlanSettings) -> float | None:
    """Returns the part of each step's movable bytes that moves by ``plan``; ``None`` where a setting says it.

    On a CPU a budget would be of all that the process takes, of which a plan knows the step alone: so there it is the
    plan's part that moves.
    """
    is_cpu = torch.accelerator.current_accelerator(check_available=True) is None
    return plan.fraction if is_cpu and plan.policy == "least" else None


def _what_stays(plan: PlanSettings) -> dict[str, Any]:
    """Returns the fields that say what stays of a step, as ``plan`` has worked it out.

    Where a part of each step moves, ``keep_last_bytes`` are for steps that are not known: none of them stays, or all of
    them where nothing has to move.
    """
    if plan.policy == "max":
        return {}
    if plan.policy == "free":
        return {"policy": "free"}
    if fraction_of(plan) is not None:
        return {"keep_last_bytes": 0 if plan.moved_bytes else sys.maxsize}
    return {"device_budget": plan.device_budget}
