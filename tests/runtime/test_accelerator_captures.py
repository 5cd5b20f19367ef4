"""The runtime and the engine beside a capture, on the recording double, which refuses what CUDA refuses in each mode.

A call that is refused makes the capture void, so none may be made; ``refused`` has it also where its error is caught.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.errors import (
    CaptureInvalidatedError,
    CaptureStateError,
    HostAllocationUnderCaptureError,
    StaleEventError,
    UnjoinedStreamError,
)
from eager_offload.graphs import CapturedGraph, CapturePool, CaptureStatus, GraphCaptureGuard
from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.runtime.captures import CAPTURES, Capture, CaptureMode, Captures
from eager_offload.tiers.memory import PAGE
from tests.doubles.recording_accelerator import RecordingAccelerator
from tests.doubles.recording_streams import RecordingStream
from tests.doubles.training_accelerator import TrainingAccelerator
from tests.hazards.backends import assert_settled
from tests.hazards.programs import assert_identical, leaf
from tests.runtime.accelerator_double import DEVICE, NBYTES, host_slot, selection
from tests.runtime.test_beside_an_accelerator import EVERYTHING, forward
from tests.threads import collect, on_a_thread

if not hasattr(torch.Stream, "is_capturing"):
    pytest.skip("this torch does not say of a stream whether it is being captured", allow_module_level=True)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert CAPTURES.under_way == ()


@pytest.fixture
def double() -> RecordingAccelerator:
    return RecordingAccelerator(devices=2, can_register=True)


@pytest.fixture
def runtime(double: RecordingAccelerator) -> AcceleratorRuntime:
    return AcceleratorRuntime(double)


def here(call: Callable[[], object]) -> Any:
    return call()


# -- the runtime ------------------------------------------------------------------------------------------------------


class Beside:
    """A runtime in a capture, and events of before it, of it, and of a stream that is not a part of it."""

    def __init__(self, double: RecordingAccelerator, runtime: AcceleratorRuntime, mode: CaptureMode) -> None:
        self.double, self.runtime, self.mode = double, runtime, mode
        self.stream, self.side, self.free = (double.stream(DEVICE) for _ in range(3))
        self.older = runtime.record(self.free)
        self.slab: Tensor | None = runtime.host_buffer(PAGE)

    def __enter__(self) -> Beside:
        self.capture: Capture = self.runtime.begin_capture(self.stream, self.mode)
        self.own, self.younger = self.runtime.record(self.stream), self.runtime.record(self.free)
        return self

    def __exit__(self, *_: object) -> None:
        """Raises where the driver has refused a call: then there is no graph."""
        self.runtime.end_capture(self.capture)
        assert self.double.captures.refused == []

    def poll(self, how: Callable[[AcceleratorRuntime], object] = AcceleratorRuntime.poll) -> None:
        self.runtime.keep_until(self.younger, object())
        how(self.runtime)

    def drop_slab(self) -> None:
        self.slab = None
        collect()
        self.runtime.poll()


#: What the engine does, and what it is told in a capture of its own thread.
OURS: dict[str, tuple[type[Exception] | None, Callable[[Beside], object]]] = {
    "to ask about an older event": (None, lambda beside: beside.runtime.query(beside.older)),
    "to ask about its event": (None, lambda beside: beside.runtime.query(beside.own)),
    "to ask about a younger event": (None, lambda beside: beside.runtime.query(beside.younger)),
    "to wait for an older event": (None, lambda beside: beside.runtime.synchronize(beside.older)),
    "to wait for its event": (CaptureStateError, lambda beside: beside.runtime.synchronize(beside.own)),
    "to wait for a younger event": (CaptureStateError, lambda beside: beside.runtime.synchronize(beside.younger)),
    "to wait for all that is kept": (None, lambda beside: beside.poll(AcceleratorRuntime.synchronize_kept)),
    "a stream's wait for an older event": (None, lambda beside: beside.runtime.wait(beside.stream, beside.older)),
    "a stream's wait for a younger event": (
        CaptureStateError,
        lambda beside: beside.runtime.wait(beside.stream, beside.younger),
    ),
    "to poll": (None, Beside.poll),
    "to let go of what is pinned": (None, Beside.drop_slab),
    "to pin": (HostAllocationUnderCaptureError, lambda beside: beside.runtime.host_buffer(PAGE)),
    "memory that is not pinned": (None, lambda beside: beside.runtime.host_buffer(PAGE, pin_memory=False)),
}


@pytest.mark.parametrize("mode", CaptureMode)
@pytest.mark.parametrize("name", OURS)
def test_the_runtime_asks_for_nothing_in_a_capture_that_is_refused(
    double: RecordingAccelerator, runtime: AcceleratorRuntime, name: str, mode: CaptureMode
) -> None:
    kind, call = OURS[name]
    before = selection(double)
    with Beside(double, runtime, mode) as beside:
        if kind is None:
            call(beside)
        else:
            with pytest.raises(kind):
                call(beside)
    assert selection(double) == before
    double.run_all()
    assert runtime.query(beside.younger)
    runtime.poll()


@pytest.mark.parametrize("mode", CaptureMode)
@pytest.mark.parametrize("name", OURS)
def test_another_thread_is_refused_nothing_either(
    double: RecordingAccelerator, runtime: AcceleratorRuntime, name: str, mode: CaptureMode
) -> None:
    """In mode ``global`` it is told as the thread that captures is; else it need not know of the capture."""
    kind, call = OURS[name]
    is_told = kind is not None and (mode is CaptureMode.GLOBAL or "its event" in name or "a stream's" in name)
    with Beside(double, runtime, mode) as beside:
        if is_told:
            with pytest.raises(kind or RuntimeError):
                on_a_thread(lambda: call(beside))
        else:
            on_a_thread(lambda: call(beside))


def test_what_is_unpinned_in_a_capture_is_unpinned_after_it(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    with Beside(double, runtime, CaptureMode.THREAD_LOCAL) as beside:
        beside.drop_slab()
        assert len(double.registered) == 1
    runtime.poll()
    assert not double.registered


def test_copies_become_nodes_behind_events_of_the_capture_and_run_only_later(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    source, slot = double.empty(NBYTES, DEVICE), host_slot(runtime, NBYTES)
    with Beside(double, runtime, CaptureMode.THREAD_LOCAL) as beside:
        runtime.wait(beside.side, beside.own)
        over = runtime.copy(slot, source, beside.side)
        assert not runtime.query(over)
        runtime.wait(beside.stream, over)
        nodes = beside.capture.graph.capture.nodes
        assert [(key.stream_id, step.run is not None) for key, step, _ in nodes] == [(beside.side.stream_id, True)]
        assert not double.pending(beside.side)
    with pytest.raises(StaleEventError):
        runtime.query(over)


def test_a_stream_that_has_not_joined_is_an_error_and_the_next_capture_is_good(
    double: RecordingAccelerator, runtime: AcceleratorRuntime
) -> None:
    source, slot = double.empty(NBYTES, DEVICE), host_slot(runtime, NBYTES)
    before = selection(double)
    beside = Beside(double, runtime, CaptureMode.RELAXED).__enter__()
    runtime.wait(beside.side, beside.own)
    runtime.copy(slot, source, beside.side)
    with pytest.raises(UnjoinedStreamError, match="unjoined"):
        runtime.end_capture(beside.capture)
    assert selection(double) == before
    assert not beside.side.is_capturing()
    with Beside(double, runtime, CaptureMode.RELAXED):
        pass


@pytest.mark.parametrize("abandons", [False, True])
def test_a_capture_that_another_library_makes_void_is_put_right(
    double: RecordingAccelerator, runtime: AcceleratorRuntime, abandons: bool
) -> None:
    before, beside = selection(double), Beside(double, runtime, CaptureMode.THREAD_LOCAL)
    beside.__enter__()
    with pytest.raises(RuntimeError, match="not permitted"):
        double.empty_pinned(64)
    if abandons:
        runtime.abandon_capture(beside.capture)
    else:
        with pytest.raises(CaptureInvalidatedError, match="previous error"):
            runtime.end_capture(beside.capture)
    assert selection(double) == before
    double.captures.refused.clear()
    with Beside(double, runtime, CaptureMode.THREAD_LOCAL):
        pass


@pytest.mark.parametrize("voids", [False, True])
@pytest.mark.parametrize("abandons", [False, True])
def test_a_graph_works_in_no_memory_that_eager_code_or_another_graph_works_in(
    double: RecordingAccelerator, runtime: AcceleratorRuntime, abandons: bool, voids: bool
) -> None:
    """torch has a workspace for each stream, and takes it from all graphs of a stream with the first one that goes."""
    stream = double.stream(DEVICE)
    assert isinstance(stream, RecordingStream)
    for number in range(3):
        double.multiply(stream)  # as a warm-up does
        assert double.workspaces == {stream.key: None}
        begun = runtime.begin_capture(stream, CaptureMode.THREAD_LOCAL)
        double.multiply(stream)
        assert begun.graph.capture.workspaces == {begun.memory}
        if number == 1:  # a reset looks whether a workspace keeps the memory of the graph
            if voids:
                with pytest.raises(RuntimeError, match="not permitted"):
                    double.empty_pinned(64)
            with suppress(CaptureInvalidatedError):
                (runtime.abandon_capture if abandons else runtime.end_capture)(begun)
        else:
            runtime.end_capture(begun)
        assert double.workspaces == {}


def test_a_pool_goes_on_after_a_capture_that_failed(
    double: RecordingAccelerator, runtime: AcceleratorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In other memory: to 2.12, torch goes on to take the first for that of a capture that is under way."""
    monkeypatch.setattr("eager_offload.graphs.graph.capturing_runtime", lambda: runtime)
    pool, stream = CapturePool(), double.stream(DEVICE)

    def capture(*, voids: bool = False) -> CapturedGraph:
        pool.unseal()
        with GraphCaptureGuard(stream, pool=pool) as guard:
            if voids:
                with pytest.raises(RuntimeError, match="not permitted"):
                    double.empty_pinned(64)
        return guard.finish()

    graphs = [capture(), capture()]
    with pytest.raises(CaptureInvalidatedError):
        capture(voids=True)
    graphs += [capture(), capture()]
    pool.unseal()
    with pytest.raises(CaptureStateError):
        GraphCaptureGuard(runtime.current_stream(DEVICE), pool=pool).__enter__()  # which changes nothing
    graphs.append(capture())
    first, second, third, fourth, fifth = (graph._graph.pool() for graph in graphs)
    assert first == second != third == fourth == fifth


