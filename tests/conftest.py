"""What every test may use, and what every test that offloads must leave behind: nothing."""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import fake_cuda
from tests.budgets import SecondsOfModules
from tests.compiler_caches import keep_no_graphs, move_machine_code
from tests.processes import ROOT
from tests.sampling import leave_out
from tests.threads import collect

# Tensors of tests are small: a second thread of an operator would only spin, and a compiler's would import torch again.
for _threads in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ.setdefault(_threads, "1")
keep_no_graphs()  # before anything imports torch, and with it names a directory
_end_of_machine_code = move_machine_code()
# No test asks a hub of models or data for anything.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

# How long an example takes says something of the machine.
hypothesis.settings.register_profile("the same in every run", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("the same in every run")

pytest.register_assert_rewrite(
    *(f"tests.{name}" for name in ("hazards.backends", "hazards.programs", "hazards.probes", "matrix"))
)

import torch  # noqa: E402  # after its caches are named

import eager_offload as eo  # noqa: E402  # it imports torch
from eager_offload import contexts  # noqa: E402  # after torch
from eager_offload.errors import tell  # noqa: E402  # after torch
from eager_offload.observe import no_effect  # noqa: E402  # after torch
from eager_offload.runtime.host import HostRuntime, host_runtime  # noqa: E402  # after torch
from eager_offload.tiers.disk import (  # noqa: E402  # after torch
    DiskTier,
    filesystem_of,
    usual_directories,
)
from tests.hazards.backends import Backend, DiskBackend, HostBackend, SimulatedBackend  # noqa: E402  # after torch
from tests.tiers.files import Watched  # noqa: E402  # after torch

# torch writes its compile trace there, thousands of lines that would hide why a test failed.
logging.getLogger("torch.__trace").propagate = False

_BACKENDS: dict[str, type[Backend]] = {
    "disk": DiskBackend,
    "host": HostBackend,
    "simulated": SimulatedBackend,
}
#: All of them, but where the virtual device is the accelerator, which is for good.
_PARAMS = ["disk", "simulated"]
if "tests.virtual_device.plugin" in sys.modules:
    from tests.virtual_device.backend import VirtualBackend

    _BACKENDS["virtual"] = VirtualBackend
    _PARAMS = ["virtual"]
_passed = pytest.StashKey[bool]()
_all_passed = pytest.StashKey[bool]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    if call.when == "call":
        item.stash[_passed] = outcome.get_result().passed
    elif call.when == "teardown" and not item.stash.get(_passed, True):
        host_runtime().close()  # one test's failure is not that of those behind it, which count threads


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # A user's program goes on where a pass of the library fails; a test does not.
    config.addinivalue_line("filterwarnings", "error:eager_offload. a compiled graph is not offloaded:RuntimeWarning")
    # Told once in a process, so by whichever test comes first.
    config.addinivalue_line("filterwarnings", "ignore:eager_offload. tier=.host. on a CPU device:RuntimeWarning")
    # Before pytest chooses where the directories of tests are.
    if (remove := _move_to_a_disk()) is not None:
        config.add_cleanup(remove)
    if (end := _end_of_machine_code) is not None:
        config.add_cleanup(lambda: end(config.stash.get(_all_passed, False)))
    # A table of seconds is for the suite itself: not for what a test of it starts, nor over the stand-in for CUDA.
    if not (hasattr(config, "workerinput") or "virtual" in _BACKENDS or fake_cuda.LIBRARY in os.environ):
        config.pluginmanager.register(SecondsOfModules())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_all_passed] = exitstatus == pytest.ExitCode.OK
    no_effect.unused.clear()  # many tests make an Offload that they do not use


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # After -k and -m: what they leave is what is sampled.
    config.hook.pytest_deselected(items=leave_out(items, config.args, config.option.markexpr))
    # The longest in front of what xdist takes in this order, which is all but groups of several tests: begun last, it
    # would run beside a worker that has nothing left to do.
    items.sort(key=lambda item: "/virtual_device/" not in item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """How many faults the tests of faults have injected, each of which asserts that some were; and what is told."""
    passed = terminalreporter.stats.get("passed", [])
    faults = sum(number for report in passed for name, number in report.user_properties if name == "faults")
    if faults:
        outcome = " in what passed" if exitstatus else ": 0 wrong gradients, 0 leaks, 0 hangs"
        terminalreporter.write_line(f"{faults:,} faults injected{outcome}")
    if ours := [one for one in terminalreporter.stats.get("warnings", []) if "eager_offload: " in one.message]:
        line = f"{len(ours)} warnings of the library's: assert them, or filter them at the test that makes them"
        terminalreporter.write_line(line, red=True)


@pytest.fixture(autouse=True, scope="module")
def _what_lives_on_is_not_looked_through() -> None:
    """Tests collect garbage thousands of times, and each time takes a second while all that was imported is looked
    through: a million objects of frameworks and compilers, none of which ever goes."""
    collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _the_environment_says_nothing() -> Iterator[None]:
    """A developer may have the library's variables set; a test sets those that it means, for itself."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: tests undo theirs in the middle
        for name in [name for name in os.environ if name.startswith("EAGER_OFFLOAD")]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def _nothing_was_compiled() -> Iterator[None]:
    """An ``Offload`` tells of forwards in which it saw nothing only in processes that have compiled nothing."""
    yield
    contexts.compiled.clear()
    if compiler := sys.modules.get("torch._dynamo.utils"):
        compiler.counters.clear()


@pytest.fixture(autouse=True)
def _every_warning_was_told() -> Iterator[None]:
    """One that is an error in a test is raised where a user's line comes next: in the same test at the latest."""
    yield
    tell()


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of small tensors on a CPU are held back, as those of large ones are."""
    monkeypatch.setattr(HostRuntime, "given_bytes", 0)


@pytest.fixture
def threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of transfers, for tests that count threads: none ends on a machine so busy that it waits for work."""
    monkeypatch.setattr("eager_offload.runtime.transfer_threads._IDLE_SECONDS", 600.0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests whose tensors are small: a second thread in an operator would only spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=_PARAMS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Where a hazard is run: on the host runtime with the disk tier, and simulated under the happens-before checker.

    Afterwards nothing may be held: no storage, no slot, no hook, no thread.
    """
    yield from _leaves_nothing(request)


@pytest.fixture(params=_PARAMS[:1])
def users_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The one that a user has on this machine: the disk, or the virtual device where that is the accelerator."""
    yield from _leaves_nothing(request)


@pytest.fixture
def disk() -> Iterator[DiskBackend]:
    """Makes offloads to the disk that move everything; nothing may be held in the end."""
    with DiskBackend() as running:
        yield running
        running.assert_nothing_is_held()


@pytest.fixture
def offloads() -> Iterator[Callable[..., eo.Offload]]:
    """Makes an ``Offload`` that moves everything that can move, all at once, unless told otherwise; closed at the end.

    Where an accelerator is: the virtual device, or the stand-in for CUDA.
    """
    made: list[eo.Offload] = []
    everything = {"tier": "host", "min_bytes": 0, "keep_last_bytes": 0}
    windows = {"max_inflight_bytes": "256MiB", "prefetch_bytes": "256MiB"}  # which no test fills

    def make(**fields: Any) -> eo.Offload:
        made.append(eo.Offload(**everything | windows | fields))
        return made[-1]

    yield make
    for offload in made:
        offload.close()


@pytest.fixture
def watched(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[eo.Offload, Watched]]]:
    """Makes an ``Offload`` on a disk whose calls a test can make fail."""
    monkeypatch.setattr("eager_offload.engine.offloaders.DiskTier", functools.partial(DiskTier, file_type=Watched))

    def make(**fields: Any) -> tuple[eo.Offload, Watched]:
        return disk.offload(**fields), Watched.opened[-1]

    yield make
    Watched.opened.clear()


def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with _BACKENDS[request.param]() as running:
        yield running
        # A failed test's traceback holds its tensors: what is left then says nothing.
        if request.node.stash.get(_passed, False):
            running.assert_nothing_is_held()


def _move_to_a_disk() -> Callable[[], None] | None:
    """Names another temporary directory, for this process and those that it starts, where the usual one is memory: the
    files of tests are on a disk.

    Returns:
        What removes it, or ``None`` where there is none: the usual one serves, or nothing does. A process that was
        started by one that has moved (a worker of xdist) finds a usual one that serves.
    """
    if filesystem_of(Path(tempfile.gettempdir())) != "tmpfs":
        return None
    for place in (*usual_directories()[1:], ROOT):
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK) and filesystem_of(place) != "tmpfs":
            found = tempfile.mkdtemp(prefix="eager_offload-tests-", dir=place)
            os.environ["TMPDIR"] = tempfile.tempdir = found
            return lambda: shutil.rmtree(found, ignore_errors=True)
    return None
