"""H10: a KeyboardInterrupt where a function of the library is entered, one in each small step, at 60 places spread over
all. There CPython looks for signals; ``test_in_between.py`` has those right before and right behind a copy.

Each trial raises at one place, once; then:
    - the hooks are gone, and the next step is exact, with its bytes moved;
    - once its graph is gone nothing is held: no record, no transfer, no slot, no byte (the graph of an interrupted
      backward stays with autograd itself until the thread's next backward);
    - the stats balance, or say that they are approximate, and ``close`` works.

What is left out, and what may stay of an interrupt there:
    - the way into ``Offload.__exit__``: nothing of it has run, so the hooks stay in that thread, as those of
      ``torch.autograd.graph.saved_tensors_hooks`` itself would;
    - opening and closing, which happen once (``offloaders.py``, the constructors); and the simulation's own inside.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import eager_offload
from eager_offload import Offload, OffloadStats
from eager_offload.runtime.host import host_runtime
from tests.hazards.backends import Backend, DiskBackend, SimulatedBackend, assert_settled, hooks_are_gone
from tests.hazards.programs import Around, assert_identical
from tests.programs import leaf
from tests.sampling import spread

PACKAGE = Path(eager_offload.__file__).parent
NBYTES = 16 * 16 * 4
#: A window, a look-ahead and newest bytes of one or two storages, so that there is waiting, bringing early, dropping.
FIELDS = {"max_inflight_bytes": 2 * NBYTES, "prefetch_bytes": 2 * NBYTES, "keep_last_bytes": NBYTES}

_OUTSIDE = {PACKAGE / "config.py", PACKAGE / "engine" / "offloaders.py"}
#: What looks for a directory.
_DIRECTORIES = ("_open", "_check", "filesystem_of", "usual_directories")


@cache
def is_ours(code: CodeType) -> bool:
    """Whether the entries of ``code`` are looked at."""
    path = Path(code.co_filename)
    return (
        PACKAGE in path.parents
        and path not in _OUTSIDE
        and not (path.name in ("offload.py", "contexts.py") and code.co_name in ("__init__", "__exit__"))
        and not (path.name == "disk.py" and code.co_name in _DIRECTORIES)
    )


class Walk:
    """Calls ``reached`` where a function of the library is entered in this thread.

    Args:
        only: look at no other code.
    """

    def __init__(self, reached: Callable[[CodeType], None], only: CodeType | None = None) -> None:
        self._reached, self._only = reached, only

    def __enter__(self) -> Any:
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> Any:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if code is self._only if self._only is not None else is_ours(code):
            self._reached(code)


def forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole storages, a part of one that is gathered, one that is shared, and some that backward does not ask for.

    Returns:
        The loss, and what half a backward ends at: nobody has saved that.
    """
    middle = (x.exp() * 2.0).sin()
    y = middle + 1.0
    y.cos()
    z = (y * y.t()).tanh()
    part = z[:, ::4] * leaf(16, 4)
    return part.exp().sum() + z.sigmoid().sum(), middle


def gradient(around: Around, settle: Callable[[], object] = lambda: None) -> Tensor:
    """One step; some of what was saved has left when ``settle`` is called, and some is on its way.

    Half a backward comes first: what is brought early then, the whole one needs later, or nobody does.
    """
    x = leaf(16, 16)
    with around:
        loss, middle = forward(x)
        aside, aside_middle = forward(x)
    settle()
    torch.autograd.grad(aside, aside_middle, retain_graph=True)
    torch.autograd.grad(loss, middle, retain_graph=True)
    del aside, aside_middle, middle
    settle()
    loss.backward()
    return x.grad


class InterruptedAt(Walk):
    """Raises at one point, the time that is given; yields where it did.

    No generator: from Python 3.12 on its frame leads back to the one that threw the interrupt into it, which holds the
    interrupt, which holds all that it went through.
    """

    def __init__(self, point: CodeType, occurrence: int) -> None:
        super().__init__(self._at, point)
        self._left = occurrence
        self._raised: list[CodeType] = []

    def __enter__(self) -> list[CodeType]:
        super().__enter__()
        return self._raised

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        super().__exit__()
        return kind is KeyboardInterrupt

    def _at(self, found: CodeType) -> None:
        self._left -= 1
        if not self._left:
            sys.settrace(None)
            self._raised.append(found)
            raise KeyboardInterrupt


