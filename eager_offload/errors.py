"""Every exception that the library raises on purpose, and the one way in which it warns."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections import deque
from functools import partial
from typing import Any

#: Whose frames a warning is never about.
_INNER = {"eager_offload", "torch", "contextlib", "functools", "threading"}
#: Warnings that the user makes errors of and that were not raised yet, of the whole process.
_untold: deque[str] = deque()


class OffloadError(RuntimeError):
    """The base of every error of this library."""


class ConfigError(OffloadError, ValueError):
    """A configuration that cannot work.

    The text names the field, repeats what was given and says what is accepted.
    """


class GoneError(ConfigError, AttributeError):
    """A name of this package that is gone. The text says what to use in its place; ``hasattr`` is ``False``."""


class CapacityError(OffloadError):
    """No tier can take the bytes, and keeping them on the device is forbidden."""


class PlanError(OffloadError):
    """A model cannot be planned without running it: what it does depends on numbers that are computed in the step.

    The text names the module in which that was met, and the operator.
    """


class TransferError(OffloadError):
    """Bytes could not be moved.

    Attributes:
        errno: the operating system's error number, or ``None`` where there is none.
        tier: ``"host"`` or ``"disk"``.
        nbytes: the size of the transfer that failed, in bytes.
    """

    def __init__(self, message: str, *, errno: int | None, tier: str, nbytes: int) -> None:
        super().__init__(message)
        self.errno = errno
        self.tier = tier
        self.nbytes = nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        # An error travels between processes too, and what is built from keywords does not by itself.
        return partial(type(self), errno=self.errno, tier=self.tier, nbytes=self.nbytes), self.args, self.__dict__


class CorruptionError(OffloadError):
    """What came back from a tier is not what was written to it: a checksum does not match."""


class SavedTensorModifiedError(OffloadError):
    """A saved tensor was changed in place between the forward that saved it and its backward.

    Raised where autograd itself raises when no hooks are installed; installing any saved-tensor
    hook switches autograd's own check off, so this library repeats it.
    """


class GraphError(OffloadError):
    """The base of the errors of ``eager_offload.graphs``, and of a capture in whose way something is."""


class NoAcceleratorError(GraphError):
    """There is nothing to capture: no accelerator, or one of whose work this torch makes no graphs."""


class CaptureStateError(GraphError):
    """This cannot be done in a capture, or only in one: such as to begin another, to have the host wait, or to launch.

    The capture is as valid as it was before the call.
    """


class CaptureInvalidatedError(GraphError):
    """A call that the driver does not permit in a capture came before, and made the capture void."""


class UnjoinedStreamError(GraphError):
    """A stream came into the capture by waiting for an event of it, and the capture ended without waiting for it."""


class StaleEventError(GraphError):
    """An event that was recorded in a capture is a part of that graph: outside it stands for no moment."""


class PoolSealedError(GraphError):
    """A graph has been captured with this pool, and ``unseal`` has not been called since."""


class PoolInUseError(GraphError):
    """Graphs that live, or a capture that is under way, need what the pool holds."""


class HostAllocationUnderCaptureError(GraphError):
    """Host memory for a device cannot be had while a graph is captured: to pin it would invalidate the capture.

    The text says how many bytes were asked for, and how many the pool has left.
    """


class ScheduleMismatchError(GraphError):
    """A step that is captured does not do what its warm-ups did. The text has the first difference, and both sides."""


class CaptureInputError(GraphError, ValueError):
    """What a replay is given differs from what was captured. The text names where, and has both sides."""


class KernelError(OffloadError, ValueError):
    """A kernel is given, or made of, what it does not take. The text has what was expected and what was given."""


class CapabilityError(OffloadError):
    """A kernel needs what the device, or what is installed, does not have."""


def captured(what: str) -> CaptureStateError:
    """What is raised where a stream is being captured into a graph, and ``what`` cannot be a part of it."""
    return CaptureStateError(
        f"{what} while the current stream of the accelerator is being captured into a graph. A replay does not repeat "
        "what the host does for a transfer, and its events would invalidate the capture. Leave the capture out of "
        "`with offload:`, or `with offload:` out of the capture"
    )


def reentered() -> OffloadError:
    """What a thread is told that calls the library in the midst of a call of its own."""
    return OffloadError(
        "this was called in the midst of a call of eager_offload on the same thread, where nothing can be begun: by a "
        "signal handler, a __del__, a callback of the garbage collector or a warnings.showwarning of yours. Nothing "
        "was done. Have it only note what is to be done, and do that when the call in whose midst it ran is over; "
        "stats() may be called"
    )


def warn(message: str) -> None:
    """Warns at the line of the caller's code that led here, past the frames of this library and of torch.

    Never raises. Where the user's filters make an error of the warning, or a ``warnings.showwarning`` of theirs fails,
    ``tell`` raises that later: here it would come in the midst of a transfer, a compilation or other hooks.
    """
    try:
        _warn(message)
    except Exception:
        _untold.append(message)


def tell() -> None:
    """Gives the warnings that would have raised before, at a line of the user's where nothing is under way.

    Raises:
        Warning: the first of them that is still an error; the others wait for the next such line.
    """
    while _untold:
        try:
            message = _untold.popleft()
        except IndexError:  # another thread was faster
            return
        _warn(message)


def _warn(message: str) -> None:
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INNER:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"eager_offload: {message}", RuntimeWarning, stacklevel=level)


atexit.register(tell)  # what came after the last such line
