"""The browser of the tests leaves no process behind, even where it does not come up or does not want to go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.observe import browser

#: Tells its number, closes the pipe that it is to answer through, and stays.
_MUTE = """#!{python}
import os, signal, sys
signal.signal(signal.SIGTERM, signal.{action})
profile = next(one for one in sys.argv if one.startswith("--user-data-dir="))
with open(profile.partition("=")[2] + "/pid", "w") as file:
    file.write(str(os.getpid()))
os.closerange(4, 256)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("action", "error"), [("SIG_DFL", AssertionError), ("SIG_IGN", subprocess.TimeoutExpired)])
def test_a_browser_that_does_not_come_up_is_ended(
    action: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = tmp_path / "mute"
    mute.write_text(_MUTE.format(python=sys.executable, action=action))
    mute.chmod(0o700)
    monkeypatch.setattr(browser, "CHROMIUM", str(mute))
    if action == "SIG_IGN":
        monkeypatch.setattr(browser, "_PATIENCE", 0.1)
    with pytest.raises(error):
        browser.Browser(tmp_path)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
