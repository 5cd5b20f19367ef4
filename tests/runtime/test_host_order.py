"""What the CPU's runtime puts in order: copies and events, each behind what comes before."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from eager_offload.runtime.base import Direction
from eager_offload.runtime.host import HostRuntime, TransferThread
from eager_offload.tiers.arena import Arena, HostSlot

CPU = torch.device("cpu")


class Earlier:
    """An event that is not over until somebody waits for it."""

    def __init__(self, said: list[str]) -> None:
        self.done = False
        self._said = said

    def wait(self) -> None:
        self._said.append("waited")
        self.done = True


@pytest.mark.parametrize("direction", Direction)
def test_a_copy_moves_no_byte_before_what_it_was_told_to_wait_for(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, stream, said = HostRuntime(), TransferThread("of this test"), list[str]()
    works: list[Callable[[], None]] = []
    monkeypatch.setattr(stream, "submit", works.append)
    for name in ("read", "write"):
        monkeypatch.setattr(HostSlot, name, lambda slot, tensor, name=name: said.append(name))
    slot, tensor = Arena().allocate(4096), torch.zeros(4096, dtype=torch.uint8)
    assert slot is not None
    ends = (slot, tensor) if direction is Direction.OUT else (tensor, slot)
    runtime.copy(*ends, stream, (Earlier(said), Earlier(said)))
    (work,) = works
    work()
    assert said == ["waited", "waited", "write" if direction is Direction.OUT else "read"]


def test_an_event_stands_for_what_was_enqueued_before_it_however_often_one_is_recorded() -> None:
    runtime = HostRuntime()
    stream = runtime.transfer_stream(CPU, Direction.OUT)
    assert isinstance(stream, TransferThread)
    for _ in range(2):
        opened = threading.Event()
        stream.submit(lambda opened=opened: _wait(opened))
        event = runtime.record(stream)
        assert not runtime.query(event)
        opened.set()
        runtime.synchronize(event)
        assert runtime.query(event)
    stream.retire()


def _wait(opened: threading.Event) -> None:
    assert opened.wait(60)


def test_a_stream_that_waits_for_an_event_does_so_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, stream, said = HostRuntime(), TransferThread("of this test"), list[str]()
    works: list[Callable[[], None]] = []
    monkeypatch.setattr(stream, "submit", works.append)
    runtime.wait(stream, Earlier(said))
    assert said == [], "whoever enqueues goes on"
    (work,) = works
    work()
    assert said == ["waited"]
