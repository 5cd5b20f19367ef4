"""What stacks leave behind goes before others count it; in an environment of ``make stacks`` no test is skipped."""

from __future__ import annotations

import os

import pytest

from tests.integrations.leftovers import nothing_outlives_a_file

__all__ = ["nothing_outlives_a_file"]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("TESTS_STACK") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
