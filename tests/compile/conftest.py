"""What tests of compiled code leave behind: nothing, in the compiler too."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import eager_offload as eo


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    """What compiled code was served by outside of every context lives as long as the process; its threads need not."""
    yield
    torch._dynamo.reset()
    gc.collect()
    for one in [one for one in gc.get_objects() if type(one) is eo.Offload]:
        one.close()
