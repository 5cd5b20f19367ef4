"""Rates as several short measurements find them. A single one may be 50 times too slow on a busy machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

#: How often a rate is measured, after a first time that is not counted: it loads kernels and touches memory.
TIMES = 5


class Rate(NamedTuple):
    """A rate, by the second."""

    median: float
    spread: float = 1.0
    """The ninth decile of the measurements divided by the first."""

    @classmethod
    def of(cls, amount: float, seconds: Sequence[float]) -> Rate:
        """Returns the rate of work of ``amount`` that took ``seconds``, one number for each time."""
        rates = [amount / max(one, 1e-9) for one in seconds]
        if len(rates) == 1:
            return cls(rates[0])
        deciles = statistics.quantiles(rates, n=10, method="inclusive")
        return cls(statistics.median(rates), deciles[-1] / deciles[0])


class LinkRates(NamedTuple):
    """Bytes a second between a device and a tier, each way by itself."""

    out: Rate
    back: Rate
