"""How many pieces of one transfer to have in flight at a time: found by trying, no clock, no threads."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DepthSearch"]

#: How much a depth has to move, and in how many transfers, before it is judged.
_TRIAL_BYTES, _TRIAL_TRANSFERS = 64 << 20, 4
#: By which factor a depth has to be faster than half of it, to be worth its threads.
_GAIN = 1.1
#: Bytes after which the search begins anew: a disk that others use as well changes.
_AGAIN_BYTES = 64 << 30


class _Trial(NamedTuple):
    """What has been seen of the depth that is tried."""

    transfers: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class DepthSearch:
    """Doubles the depth for as long as that makes transfers faster, and stays at the last that did.

    A search learns from the transfers of the run itself, so nothing is written to find out, and what else keeps disk
    and processor busy counts. Two threads at once may cost it a transfer, not its sense.

    Args:
        least: the depth to begin with.
        most: no depth above it is tried.
    """

    def __init__(self, least: int, most: int) -> None:
        assert 1 <= least <= most
        self._least, self._most = least, most
        #: How many pieces to have in flight now.
        self.depth = least
        self._trial = _Trial()
        #: Bytes a second of the depth before this one; 0 while the first is tried.
        self._rate = 0.0
        #: Bytes until the search begins anew, once it has ended.
        self._rest = 0

    @property
    def settled(self) -> bool:
        """Whether the search has ended, for now."""
        return self._rest > 0

    def note(self, nbytes: int, seconds: float) -> None:
        """A transfer of ``nbytes`` bytes took so long at ``depth``."""
        if self.settled:
            self._rest -= nbytes
            if self._rest <= 0:
                self.depth, self._rate, self._trial = self._least, 0.0, _Trial()
            return
        trial = _Trial(self._trial.transfers + 1, self._trial.nbytes + nbytes, self._trial.seconds + seconds)
        self._trial = trial
        if trial.transfers < _TRIAL_TRANSFERS or trial.nbytes < _TRIAL_BYTES:
            return
        # Two threads may both get here, and a depth that has left its bounds would never come back.
        rate = trial.nbytes / max(trial.seconds, 1e-9)
        self._trial = _Trial()
        if self._rate and rate < _GAIN * self._rate:
            self.depth = max(self.depth // 2, self._least)
            self._rest = _AGAIN_BYTES
        elif self.depth * 2 > self._most:
            self._rest = _AGAIN_BYTES
        else:
            self._rate = rate
            self.depth = min(self.depth * 2, self._most)
