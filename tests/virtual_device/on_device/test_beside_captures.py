"""The runtime and the engine beside a capture, in each mode: the driver refuses none of their calls.

A call that is refused makes the capture void, so its end raises where one was made, also where its error was caught.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadError
from eager_offload.errors import (
    CaptureStateError,
    HostAllocationUnderCaptureError,
    StaleEventError,
)
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.captures import CAPTURES, Capture, CaptureMode
from eager_offload.runtime.pinned import unregister
from eager_offload.tiers.memory import PAGE
from tests.hazards.backends import assert_settled, hooks_are_gone
from tests.hazards.programs import assert_identical
from tests.threads import collect, on_a_thread
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.api import Api
from tests.virtual_device.backend import side_stream
from tests.virtual_device.graphs import capturing

MESSAGE = "being captured into a graph.*Keep the capture outside of `with offload:`"


@pytest.fixture(autouse=True)
def _nothing_is_left(virtual: VirtualDevice) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    yield
    assert CAPTURES.under_way == ()
    assert torch.accelerator.current_stream() == before


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    return Api(monkeypatch)


@pytest.fixture
def runtime(api: Api) -> Iterator[AcceleratorRuntime]:
    runtime = AcceleratorRuntime()
    yield runtime
    collect()
    runtime.poll()
    for address in [*api.registered]:  # which a driver refused to do
        unregister(address)


def here(call: Callable[[], object]) -> Any:
    return call()


class Beside:
    """A runtime in a capture, and events of before it, of it, and of a stream that is not a part of it."""

    def __init__(self, runtime: AcceleratorRuntime, mode: CaptureMode = CaptureMode.THREAD_LOCAL) -> None:
        self.runtime, self.mode = runtime, mode
        self.stream, self.free = (side_stream() for _ in range(2))
        self.older = runtime.record(self.free)
        self.slab: Tensor | None = runtime.host_buffer(PAGE)

    def __enter__(self) -> Beside:
        self.capture: Capture = self.runtime.begin_capture(self.stream, self.mode)
        self.own, self.younger = self.runtime.record(self.stream), self.runtime.record(self.free)
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.end_capture(self.capture)

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


@pytest.mark.parametrize("where", [here, on_a_thread])
@pytest.mark.parametrize("mode", CaptureMode)
@pytest.mark.parametrize("name", OURS)
def test_the_runtime_asks_for_nothing_in_a_capture_that_is_refused(
    api: Api, runtime: AcceleratorRuntime, name: str, mode: CaptureMode, where: Callable[..., object]
) -> None:
    """In mode ``global`` another thread is told what the thread that captures is told; else it need not know of it."""
    kind, call = OURS[name]
    told_everywhere = mode is CaptureMode.GLOBAL or "its event" in name or "a stream's" in name
    is_told = kind is not None and (where is here or told_everywhere)
    with Beside(runtime, mode) as beside, pytest.raises(kind) if is_told and kind else nullcontext():
        where(lambda: call(beside))
    with pytest.raises(StaleEventError):
        runtime.query(beside.own)
    torch.accelerator.synchronize()
    assert runtime.query(beside.younger)
    collect()
    runtime.poll()
    assert len(api.registered) == (beside.slab is not None), "what has gone is unpinned after the capture"


# -- the engine -------------------------------------------------------------------------------------------------------


def forward(x: Tensor, w: Tensor) -> Tensor:
    h = (x * 2).tanh().exp()
    return (h @ w).sin().sum()


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 32, generator=generator).to(NAME).requires_grad_() for _ in range(2)]


def step(around: Any, of: list[Tensor]) -> tuple[Tensor, ...]:
    with around:
        loss = forward(*of)
    return torch.autograd.grad(loss, of)


@pytest.mark.filterwarnings("ignore:eager_offload. no room for")
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("mode", CaptureMode)
def test_h52_a_thread_trains_while_another_captures(
    mode: CaptureMode, warm: bool, offloads: Callable[..., Offload]
) -> None:
    """In mode ``global`` what would have to be pinned first stays, and what is pinned is used."""
    runtime, expected, offload = accelerator_runtime(), step(nullcontext(), of := leaves()), offloads()
    torch.accelerator.synchronize()
    if warm:
        assert_identical(expected, step(offload, of))
    before = offload.stats(synchronize=True).bytes_out
    capturing, over, failed = threading.Event(), threading.Event(), list[BaseException]()

    def capture() -> None:
        try:
            begun = runtime.begin_capture(side_stream(), mode)
            capturing.set()
            over.wait()
            runtime.end_capture(begun)
        except BaseException as error:
            failed.append(error)
        capturing.set()

    thread = threading.Thread(target=capture)
    thread.start()
    capturing.wait()
    try:
        found = [step(offload, of) for _ in range(3)]
    finally:
        over.set()
        thread.join()
    assert not failed
    for gradients in found:
        assert_identical(expected, gradients)
    moved = offload.stats(synchronize=True).bytes_out - before
    assert moved > 0 or mode is CaptureMode.GLOBAL
    assert_identical(expected, step(offload, of))
    assert assert_settled(offload).bytes_out > before + moved


@pytest.mark.parametrize("mode", CaptureMode)
def test_h52_what_is_around_a_capture_asks_the_driver_for_nothing_inside(
    virtual: VirtualDevice, mode: CaptureMode, offloads: Callable[..., Offload]
) -> None:
    """Graphs of before go in it, what it saves stays, and an ``Offload`` out of use goes as well."""
    runtime, offload, dropped = accelerator_runtime(), offloads(), Offload(tier="host", min_bytes=0)
    of, stream = leaves(), side_stream()
    expected = step(nullcontext(), of)
    assert_identical(expected, step(dropped, of))
    torch.accelerator.synchronize()
    with stream, offload:
        losses = [forward(*of) for _ in range(3)]
        moved = offload.stats().bytes_out
        begun = runtime.begin_capture(stream, mode)
        captured = forward(*of)
        torch.autograd.grad(captured, of)
        del losses[0], dropped, captured
        collect()
        runtime.poll()
        stats = offload.stats(synchronize=True)
        runtime.end_capture(begun)
    assert stats.bytes_out == moved
    assert stats.kept_bytes["region"] > 0
    assert_identical(expected, torch.autograd.grad(losses.pop(), of))
    losses.clear()
    assert assert_settled(offload).bytes_out > 0


@pytest.mark.parametrize("used", [False, True])
def test_h52_to_enter_is_an_error(virtual: VirtualDevice, used: bool, offloads: Any) -> None:
    offload, of = offloads(), leaves()
    if used:
        with offload:
            loss = forward(*of)
    with capturing():
        for enter in (offload.__enter__, lambda: offload.compile(forward, backend="aot_eager")(*of)):
            with pytest.raises(OffloadError, match=f"an Offload was entered while.*{MESSAGE}"):
                enter()
        assert hooks_are_gone()
        assert offload.stats().saved_tensors == (5 if used else 0)
    if used:
        assert_identical(step(nullcontext(), of), torch.autograd.grad(loss, of))
        del loss
        assert assert_settled(offload).bytes_out > 0
    graph, other = torch.accelerator.Graph(), side_stream()
    with other:
        graph.capture_begin()
    with offloads():
        pass  # another stream is of no concern
    with other:
        graph.capture_end()
    with offload:
        loss = forward(*of)
    assert_identical(step(nullcontext(), of), torch.autograd.grad(loss, of))
    del loss
    assert assert_settled(offload).bytes_out > 0


def test_h52_backward_in_a_capture_of_what_was_offloaded_is_an_error(virtual: VirtualDevice, offloads: Any) -> None:
    offload, of, stream = offloads(), leaves(), side_stream()
    torch.accelerator.synchronize()
    with stream, offload:
        loss = forward(*of)
    with capturing(stream=stream), pytest.raises(OffloadError, match=f"backward needed a tensor.*{MESSAGE}"):
        torch.autograd.grad(loss, of, retain_graph=True)
    assert_identical(step(nullcontext(), of), torch.autograd.grad(loss, of))
    del loss
    assert assert_settled(offload).bytes_in > 0


def test_h52_operations_of_a_compiled_graph_are_an_error(virtual: VirtualDevice) -> None:
    standing = Offload.serving(tier="host", min_bytes=0, keep_last_bytes=0)
    config = standing.config.to_text()
    x = leaves()[0].detach()
    operations = torch.ops.eager_offload
    with capturing(), pytest.raises(OffloadError, match=f"compiled code that offloads.*{MESSAGE}"):
        operations.offload(x, config=config)  # before anything is open on this device
    host = operations.offload(x, config=config)
    with capturing():
        with pytest.raises(OffloadError, match=MESSAGE):
            operations.offload(x, config=config)
        with pytest.raises(OffloadError, match=MESSAGE):
            operations.reload(host, x.device, config=config)
    assert torch.equal(operations.reload(host, x.device, config=config), x)
    assert standing.stats(synchronize=True).bytes_out == x.nbytes
    standing.close()
