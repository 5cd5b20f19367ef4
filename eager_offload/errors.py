"""Every exception that the library raises on purpose."""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = [
    "CapacityError",
    "ConfigError",
    "CorruptionError",
    "OffloadError",
    "SavedTensorModifiedError",
    "TransferError",
]


class OffloadError(RuntimeError):
    """The base of every error of this library."""


class ConfigError(OffloadError, ValueError):
    """A configuration that cannot work.

    The text names the field, repeats what was given and says what is accepted.
    """


class CapacityError(OffloadError):
    """No tier can take the bytes, and keeping them on the device is forbidden."""


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
