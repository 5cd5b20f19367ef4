"""What most tests of traces start from: a model, an ``Offload`` to the disk that moves all of it, and a file."""

from __future__ import annotations

from pathlib import Path

import pytest

import eager_offload as eo
from tests.hazards.backends import DiskBackend
from tests.observe.steps import FIELDS, Net


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.json"


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def offload(disk: DiskBackend) -> eo.Offload:
    return disk.offload(**FIELDS)