@pytest.mark.parametrize("where", [here, on_a_thread])
@pytest.mark.parametrize("mode", CaptureMode)
@pytest.mark.parametrize("launches", [False, True])
def test_a_graph_that_goes_in_a_capture_is_destroyed_after_it(
    double: RecordingAccelerator,
    runtime: AcceleratorRuntime,
    monkeypatch: pytest.MonkeyPatch,
    launches: bool,
    mode: CaptureMode,
    where: Callable[..., object],
) -> None:
    """And one that has gone while it ran is destroyed before it, so that the capture has its memory."""
    monkeypatch.setattr("eager_offload.graphs.graph.capturing_runtime", lambda: runtime)
    monkeypatch.setattr("eager_offload.graphs.graph.capture_status", lambda stream: CaptureStatus.NONE)
    stream, graphs = double.stream(DEVICE), list[CapturedGraph]()
    for _ in range(2):
        with GraphCaptureGuard(stream) as guard:
            pass
        graphs.append(guard.finish())
        del guard
    if launches:
        for graph in graphs:
            graph.launch()
        del graph
    graphs.pop()
    assert ("destroy" in double.calls) is not launches
    beside = Beside(double, runtime, mode)
    with beside:
        assert double.calls.count("destroy") == 1
        if where is on_a_thread and mode is not CaptureMode.GLOBAL:
            where(graphs.clear)
        else:
            where(lambda: (graphs.clear(), runtime.poll()))
            with runtime.enter(beside.free):
                runtime.poll()
            assert double.calls.count("destroy") == 1
    runtime.poll()
    assert double.calls.count("destroy") == 2


