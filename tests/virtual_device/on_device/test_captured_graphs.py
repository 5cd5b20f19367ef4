"""``eager_offload.graphs`` on the virtual device: replays do what eager code does, and what fails is put right."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eager_offload import Offload
from eager_offload.graphs import (
    CapturedGraph,
    CaptureInputError,
    CaptureInvalidatedError,
    CaptureMode,
    CapturePool,
    CaptureStateError,
    CaptureStatus,
    DeviceScalar,
    GraphCaptureGuard,
    GraphPoolHandle,
    HostAllocationUnderCaptureError,
    PoolInUseError,
    PoolSealedError,
    StaleEventError,
    StaticInputs,
    capture_pool_for_handle,
    capture_status,
    graph_pool_handle,
    is_capturing,
    make_graphed_callable,
    release_graph_pool_handle,
)
from eager_offload.runtime.accelerator import accelerator_runtime
from tests.processes import python
from tests.threads import collect, on_a_thread
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.on_device.steps import assert_captures, graphs_alive

HERE = torch.device(NAME, 0)


@pytest.fixture(autouse=True)
def _nothing_is_left(virtual: VirtualDevice) -> Iterator[None]:
    stream, alive = torch.accelerator.current_stream(), virtual.graphs_alive
    yield
    assert torch.accelerator.current_stream() == stream
    assert capture_status() is CaptureStatus.NONE
    assert virtual.graphs_alive <= alive or graphs_alive(virtual) <= alive  # to collect garbage takes long
    assert_captures()


# -- replays ----------------------------------------------------------------------------------------------------------


def test_a_function_is_captured_with_what_it_refers_to() -> None:
    def make() -> tuple[CapturedGraph, StaticInputs, DeviceScalar]:
        static, scale = StaticInputs({"x": torch.ones(1 << 12, device=NAME)}), DeviceScalar(2.0)
        weight = torch.full((1 << 12,), 3.0, device=NAME)  # which only the function has
        return make_graphed_callable(lambda: static.values["x"] * weight * scale.tensor), static, scale

    graph, static, scale = make()
    collect()
    torch.full((1 << 12,), 7.0, device=NAME)
    for x, number in ((1.0, 2.0), (5.0, 0.5)):
        static.update({"x": torch.full((1 << 12,), x, device=NAME)})
        scale.update(number)
        graph.launch()
        assert graph.result.unique().tolist() == [x * 3 * number]
    assert (graph.pool, graph.num_replays) == (None, 2)
    assert not graph.upload()
    assert not graph.is_uploaded


# -- streams and pools ------------------------------------------------------------------------------------------------


def test_a_replay_on_another_stream_comes_after_its_inputs_and_the_last_one(virtual: VirtualDevice) -> None:
    x, other = torch.ones(8, device=NAME), torch.Stream(device=NAME)
    total = torch.zeros(8, device=NAME)
    graph = make_graphed_callable(lambda: total.add_(x))
    with virtual.slow_compute(0.01):
        x.fill_(3)
        graph.launch(other)
        graph.launch()
        with other:
            graph.launch()
            assert total.unique().tolist() == [9.0]
    with pytest.raises(CaptureInputError, match="captured on virtual:0 was launched on a stream of virtual:1"):
        graph.launch(torch.Stream(device=f"{NAME}:1"))
    assert graph.num_replays == 3


def test_graphs_of_one_pool_share_memory_and_take_turns_on_any_stream(virtual: VirtualDevice) -> None:
    n, stream, other = 1 << 14, torch.Stream(device=NAME), torch.Stream(device=NAME)
    handle = graph_pool_handle()
    pool = capture_pool_for_handle(handle)
    assert pool is not None
    x, out = torch.ones(n, device=NAME), torch.zeros(n, device=NAME)
    torch.accelerator.synchronize()
    addresses = []

    def captured(number: int, pool: CapturePool | GraphPoolHandle) -> CapturedGraph:
        def work() -> None:
            part = x * (number + 2)  # in memory of the pool, which the other graph uses too
            addresses.append(part.data_ptr())
            out.copy_(part)

        return make_graphed_callable(work, pool=pool)

    first = captured(0, handle)
    with pytest.raises(PoolSealedError, match="unseal"):
        captured(1, handle)
    pool.unseal()
    second = captured(1, pool)
    assert addresses[0] == addresses[1]
    with other, virtual.held():
        second.launch()
        with stream:
            first.launch()
    torch.accelerator.synchronize()
    assert out.unique().tolist() == [2.0]
    with pytest.raises(PoolInUseError, match="by 2 graphs"):
        pool.clear_buffers()
    release_graph_pool_handle(handle)
    with pytest.raises(CaptureInputError, match="names no pool"):
        GraphCaptureGuard(pool=handle)
    del first, second
    collect()
    pool.clear_buffers()
    pool.unseal()
    captured(1, pool).launch()  # in new memory: that of the others has gone
    assert out.unique().tolist() == [3.0]


def test_a_graph_that_goes_while_its_replay_runs_goes_after_it(virtual: VirtualDevice) -> None:
    """In a cycle with what is captured, inside of a capture of another program, which it does not spoil."""

    class Trainer:
        def __init__(self) -> None:
            self.x = torch.zeros(4, device=NAME)
            self.graph = make_graphed_callable(self.step)

        def step(self) -> None:
            self.x += 1

    alive, trainer, foreign = graphs_alive(virtual), Trainer(), torch.accelerator.Graph()
    gone, x = weakref.ref(trainer.graph), trainer.x
    with torch.Stream(device=NAME), virtual.held():
        trainer.graph.launch()
        with torch.Stream(device=NAME):
            foreign.capture_begin()
            x.mul_(2)
            del trainer
            collect()
            foreign.capture_end()
    torch.accelerator.synchronize()
    foreign.replay()
    assert x.tolist() == [2.0] * 4
    del foreign
    assert graphs_alive(virtual) == alive
    assert gone() is None


def test_buffers_of_a_pool_that_is_cleared_stay_while_a_replay_runs(virtual: VirtualDevice) -> None:
    out, pool, other = torch.zeros(1 << 14, device=NAME), CapturePool(), torch.Stream(device=NAME)
    x = torch.ones(1 << 14, device=NAME)
    torch.accelerator.synchronize()
    with GraphCaptureGuard(pool=pool) as guard:
        assert pool.record_buffer(x) == 0
        out.copy_(x)
    assert (guard.finish().pool, pool.buffer_count, pool.sealed) == (pool, 1, True)
    address, default = x.data_ptr(), torch.accelerator.current_stream()
    del x
    with other, virtual.held():
        guard.finish().launch()
        del guard
        pool.clear_buffers()
        with default:
            assert torch.full((1 << 14,), 9.0, device=NAME).data_ptr() != address
    torch.accelerator.synchronize()
    assert out.unique().tolist() == [1.0]
    accelerator_runtime().poll()
    assert torch.full((1 << 14,), 9.0, device=NAME).data_ptr() == address


# -- what a capture refuses without being the worse for it ------------------------------------------------------------

#: What is refused, with a graph, a pool and the like of before; ``guard`` is the capture's own.
REFUSED: dict[str, tuple[type[Exception], Callable[[SimpleNamespace], object]]] = {
    "another capture": (CaptureStateError, lambda given: GraphCaptureGuard().__enter__()),
    "itself again": (CaptureStateError, lambda given: given.guard.__enter__()),
    "a launch": (CaptureStateError, lambda given: given.graph.launch()),
    "an upload": (CaptureStateError, lambda given: given.graph.upload()),
    "a scalar's update": (CaptureStateError, lambda given: given.scalar.update(2.0)),
    "a scalar": (CaptureStateError, lambda given: DeviceScalar(2.0)),
    "an update of inputs": (CaptureStateError, lambda given: given.static.update(given.x)),
    "inputs": (CaptureStateError, lambda given: StaticInputs(given.x)),
    "an Offload": (CaptureStateError, lambda given: Offload().__enter__()),
    "a pool's first part": (HostAllocationUnderCaptureError, lambda given: CapturePool(64).host_buffer(64)),
    "more than a pool has": (HostAllocationUnderCaptureError, lambda given: given.pool.host_buffer(64)),
    "to clear its pool": (PoolInUseError, lambda given: given.pool.clear_buffers()),
    "an event of another capture": (
        StaleEventError,
        lambda given: accelerator_runtime().wait(torch.accelerator.current_stream(), given.stale),
    ),
    "the end on another thread": (CaptureStateError, lambda given: on_a_thread(given.guard.finish)),
}


@pytest.fixture(scope="module")
def given() -> SimpleNamespace:
    x, pool = torch.ones(4, device=NAME), CapturePool(64)
    pool.host_buffer(32)
    graph = make_graphed_callable(lambda: x + 1)
    with GraphCaptureGuard():
        stale = accelerator_runtime().record(torch.accelerator.current_stream())
    return SimpleNamespace(x=x, pool=pool, graph=graph, scalar=DeviceScalar(1.0), static=StaticInputs(x), stale=stale)


@pytest.mark.parametrize("mode", [CaptureMode.THREAD_LOCAL, CaptureMode.RELAXED])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_in_a_capture_leaves_it_valid(given: SimpleNamespace, name: str, mode: CaptureMode) -> None:
    kind, call = REFUSED[name]
    out = torch.zeros(4, device=NAME)
    given.pool.unseal()
    with GraphCaptureGuard(mode=mode, pool=given.pool) as given.guard:
        out += 1
        with pytest.raises(kind):
            call(given)
        assert given.guard.status() is capture_status() is CaptureStatus.ACTIVE
        assert is_capturing()
        out += 1
    assert given.guard.status() is CaptureStatus.NONE
    given.guard.finish().launch()
    assert out.tolist() == [2.0] * 4
    del given.guard


def test_captures_of_threads_do_not_get_into_each_others_way() -> None:
    runtime = accelerator_runtime()

    def capture(mode: CaptureMode, device: int, of_another: Any = None) -> None:
        with torch.accelerator.device_index(device), GraphCaptureGuard(mode=mode):
            if of_another is not None:
                with pytest.raises(StaleEventError, match="of another capture"):
                    runtime.wait(torch.accelerator.current_stream(), of_another)

    with GraphCaptureGuard():
        with pytest.raises(CaptureStateError, match="while another thread captures on virtual:0"):
            on_a_thread(lambda: capture(CaptureMode.THREAD_LOCAL, 0))
        own = runtime.record(torch.accelerator.current_stream())
        on_a_thread(lambda: capture(CaptureMode.THREAD_LOCAL, 1, own))
    with GraphCaptureGuard(mode=CaptureMode.GLOBAL), pytest.raises(CaptureStateError, match="mode 'global'"):
        on_a_thread(lambda: capture(CaptureMode.THREAD_LOCAL, 1))


#: The graph goes after names of the module that it is from.
HELD = """
from tests.virtual_device import NAME, install; install()
import torch
from eager_offload.graphs import graph as module, make_graphed_callable
x = torch.ones(4, device=NAME)
graph = make_graphed_callable(lambda: x + 1)
graph.launch()
module.held = lambda: graph
print(graph.result.tolist())
"""


def test_a_process_ends_in_silence_with_a_graph_that_is_still_held() -> None:
    done = python("-c", HELD)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2.0, 2.0, 2.0, 2.0]\n", "")


# -- captures that fail; see ``test_captured_steps.py`` too ----------------------------------------------------------


def test_a_capture_that_has_failed_is_over_and_holds_nothing(virtual: VirtualDevice) -> None:
    pool, user = CapturePool(), torch.Stream(device=NAME)
    torch.accelerator.empty_cache()
    reserved, alive, guard = torch.accelerator.memory_reserved(), graphs_alive(virtual), GraphCaptureGuard(pool=pool)

    def invalidate() -> None:
        with guard:
            with suppress(RuntimeError):
                torch.zeros(1 << 20, device=NAME).add_(1)[0].item()
            assert capture_status() is CaptureStatus.INVALIDATED
            assert not is_capturing()

    with user:
        with pytest.raises(
            CaptureInvalidatedError, match=r"first error raised inside.*was invalidated by an earlier call"
        ):
            invalidate()
        assert torch.accelerator.current_stream() == user
    assert guard.status() is CaptureStatus.NONE
    assert (virtual.graphs_alive, pool.sealed) == (alive, False)
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == reserved
    with pytest.raises(CaptureStateError, match="the capture has failed"):
        guard.finish()
    with pytest.raises(CaptureStateError, match="a second time"):
        guard.__enter__()
    out = torch.zeros(4, device=NAME)
    make_graphed_callable(lambda: out.add_(1), pool=pool).launch()
    assert out.tolist() == [1.0] * 4


def test_a_capture_that_cannot_begin_changes_nothing() -> None:
    pool, default = CapturePool(), torch.accelerator.current_stream()
    user = torch.Stream(device=NAME)
    with user:
        with pytest.raises(CaptureStateError, match="not the default one"):
            GraphCaptureGuard(default, pool=pool).__enter__()
        assert torch.accelerator.current_stream() == user
    assert not pool.sealed
    with pytest.raises(CaptureStateError, match="no capture has begun"):
        GraphCaptureGuard().finish()
    foreign = torch.accelerator.Graph()
    with torch.Stream(device=NAME):
        foreign.capture_begin()
        with pytest.raises(CaptureStateError, match="inside of another one"):
            GraphCaptureGuard(pool=pool).__enter__()
        foreign.capture_end()
    make_graphed_callable(lambda: torch.ones(4, device=NAME).mul_(2), pool=pool)
