"""``with offload.trace(path):`` checks the path, installs a recorder, writes the file, and removes the recorder
again."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from eager_offload.config import OffloadConfig
from eager_offload.eager.hooks import Hooks
from eager_offload.engine.offloaders import Offloaders
from eager_offload.errors import ConfigError, OffloadError, captured, tell, warn
from eager_offload.observe.recorder import TraceRecorder
from eager_offload.stats import Accounts, OffloadStats
from eager_offload.trace_file import write_trace


class _Traced(Protocol):
    """The part of ``Offload`` that a trace uses; ``Offload`` imports this module."""

    config: OffloadConfig
    pack: Callable[[Tensor], object]
    _accounts: Accounts
    _offloaders: Offloaders
    _hooks: Hooks

    def refuse_reentry(self) -> None: ...

    def stats(self, synchronize: bool = False) -> OffloadStats: ...


class Tracing:
    """One trace of one ``Offload``; see ``Offload.trace``."""

    def __init__(self, offload: _Traced, path: str | os.PathLike[str]) -> None:
        self._offload = offload
        #: The path of the file.
        self.path = _writable(path)
        self._recorder: TraceRecorder | None = None
        self._process = os.getpid()

    def __enter__(self) -> Self:
        offload = self._offload
        offload.refuse_reentry()
        accounts = offload._accounts
        if offload._offloaders.is_capturing():
            raise captured("a trace was begun")
        if offload._offloaders.transfer_log.on_entry is not None:
            raise OffloadError(
                f"this Offload is being traced already, so no second trace can be written to {self.path}: leave the "
                "first `with offload.trace(...)`, or trace another Offload"
            )
        self._process = os.getpid()
        try:
            before = offload.stats(synchronize=True)
            recorder = TraceRecorder(before, accounts, offload._offloaders, offload.config, offload._hooks.pack)
            self._recorder = recorder
            with accounts.lock:
                recorder.start()
            offload.pack = recorder.pack
        except BaseException:
            self._take_all_away()
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
            found = recorder.finish(offload.stats(synchronize=True))
        finally:
            self._take_all_away()
        if error is None and not (found.saved or found.slices):
            warn(
                f"nothing ran inside `with offload.trace({os.fspath(self.path)!r}):`, so no trace is written: put it "
                "around whole steps, forward and backward"
            )
            tell()
            return
        if error is not None:
            found = dataclasses.replace(found, error=f"{type(error).__name__}: {error}")
        try:
            write_trace(found, self.path)
        except OSError as failure:
            message = f"the trace could not be written to {self.path}: {failure}. What ran inside is not affected"
            if error is None:
                raise OffloadError(message) from failure
            warn(message)

    def _take_all_away(self) -> None:
        """Removes the recorder, also if an interrupt comes in its midst."""
        try:
            self._take_away()
        except BaseException:
            self._take_away()
            raise

    def _take_away(self) -> None:
        """Removes the recorder; may be called again."""
        offload, recorder = self._offload, self._recorder
        if recorder is not None:
            offload.pack = offload._hooks.pack
            recorder.stop()
            self._recorder = None


def _writable(path: str | os.PathLike[str]) -> Path:
    """Returns ``path``; raises ``ConfigError`` if no file can be written there."""
    try:
        found = Path(os.fsdecode(path)).absolute()
    except TypeError:
        raise ConfigError(f"path={path!r} is not accepted: trace takes the path of a file") from None
    target = Path(os.path.realpath(found))
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        os.stat(os.path.join(target.parent, ""))  # which has to be a directory
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"path={os.fspath(path)!r} is not accepted ({error.strerror}): trace takes the path of a file in a "
            "directory that exists and can be written to"
        ) from error
    return found
