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
    if filesystem_of(tmp_path) == "tmpfs":
        pytest.fail(f"{tmp_path} is memory, not a disk: name one on a disk with --basetemp", pytrace=False)
    return tmp_path
