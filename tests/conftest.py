"""What every test may use, and what every test that offloads must leave behind: nothing."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

from tests.compiler_caches import keep_no_graphs, move_machine_code

keep_no_graphs()  # before anything imports torch
# No test asks a hub of models or data for anything.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

pytest.register_assert_rewrite("tests.hazards.backends", "tests.hazards.programs", "tests.hazards.probes")

from tests.doubles.recorded_backend import RecordedBackend  # noqa: E402
from tests.faults.telling import sentence  # noqa: E402
from tests.hazards.backends import Backend, DiskBackend, SimulatedBackend  # noqa: E402
from tests.temporary import move_to_a_disk  # noqa: E402

_BACKENDS: dict[str, type[Backend]] = {
    "disk": DiskBackend,
    "simulated": SimulatedBackend,
    "recorded": RecordedBackend,
}
_passed = pytest.StashKey[bool]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    if call.when == "call":
        item.stash[_passed] = outcome.get_result().passed


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Before pytest chooses where the directories of tests are.
    for remove in (move_to_a_disk(), move_machine_code()):
        if remove is not None:
            config.add_cleanup(remove)


def pytest_collection_finish() -> None:
    # Tests collect garbage thousands of times, and each time takes a second while all that was imported is looked
    # through: a million objects of the frameworks, none of which ever goes.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """How many faults the tests of faults have injected; each of them asserts that some were."""
    passed = terminalreporter.stats.get("passed", [])
    faults = sum(number for report in passed for name, number in report.user_properties if name == "faults")
    if faults:
        terminalreporter.write_line(sentence(faults, well=exitstatus == 0))


@pytest.fixture(autouse=True)
def _the_environment_says_nothing() -> Iterator[None]:
    """Whoever runs the tests may have the library's variables set; a test sets those that it means, for itself."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: tests undo theirs in the middle
        for name in [name for name in os.environ if name.startswith("EAGER_OFFLOAD")]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def _nothing_was_compiled() -> Iterator[None]:
    """An ``Offload`` tells of forwards in which it saw nothing only in processes that have compiled nothing."""
    yield
    if compiler := sys.modules.get("torch._dynamo.utils"):
        compiler.counters.clear()


@pytest.fixture(params=["disk", "simulated", pytest.param("recorded", marks=pytest.mark.long)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Where a hazard is run: on the host runtime with the disk tier, simulated under the happens-before checker, and on
    the accelerator runtime over its recording double, under the checker too.

    Afterwards nothing may be held: no storage, no slot, no hook, no thread.
    """
    with _BACKENDS[request.param]() as running:
        yield running
        # A failed test's traceback holds its tensors: what is left then says nothing.
        if request.node.stash.get(_passed, False):
            running.assert_nothing_is_held()
