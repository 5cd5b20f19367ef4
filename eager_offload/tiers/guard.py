"""Looks at what the machine has left while training goes on, and refuses memory before the kernel has to.

After a budget was worked out the model grows, other processes come, a checkpoint is written: the memory that it counted
on may be gone. So before a pool takes a slab, what is left is looked at again. What the user gave in bytes is not
held back: see [Note: a budget in bytes] in ``host.py``.

[Note: how often]
To look takes a few hundred microseconds. What one look has found admits slabs up to an eighth of it and up to a GiB, so
the nearer the limit, the more often; and what one look has refused is refused for the next 256 MiB that are asked for.
Both are forgotten when slabs have gone back to the system. When a forward begins, there is another look if a tier has
refused anything or has handed out a GiB since the last one.

[Note: what is left for others]
Of every limit a 16th is never taken: the kernel kills the process that crosses a limit, not the one that took most, and
between two looks others take memory too. Slabs have all their pages from the start, so that a look sees what was taken
before.
"""

from __future__ import annotations

from operator import attrgetter

from eager_offload.config import size_text
from eager_offload.tiers.base import Shortage
from eager_offload.tiers.forking import ForkSafeLock
from eager_offload.tiers.limits import RESERVED_PART, Limit, host_headroom

#: What one look admits without another: this part of what it has found, and at most so many bytes.
_TRUSTED, _TRUSTED_BYTES = 8, 1 << 30
#: Bytes that are refused without another look.
_REFUSED = 256 << 20


class NoHeadroomError(MemoryError):
    """Taking more memory would come too near to a limit."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(shortage.reason)
        self.shortage = shortage


class Guard:
    """Admits slabs as long as enough is left. Thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        #: Bytes that the last look admits yet.
        self._admitted = 0
        #: What the last look refused: as many bytes or more are refused again.
        self._refused: tuple[int, Shortage] | None = None
        self._refused_bytes = 0

    def admit(self, nbytes: int) -> None:
        """Counts ``nbytes`` more that are taken from the system.

        Raises:
            NoHeadroomError: they may not be.
        """
        with self._lock.lock:
            if nbytes <= self._admitted:
                self._admitted -= nbytes
                return
            refused = self._refused
            if refused is not None and nbytes >= refused[0] and self._refused_bytes < _REFUSED:
                self._refused_bytes += nbytes
                raise NoHeadroomError(refused[1])
            try:
                limit = _tightest()
            except OSError as error:
                reason, remedy = f"what the system has left cannot be read ({error.strerror})", "close files"
                raise NoHeadroomError(Shortage(reason, remedy)) from error
            if nbytes <= limit.spare:
                self._admitted, self._refused = min((limit.spare - nbytes) // _TRUSTED, _TRUSTED_BYTES), None
                return
            shortage = Shortage(
                f"{size_text(nbytes)} more of host memory would leave less than "
                f"{size_text(int(limit.capacity * RESERVED_PART))} of it for others, for {limit.reason}",
                limit.remedy,
            )
            self._admitted, self._refused, self._refused_bytes = 0, (nbytes, shortage), 0
            raise NoHeadroomError(shortage)

    def missing_bytes(self) -> int:
        """Looks, and returns how many bytes should go back to the system so that enough is left for others."""
        try:
            return max(-_tightest().spare, 0)
        except OSError:
            return 0

    def forget(self) -> None:
        """Slabs have gone back to the system: what the last look has found does not hold any more."""
        with self._lock.lock:
            self._admitted, self._refused = 0, None


def _tightest() -> Limit:
    """Returns the limit that leaves least.

    Raises:
        OSError: the process has no free file descriptor to look with.
    """
    return min(host_headroom().limits, key=attrgetter("spare"))


_guard = Guard()


def process_guard() -> Guard:
    """Returns the one of this process, since all memory comes from the same machine."""
    return _guard
