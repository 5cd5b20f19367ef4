"""H10: a KeyboardInterrupt wherever one may come inside a trace ends the trace, and nothing of it stays.

The points and what holds after each are those of ``test_interrupts_everywhere``. Left out is the way into ``__exit__``,
of which nothing has run, and the way out of ``__enter__``, of which the ``with`` knows nothing yet.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import eager_offload.observe.tracing as tracing
from tests.hazards.backends import Backend, DiskBackend
from tests.hazards.test_interrupts_everywhere import Point, Trials, Walk, gradient, interrupted_at, no_finalizer_fails
from tests.observe.looking import nothing_is_left

#: What a handle's finalizer calls: Python prints what is raised there and goes on, and a trace counts one save less.
_OF_FINALIZERS = {"outcomes", "outcome", "_outcome_of"}
OBSERVE = Path(tracing.__file__).parent


class TracedTrials(Trials):
    """Steps with a trace around them."""

    def __init__(self, backend: Backend, path: Path) -> None:
        super().__init__(backend)
        self._path = path

    def traced(self) -> None:
        with self.offload.trace(self._path):
            gradient(self.offload, self.settle)

    def points(self) -> Counter[Point]:
        found: Counter[Point] = Counter()
        for _ in range(2):
            self.traced()
        with Walk(lambda point: found.update([point])):
            self.traced()
        return Counter({point: times for point, times in found.items() if is_looked_at(point)})

    def run(self, point: Point, occurrence: int) -> bool:
        with interrupted_at(point, occurrence) as raised:
            self.traced()
        left = not nothing_is_left(self.offload)
        super().run(Point(Trials.run.__code__, -1), 1)  # which nothing comes to: what must hold afterwards
        if left:
            self.harmful.append(f"{point} time {occurrence}: something of the trace is still there")
        return bool(raised)


def is_looked_at(point: Point) -> bool:
    path, name = Path(point.code.co_filename), point.code.co_name
    if name in ("__exit__", "__enter__") and path.name == "tracing.py":
        return point.offset >= 0 and name == "__exit__"
    return OBSERVE in path.parents and name not in _OF_FINALIZERS


def run_all(tmp_path: Path, stride: int) -> None:
    with DiskBackend() as backend, no_finalizer_fails():
        trials = TracedTrials(backend, tmp_path / "step.json")
        reached = tried = 0
        for point, times in list(trials.points().items())[::stride]:
            for occurrence in sorted({1, times}):
                tried += 1
                reached += trials.run(point, occurrence)
        assert not trials.harmful, f"{len(trials.harmful)} of {tried}:\n" + "\n".join(trials.harmful)
        assert reached >= 0.7 * tried > 0, f"only {reached} of {tried} points were reached again"
        backend.assert_nothing_is_held()


def test_h10_an_interrupt_at_a_sample_of_all_points_of_a_trace_is_harmless(tmp_path: Path) -> None:
    run_all(tmp_path, stride=8)


@pytest.mark.long
def test_h10_an_interrupt_at_every_point_of_a_trace_is_harmless(tmp_path: Path) -> None:
    run_all(tmp_path, stride=1)
