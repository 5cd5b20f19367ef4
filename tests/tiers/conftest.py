"""What tests of tiers start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eager_offload.tiers.disk import filesystem_of
from eager_offload.tiers.pool import Pool
from tests.tiers.files import Watched
from tests.tiers.rig import MIB, Made, System


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


@pytest.fixture
def system() -> System:
    return System()


@pytest.fixture
def pool(system: System) -> Pool:
    return Pool(system, slab_bytes=MIB, idle_bytes=64 * MIB)


@pytest.fixture(params=["host", "disk"])
def made(request: pytest.FixtureRequest, directory: Path) -> Made:
    return Made(request.param, directory)
