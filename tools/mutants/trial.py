"""One mutant, tried: a copy of the project in a temporary directory, and pytest over it until something fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.mutants.sites import Site, mutate

ROOT = Path(__file__).resolve().parent.parent.parent
_COPIED = ("eager_offload", "tests", "examples", "benchmarks", "tools")
_BUILT = ".virtual_device"
#: Hypothesis neither remembers what failed nor looks for a smaller example of it: one failure is enough here.
_CONFTEST = """
from hypothesis import Phase, settings

settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), database=None, derandomize=True)
settings.load_profile("mutants")
"""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/[^\s:]+(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
_NOTICED = re.compile(r"^(tests/\S+::.*?) (?:FAILED|ERROR)", re.MULTILINE)
_BEGUN = re.compile(r"^(tests/\S+::.*?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|\++ Timeout).*)?$", re.MULTILINE)
#: Seconds that a process has to end by itself after a failure.
_TO_END = 5.0


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    #: The test that failed, or hung; ``None``: nothing noticed.
    caught_by: str | None
    #: Whether it was stopped rather than failed.
    timeout: bool
    seconds: float
    output: str

    @property
    def survived(self) -> bool:
        return self.caught_by is None


class Workplace:
    """A copy of the project for one mutant at a time. The tree itself is never written to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in _COPIED:
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / name, directory / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", directory)
        # The virtual device is built once for all of them.
        (ROOT / _BUILT).mkdir(exist_ok=True)
        (directory / _BUILT).symlink_to(ROOT / _BUILT)
        (directory / "conftest.py").write_text(_CONFTEST)

    def try_out(self, site: Site, suites: Sequence[str], device_suites: Sequence[str], limit: float) -> Verdict:
        """Runs ``suites`` without ``site``, and ``device_suites`` on the virtual device if none of them notices.

        A test that takes more than ``limit`` seconds hangs, and has failed.
        """
        module = self.directory / site.path
        original = module.read_text()
        module.write_text(mutate(original, site))
        try:
            verdict = self.run(suites, limit) if suites else Verdict(None, False, 0.0, "")
            if verdict.survived and device_suites:
                on_device = self.run(device_suites, limit, on_device=True)
                verdict = replace(on_device, seconds=verdict.seconds + on_device.seconds)
            return verdict
        finally:
            module.write_text(original)

    def run(
        self, suites: Sequence[str], limit: float, *, on_device: bool = False, all_of_them: bool = False
    ) -> Verdict:
        """Runs ``suites``, in order, up to the first failure unless ``all_of_them``.

        Args:
            on_device: the virtual device is the accelerator of the process, and tests that need one run too.

        The process may also hang between tests, or at its end: then it is stopped after five times the limit, or thirty
        if it runs them all. Where a test has failed there is nothing left to learn, so what hangs after that (as a
        fixture may, of a test that did not come to open its gate, and pytest-timeout has stopped looking) is stopped
        within seconds.
        """
        present = [suite for suite in suites if (self.directory / suite.partition("::")[0]).exists()]
        command = [
            *(sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"),
            *("-m", "not long" if on_device else "not long and not gpu"),
            *("--timeout", str(limit), "--timeout-method", "thread"),
            *(["-p", "tests.virtual_device.plugin"] if on_device else []),
            *([] if all_of_them else ["-x"]),
            *present,
        ]
        begun = time.monotonic()
        written = self.directory / "output"
        with (
            written.open("w") as stdout,
            subprocess.Popen(
                command, cwd=self.directory, env=self._environment(), stdout=stdout, stderr=subprocess.STDOUT
            ) as process,
        ):
            latest = begun + (30 if all_of_them else 5) * limit
            failed: list[str] = []
            while (status := _status(process)) is None and time.monotonic() < latest:
                if not (failed or all_of_them) and (failed := _NOTICED.findall(written.read_text(errors="replace"))):
                    latest = min(latest, time.monotonic() + _TO_END)
            if status is None:
                process.kill()
        seconds, output = time.monotonic() - begun, written.read_text(errors="replace")
        if status is None:
            failed = _NOTICED.findall(output)
            return Verdict(failed[0] if failed else _last_begun(output), not failed, seconds, output)
        if status == 0:
            return Verdict(None, False, seconds, output)
        failed = _FAILED.findall(output)
        hung = "+ Timeout +" in output  # the whole process ends: a hang in a finalizer hears no signal
        return Verdict(failed[0] if failed else _last_begun(output), hung, seconds, output)

    def module_file(self) -> Path:
        """Where the package that is tested comes from."""
        command = [sys.executable, "-c", "import eager_offload; print(eager_offload.__file__)"]
        ended = subprocess.run(
            command, cwd=self.directory, env=self._environment(), check=True, capture_output=True, text=True
        )
        return Path(ended.stdout.strip())

    def _environment(self) -> dict[str, str]:
        here = self.directory
        return {
            **os.environ,
            "PYTHONPATH": f"{here}{os.pathsep}{here / 'examples'}",
            # A mutant may have the size and the second of the one before: no bytecode is kept.
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TESTS_QUICK": "0",  # all cases that the quick suite samples
        }


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """How a process ended, if it does so soon."""
    try:
        return process.wait(0.2)
    except subprocess.TimeoutExpired:
        return None


def _last_begun(output: str) -> str:
    """The test at which a process ended without a summary."""
    begun = _BEGUN.findall(output)
    return begun[-1].strip() if begun else "the import"
