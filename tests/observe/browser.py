"""Chromium without a window, spoken to over two pipes (its DevTools protocol): no port and no package are needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium")
#: Seconds that it has to end by itself.
_PATIENCE = 30.0

_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


#: The browser reads its descriptor 3 and writes 4; this puts the pipes there, whatever their numbers are.
_LAUNCHER = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for place, number in enumerate(pipes, 3):
    os.dup2(number, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page at a time. A context manager, since a browser is a process."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _LAUNCHER, str(to_child), str(from_child)),
                *(CHROMIUM, *_ARGUMENTS, f"--user-data-dir={profile}"),
            ],
            pass_fds=(to_child, from_child),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        try:
            self._attach()
        except BaseException:  # `__exit__` will not be called
            self._end()
            raise

    def _attach(self) -> None:
        """Opens a page and has it tell what happens."""
        self._received = b""
        self._serial = 0
        self._events: deque[dict[str, Any]] = deque()
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        """The process is gone afterwards, whether it wants to or not."""
        self._process.terminate()
        try:
            self._process.wait(timeout=_PATIENCE)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            os.close(self._in)
            os.close(self._out)

    def open(self, page: Path | str, width: int, *, dark: bool) -> list[dict[str, Any]]:
        """Loads a file or an address until it is drawn; returns what happened meanwhile: requests, errors, messages."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self._call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._receive())
        # What is asked for in one frame has been drawn two frames later.
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
        return list(self._events)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page, as PNG."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._serial += 1
        message: dict[str, Any] = {"id": self._serial, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._serial:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            more = os.read(self._in, 1 << 16)
            assert more, "the browser has ended"
            self._received += more
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer
