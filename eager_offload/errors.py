"""The library's exceptions, the errors for mistyped names, and its warnings."""

from __future__ import annotations

import atexit
import dataclasses
import difflib
import errno
import functools
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type[Any])

#: Packages to which no warning is attributed.
_INNER = {"eager_offload", "torch", "contextlib", "functools", "threading"}
#: The warning of a forked process that computes gradients while its parent offloads.
FORKED = (
    "this process was forked {where}: it trains without offload there, with the same gradients. To offload in a "
    "process, enter the Offload or prepare the model in that process"
)
#: Warnings to give later, at the user's next line: see ``warn``.
_deferred: deque[str] = deque()
#: The keys of warnings that are given once per process.
said_in_process: set[str] = set()


class OffloadError(RuntimeError):
    """The base of every error of this library."""


class ConfigError(OffloadError, ValueError):
    """A configuration that cannot work.

    The text names the field, repeats the value and lists the accepted ones.
    """


class CapacityError(OffloadError):
    """No tier can take the bytes, and keeping them on the device is forbidden."""


class PlanError(OffloadError):
    """A model that cannot be planned without running it: its control flow depends on numbers computed in the step.

    The text names the module and the operator.
    """


class TransferError(OffloadError):
    """Bytes could not be moved.

    Attributes:
        errno: the operating system's error number, or ``None``.
        tier: ``"host"`` or ``"disk"``.
        nbytes: the size of the transfer that failed, in bytes.
    """

    def __init__(self, message: str, *, errno: int | None, tier: str, nbytes: int) -> None:
        super().__init__(message)
        self.errno = errno
        self.tier = tier
        self.nbytes = nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are pickled between processes, and keyword arguments are not restored by default.
        return partial(type(self), errno=self.errno, tier=self.tier, nbytes=self.nbytes), self.args, self.__dict__


class CorruptionError(OffloadError):
    """The bytes read back from a tier differ from the bytes written: a checksum does not match."""


class SavedTensorModifiedError(OffloadError):
    """A saved tensor was modified in place between the forward that saved it and its backward.

    Saved-tensor hooks switch off autograd's own check, so this library repeats the check in the same places.
    """


class GraphError(OffloadError):
    """The base of the errors of ``eager_offload.graphs``."""


class NoAcceleratorError(GraphError):
    """There is no accelerator to capture on, or this torch has no graphs for it."""


class CaptureStateError(GraphError):
    """The call is not allowed during a capture (e.g. a wait of the host), or is allowed only then.

    The capture stays valid.
    """


class CaptureInvalidatedError(GraphError):
    """An earlier call, which the driver does not permit in a capture, has invalidated it."""


class UnjoinedStreamError(GraphError):
    """A stream joined the capture by waiting for one of its events, and the capture ended without waiting for it."""


class StaleEventError(GraphError):
    """An event recorded in a capture is part of that graph, and cannot be used outside."""


class PoolSealedError(GraphError):
    """A graph has been captured with this pool, and ``unseal`` has not been called since."""


class PoolInUseError(GraphError):
    """Living graphs, or an active capture, need the memory of the pool."""


class HostAllocationUnderCaptureError(GraphError):
    """Host memory for a device cannot be allocated during a capture: pinning would invalidate the capture.

    The text has the requested bytes, and the bytes left in the pool.
    """


class ScheduleMismatchError(GraphError):
    """A captured step differs from its warm-ups. The text has the first difference, and both sides."""


class CaptureInputError(GraphError, ValueError):
    """The inputs of a replay differ from those of the capture. The text has the place, and both sides."""


class KernelError(OffloadError, ValueError):
    """A kernel, or its source, does not accept an argument. The text has the expected and the given one."""


class CapabilityError(OffloadError):
    """A kernel needs a capability that the device, or the installed software, does not have."""


def lacks_descriptor(error: OSError) -> bool:
    """Returns whether a call failed because no file descriptor was free, which may be temporary."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


class SystemErrorsSuppressed:
    """Suppresses errors of system calls, but not those of signal handlers (a ``TimeoutError`` without a number)."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return isinstance(error, OSError) and error.errno is not None and not isinstance(error, TimeoutError)


