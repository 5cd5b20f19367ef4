"""What Lightning asks when a ``Trainer`` is made: the entry points ``*.callbacks_factory``. Imports no Lightning."""

from __future__ import annotations

from typing import Any

from eager_offload.config import switched_on


def callbacks() -> list[Any]:
    """Where ``EAGER_OFFLOAD=1`` an ``OffloadCallback`` that the ``EAGER_OFFLOAD_*`` variables configure; else none."""
    if not switched_on(False):
        return []
    from eager_offload.integrations.lightning import CallbackFromEnvironment

    return [CallbackFromEnvironment()]
