"""Seeds of stochastic rounding."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

#: 2**64 times the golden ratio: multiples of it lie far from each other.
_GOLDEN, _MOST = 0x9E3779B97F4A7C15, (1 << 63) - 1
#: The same in an ``int64``.
SIGNED_GOLDEN = _GOLDEN - (1 << 64)
#: Seeds of the user's that are remembered: a program that sets another one in each step has many.
_KEPT = 1024


class Seeds:
    """Numbers for stochastic rounding, another one for each tensor: the user's generators stay as they are.

    They follow from the seed that the user has set and from how many were drawn under it, so that a program that sets
    its seed has the same ones each time that it is run; and one that goes back to an earlier seed goes on where that
    was, since an error that comes again would add up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By the user's seed, how many were drawn; the one that drew last is last.
        self._drawn: dict[int, int] = {}

    def draw(self) -> int:
        """The next one."""
        first = torch.initial_seed()
        with self._lock:
            number = self._drawn.pop(first, 0) + 1
            self._drawn[first] = number
            if len(self._drawn) > _KEPT:
                del self._drawn[next(iter(self._drawn))]
        return (first + number * _GOLDEN) & _MOST


def next_seed(seed: Tensor) -> Tensor:
    """The next seed after ``seed``, an ``int64`` of one element, in its place: a graph that replays this draws anew."""
    return seed.add_(SIGNED_GOLDEN)


#: Of the process: every `Offload`, device and compiled graph draws from it, so that no two have the same noise.
SEEDS = Seeds()
