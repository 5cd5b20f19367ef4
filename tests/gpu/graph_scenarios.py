"""What ``eager_offload.graphs`` has to do on a device that captures. As ``scenarios.py``, they need torch alone."""

from __future__ import annotations

import gc
import tempfile
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from eager_offload.graphs import (
    CapturedGraph,
    CaptureMode,
    CapturePool,
    CaptureStateError,
    CaptureStatus,
    DeviceScalar,
    GraphCaptureGuard,
    StaticInputs,
    capture_status,
    make_graphed_callable,
)
from tests.gpu.machine import Machine
from tests.gpu.scenarios import Around, Scenario, Skipped

REPLAYS = 100


def require_graphs(machine: Machine) -> None:
    if not machine.runtime.captures:
        raise Skipped("this torch captures nothing on this device")


def names_of_copies(machine: Machine) -> tuple[str, str]:
    """How a dumped graph calls nodes that copy out and in, in small letters."""
    return ("copy out", "copy in") if machine.device.type == "virtual" else ("dtoh", "htod")


class Training:
    """Forward, backward and a fused AdamW, whose inputs and rate stay where they are."""

    def __init__(self, machine: Machine) -> None:
        torch.manual_seed(0)
        width, device = machine.width, machine.device
        self._shape = (width, width)
        self.model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).to(device)
        self.batch = StaticInputs((torch.zeros(self._shape, device=device), torch.zeros(self._shape, device=device)))
        self.rate = DeviceScalar(1e-3)
        kind = {"capturable": True} if device.type in ("cuda", "xpu") else {}  # other devices are refused it
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate.tensor, fused=True, **kind)
        self.stream = machine.side_stream()

    def __call__(self) -> Tensor:
        x, y = self.batch.values
        self.optimizer.zero_grad()
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def feed(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        device = self.rate.tensor.device
        self.batch.update(tuple(torch.randn(self._shape, generator=generator).to(device) for _ in range(2)))
        self.rate.update(1e-3 / (1 + number))

    def warm_up(self) -> None:
        for number in range(3):
            self.feed(REPLAYS + number)
            self()


def replays_are_eager_steps(machine: Machine) -> None:
    require_graphs(machine)
    eager, captured = Training(machine), Training(machine)
    with machine.computing_on(captured.stream):
        for training in (eager, captured):
            training.warm_up()
        graph = make_graphed_callable(captured, captured.stream)
        graph.upload()
        for number in range(REPLAYS):
            for training in (eager, captured):
                training.feed(number)
            graph.launch()
            assert torch.equal(eager(), graph.result), f"replay {number}"
    machine.finish()
    for one, other in zip(eager.model.parameters(), captured.model.parameters(), strict=True):
        assert torch.equal(one, other)


def copies_both_ways_are_nodes_of_the_graph(machine: Machine) -> None:
    require_graphs(machine)
    x, pool = torch.ones(machine.width, device=machine.device), CapturePool("1MiB")
    host = pool.host_buffer(x.nbytes).view(torch.float32)
    back = torch.zeros_like(x)
    with GraphCaptureGuard(pool=pool, debug=True) as guard:
        host.copy_(x * 2, non_blocking=True)
        back.copy_(host, non_blocking=True)
    graph = guard.finish()
    for number in (1.0, 5.0):
        x.fill_(number)
        graph.launch()
        assert back.unique().tolist() == [2 * number]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "graph"
        graph.dump(path)
        text = path.read_text()
    assert all(name in text.lower() for name in names_of_copies(machine)), text[:4000]


def captures_that_fail_leave_nothing_and_the_next_is_good(machine: Machine) -> None:
    require_graphs(machine)
    x = torch.ones(1 << 16, device=machine.device)

    def reserved() -> int:
        gc.collect()
        machine.finish()
        machine.runtime.poll()
        torch.accelerator.empty_cache()
        return torch.accelerator.memory_reserved(machine.device)

    def capture(fails: bool) -> None:
        before = machine.current
        try:
            with GraphCaptureGuard() as guard:
                y = x + torch.rand_like(x)
                if fails:
                    y.sum().item()
            guard.finish().launch()
        except RuntimeError:
            assert fails
        else:
            assert not fails
            assert bool((y >= 1).all())
        assert machine.current == before
        assert capture_status() is CaptureStatus.NONE

    def begin_where_nothing_can() -> None:
        try:
            with GraphCaptureGuard(stream=machine.current):
                raise AssertionError("a capture has begun on the default stream")
        except CaptureStateError:
            assert capture_status() is CaptureStatus.NONE

    capture(False)
    held = reserved()
    for number in range(20):
        capture(number % 2 == 0)
        assert reserved() == held, f"capture {number}"
        assert bool((torch.rand_like(x) >= 0).all())
    begin_where_nothing_can()
    assert reserved() == held
    assert bool((torch.rand_like(x) >= 0).all())


def a_pool_goes_on_after_a_capture_that_failed(machine: Machine) -> None:
    """With the graphs that it has."""
    require_graphs(machine)
    x, pool = torch.ones(1 << 16, device=machine.device), CapturePool()

    def capture(fails: bool = False) -> CapturedGraph:
        pool.unseal()
        with GraphCaptureGuard(pool=pool) as guard:
            y = x * 2
            if fails:
                y.sum().item()
        graph = guard.finish()
        graph.result = y
        return graph

    first = capture()
    for _ in range(3):
        with suppress(RuntimeError):
            capture(fails=True)
            raise AssertionError("a capture in which the host waits has ended with a graph")
        second = capture()
        for number in (1.0, 5.0):
            x.fill_(number)
            for graph in (first, second):
                graph.launch()
            assert first.result.unique().tolist() == second.result.unique().tolist() == [2 * number]


def another_thread_pins_and_trains_meanwhile(machine: Machine) -> None:
    require_graphs(machine)

    def gradient(x: Tensor, around: Around) -> Tensor:
        with around:
            loss = (x @ x).tanh().exp().sum()
        return torch.autograd.grad(loss, x)[0]

    def train() -> None:
        offload, x = machine.offload(), machine.leaf()
        expected, found = (gradient(x, around) for around in (nullcontext(), offload))
        assert torch.equal(found, expected)
        assert offload.stats().bytes_out > 0

    machine.in_thread(train)  # what a thread's first product creates, the next thread takes over
    x = torch.zeros(8, device=machine.device)
    for mode in (CaptureMode.THREAD_LOCAL, CaptureMode.RELAXED):
        with GraphCaptureGuard(mode=mode) as guard:
            x += 1
            machine.in_thread(train)
        guard.finish().launch()
    assert x.tolist() == [2.0] * 8


def events_are_not_asked_about_while_another_thread_captures_globally(machine: Machine) -> None:
    require_graphs(machine)
    begun, ended, found = threading.Event(), threading.Event(), []
    stream = machine.side_stream()

    def ask() -> None:
        begun.wait()
        with suppress(Exception):
            found.append(machine.runtime.query(machine.runtime.record(stream)))
        ended.set()

    thread = threading.Thread(target=ask)
    thread.start()
    x = torch.zeros(8, device=machine.device)
    with GraphCaptureGuard(mode=CaptureMode.GLOBAL) as guard:
        begun.set()
        ended.wait()
        x += 1
    thread.join()
    assert found == [False]
    guard.finish().launch()
    assert x.tolist() == [1.0] * 8


GRAPH_SCENARIOS: list[Scenario] = [
    replays_are_eager_steps,
    copies_both_ways_are_nodes_of_the_graph,
    captures_that_fail_leave_nothing_and_the_next_is_good,
    a_pool_goes_on_after_a_capture_that_failed,
    another_thread_pins_and_trains_meanwhile,
    events_are_not_asked_about_while_another_thread_captures_globally,
]
