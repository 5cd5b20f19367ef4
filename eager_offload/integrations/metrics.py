"""What an integration reports: numbers for a framework's loggers, a line when training ends, a trace of one step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal, TypeAlias

from eager_offload import ConfigError, Offload, OffloadStats
from eager_offload.config import MIB
from eager_offload.observe.trace import Tracing
from eager_offload.tiers.limits import rank

#: ``True``: the three that matter; ``"all"``: every counter; ``False``: none.
LogMetrics: TypeAlias = bool | Literal["all"]

#: What every name begins with; trackers make a group of it.
PREFIX = "offload/"
_AMOUNTS = (
    *("saved_bytes", "offloaded_bytes", "shared_bytes", "bytes_out", "bytes_in", "stall_seconds"),
    *("host_wait_seconds", "processor_seconds", "kept_bytes", "fallbacks"),
)
_PEAKS = ("inflight_bytes_peak", "resident_bytes_peak", "host_bytes_peak", "disk_bytes_peak")


class OffloadMetrics:
    """Reads what ``offload`` has done since the last reading.

    | name | unit | meaning |
    | --- | --- | --- |
    | ``offload/device_peak_mib`` | MiB | the most that saved tensors took on the device since the stats were last reset |
    | ``offload/moved_mib`` | MiB a step | what left the device |
    | ``offload/stall_seconds`` | seconds a step | how long compute waited for transfers |

    With ``log_metrics="all"`` these too, by the names of :class:`~eager_offload.OffloadStats`:

    | name | unit | meaning |
    | --- | --- | --- |
    | ``offload/saved_bytes``, ``offloaded_bytes``, ``shared_bytes``, ``kept_bytes`` | bytes a step | what autograd saved; of that: offloaded, on a storage that is offloaded already, kept |
    | ``offload/bytes_out``, ``bytes_in`` | bytes a step | what crossed the link |
    | ``offload/host_wait_seconds`` | seconds a step | how long the host waited for them, while compute may be busy |
    | ``offload/processor_seconds`` | seconds a step | what copies took of a processor core, on a CPU device |
    | ``offload/fallbacks`` | a step | what could not be done as planned |
    | ``offload/*_bytes_peak`` | bytes | the most since the stats were last reset |

    Reading waits for nothing: what is on its way counts when it has arrived, so a step's figures may be of the one before.

    Args:
        offload: whose stats are read.
        log_metrics: ``True`` for the three, ``"all"``, or ``False`` for none.

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
        """The figures of the ``steps`` steps since the last reading (or since this object was made), for one step."""
        before, now = self._before, self.offload.stats()
        self._before = now
        if not self._log_metrics:
            return {}
        amounts = {name: (_amount(now, name), _amount(before, name)) for name in _AMOUNTS}
        # What has not grown was reset in between, and has grown from nothing.
        figures = {name: (new - old if new >= old else new) / max(steps, 1) for name, (new, old) in amounts.items()}
        three = {"device_peak_mib": now.device_bytes_peak / MIB, "moved_mib": figures["bytes_out"] / MIB}
        three["stall_seconds"] = figures["stall_seconds"]
        if self._log_metrics == "all":
            three |= figures | {name: float(getattr(now, name)) for name in _PEAKS}
        return {PREFIX + name: figure for name, figure in three.items()}


class StepTrace:
    """A trace of one step of training; see :meth:`Offload.trace <eager_offload.Offload.trace>`.

    Args:
        offload: what is traced.
        step: which one, the first being 1; ``None`` for none.
        path: where it is written; by a rank other than 0 with the rank before the suffix, as in ``step.rank1.json``.

    Raises:
        ConfigError: for a step that is no positive number, or a path where no file can be written.
    """

    def __init__(self, offload: Offload, step: int | None, path: str | os.PathLike[str]) -> None:
        if step is not None and (type(step) is not int or step < 1):
            raise ConfigError(f"trace_step={step!r} is not accepted: trace_step takes a step, 1 or more, or None")
        self._offload = offload
        #: As they were given.
        self.step, self.path = step, Path(path)
        self._tracing: Tracing | None = None
        if step is not None:
            offload.trace(self.path)  # which refuses what cannot be written

    def begin(self, step: int) -> None:
        """Step number ``step`` begins; where another one is traced still, that one is over."""
        self.end()
        if step == self.step and self._offload.config.enabled:
            number = rank()
            path = self.path.with_suffix(f".rank{number}{self.path.suffix}") if number else self.path
            self._tracing = self._offload.trace(path)
            self._tracing.__enter__()

    def end(self) -> None:
        """The step is over, or training is. Idempotent."""
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            tracing.__exit__(None, None, None)


def summarize(offload: Offload) -> None:
    """Training ends: a line for the user, on the first rank alone, where anything moved; it says why memory has not
    fallen, where it has not."""
    stats = offload.stats()
    if stats.offloaded_bytes and rank() == 0:
        headline, memory = str(stats).splitlines()[0], stats.advice[0]
        print(
            f"eager_offload: {headline}" + ("" if memory.startswith("Memory fell") else f". {memory}"), file=sys.stderr
        )


def _amount(stats: OffloadStats, name: str) -> float:
    value: float | dict[str, int] = getattr(stats, name)
    return sum(value.values()) if isinstance(value, dict) else value
