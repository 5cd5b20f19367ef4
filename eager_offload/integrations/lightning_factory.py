"""Entry point ``*.callbacks_factory``, which Lightning calls for each new ``Trainer``. Does not import Lightning."""

from __future__ import annotations

from typing import Any

from eager_offload.config import switched_on


def callbacks() -> list[Any]:
    """Returns an ``OffloadCallback`` configured by ``EAGER_OFFLOAD_*`` if ``EAGER_OFFLOAD=1``; otherwise nothing."""
    if not switched_on(False):
        return []
    from eager_offload.integrations.lightning import CallbackFromEnvironment

    return [CallbackFromEnvironment()]
