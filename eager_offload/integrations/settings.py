"""What a user gives an integration, and what the environment says where nothing is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from eager_offload import ConfigError, Offload, OffloadConfig
from eager_offload.config import FIELDS

#: An object of the user's own, a configuration, its fields (a file's), or nothing.
Given: TypeAlias = Offload | OffloadConfig | Mapping[str, Any] | None


def missing(extra: str, error: Exception) -> ImportError:
    """What is raised where the framework of ``eager_offload.integrations.<extra>`` cannot be imported."""
    return ImportError(
        f"eager_offload.integrations.{extra} needs {extra}, which cannot be imported here ({error}): "
        f"pip install 'eager_offload[{extra}]', or '.[{extra}]' in a checkout",
        name=getattr(error, "name", None),
    )


def offload_from(given: Given, fields: Mapping[str, Any] | None = None) -> Offload:
    """The :class:`~eager_offload.Offload` that an integration works with.

    Args:
        given: an ``Offload``, taken as it is; an ``OffloadConfig``; a mapping of its fields, or ``None``: then the
            ``EAGER_OFFLOAD_*`` variables say what the mapping does not.
        fields: more fields, which come before all of that; one that is ``None`` is not given.

    Raises:
        ConfigError: for anything else, a field that does not exist, or fields beside an ``Offload``, which has its own;
            ``enabled`` alone may stand there.
    """
    fields = {name: value for name, value in (fields or {}).items() if value is not None or name not in FIELDS}
    if not isinstance(given, Offload):
        made = Offload(OffloadConfig.from_given(given, fields))
        made.expect_no_use()  # training may never begin
        return made
    given.expect_no_use()
    if others := fields.keys() - {"enabled"}:
        raise ConfigError(
            f"{', '.join(sorted(others))} beside an Offload is not accepted: it has its configuration already. Give "
            "them to Offload(...), or leave it out here"
        )
    return given if fields.get("enabled", True) else Offload(given.config, **fields)
