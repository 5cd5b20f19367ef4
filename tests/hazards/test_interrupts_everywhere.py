"""H10: a KeyboardInterrupt wherever CPython may raise one inside the library, one in each small step.

CPython looks for signals when a Python function is entered, after a call of anything that is not a plain Python
function, and when a loop turns back. Those are the *points* here. Each trial raises at one of them, once; then:
    - the hooks are gone, and the next step is exact, with its bytes moved;
    - once its graph is gone nothing is held: no storage, no promise, no registration, no slot, no byte (the graph of an
      interrupted backward stays with autograd itself until the thread's next backward);
    - the stats balance, and ``close`` works.

What is left out, and what may stay of an interrupt there:
    - the finalizers: Python itself prints what is raised in one and goes on, and what that one was to hand over (a use,
      a storage's accounts, a slot's range) stays known until the ``Offload``, or the tier, is gone;
    - the way into ``Offload.__exit__``: nothing of it has run, so the hooks stay in that thread, as those of
      ``torch.autograd.graph.saved_tensors_hooks`` itself would;
    - opening and closing, which happen once (``lanes.py``, the constructors); and the simulated runtime's own inside.
"""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import eager_offload
from eager_offload import Offload, OffloadStats
from eager_offload.runtime.host import host_runtime
from tests.doubles.recorded_backend import RecordedBackend
from tests.hazards.backends import Backend, DiskBackend, SimulatedBackend, assert_settled, hooks_are_gone
from tests.hazards.programs import leaf

PACKAGE = Path(eager_offload.__file__).parent
NBYTES = 16 * 16 * 4
#: A window, a look-ahead and newest bytes of one or two storages, so that there is waiting, bringing early, dropping.
FIELDS = {"max_inflight_bytes": 2 * NBYTES, "prefetch_bytes": 2 * NBYTES, "keep_last_bytes": NBYTES}

_OUTSIDE = {PACKAGE / "config.py", PACKAGE / "eager" / "lanes.py", PACKAGE / "tiers" / "directories.py"}
_SIMULATION = {"simulated", "checker", "deferred", "observer", "recording", "signatures", "timeline"}
_OUTSIDE |= {PACKAGE / "runtime" / f"{name}.py" for name in _SIMULATION}
_FINALIZERS = {"__del__", "<lambda>"}


class Point(NamedTuple):
    """A place where an interrupt may come: before the instruction at ``offset``, or at the entry where that is -1."""

    code: CodeType
    offset: int

    def __str__(self) -> str:
        where = Path(self.code.co_filename).relative_to(PACKAGE)
        return f"{where}:{self.line} {self.code.co_name}{'' if self.offset >= 0 else ' (entry)'}"

    @property
    def line(self) -> int:
        lines = [line for start, stop, line in self.code.co_lines() if start <= self.offset < stop and line is not None]
        return lines[0] if lines else self.code.co_firstlineno


@cache
def is_ours(code: CodeType) -> bool:
    """Whether the points of ``code`` are looked at."""
    path = Path(code.co_filename)
    return (
        PACKAGE in path.parents
        and path not in _OUTSIDE
        and code.co_name not in _FINALIZERS
        and (path.name, code.co_name) not in {("offload.py", "__init__"), ("offload.py", "__exit__")}
    ) or code is Offload.__exit__.__code__


@cache
def checks_behind(code: CodeType) -> frozenset[int]:
    """The instructions of ``code`` behind which CPython looks for signals."""
    return frozenset(
        step.offset
        for step in dis.get_instructions(code)
        if step.opname.startswith("CALL") or step.opname == "JUMP_BACKWARD"
    )


