"""The runtime and the engine beside a capture, in each mode: the driver refuses none of their calls.

A call that is refused makes the capture void, so its end raises where one was made, also where its error was caught.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadError
from eager_offload.errors import CaptureStateError, HostAllocationUnderCaptureError, StaleEventError
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.runtime.captures import CAPTURES, CaptureMode
from eager_offload.tiers.memory import PAGE
from tests.hazards.backends import assert_settled, hooks_are_gone
from tests.hazards.programs import assert_identical
from tests.threads import collect
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.backend import side_stream
from tests.virtual_device.graphs import capturing

MESSAGE = "being captured into a graph.*Keep the capture outside of `with offload:`"


@pytest.fixture(autouse=True)
def _nothing_is_left(virtual: VirtualDevice) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    yield
    assert CAPTURES.under_way == ()
    assert torch.accelerator.current_stream() == before


@contextmanager
def beside(runtime: AcceleratorRuntime, mode: CaptureMode) -> Iterator[SimpleNamespace]:
    """A capture inside; events of before it, of it, and of a stream that is not a part of it; and a slab."""
    stream, free = side_stream(), side_stream()
    given = SimpleNamespace(runtime=runtime, stream=stream)
    given.older, given.slab = runtime.record(free), [runtime.host_buffer(PAGE)]
    capture = runtime.begin_capture(stream, mode)
    given.own, given.younger = runtime.record(stream), runtime.record(free)
    try:
        yield given
    finally:
        runtime.end_capture(capture)


#: What the engine asks of a runtime in a capture, and the error where it cannot be had.
ASKED: dict[str, tuple[type[Exception] | None, Callable[[SimpleNamespace], object]]] = {
    "whether an older event is over": (None, lambda given: given.runtime.query(given.older)),
    "whether its event is over": (None, lambda given: given.runtime.query(given.own)),
    "whether a younger event is over": (None, lambda given: given.runtime.query(given.younger)),
    "to wait for an older event": (None, lambda given: given.runtime.synchronize(given.older)),
    "to wait for its event": (CaptureStateError, lambda given: given.runtime.synchronize(given.own)),
    "to wait for a younger event": (CaptureStateError, lambda given: given.runtime.synchronize(given.younger)),
    "a stream's wait for an older event": (None, lambda given: given.runtime.wait(given.stream, given.older)),
    "a stream's wait for a younger": (CaptureStateError, lambda given: given.runtime.wait(given.stream, given.younger)),
    "to wait for all that is kept": (None, lambda given: given.runtime.synchronize_kept()),
    "to poll": (None, lambda given: given.runtime.poll()),
    "to let go of what is pinned": (None, lambda given: (given.slab.clear(), collect(), given.runtime.poll())),
    "to pin": (HostAllocationUnderCaptureError, lambda given: given.runtime.host_buffer(PAGE)),
    "memory that is not pinned": (None, lambda given: given.runtime.host_buffer(PAGE, pin_memory=False)),
}


@pytest.mark.parametrize("mode", CaptureMode)
@pytest.mark.parametrize("name", ASKED)
def test_the_runtime_asks_for_nothing_in_a_capture_that_is_refused(
    runtime: AcceleratorRuntime, name: str, mode: CaptureMode
) -> None:
    error, call = ASKED[name]
    with beside(runtime, mode) as given, pytest.raises(error) if error else nullcontext():
        runtime.keep_until(given.younger, object())
        call(given)
    with pytest.raises(StaleEventError):
        runtime.query(given.own)
    torch.accelerator.synchronize()
    assert runtime.query(given.younger)


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