@pytest.mark.parametrize(
    ("check", "answer", "name", "refused"),
    [
        ("forbid_queries", False, "to ask about a younger event", "query"),
        ("forbid_queries", False, "to poll", "query"),
        ("forbid_queries", False, "to wait for a younger event", "synchronize"),
        ("forbid_queries", False, "to let go of what is pinned", "unpin"),
        ("of", None, "a stream's wait for a younger event", "a stream's wait for an event from outside"),
    ],
)
def test_a_runtime_without_one_of_its_checks_is_refused(
    double: RecordingAccelerator,
    runtime: AcceleratorRuntime,
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    answer: object,
    name: str,
    refused: str,
) -> None:
    """So what is checked above can be seen."""
    monkeypatch.setattr(Captures, check, lambda *_: answer)
    beside = Beside(double, runtime, CaptureMode.THREAD_LOCAL)
    beside.__enter__()
    try:
        with pytest.raises(RuntimeError, match="not permitted"):
            OURS[name][1](beside)
    finally:
        runtime.abandon_capture(beside.capture)
    assert double.captures.refused[0] == (refused, "thread_local")


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def training() -> Iterator[TrainingAccelerator]:
    double = TrainingAccelerator(can_register=True)
    with double.checked() as checker:
        yield double
    checker.assert_clean()


