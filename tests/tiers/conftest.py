"""What every test of a disk tier starts from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eager_offload.tiers.directories import filesystem_of
from tests.tiers.files import Watched


@pytest.fixture(autouse=True)
def _opened() -> Iterator[None]:
    Watched.opened.clear()
    yield
    Watched.opened.clear()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    assert filesystem_of(tmp_path) != "tmpfs", "these tests need a temporary directory on a disk"
    return tmp_path