def captured(what: str) -> CaptureStateError:
    """Returns the error for a call that cannot be captured; ``what`` is the beginning of the sentence."""
    return CaptureStateError(
        f"{what} while the current stream of the accelerator is being captured into a graph. A replay does not repeat "
        "the work of the host for a transfer, and its events would invalidate the capture. Keep the capture outside of "
        "`with offload:`, or `with offload:` outside of the capture"
    )


def reentered() -> OffloadError:
    """Returns the error for a call that interrupts another call of the library on the same thread."""
    return OffloadError(
        "this was called while another call of eager_offload runs on the same thread: by a signal handler, a __del__, "
        "a callback of the garbage collector or your own warnings.showwarning. Nothing was done. Let the handler only "
        "set a flag, and call this after the interrupted call has returned; stats() may be called"
    )


def briefly(value: object) -> str:
    """Returns the ``repr`` of a value for an error, or only its type if the ``repr`` is long (e.g. of a model)."""
    text = repr(value)
    is_short = isinstance(value, str) or (len(text) <= 200 and "\n" not in text)
    return text if is_short else f"<{type(value).__name__}>"


def unknown_name(what: str, name: object, known: Sequence[str], others: str = "") -> ConfigError:
    """Returns the error for a name that is not in ``known``, with the nearest name and then all.

    Args:
        what: the kind and the name (e.g. ``"field 'min_byts'"``).
        others: further accepted values, as the end of the sentence.
    """
    by_letters = {one.lower(): one for one in known}
    near = difflib.get_close_matches(str(name).lower(), by_letters, 1)
    accepted = f"did you mean {by_letters[near[0]]}? Accepted" if near else "accepted"
    return ConfigError(f"unknown {what}: {accepted} are {', '.join(known)}{others}")


def check_names(given: Iterable[object], known: Sequence[str]) -> None:
    """Raises ``ConfigError`` if a field's name is not in ``known``."""
    for name in given:
        if name not in known:
            raise unknown_name(f"field {name!r}", name, known)


def checks_names(cls: _Class) -> _Class:
    """Makes the constructor of a dataclass raise ``ConfigError``, and not ``TypeError``, for an unknown field.

    Files, command lines and ``dataclasses.replace`` call ``cls(**mapping)``.
    """
    known = [field.name for field in dataclasses.fields(cls)]
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: object, *values: object, **fields: object) -> None:
        check_names(fields, known)
        init(self, *values, **fields)

    cls.__init__ = checked
    return cls


def warn(message: str) -> None:
    """Warns at the line of the user's code that led here, skipping frames of this library and of torch.

    Never raises, since that could interrupt a transfer or a compilation. The warning is left to ``tell`` if it would
    raise here (an "error" filter, a failing ``warnings.showwarning``), or if the stack has no line of the user's (on a
    thread of the library).
    """
    _, frame = users_frame()
    if frame.f_globals.get("__name__", "").split(".")[0] in _INNER:
        _deferred.append(message)
        return
    try:
        _warn(message)
    except Exception:
        _deferred.append(message)


def warn_once(key: str, message: str | Callable[[], str], said: set[str] = said_in_process) -> None:
    """Warns as ``warn`` does, once for each ``key``.

    Args:
        message: the text, or a function that returns it.
        said: the keys of earlier warnings, of an ``Offload`` or (by default) of the process.
    """
    if key not in said:
        said.add(key)
        warn(message if isinstance(message, str) else message())


def tell() -> None:
    """Gives the deferred warnings, at a line of the user's that interrupts no transfer or compilation.

    Raises:
        Warning: a filter makes the warning an error; the warnings after it are given by the next call.
    """
    while _deferred:
        try:
            message = _deferred.popleft()
        except IndexError:  # another thread took it
            return
        _warn(message)


def _warn(message: str) -> None:
    level, _ = users_frame()
    warnings.warn(f"eager_offload: {message}", RuntimeWarning, stacklevel=level)


def users_frame() -> tuple[int, FrameType]:
    """Returns the frame of the user's line that led here, and its ``stacklevel`` for the caller."""
    level, frame = 0, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INNER:
        level, frame = level + 1, frame.f_back
    return level, frame


atexit.register(tell)  # for warnings after the last such line
