"""Seeds of stochastic rounding."""

from __future__ import annotations

import torch

__all__ = ["Seeds"]

#: 2**64 times the golden ratio: multiples of it lie far from each other.
_GOLDEN, _MOST = 0x9E3779B97F4A7C15, (1 << 63) - 1


class Seeds:
    """Numbers for stochastic rounding, another one for each tensor: the user's generators stay as they are."""

    def __init__(self) -> None:
        self._next = torch.initial_seed()  # so that a program that sets its seed begins with the same ones

    def draw(self) -> int:
        """The next one."""
        self._next += _GOLDEN
        return self._next & _MOST
