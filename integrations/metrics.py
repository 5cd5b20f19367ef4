"""The stats of an :class:`~eager_offload.Offload` as flat numbers, for whatever a framework logs to."""

from __future__ import annotations

from eager_offload import Offload, OffloadStats

__all__ = ["PREFIX", "OffloadMetrics"]

#: What every name begins with; trackers make a group of it.
PREFIX = "offload/"
_AMOUNTS = ("saved_bytes", "offloaded_bytes", "shared_bytes", "bytes_out", "bytes_in", "stall_seconds")
_PEAKS = ("inflight_bytes_peak", "resident_bytes_peak", "host_bytes_peak", "disk_bytes_peak")


class OffloadMetrics:
    """Reads what ``offload`` has done since the last reading, by the names of :class:`~eager_offload.OffloadStats`.

    | name | unit | meaning |
    | --- | --- | --- |
    | ``offload/saved_bytes``, ``offloaded_bytes``, ``shared_bytes``, ``kept_bytes`` | bytes a step | what autograd saved; of that: taken away, on a storage taken already, kept |
    | ``offload/bytes_out``, ``bytes_in`` | bytes a step | what crossed the link |
    | ``offload/stall_seconds`` | seconds a step | how long the host waited |
    | ``offload/demotions`` | a step | what could not be done as planned |
    | ``offload/*_bytes_peak`` | bytes | the most since the stats were last reset |

    Reading waits for nothing: what is on its way counts when it has arrived, so a step's figures may be of the one before.
    """  # noqa: E501  # rows of a table cannot be broken

    def __init__(self, offload: Offload) -> None:
        self.offload = offload
        self._before = offload.stats()

    def read(self, steps: int = 1) -> dict[str, float]:
        """The figures of the ``steps`` steps since the last reading (or since this object was made), for one step."""
        before, now = self._before, self.offload.stats()
        self._before = now
        amounts = {name: _since(getattr(now, name), getattr(before, name)) for name in _AMOUNTS}
        amounts["kept_bytes"] = _since(_kept(now), _kept(before))
        amounts["demotions"] = _since(_demotions(now), _demotions(before))
        figures = {PREFIX + name: amount / max(steps, 1) for name, amount in amounts.items()}
        return figures | {PREFIX + name: float(getattr(now, name)) for name in _PEAKS}


def _since(now: float, before: float) -> float:
    """An amount that has grown, or that was reset in between and has grown from nothing."""
    return now - before if now >= before else now


def _kept(stats: OffloadStats) -> int:
    return sum(stats.kept_bytes.values())


def _demotions(stats: OffloadStats) -> int:
    return sum(stats.demotions.values())
