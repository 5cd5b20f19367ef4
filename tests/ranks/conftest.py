"""One launch of ranks for all tests that ask for it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.ranks.launch import launch


@pytest.fixture(scope="session")
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, Sequence[str], bool], Path]:
    """Launches so many ranks that run those of these scenarios that are to be tested; what they left is in the result.

    Processes that share the tests among them share the launch as well: the first starts it, the others wait for it.
    Groups of xdist have one process ask for each launch, so that none waits.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    wanted = {item.callspec.params.get("scenario") for item in request.session.items if hasattr(item, "callspec")}

    def run(number: int, scenarios: Sequence[str], thorough: bool) -> Path:
        directory = base / f"ranks-{number}-{len(scenarios)}{'-thorough' * thorough}"
        directory.mkdir(exist_ok=True)
        with open(directory / "turn", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if not (directory / "output").exists():
                (directory / "output").write_text("the ranks took too long and were ended")
                launch(number, directory, [name for name in scenarios if name in wanted], thorough=thorough)
        return directory

    return run
