"""The runtime of a CPU device: threads with queues, when they start and end, events, and memory for reloads."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.runtime import transfer_threads
from eager_offload.runtime.base import Direction
from eager_offload.runtime.host import HostRuntime, TransferThread
from eager_offload.tiers.base import Slot
from eager_offload.tiers.memory import view_of
from tests.simulation.log import ByteRegion
from tests.threads import on_a_thread
from tests.tiers.rig import noise

CPU = torch.device("cpu")


class Memory(Slot):
    """A slot in plain memory, whose writes a test can hold back or make fail."""

    tier = "host"

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, ())
        self.content = torch.zeros(nbytes, dtype=torch.uint8)
        self.before: Callable[[], object] = lambda: None

    @property
    def region(self) -> ByteRegion:
        return ByteRegion(id(self), 0, self.nbytes)

    def write(self, source: Tensor) -> None:
        self.before()
        self.content.copy_(source)

    def read(self, target: Tensor) -> None:
        target.copy_(self.content)

    def memory(self) -> memoryview:
        return view_of(self.content.data_ptr(), self.nbytes, self)


@pytest.fixture
def runtime() -> Iterator[HostRuntime]:
    runtime = HostRuntime()
    yield runtime
    for direction in Direction:
        stream(runtime, direction).close()


def stream(runtime: HostRuntime, direction: Direction = Direction.OUT) -> TransferThread:
    transfer = runtime.transfer_stream(CPU, direction)
    assert isinstance(transfer, TransferThread)
    return transfer


def raising(error: BaseException) -> Callable[[], None]:
    def operation() -> None:
        raise error

    return operation


# -- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_stream", [False, True])
@pytest.mark.parametrize("direction", Direction)
def test_a_copy_comes_after_what_it_or_its_stream_waits_for_and_the_host_goes_on(
    runtime: HostRuntime, direction: Direction, by_stream: bool
) -> None:
    opened, other = threading.Event(), Direction.IN if direction is Direction.OUT else Direction.OUT
    slot, tensor, over = Memory(1000), noise(1000), runtime.record(runtime.current_stream(CPU))
    target, source = (slot, tensor) if direction is Direction.OUT else (tensor, slot)
    content = tensor if direction is Direction.OUT else slot.content
    earlier = stream(runtime, other).submit(lambda: (opened.wait(), content.fill_(7)))
    if by_stream:
        runtime.wait(stream(runtime, direction), earlier)
    copied = runtime.copy(target, source, stream(runtime, direction), after=() if by_stream else (over, earlier))
    stream(runtime, direction).hurry()
    while not (stream(runtime, other).waiters or runtime.query(copied)):
        pass
    early = runtime.query(copied)
    opened.set()
    assert not early
    runtime.wait(runtime.current_stream(CPU), copied)
    assert runtime.query(earlier)
    assert (slot.content if direction is Direction.OUT else tensor).eq(7).all()


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(errno.ENOSPC, "full"), MemoryError("none"), AssertionError("a bug")),
        eo.TransferError("moving 77 bytes to or from the host tier failed", errno=5, tier="host", nbytes=77),
    ],
)
def test_whatever_a_tier_raises_is_a_transfer_error_of_its_own_event_and_of_no_other(
    runtime: HostRuntime, error: Exception
) -> None:
    slot, out = Memory(77), stream(runtime)
    slot.before = raising(error)
    before, failed = out.record(), runtime.copy(slot, noise(77), out)
    runtime.synchronize(out.record())
    runtime.synchronize(before)
    for _ in range(2):
        with pytest.raises(eo.TransferError, match="moving 77 bytes to or from the host tier failed") as raised:
            runtime.wait(runtime.current_stream(CPU), failed)
    assert raised.value.__cause__ is error or isinstance(error, eo.TransferError)
    assert raised.value.errno == getattr(error, "errno", None)
    assert (raised.value.tier, raised.value.nbytes) == ("host", 77)
    assert runtime.query(failed), "over, by failure"
    slot.before = lambda: None
    runtime.synchronize(runtime.copy(slot, noise(77), out))
    assert torch.equal(slot.content, noise(77)), "the queue goes on"


# -- the life of a thread -------------------------------------------------------------------------------------------


def test_a_thread_starts_with_the_first_operation_and_ends_by_itself_when_it_is_idle(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stream(runtime)
    assert out.thread is None, "no thread without work"
    monkeypatch.setattr(transfer_threads, "_IDLE_SECONDS", 0.01)
    seen: list[threading.Thread] = []
    for _ in range(3):
        runtime.synchronize(out.submit(lambda: seen.append(threading.current_thread())))
        seen[-1].join(60)
        assert not seen[-1].is_alive()
        assert out.thread is None
    assert len(set(seen)) == 3, "later work starts a new one"
    assert {thread.name for thread in seen} == {"eager_offload-out"}
    assert all(thread.daemon for thread in seen), "an exiting process does not wait for it"


def test_h40_a_thread_that_pauses_says_so_again_until_it_was_heard(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_threads, "_PAUSE_SECONDS", 0.0)
    out, answers, heard = stream(runtime), [True, False, False], threading.Event()
    runtime.attach_user(out)  # else it ends in a pause

    def pauses() -> bool:
        answer = answers.pop()
        if answer:
            heard.set()
        return answer

    monkeypatch.setattr(out, "pauses", pauses)
    runtime.synchronize(out.submit(lambda: None))
    assert heard.wait(60)
    assert answers == [], "and not again after that"
    monkeypatch.setattr(out, "pauses", lambda: answers.append(True))
    out.close()
    assert answers == [True], "nothing is left when it ends"


def test_h40_a_poll_waits_for_no_thread_that_is_inside() -> None:
    offload = eo.Offload(tier="disk", min_bytes=0, keep_last_bytes=0)
    with offload:
        loss = torch.randn(64, 64, requires_grad=True).sin().sin().sum()
    (offloader,) = offload._offloaders.all()
    with offload._accounts.lock:
        assert not on_a_thread(offloader.poll_from_thread)
    assert offloader.poll_from_thread()
    del loss
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()


def test_h10_an_interrupt_while_a_thread_starts_leaves_one_thread_at_the_queue(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, opened, ran, start = stream(runtime), threading.Event(), [], threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        out.submit(lambda: (opened.wait(), ran.append("first")))
    monkeypatch.undo()
    first = out.items[0]
    later = [out.submit(lambda number=number: ran.append(number)) for number in range(5)]
    for _ in range(100):
        out.hurry()
    assert first is not None
    assert not first.done
    assert not any(event.done for event in later)
    opened.set()
    runtime.synchronize(later[-1])
    assert ran == ["first", 0, 1, 2, 3, 4]
