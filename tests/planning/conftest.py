"""Fixtures of the tests of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

import eager_offload as eo
from eager_offload import OffloadConfig
from eager_offload.planning import planner


@pytest.fixture
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for ``"here"`` believe in a link that takes no time: how busy the disk is decides nothing."""
    measured = planner.here

    def here(settings: OffloadConfig) -> eo.Machine:
        return replace(measured(settings), out=1e15, back=1e15)

    monkeypatch.setattr(planner, "here", here)
