"""How long each test module may take: a run on CI names those that took longer, so that the suite can be run.

``tests/seconds.json`` says what each module took on two quiet cores, all of its tests run; it has those alone that took
more than a few seconds. A machine that is shared is slower, so a budget is a multiple of that and some seconds more,
and no run fails for it: the time of a test says as much of the machine as of the code.

    TESTS_SECONDS=write make test-full     measures all of them anew
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

__all__ = ["SecondsOfModules"]

_TABLE = Path(__file__).with_name("seconds.json")
_WRITE = "TESTS_SECONDS"
#: A module's budget in seconds: so many times what it took, and so many more.
_TIMES, _MORE = 3, 30
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

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._over:
            terminalreporter.write_line(line, yellow=True)


def overruns(spent: Mapping[str, float], table: Mapping[str, float]) -> list[str]:
    """A sentence about each module that took longer than it may; both are in seconds, by the module's file."""
    budgets = {name: _TIMES * table.get(name, 0) + _MORE for name in spent}
    return [
        f"{name} took {seconds:.0f} s, and its budget is {budgets[name]} s: {_TIMES} times what {_TABLE.name} says and "
        f"{_MORE} s. Make it cheaper, or measure all of them anew with {_WRITE}=write"
        for name, seconds in spent.items()
        if seconds > budgets[name]
    ]
