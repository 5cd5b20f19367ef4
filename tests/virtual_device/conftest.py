"""What stands in ``on_device`` runs in processes of its own; see ``test_on_virtual_device.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eager_offload import Offload

collect_ignore = [] if "tests.virtual_device.plugin" in sys.modules else ["on_device"]


@pytest.fixture
def offloads() -> Iterator[Callable[..., Offload]]:
    """Makes an ``Offload`` that moves everything that can move, all at once, unless told otherwise; all are closed at
    the end."""
    made: list[Offload] = []
    everything = {"tier": "host", "min_bytes": 0, "keep_last_bytes": 0}
    windows = {"max_inflight_bytes": "256MiB", "prefetch_bytes": "256MiB"}  # which no test fills

    def make(**fields: Any) -> Offload:
        made.append(Offload(**everything | windows | fields))
        return made[-1]

    yield make
    for offload in made:
        offload.close()
