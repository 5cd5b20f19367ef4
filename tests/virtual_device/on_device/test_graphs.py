"""What the virtual device refuses in a capture, as a driver does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.threads import on_a_thread
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.graphs import capturing
from tests.virtual_device.on_device.steps import assert_captures

INVALIDATED = "was invalidated by an earlier call"


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