def step(around: Any) -> tuple[Tensor, ...]:
    of = [leaf(32, 32, seed=seed) for seed in (1, 2)]
    with around:
        loss = forward(*of)
    return torch.autograd.grad(loss, of)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("mode", CaptureMode)
def test_h52_a_thread_trains_while_another_captures(
    training: TrainingAccelerator, mode: CaptureMode, warm: bool
) -> None:
    """In mode ``global`` what would have to be pinned first stays, and what is pinned is used."""
    runtime, expected = training.runtime, step(torch.enable_grad())
    offload = Offload(runtime=runtime, **EVERYTHING)
    if warm:
        assert_identical(expected, step(offload))
    found, capturing = training.stream(torch.device("cpu", 0)), threading.Event()
    before = offload.stats(synchronize=True).bytes_out
    over = threading.Event()

    def capture() -> None:
        begun = runtime.begin_capture(found, mode)
        capturing.set()
        over.wait()
        runtime.end_capture(begun)

    thread = threading.Thread(target=capture)
    thread.start()
    capturing.wait()
    try:
        for _ in range(3):
            assert_identical(expected, step(offload))
    finally:
        over.set()
        thread.join()
    assert training.captures.refused == []
    moved = offload.stats(synchronize=True).bytes_out - before
    assert (moved > 0) == (warm or mode is not CaptureMode.GLOBAL)
    assert_identical(expected, step(offload))
    assert assert_settled(offload).bytes_out > before + moved
    offload.close()


@pytest.mark.parametrize("mode", CaptureMode)
def test_h52_what_is_around_a_capture_asks_the_driver_for_nothing_inside(
    training: TrainingAccelerator, mode: CaptureMode
) -> None:
    """Graphs of before go in it, what it saves stays, and an ``Offload`` out of use goes as well."""
    runtime = training.runtime
    offload, dropped = Offload(runtime=runtime, **EVERYTHING), Offload(runtime=runtime, **EVERYTHING)
    with training.computing_on(training.side_stream()):
        expected = step(torch.enable_grad())
        assert_identical(expected, step(dropped))
        of = [leaf(32, 32, seed=seed) for seed in (1, 2)]
        with offload:
            losses = [forward(*of) for _ in range(3)]
            moved = offload.stats().bytes_out
            begun = runtime.begin_capture(runtime.current_stream(torch.device("cpu", 0)), mode)
            captured = forward(*of)
            assert_identical(expected, torch.autograd.grad(captured, of))
            del losses[0], dropped, captured
            collect()
            runtime.poll()
            stats = offload.stats(synchronize=True)
            assert stats.bytes_out == moved > 0
            assert stats.kept_bytes["region"] > 0
            runtime.end_capture(begun)
        assert training.captures.refused == []
        assert_identical(expected, torch.autograd.grad(losses.pop(), of))
        losses.clear()
        del of, expected
    assert_settled(offload)
    offload.close()