class Walk:
    """Follows the library's functions in this thread from point to point.

    Args:
        reached: called at each point.
        only: look at no other code.
    """

    def __init__(self, reached: Callable[[Point], None], only: CodeType | None = None) -> None:
        self._reached = reached
        self._only = only
        #: The frames that a plain Python function has returned to, or is about to, by id: frames hold tensors.
        self._called: set[int] = set()

    def __enter__(self) -> None:
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        self._returns_to(frame)
        if (code is not self._only) if self._only is not None else not is_ours(code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        behind, before = checks_behind(code), -1
        if code is not Offload.__exit__.__code__:
            self._reached(Point(code, -1))

        def step(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal before
            if event == "opcode":
                called = id(frame) in self._called
                self._called.discard(id(frame))
                checks, before = before in behind and not called, frame.f_lasti
                if checks:
                    self._reached(Point(code, before))
            return step

        return step

    def _returns_to(self, frame: FrameType) -> None:
        """A plain Python function goes back to its caller without a look at signals."""
        caller, name = frame.f_back, frame.f_code.co_name
        if caller is not None and is_ours(caller.f_code) and not name.startswith(("__", "<")):
            self._called.add(id(caller))


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


def gradient(around: AbstractContextManager[Any], settle: Callable[[], object]) -> Tensor:
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
    assert x.grad is not None
    return x.grad


@contextmanager
def interrupted_at(point: Point, occurrence: int) -> Iterator[list[Point]]:
    """Raises at one point, the time that is given; yields where it did."""
    seen, raised = 0, []

    def reached(found: Point) -> None:
        nonlocal seen
        if not raised and found == point:
            seen += 1
            if seen == occurrence:
                sys.settrace(None)
                raised.append(found)
                raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), Walk(reached, point.code):
        yield raised


class Trials:
    """Steps on one backend, each interrupted at one point."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.expected = gradient(nullcontext(), lambda: None)
        self.offload = backend.offload(**FIELDS)
        self.harmful: list[str] = []

    def settle(self) -> None:
        self.offload.stats()

    def points(self) -> Counter[Point]:
        """How often each point is reached in one step, once the library knows what to expect."""
        found: Counter[Point] = Counter()
        for _ in range(2):
            gradient(self.offload, self.settle)
        with Walk(lambda point: found.update([point])):
            gradient(self.offload, self.settle)
        return found

    def run(self, point: Point, occurrence: int) -> bool:
        """One trial; whether the point was reached. Where and when bytes arrive differs from one step to the next."""
        with interrupted_at(point, occurrence) as raised:
            gradient(self.offload, self.settle)
        try:
            assert hooks_are_gone(), "the hooks are still there"
            moved = self.offload.stats(synchronize=True).bytes_out
            assert torch.equal(gradient(self.offload, self.settle), self.expected), "another gradient"
            stats = assert_settled(self.offload)
            assert stats.bytes_out > moved, "the next step moved nothing"
            assert not stats.demotions, stats.demotions
            self.offload.reset_stats()
            assert torch.equal(gradient(self.offload, self.settle), self.expected), "another gradient, later"
            assert_most_moved(assert_settled(self.offload))
            assert host_runtime().arena.used_bytes == 0, "a reload target is still taken"
            self.offload.reset_stats()
        except Exception as error:
            self.harmful.append(f"{point} time {occurrence}: {type(error).__name__} {str(error)[:160]!r}")
            self.backend.offloads.remove(self.offload)
            self.offload = self.backend.offload(**FIELDS)
        return bool(raised)


def assert_most_moved(stats: OffloadStats) -> None:
    """All that is not a leaf's, and not of the newest bytes; several saves share those."""
    assert set(stats.kept_bytes) <= {"newest", "parameter"}, stats
    assert stats.kept_bytes.get("newest", 0) <= 3 * NBYTES, stats
    stay = sum(stats.kept_bytes.values())
    assert stats.offloaded_bytes + stats.shared_bytes >= 0.9 * (stats.saved_bytes - stay) > 0, stats
    assert stats.bytes_out > 0


def run_all(backend: Backend, stride: int) -> None:
    """Interrupts every ``stride``-th point, the first time and the last time that a step comes to it."""
    trials = Trials(backend)
    reached = tried = 0
    for point, times in list(trials.points().items())[::stride]:
        for occurrence in sorted({1, times}):
            tried += 1
            reached += trials.run(point, occurrence)
    assert not trials.harmful, f"{len(trials.harmful)} of {tried}:\n" + "\n".join(trials.harmful)
    assert reached >= 0.7 * tried > 0, f"only {reached} of {tried} points were reached again"
    trials.offload.close()
    trials.offload.close()
    assert torch.equal(gradient(trials.offload, trials.settle), trials.expected), "after it was closed"
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


@pytest.mark.parametrize("kind", [DiskBackend, SimulatedBackend])
def test_h10_an_interrupt_at_a_sample_of_all_points_is_harmless(kind: type[Backend]) -> None:
    with kind() as backend, no_finalizer_fails():
        run_all(backend, stride=6)
        backend.assert_nothing_is_held()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "stride"), [(DiskBackend, 1), (SimulatedBackend, 1), (RecordedBackend, 4)])
def test_h10_an_interrupt_at_every_point_is_harmless(kind: type[Backend], stride: int) -> None:
    with kind() as backend, no_finalizer_fails():
        run_all(backend, stride)
        backend.assert_nothing_is_held()
