"""Settings of the hazard tests."""

from __future__ import annotations

import pytest

from tests.hazards.backends import Backend, follows_plans

#: Modules whose tests are run twice where steps are to follow a plan: each makes one step, of which nothing is known
#: the first time, and which is the next one like it the second time. What others count is that of an unknown step.
_AGAIN = {
    "test_overlapping",
    "test_replaced_memory",
    "test_streams",
}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """The first of two times; what comes after this is the second one."""
    backend = pyfuncitem.funcargs.get("backend")
    if isinstance(backend, Backend) and pyfuncitem.path.stem in _AGAIN and follows_plans():
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
        backend.begin_again()


@pytest.fixture(autouse=True, scope="module")
def _on_one_thread(one_thread: None) -> None:
    """All of them."""
