"""What a user gives an integration, and what the environment says where nothing is given."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, TypedDict

from eager_offload import ConfigError, Offload, OffloadConfig

__all__ = ["SWITCH", "Given", "OffloadFields", "config_from", "offload_from", "switch"]

#: Switches every integration on (1) or off (0), whatever the code says of it.
SWITCH = "EAGER_OFFLOAD"
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

#: An object of the user's own, a configuration, its fields (a file's), or nothing.
Given: TypeAlias = Offload | OffloadConfig | Mapping[str, Any] | None


class OffloadFields(TypedDict, total=False):
    """The fields of :class:`~eager_offload.OffloadConfig` as keywords, for type checkers and for command lines, which
    read them off a signature."""

    tier: Literal["auto", "host", "disk"]
    min_bytes: int | str
    max_inflight_bytes: int | str
    prefetch_bytes: int | str
    keep_last_bytes: int | str
    pin_memory: bool | Literal["auto"]
    host_budget: int | str
    disk_budget: int | str
    disk_path: Sequence[str | PathLike[str]] | str | PathLike[str] | None  # a command line takes the first that fits
    verify: bool


def offload_from(given: Given, fields: Mapping[str, Any] | None = None) -> Offload:
    """The :class:`~eager_offload.Offload` that an integration works with.

    Args:
        given: an ``Offload``, taken as it is; an ``OffloadConfig``; a mapping of its fields, or ``None``: then the
            ``EAGER_OFFLOAD_*`` variables say what the mapping does not.
        fields: more fields, which come before all of that.

    Raises:
        ConfigError: for anything else, a field that does not exist, or fields beside an ``Offload``, which has its own.
    """
    config = config_from(given, fields)
    return given if isinstance(given, Offload) else Offload(config)


def config_from(given: Given, fields: Mapping[str, Any] | None = None) -> OffloadConfig:
    """The configuration of what :func:`offload_from` returns; nothing is opened for it."""
    if isinstance(given, Offload):
        if fields:
            raise ConfigError(
                f"{', '.join(fields)} beside an Offload is not accepted: it has its configuration already. Give them "
                "to Offload(...), or leave it out here"
            )
        return given.config
    if given is None or isinstance(given, Mapping):
        return OffloadConfig.from_fields({**(given or {}), **(fields or {})}, OffloadConfig.from_env())
    if isinstance(given, OffloadConfig):
        return OffloadConfig.from_fields(fields or {}, given)
    raise ConfigError(
        f"config={given!r} is not accepted: it takes an Offload, an OffloadConfig, a mapping of its fields, or None"
    )


def switch(default: bool) -> bool:
    """What ``EAGER_OFFLOAD`` in the environment says: 1 or 0, true or false, yes or no, on or off.

    Args:
        default: where it is unset or empty.

    Raises:
        ConfigError: for another text.
    """
    text = os.environ.get(SWITCH, "").strip().lower()
    if text and text not in _ON + _OFF:
        raise ConfigError(f"{SWITCH}={text!r} is not accepted: it takes {', '.join(_ON + _OFF)}")
    return text in _ON if text else default
