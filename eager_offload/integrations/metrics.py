"""Reports of the integrations: figures for loggers, a line when training ends, and a trace of one step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal, TypeAlias

from eager_offload import ConfigError, Offload, OffloadStats
from eager_offload.config import MIB
from eager_offload.observe.trace import Tracing
from eager_offload.tiers.limits import rank

#: ``True``: the three main figures; ``"all"``: every counter; ``False``: none.
LogMetrics: TypeAlias = bool | Literal["all"]

#: Trackers group names by their prefix.
PREFIX = "offload/"
_AMOUNTS = (
    *("saved_bytes", "offloaded_bytes", "shared_bytes", "bytes_out", "bytes_in", "stall_seconds"),
    *("host_wait_seconds", "processor_seconds", "kept_bytes", "fallbacks"),
)
_PEAKS = ("inflight_bytes_peak", "resident_bytes_peak", "host_bytes_peak", "disk_bytes_peak")


class OffloadMetrics:
    """Turns the stats of ``offload`` into figures per step.

    | name | unit | meaning |
    | --- | --- | --- |
    | ``offload/device_peak_mib`` | MiB | peak of saved tensors on the device since the stats were reset |
    | ``offload/moved_mib`` | MiB a step | bytes that left the device |
    | ``offload/stall_seconds`` | seconds a step | time that compute waited for transfers |

    ``log_metrics="all"`` adds, under the names of :class:`~eager_offload.OffloadStats`:

    | name | unit | meaning |
    | --- | --- | --- |
    | ``offload/saved_bytes``, ``offloaded_bytes``, ``shared_bytes``, ``kept_bytes`` | bytes a step | bytes saved by autograd; of these: offloaded, views of an offloaded storage, kept |
    | ``offload/bytes_out``, ``bytes_in`` | bytes a step | bytes copied off the device and back |
    | ``offload/host_wait_seconds`` | seconds a step | time that the host waited for transfers; compute may be busy |
    | ``offload/processor_seconds`` | seconds a step | CPU time of copies, on a CPU device |
    | ``offload/fallbacks`` | a step | transfers that could not run as planned |
    | ``offload/*_bytes_peak`` | bytes | peak since the stats were reset |

    Reading never waits: a transfer counts once it has finished, so its bytes may appear in the next step's figures.

    Args:
        offload: the ``Offload`` whose stats are read.
        log_metrics: ``True`` for the first three, ``"all"``, or ``False`` for none.

    Raises:
        ConfigError: for another ``log_metrics``.
    """  # noqa: E501  # rows of a table cannot be broken

    def __init__(self, offload: Offload, log_metrics: LogMetrics = True) -> None:
        if not (isinstance(log_metrics, bool) or log_metrics == "all"):
            raise ConfigError(f'log_metrics={log_metrics!r} is not accepted: log_metrics takes True, False or "all"')
        self.offload = offload
        self._log_metrics = log_metrics
        self._before = offload.stats()

    def read(self, steps: int = 1) -> dict[str, float]:
        """Returns the figures since the last call (or since construction), divided by ``steps``."""
        before, now = self._before, self.offload.stats()
        self._before = now
        if not self._log_metrics:
            return {}
        amounts = {name: (_amount(now, name), _amount(before, name)) for name in _AMOUNTS}
        # A counter that fell was reset in between and started from 0.
        figures = {name: (new - old if new >= old else new) / max(steps, 1) for name, (new, old) in amounts.items()}
        three = {"device_peak_mib": now.device_bytes_peak / MIB, "moved_mib": figures["bytes_out"] / MIB}
        three["stall_seconds"] = figures["stall_seconds"]
        if self._log_metrics == "all":
            three |= figures | {name: float(getattr(now, name)) for name in _PEAKS}
        return {PREFIX + name: figure for name, figure in three.items()}


class StepTrace:
    """Traces one training step; see :meth:`Offload.trace <eager_offload.Offload.trace>`.

    Args:
        offload: the ``Offload`` to trace.
        step: the number of the step, counted from 1; ``None`` for no trace.
        path: the file to write. Ranks other than 0 insert their rank before the suffix (e.g. ``step.rank1.json``).

    Raises:
        ConfigError: if ``step`` is not a positive integer, or ``path`` cannot be written.
    """

    def __init__(self, offload: Offload, step: int | None, path: str | os.PathLike[str]) -> None:
        if step is not None and (type(step) is not int or step < 1):
            raise ConfigError(f"trace_step={step!r} is not accepted: trace_step takes a step, 1 or more, or None")
        self._offload = offload
        self.step, self.path = step, Path(path)
        self._tracing: Tracing | None = None
        if step is not None:
            offload.trace(self.path)  # raises now if the path cannot be written

    def begin(self, step: int) -> None:
        """Ends a running trace, and begins one if ``step`` is the step to trace."""
        self.end()
        if step == self.step and self._offload.config.enabled:
            number = rank()
            path = self.path.with_suffix(f".rank{number}{self.path.suffix}") if number else self.path
            self._tracing = self._offload.trace(path)
            self._tracing.__enter__()

    def end(self) -> None:
        """Ends a running trace. Idempotent."""
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            tracing.__exit__(None, None, None)


def summarize(offload: Offload) -> None:
    """Prints a line of totals on rank 0 if anything moved, and the reason if memory did not fall."""
    stats = offload.stats()
    if stats.offloaded_bytes:
        headline, memory = str(stats).splitlines()[0], stats.advice[0]
        say(headline if memory.startswith("Memory fell") else f"{headline}. {memory}")


def say(line: str) -> None:
    """Prints a line on rank 0."""
    if rank() == 0:
        print(f"eager_offload: {line}", file=sys.stderr)


def _amount(stats: OffloadStats, name: str) -> float:
    value: float | dict[str, int] = getattr(stats, name)
    return sum(value.values()) if isinstance(value, dict) else value
