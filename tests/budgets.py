"""How long each test module may take: a run on CI fails where one took longer, so that the suite can be run.

``tests/seconds.json`` says what each module took on two quiet cores, all of its tests run; it has those alone that took
more than a few seconds. How much slower this machine is shows in the median over all modules of the table, and is
allowed for; a budget is a multiple of what is left and some seconds more. So noise fails no run, and a machine that is
shared does not either: only a module that takes several times its seconds while most of the others do not.

    TESTS_SECONDS=write make test-full     measures all of them anew
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import pytest

_TABLE = Path(__file__).with_name("seconds.json")
_WRITE = "TESTS_SECONDS"
#: A module's budget in seconds: so many times what it would take here, and so many more.
_TIMES, _MORE = 3, 60
#: Seconds below which a module does not stand in the table.
_SHORT = 5


class SecondsOfModules:
    """A plugin of the process that hears of every test, which is not a worker."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()
        self._over: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._spent[report.nodeid.partition("::")[0]] += report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if os.environ.get(_WRITE) == "write":
            kept = {name: math.ceil(spent) for name, spent in sorted(self._spent.items()) if spent >= _SHORT}
            _TABLE.write_text(json.dumps(kept, indent=2) + "\n")
        elif os.environ.get("CI"):
            self._over = overruns(self._spent, json.loads(_TABLE.read_text()))
            if self._over and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._over:
            terminalreporter.write_line(line, red=True)


def overruns(spent: Mapping[str, float], table: Mapping[str, float]) -> list[str]:
    """A sentence about each module that took longer than it may; both are in seconds, by the module's file."""
    slower = max(1.0, median([spent[name] / table[name] for name in spent if name in table] or [1.0]))
    budgets = {name: _TIMES * slower * table.get(name, _SHORT) + _MORE for name in spent}
    return [
        f"{name} took {seconds:.0f} s, past its budget of {budgets[name]:.0f} s: {_TIMES} times the "
        f"{table.get(name, _SHORT)} s of {_TABLE.name} on a machine {slower:.1f} times as slow, and {_MORE} s. "
        f"Make it cheaper; if it is worth its time, change {_TABLE.name}, or measure all with {_WRITE}=write"
        for name, seconds in spent.items()
        if seconds > budgets[name]
    ]
