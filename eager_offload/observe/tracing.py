"""``with offload.trace(path):``: what a trace needs before, what it puts in place, and that all of it goes again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import warnings
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from eager_offload.errors import ConfigError, OffloadError
from eager_offload.observe.recorder import Recorder
from eager_offload.observe.trace import write_trace

if TYPE_CHECKING:
    from eager_offload.offload import Offload

__all__ = ["Tracing"]


class Tracing:
    """One trace of one ``Offload``; see ``Offload.trace``."""

    def __init__(self, offload: Offload, path: str | os.PathLike[str]) -> None:
        self._offload = offload
        #: Where the file will be.
        self.path = _writable(path)
        self._recorder: Recorder | None = None
        self._process = os.getpid()

    def __enter__(self) -> Self:
        offload = self._offload
        accounts = offload._accounts
        if accounts.recorder is not None:
            raise OffloadError(
                f"this Offload is being traced already, so no second trace can be written to {self.path}: leave the "
                "first `with offload.trace(...)`, or trace another Offload"
            )
        self._process = os.getpid()
        try:
            self._before = offload.stats(synchronize=True)
            self._tally = accounts.tally
            recorder = Recorder(accounts, offload._lanes, offload.config, offload._hooks.pack)
            self._recorder = accounts.recorder = recorder
            with accounts.lock:
                recorder.start()
            offload.pack = recorder.pack
        except BaseException:
            try:
                self._take_away()
            except BaseException:
                self._take_away()
                raise
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder, offload = self._recorder, self._offload
        if recorder is None:
            raise OffloadError("this trace is left but was not entered: use `with offload.trace(path):`")
        try:
            if os.getpid() != self._process:
                return  # a forked child: the file is its parent's
            after = offload.stats(synchronize=True)
            told = recorder.finish(self._before, after, self._tally)
        finally:
            try:
                self._take_away()
            except BaseException:
                self._take_away()
                raise
        if error is not None:
            told = dataclasses.replace(told, error=f"{type(error).__name__}: {error}")
        try:
            write_trace(told, self.path)
        except OSError as failure:
            message = f"the trace could not be written to {self.path}: {failure}. What ran inside is not affected"
            if error is None:
                raise OffloadError(message) from failure
            warnings.warn(f"eager_offload: {message}", RuntimeWarning, stacklevel=2)

    def _take_away(self) -> None:
        """Takes away all that was put in place; may be called again, as it is where an interrupt comes into it."""
        offload, recorder = self._offload, self._recorder
        if recorder is not None:
            offload.pack = offload._hooks.pack
            if offload._accounts.recorder is recorder:
                offload._accounts.recorder = None
            recorder.stop()
            self._recorder = None


def _writable(path: str | os.PathLike[str]) -> Path:
    """``path``, if a file can be put there.

    Raises:
        ConfigError: it cannot, and why.
    """
    try:
        found = Path(os.fsdecode(path)).absolute()
    except TypeError:
        raise ConfigError(f"path={path!r} is not accepted: trace takes the path of a file") from None
    accepted = "trace takes the path of a file in a directory that exists and can be written to"
    if found.is_dir():
        raise ConfigError(f"path={os.fspath(path)!r} is not accepted, since it is a directory: {accepted}")
    try:
        handle, probe = tempfile.mkstemp(prefix=f".{found.name}.", dir=found.parent)
    except OSError as error:
        raise ConfigError(f"path={os.fspath(path)!r} is not accepted ({error.strerror}): {accepted}") from error
    os.close(handle)
    with contextlib.suppress(OSError):
        os.unlink(probe)
    return found
