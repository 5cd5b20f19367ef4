"""Files that fail at one chosen system call."""

from __future__ import annotations

import errno
import os
import random
import threading
from typing import ClassVar

from eager_offload.tiers.rawfile import RawFile, Usage

#: What a disk may say, by the call that it says it to.
ERRNOS = {
    "write": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.EROFS, errno.EBADF),
    "read": (errno.EIO, errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.EBADF, errno.ESTALE),
    "allocate": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EOPNOTSUPP),
    "usage": (errno.EIO,),
    "short": (0,),
    "corrupt": (0,),
}


class Fault:
    """Strikes one operation, the ``first`` of its kind from now on, or all from there.

    Besides errors there are ``"short"``, a read or write that stops halfway, and ``"corrupt"``, a read that succeeds
    and brings back something else.
    """

    def __init__(self, kind: str, first: int, number: int, *, for_good: bool) -> None:
        self.kind, self.first, self.number, self.for_good = kind, first, number, for_good
        self.injected = 0
        self._seen = 0
        self._lock = threading.Lock()

    @classmethod
    def any(cls, chance: random.Random, kinds: tuple[str, ...]) -> Fault:
        """One that ``chance`` chooses."""
        kind = chance.choice(kinds)
        return cls(kind, chance.randint(1, 12), chance.choice(ERRNOS[kind]), for_good=chance.random() < 0.2)

    def strikes(self, *kinds: str) -> bool:
        """Whether an operation of ``kinds`` that begins now is struck."""
        if self.kind not in kinds:
            return False
        with self._lock:
            self._seen += 1
            struck = self._seen == self.first or (self.for_good and self._seen > self.first)
            self.injected += struck
        return struck


class FaultyFile(RawFile):
    """A real file under the fault that is in force."""

    fault: ClassVar[Fault | None] = None

    def _struck(self, *kinds: str) -> str:
        """The kind of fault by which an operation of ``kinds`` is struck, if it is; an error is raised at once."""
        fault = FaultyFile.fault
        if fault is None or not fault.strikes(*kinds):
            return ""
        if fault.kind not in ("short", "corrupt"):
            raise OSError(fault.number, os.strerror(fault.number))
        return fault.kind

    def write_from(self, source: memoryview, offset: int) -> int:
        short = self._struck("write", "short")
        return super().write_from(source[: _half(len(source))] if short else source, offset)

    def read_into(self, target: memoryview, offset: int) -> int:
        struck = self._struck("read", "short", "corrupt")
        moved = super().read_into(target[: _half(len(target))] if struck == "short" else target, offset)
        target[0] ^= struck == "corrupt"
        return moved

    def allocate(self, offset: int, nbytes: int) -> None:
        self._struck("allocate")
        super().allocate(offset, nbytes)

    def usage(self) -> Usage:
        self._struck("usage")
        return super().usage()


def _half(nbytes: int) -> int:
    return max(nbytes // 2 // 4096 * 4096, min(nbytes, 4096))
