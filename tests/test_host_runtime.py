"""The runtime of a CPU device: threads with queues, when they start and end, events, and memory for reloads."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.runtime import transfer_threads
from eager_offload.runtime.base import ALIGNMENT, Direction, Layout
from eager_offload.runtime.host import HostRuntime, TransferThread
from eager_offload.tiers.base import Slot
from eager_offload.tiers.memory import view_of
from tests.processes import python
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


def test_operations_of_a_stream_run_in_order_and_an_event_stands_for_all_before_it(runtime: HostRuntime) -> None:
    out, ran = stream(runtime), []
    first = threading.Event()
    out.submit(first.wait)
    events = []
    for number in range(50):
        out.submit(lambda number=number: ran.append(number))
        events.append(runtime.record(out))
    assert not any(runtime.query(event) for event in events)
    first.set()
    assert len({*events}) == 50, "each is a moment of its own"
    for number, event in enumerate(events):
        runtime.synchronize(event)
        assert ran[: number + 1] == list(range(number + 1))
        assert runtime.query(event)


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


@pytest.mark.parametrize("fails", [False, True])
def test_when_a_copy_is_over_its_thread_and_its_event_hold_on_to_nothing(runtime: HostRuntime, fails: bool) -> None:
    out, slot, source = stream(runtime), Memory(5000), noise(5000)
    if fails:
        slot.before = raising(OSError(errno.EIO, "broken"))
    bytes_gone, slot_gone = weakref.ref(source.untyped_storage()), weakref.ref(slot)
    gc.disable()
    try:
        event = runtime.copy(slot, source, out)
        del slot, source
        for _ in range(2):
            with pytest.raises(eo.TransferError) if fails else nullcontext():
                runtime.synchronize(event)
        assert bytes_gone() is None
        assert slot_gone() is None
    finally:
        gc.enable()


# -- time -----------------------------------------------------------------------------------------------------------


def test_a_copy_lies_between_the_moments_around_it_and_one_that_failed_has_no_time(runtime: HostRuntime) -> None:
    slot, between = Memory(5000), runtime.seconds_between
    before = runtime.moment(None)
    runtime.synchronize(copied := runtime.copy(slot, noise(5000), stream(runtime), timed=True))
    after = runtime.moment(runtime.current_stream(CPU))
    (span,) = runtime.spans(copied)
    for waits in (False, True):
        parts = [between(before, span.began, synchronize=waits), between(span.ended, after, synchronize=waits)]
        assert all(seconds is not None and seconds >= 0 for seconds in parts)
    assert runtime.copy_seconds(copied) == pytest.approx(between(span.began, span.ended))
    slot.before = raising(OSError(errno.EIO, "broken"))
    with pytest.raises(eo.TransferError):
        runtime.synchronize(failed := runtime.copy(slot, noise(5000), stream(runtime), timed=True))
    assert runtime.spans(failed) == ()
    assert runtime.copy_seconds(failed) is None


# -- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 63, 64, 4000, 4096, 100_001, 9 << 20])
def test_targets_have_their_size_and_alignment_offset(runtime: HostRuntime, nbytes: int) -> None:
    offsets = range(ALIGNMENT) if nbytes < 1 << 20 else (0, 1, 63)
    targets = [runtime.allocate(Layout(nbytes, one), CPU, runtime.current_stream(CPU)).fill_(one) for one in offsets]
    for alignment_offset, target in zip(offsets, targets, strict=True):
        assert target.data_ptr() % ALIGNMENT == alignment_offset
        assert (target.dtype, target.shape, target.is_contiguous()) == (torch.uint8, (nbytes,), True)
        assert target.eq(alignment_offset).all(), "no byte is shared"


# -- the life of a thread -------------------------------------------------------------------------------------------


def test_a_thread_starts_with_the_first_operation_and_ends_by_itself_when_it_is_idle(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stream(runtime)
    assert out.thread is None, "no thread without work"
    monkeypatch.setattr(transfer_threads, "_IDLE_SECONDS", 0.01)
    seen: list[threading.Thread] = []
    for _ in range(3):
        out.submit(lambda: seen.append(threading.current_thread()))
        runtime.synchronize(out.record())
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


ENDS = """
import atexit, threading, time

def look():  # the last of all that happens at exit, since it was registered first
    print([one.name for one in threading.enumerate() if one.name.startswith("eager_offload")], sorted(carried_out))

carried_out = []
atexit.register(look)
from eager_offload.runtime.transfer_threads import TransferThread

def work():
    begun.set()
    while not thread._stops:
        time.sleep(1e-3)
    carried_out.append("begun")

thread, begun = TransferThread("eager_offload-out"), threading.Event()
thread.submit(work)
thread.submit(lambda: carried_out.append("still to come"))
begun.wait()
"""


def test_h28_a_thread_ends_before_the_interpreter_does_with_what_it_is_at() -> None:
    ran = python("-c", ENDS)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[] ['begun']\n", "")


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
