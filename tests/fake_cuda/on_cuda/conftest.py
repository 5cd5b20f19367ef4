"""Fixtures of the tests over the stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.fake_cuda import StandIn


@pytest.fixture
def cuda() -> Iterator[StandIn]:
    """The stand-in, whose counts are 0; nothing runs when the test begins and when it has ended."""
    torch.cuda.synchronize()
    stand_in = StandIn()
    stand_in.forget()
    yield stand_in
    torch.cuda.synchronize()
