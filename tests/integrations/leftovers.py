"""What tests of frameworks leave behind goes before others count threads and bytes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from eager_offload import Offload
from tests.hazards.backends import transfer_threads

__all__ = ["nothing_outlives_a_file"]


@pytest.fixture(scope="module", autouse=True)
def nothing_outlives_a_file() -> Iterator[None]:
    """Other tests count threads and bytes. What was raised holds frames, and those hold trainers and graphs."""
    yield
    for error in [one for one in gc.get_objects() if issubclass(type(one), BaseException)]:  # isinstance asks proxies
        error.__traceback__ = None
    gc.collect()
    for offload in [one for one in gc.get_objects() if issubclass(type(one), Offload)]:
        offload.close()
    for thread in threading.enumerate():
        if thread.name in transfer_threads():
            thread.join(timeout=60)  # by itself, once it has been idle for a while
    assert transfer_threads() == []