class Trials:
    """Steps on one backend, each interrupted at one point."""

    def __init__(self, backend: Backend, *, step_tables: bool) -> None:
        self.backend, self.step_tables = backend, step_tables
        self.offload = self.make()
        self.expected = self.step(None)
        self.harmful: list[str] = []
        # Graphs of other tests, whose backward raised, are kept by torch itself, with what was reloaded for them.
        self.taken_before = host_runtime().pool.used_bytes

    def make(self) -> Offload:
        return self.backend.offload(**FIELDS, step_tables=self.step_tables)

    def step(self, offload: Offload | None) -> object:
        """A step, without offload if there is none."""
        return gradient(offload or nullcontext(), self.offload.stats)

    def points(self) -> Counter[CodeType]:
        """How often each point is reached in a step, once the library knows what to expect."""
        found: Counter[CodeType] = Counter()
        for _ in range(2):
            self.step(self.offload)
        with Walk(lambda point: found.update([point])):
            self.step(self.offload)
        return found

    def run(self, point: CodeType, occurrence: int) -> bool:
        """One trial; whether the point was reached. Where and when bytes arrive differs from one step to the next."""
        with InterruptedAt(point, occurrence) as raised:
            self.step(self.offload)
        try:
            assert hooks_are_gone(), "the hooks are still there"
            moved = self.offload.stats(synchronize=True).bytes_out
            assert_identical(self.expected, self.step(self.offload), "the next step")
            stats = assert_settled(self.offload)
            assert stats.bytes_out > moved, "the next step moved nothing"
            assert not stats.fallbacks, stats.fallbacks
            self.offload.reset_stats()
            assert_identical(self.expected, self.step(self.offload), "a later step")
            assert_most_moved(assert_settled(self.offload))
            assert host_runtime().pool.used_bytes <= self.taken_before, "a reload target is still taken"
            self.offload.reset_stats()
        except Exception as error:
            where = f"{Path(point.co_filename).relative_to(PACKAGE)} {point.co_qualname}"
            self.harmful.append(f"{where} time {occurrence}: {type(error).__name__} {str(error)[:160]!r}")
            self.backend.offloads.remove(self.offload)
            self.offload = self.make()
        return bool(raised)


def assert_most_moved(stats: OffloadStats) -> None:
    """All that is not a leaf's, and not of the newest bytes; several saves share those."""
    assert set(stats.kept_bytes) <= {"newest", "parameter"}, stats
    assert stats.kept_bytes.get("newest", 0) <= 3 * NBYTES, stats
    stay = sum(stats.kept_bytes.values())
    assert stats.offloaded_bytes + stats.shared_bytes >= 0.9 * (stats.saved_bytes - stay) > 0, stats
    assert stats.bytes_out > 0


#: Of each of the four kinds of steps: 60 together.
PLACES = 15


def run_all(trials: Trials) -> None:
    """Interrupts ``PLACES`` points, the same distance apart, the first and the last time that a step comes to each."""
    reached = tried = 0
    for point, times in spread(PLACES, [*trials.points().items()]):
        for occurrence in sorted({1, times}):
            tried += 1
            reached += trials.run(point, occurrence)
    assert not trials.harmful, f"{len(trials.harmful)} of {tried}:\n" + "\n".join(trials.harmful)
    assert reached >= 0.7 * tried > 0, f"only {reached} of {tried} points were reached again"
    trials.offload.close()
    trials.offload.close()
    assert_identical(trials.expected, trials.step(trials.offload), "after it was closed")
    assert_most_moved(trials.offload.stats())


@contextmanager
def no_finalizer_fails() -> Iterator[None]:
    """Of objects whose ``__init__`` was interrupted, for instance: Python would print it and go on."""
    failed: list[str] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda what: failed.append(f"{what.object}: {what.exc_value!r}")
    try:
        yield
    finally:
        sys.unraisablehook = before
    assert not failed, failed


@pytest.mark.filterwarnings("ignore:eager_offload. nothing of this Offload:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "step_tables"),
    [
        *((DiskBackend, False), (SimulatedBackend, True)),
        *(pytest.param(*steps, marks=pytest.mark.long) for steps in ((DiskBackend, True), (SimulatedBackend, False))),
    ],
)
def test_h10_h39_h41_h54_an_interrupt_at_any_point_is_harmless(kind: type[Backend], step_tables: bool) -> None:
    with kind() as backend, no_finalizer_fails():
        run_all(Trials(backend, step_tables=step_tables))
        backend.assert_nothing_is_held()
