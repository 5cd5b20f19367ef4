"""What tests of compiled code leave behind: nothing, in the compiler too."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import eager_offload as eo
from eager_offload import contexts
from tests.compile.sanitizer import sanitized
from tests.hazards.backends import DiskBackend
from tests.threads import collect


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``aot_eager`` has no pass that orders transfers: what is told of that is asserted once."""
    waits = pytest.mark.filterwarnings("ignore:eager_offload. compiled code waits:RuntimeWarning")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(waits, append=False)


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    """What compiled code was served by outside of every context lives as long as the process; its threads need not."""
    yield
    torch._dynamo.reset()
    collect()
    # The collector does not name what was frozen with the modules, and those that stand live for ever.
    for one in [*contexts._default_owners.values(), *(one for one in gc.get_objects() if type(one) is eo.Offload)]:
        one.close()


@pytest.fixture
def offload(disk: DiskBackend) -> eo.Offload:
    return disk.offload()


@pytest.fixture(autouse=True)
def violations() -> Iterator[list[str]]:
    """What the sanitizer finds in a test; a test that means it to find something takes that out again."""
    with sanitized() as found:
        yield found
    assert not found, found
