"""Files that fail at one chosen system call."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path
from typing import ClassVar

from eager_offload.tiers.rawfile import RawFile, Usage

__all__ = ["ERRNOS", "Fault", "FaultyFile"]

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

    def fail(self) -> None:
        raise OSError(self.number, os.strerror(self.number))


class FaultyFile(RawFile):
    """A real file under the fault that is in force."""

    fault: ClassVar[Fault | None] = None

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)

    def write_from(self, source: memoryview, offset: int) -> int:
        fault = FaultyFile.fault
        if fault is not None and fault.strikes("write", "short"):
            if fault.kind == "write":
                fault.fail()
            return super().write_from(source[: _half(len(source))], offset)
        return super().write_from(source, offset)

    def read_into(self, target: memoryview, offset: int) -> int:
        fault = FaultyFile.fault
        struck = fault is not None and fault.strikes("read", "short", "corrupt")
        if fault is None or not struck:
            return super().read_into(target, offset)
        if fault.kind == "read":
            fault.fail()
        if fault.kind == "short":
            return super().read_into(target[: _half(len(target))], offset)
        moved = super().read_into(target, offset)
        target[0] ^= 1
        return moved

    def allocate(self, offset: int, nbytes: int) -> None:
        if FaultyFile.fault is not None and FaultyFile.fault.strikes("allocate"):
            FaultyFile.fault.fail()
        super().allocate(offset, nbytes)

    def usage(self) -> Usage:
        if FaultyFile.fault is not None and FaultyFile.fault.strikes("usage"):
            FaultyFile.fault.fail()
        return super().usage()


def _half(nbytes: int) -> int:
    return max(nbytes // 2 // 4096 * 4096, min(nbytes, 4096))
