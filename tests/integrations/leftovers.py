"""What tests of frameworks leave behind goes before others count it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from eager_offload import Offload
from eager_offload.runtime.host import host_runtime
from tests.hazards.backends import transfer_threads
from tests.threads import collect


@pytest.fixture(scope="module", autouse=True)
def nothing_outlives_a_file() -> Iterator[None]:
    """Other tests count threads and bytes. What was raised holds frames, and those hold trainers and graphs."""
    yield
    for error in [one for one in gc.get_objects() if issubclass(type(one), BaseException)]:  # isinstance asks proxies
        error.__traceback__ = None
    collect()
    for offload in [one for one in gc.get_objects() if issubclass(type(one), Offload)]:
        offload.close()
    host_runtime().close()  # who let go of an Offload and closed none left its threads idle
    for thread in threading.enumerate():
        if thread.name in transfer_threads():
            thread.join(timeout=60)  # a tier's own, which its finalizer has asked to end
    assert transfer_threads() == []
