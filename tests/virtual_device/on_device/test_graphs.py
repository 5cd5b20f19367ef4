"""Graphs of the virtual device: a step that was captured is exact whatever the order, and a missing edge is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.threads import on_a_thread
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.graphs import capturing, nodes_of, violations
from tests.virtual_device.on_device.steps import assert_captures

INVALIDATED = "was invalidated by an earlier call"


# -- replays ----------------------------------------------------------------------------------------------------------


def test_orders_differ_and_follow_from_the_seed(virtual: VirtualDevice) -> None:
    """Two streams that nothing orders, as a program must not have it: who is last shows."""
    x, other = torch.zeros(1, device=NAME), torch.Stream(device=NAME)
    with capturing() as graph:
        here = torch.accelerator.current_stream()
        other.wait_stream(here)
        x.fill_(1)
        with other:
            x.fill_(2)
        here.wait_stream(other)
    assert len(violations(nodes_of(graph))) == 1

    def values() -> list[float]:
        found = []
        for _ in range(20):
            graph.replay()
            found.append(x.item())
        return found

    with virtual.replays(7):
        first = values()
    with virtual.replays(7):
        assert values() == first
    assert set(first) == {1.0, 2.0}


# -- what a capture is ------------------------------------------------------------------------------------------------


def test_a_graph_has_memory_of_its_own(virtual: VirtualDevice) -> None:
    torch.accelerator.empty_cache()
    outside = torch.accelerator.memory_reserved()
    with capturing() as graph:
        kept = torch.full((1 << 20,), 1.0, device=NAME)
        first = torch.full((1 << 20,), 2.0, device=NAME)
        address = first.data_ptr()
        del first
        second = torch.full((1 << 20,), 3.0, device=NAME)  # where the first was
        assert second.data_ptr() == address
        kept += second
        del second
    with torch.Stream(device=NAME):
        assert torch.empty(1 << 20, device=NAME).data_ptr() != address
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == outside + 2 * kept.nbytes
    graph.replay()
    assert kept.unique().tolist() == [4.0]
    graph.reset()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == outside + kept.nbytes  # a tensor has it
    del kept
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == outside


def test_what_another_stream_uses_has_no_new_owner_in_the_capture() -> None:
    other = torch.Stream(device=NAME)
    with capturing() as graph:
        here = torch.accelerator.current_stream()
        x = torch.ones(1 << 10, device=NAME)
        other.wait_stream(here)
        x.record_stream(other)
        address = x.data_ptr()
        with other:
            y = x + 1
        del x
        assert torch.ones(1 << 10, device=NAME).data_ptr() != address
        here.wait_stream(other)
    assert not violations(nodes_of(graph))
    with capturing(pool=graph.pool(), stream=here) as second:
        assert torch.ones(1 << 10, device=NAME).data_ptr() == address
    graph.replay()
    assert y.unique().tolist() == [2.0]
    del second


# -- errors -----------------------------------------------------------------------------------------------------------

#: Calls about what is captured, or across the edge of the graph: no mode permits them.
ALWAYS: dict[str, Callable[[Tensor, torch.Stream, torch.Event], object]] = {
    "wait for the device": lambda x, other, event: torch.accelerator.synchronize(),
    "wait for the stream": lambda x, other, event: torch.accelerator.current_stream().synchronize(),
    "query the stream": lambda x, other, event: torch.accelerator.current_stream().query(),
    "wait for an event of it": lambda x, other, event: torch.accelerator.current_stream().record_event().synchronize(),
    "query an event of it": lambda x, other, event: torch.accelerator.current_stream().record_event().query(),
    "wait on the outside": lambda x, other, event: torch.accelerator.current_stream().wait_event(event),
    "copy to pageable memory": lambda x, other, event: x.cpu(),
    "copy from pageable memory": lambda x, other, event: torch.ones(4).to(NAME, non_blocking=True),
    "read a number": lambda x, other, event: x.sum().item(),
    "shape by data": lambda x, other, event: x.nonzero(),
}
#: Calls that a driver calls unsafe, and that it permits a thread in a relaxed capture.
UNSAFE: dict[str, Callable[[Tensor, torch.Stream, torch.Event], object]] = {
    "wait for another stream": lambda x, other, event: other.synchronize(),
    "query another stream": lambda x, other, event: other.query(),
    "wait for an earlier event": lambda x, other, event: event.synchronize(),
    "query an earlier event": lambda x, other, event: event.query(),
    "empty the cache": lambda x, other, event: torch.accelerator.empty_cache(),
    "pin what is not cached": lambda x, other, event: torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True),
}
MODES = ["default", "global", "thread_local", "relaxed"]


def operands() -> tuple[Tensor, torch.Stream, torch.Event]:
    x, other, event = torch.ones(4, device=NAME), torch.Stream(device=NAME), torch.Event(device=NAME)
    event.record()
    torch.accelerator.synchronize()
    return x, other, event


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*ALWAYS, *UNSAFE])
def test_what_a_driver_refuses_in_a_capture_invalidates_it(virtual: VirtualDevice, name: str, mode: str) -> None:
    """Of what is unsafe, another thread is refused it while a capture goes on whose mode is global."""
    given, alive, call = operands(), virtual.graphs_alive, (ALWAYS | UNSAFE)[name]
    for elsewhere in [False, True] if name in UNSAFE else [False]:
        is_refused = name in ALWAYS or mode in ("default", "global") or (mode == "thread_local" and not elsewhere)
        with (
            pytest.raises(RuntimeError, match=INVALIDATED) if is_refused else nullcontext(),
            capturing(mode) as graph,
            pytest.raises(RuntimeError, match="not permitted") if is_refused else nullcontext(),
        ):
            on_a_thread(lambda: call(*given)) if elsewhere else call(*given)
        del graph
        torch.accelerator.empty_host_cache()
        assert_captures()
    assert virtual.graphs_alive == alive


def test_an_event_of_a_capture_is_of_no_use_outside() -> None:
    with capturing() as first:
        stale = torch.accelerator.current_stream().record_event()
    for call in (stale.synchronize, stale.query):
        with pytest.raises(RuntimeError, match="recorded in a capture"):
            call()
    with pytest.raises(RuntimeError, match="outside that capture"):
        torch.accelerator.current_stream().wait_event(stale)
    with (
        pytest.raises(RuntimeError, match=INVALIDATED),
        capturing(),
        pytest.raises(RuntimeError, match="outside that capture"),
    ):
        torch.accelerator.current_stream().wait_event(stale)
    stale.record()  # a moment again
    stale.synchronize()
    del first
    assert_captures()
