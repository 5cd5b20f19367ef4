"""The settings of an ``Offload`` that is given a computed plan: what it was made for, and what goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eager_offload.computed_plan import ComputedPlan
from eager_offload.config import OffloadConfig, OffloadFields, shown, variable_of
from eager_offload.errors import ConfigError

#: The fields that a plan has worked out where they are left to ``"auto"``, and all that it has been made for.
_WINDOWS = ("max_inflight_bytes", "prefetch_bytes")
_PLANNED = ("min_bytes", *_WINDOWS, "keep_last_bytes", "skip", "codec")


def settings_of(
    plan: ComputedPlan, config: OffloadConfig | Mapping[str, Any] | None, fields: OffloadFields
) -> OffloadConfig:
    """The settings of ``plan``, with those that a user gives beside it.

    Raises:
        ConfigError: one of them contradicts the plan.
    """
    planned = {name: getattr(plan.config, name) for name in _PLANNED}
    if not isinstance(config, OffloadConfig):  # beside which no variable is asked
        _check_variables(plan, planned)
    if config is None:
        config = plan.config
    elif isinstance(config, Mapping):
        config = OffloadConfig.from_fields(config, plan.config)
    found = OffloadConfig.from_given(config, fields)
    # A plan has worked out what the windows come to.
    auto = {name: planned[name] for name in _WINDOWS if getattr(found, name) == "auto"}
    found = OffloadConfig.from_fields(auto, found) if auto else found
    for name, value in planned.items():
        if getattr(found, name) != value:
            # A plan says itself what stays.
            other = "" if name == "keep_last_bytes" else f", or plan with config={{{name!r}: ...}}"
            raise ConfigError(
                f"{name}={found.shown(name)!r} does not go with plan=..., which was made for "
                f"{name}={plan.config.shown(name)!r}: leave it out{other}"
            )
    return found


def _check_variables(plan: ComputedPlan, planned: Mapping[str, object]) -> None:
    """Looks for variables of the environment that a plan was not made for; the rest of them it has heeded.

    Raises:
        ConfigError: there is one.
    """
    known = {
        **planned,
        "device_budget": plan.device_budget,
        "policy": plan.policy,
        "max_slowdown": 0,
        "step_plans": True,
    }
    config = OffloadConfig.from_env()
    for name, given in config.changed().items():
        if name in known and given not in ("auto", known[name]):
            raise ConfigError(
                f"{variable_of(name)}={config.shown(name)} in the environment does not go with plan=..., which was "
                f"made for {name}={shown(known[name])!r}: unset the variable, or plan anew"
            )
