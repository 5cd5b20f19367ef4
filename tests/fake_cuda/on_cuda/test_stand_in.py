"""The stand-in refuses what CUDA refuses and makes the host wait where CUDA does, or the other tests show less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.fake_cuda import StandIn
from tests.threads import on_a_thread

CYCLES = 20_000_000  # 10 ms
SECONDS = CYCLES / 1.98e9
PINNED = torch.empty(1 << 20, dtype=torch.uint8)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(1 << 16, device="cuda")


def asleep() -> torch.cuda.Stream:
    """Returns a stream that is busy for a while."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
    return stream


def test_it_is_torchs_own_cuda_build_with_so_much_memory() -> None:
    assert torch.version.cuda is not None
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties(0).name.endswith("(fake)")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(81 << 30, dtype=torch.uint8, device="cuda")


def test_streams_run_beside_each_other_and_an_event_is_reached_when_its_stream_is() -> None:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    stream, other = asleep(), torch.cuda.Stream()
    last.record(stream)
    assert other.query()
    assert not stream.query()
    assert not last.query()
    other.wait_event(last)
    assert not other.query()
    other.synchronize()
    assert last.query()
    assert first.elapsed_time(last) >= SECONDS * 1000


def test_a_copy_takes_the_time_of_its_bytes_and_each_way_has_an_engine(cuda: StandIn) -> None:
    host = torch.empty(1 << 24, dtype=torch.uint8).pin_memory()
    there, back = (host.to("cuda") for _ in range(2))
    torch.cuda.synchronize()
    cuda.forget()
    for target, source in ((host, there), (back, host)):
        with torch.cuda.stream(torch.cuda.Stream()):
            target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert cuda.copied_bytes == (host.nbytes, host.nbytes)
    _, out, into = cuda.busy_seconds
    assert out == into >= host.nbytes / 50e9
    assert cuda.pageable_copies == 0


def test_the_host_waits_for_copies_of_memory_that_is_not_pinned(cuda: StandIn, x: torch.Tensor) -> None:
    stream = asleep()
    with torch.cuda.stream(stream):
        torch.empty(x.shape).copy_(x, non_blocking=True)
        assert stream.query()
    assert cuda.pageable_copies == 1


def test_the_host_waits_until_what_it_frees_is_out_of_use() -> None:
    torch.cuda.empty_cache()
    block = torch.empty(1 << 28, device="cuda")
    stream = asleep()
    del block
    torch.cuda.empty_cache()
    assert stream.query()


# -- captures ---------------------------------------------------------------------------------------------------------


def capture(work: Callable[[torch.cuda.Stream], object], mode: str = "global") -> torch.cuda.CUDAGraph:
    """Captures ``work``, which is given the stream that it is captured on."""
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode=mode)
        try:
            work(stream)
        finally:
            graph.capture_end()
    return graph


def test_what_is_captured_runs_when_it_is_launched(cuda: StandIn, x: torch.Tensor) -> None:
    graph = capture(lambda stream: torch.cuda._sleep(CYCLES))
    assert cuda.busy_seconds[0] < SECONDS
    for _ in range(2):
        graph.replay()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert cuda.busy_seconds[0] >= 2 * SECONDS


def test_a_stream_that_waits_for_a_capture_is_captured_and_has_to_be_joined(x: torch.Tensor) -> None:
    side = torch.cuda.Stream()

    def fork(stream: torch.cuda.Stream, joins: bool) -> None:
        x.add_(1)
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            x.add_(1)
        if joins:
            stream.wait_stream(side)

    capture(lambda stream: fork(stream, True)).replay()
    with pytest.raises(RuntimeError, match="unjoined"):
        capture(lambda stream: fork(stream, False))
    with torch.cuda.stream(side):
        assert not torch.cuda.is_current_stream_capturing()


WAITS: dict[str, Callable[[torch.cuda.Stream], object]] = {
    "stream": lambda stream: stream.synchronize(),
    "query of a stream": lambda stream: stream.query(),
    "device": lambda stream: torch.cuda.synchronize(),
    "event": lambda stream: stream.record_event().synchronize(),
    "query of an event": lambda stream: stream.record_event().query(),
    "item": lambda stream: torch.ones(8, device="cuda").sum().item(),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_nobody_waits_for_what_is_captured(wait: str, mode: str) -> None:
    def work(stream: torch.cuda.Stream) -> None:
        with pytest.raises(RuntimeError, match="captur"):
            WAITS[wait](stream)

    with pytest.raises(RuntimeError):
        capture(work, mode)


def test_nothing_of_a_capture_is_ordered_with_what_is_outside_of_it(x: torch.Tensor) -> None:
    outside, events = asleep().record_event(), list[torch.cuda.Event]()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"isolat|uncaptured|previous error"):
        capture(lambda stream: stream.wait_event(outside))
    capture(lambda stream: (x.add_(1), events.append(stream.record_event())))
    with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
        events[0].query()


@pytest.mark.parametrize(
    ("mode", "here", "elsewhere"),
    [("global", False, False), ("thread_local", False, True), ("relaxed", True, True)],
)
def test_the_mode_says_which_threads_may_pin(mode: str, here: bool, elsewhere: bool, x: torch.Tensor) -> None:
    def pin() -> None:
        answers.append(int(torch.cuda.cudart().cudaHostRegister(PINNED.data_ptr(), PINNED.nbytes, 0)))

    for is_elsewhere, may in ((False, here), (True, elsewhere)):
        answers: list[int] = []

        def work(stream: torch.cuda.Stream, is_elsewhere: bool = is_elsewhere) -> None:
            x.add_(1)
            on_a_thread(pin) if is_elsewhere else pin()

        if may:
            capture(work, mode)
            torch.cuda.cudart().cudaHostUnregister(PINNED.data_ptr())
        else:
            with pytest.raises(RuntimeError, match="previous error"):
                capture(work, mode)
        assert (answers == [0]) is may
