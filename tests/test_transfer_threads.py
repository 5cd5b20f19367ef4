"""The threads of the host runtime: when they start and end, and what a fork leaves of them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from eager_offload.runtime import host
from eager_offload.runtime.base import Direction
from eager_offload.runtime.host import HostRuntime, TransferThread

CPU = torch.device("cpu")


@pytest.fixture
def runtime() -> Iterator[HostRuntime]:
    runtime = HostRuntime()
    yield runtime
    for direction in Direction:
        stream(runtime, direction).retire()


def stream(runtime: HostRuntime, direction: Direction = Direction.OUT) -> TransferThread:
    transfer = runtime.transfer_stream(CPU, direction)
    assert isinstance(transfer, TransferThread)
    return transfer


def raising(error: BaseException) -> Callable[[], None]:
    def operation() -> None:
        raise error

    return operation


# -- the life of a thread -------------------------------------------------------------------------------------------


def test_a_thread_starts_with_the_first_operation_and_ends_by_itself_when_it_is_idle(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stream(runtime)
    assert out._thread is None, "no thread without work"
    monkeypatch.setattr(host, "_IDLE_SECONDS", 0.01)
    seen: list[threading.Thread] = []
    for _ in range(3):
        out.submit(lambda: seen.append(threading.current_thread()))
        runtime.synchronize(out.record())
        seen[-1].join(60)
        assert not seen[-1].is_alive()
        assert out._thread is None
    assert len(set(seen)) == 3, "later work starts a new one"
    assert {thread.name for thread in seen} == {"eager_offload-out"}
    assert all(thread.daemon for thread in seen), "an exiting process does not wait for it"


def test_work_that_comes_in_the_moment_of_going_idle_is_done(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_IDLE_SECONDS", 0.0)
    out, ran = stream(runtime), []
    for number in range(500):
        out.submit(lambda number=number: ran.append(number))
    runtime.synchronize(out.record())
    assert ran == list(range(500))


def test_a_thread_that_dozes_is_not_woken_by_work_but_by_whoever_waits_for_it(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_DOZE_SECONDS", 3600.0)
    out, ran = stream(runtime), []
    for number in range(20):
        runtime.synchronize(out.submit(lambda number=number: ran.append(number)))
        while not out._dozes:
            pass
        first = out.submit(lambda: ran.append(None))
        assert out._bell.empty(), "nobody rang"
        assert not runtime.query(first)
        runtime.synchronize(first)
        assert ran == [number, None]
        ran.clear()


def test_a_thread_that_sleeps_is_woken_by_work(runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_DOZE_SECONDS", 0.0)
    monkeypatch.setattr(host, "_IDLE_SECONDS", 3600.0)
    out = stream(runtime)
    for _ in range(20):
        done = threading.Event()
        out.submit(done.set)
        assert done.wait(60)
        while not out._sleeps:
            pass


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
    first = out._items[0]
    later = [out.submit(lambda number=number: ran.append(number)) for number in range(5)]
    for _ in range(100):
        out.hurry()
    assert first is not None
    assert not first.done
    assert not any(event.done for event in later)
    opened.set()
    runtime.synchronize(later[-1])
    assert ran == ["first", 0, 1, 2, 3, 4]


def test_h10_a_thread_whose_start_was_interrupted_ends_if_another_has_begun_meanwhile(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_IDLE_SECONDS", 3600.0)
    out, gate, started, run = stream(runtime), threading.Event(), [], host.TransferThread._run

    def gated(transfer: TransferThread) -> None:
        started.append(threading.current_thread())
        gate.wait()
        run(transfer)

    def interrupted(transfer: TransferThread) -> None:
        threading.Thread(target=gated, args=(transfer,), daemon=True).start()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TransferThread, "_begin_turn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            out.record()
    runtime.synchronize(out.record())
    working = out._thread
    assert working is not started[0]
    gate.set()
    started[0].join(60)
    assert not started[0].is_alive()
    assert out._thread is working
    runtime.synchronize(out.record())


def test_h10_what_was_enqueued_when_an_interrupt_kept_a_thread_from_starting_is_done_for_whoever_waits(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ran = stream(runtime), []

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        out.submit(lambda: ran.append("done"))
    monkeypatch.undo()
    event = out._items[0]
    assert event is not None
    event.wait()
    assert ran == ["done"]


def test_retiring_waits_for_what_is_enqueued_and_later_work_starts_a_new_thread(runtime: HostRuntime) -> None:
    out, ran = stream(runtime), []
    out.retire()
    for number in range(20):
        out.submit(lambda number=number: ran.append(number))
    thread = out._thread
    assert thread is not None
    out.retire()
    assert ran == list(range(20))
    assert not thread.is_alive()
    out.retire()
    out.submit(lambda: ran.append(20))
    runtime.synchronize(out.record())
    assert ran[-1] == 20


def test_a_failure_outlives_the_thread_that_it_happened_on(runtime: HostRuntime) -> None:
    out = stream(runtime)
    event = out.submit(raising(OSError(errno.EIO, "broken")))
    out.retire()
    with pytest.raises(OSError, match="broken"):
        runtime.synchronize(event)
    runtime.synchronize(out.record())


def test_retiring_does_not_wait_for_the_work_of_somebody_who_came_later(runtime: HostRuntime) -> None:
    out = stream(runtime)
    reached, first, second = threading.Event(), threading.Event(), threading.Event()
    out.submit(lambda: (reached.set(), first.wait()))
    reached.wait()
    retiring = threading.Thread(target=out.retire)
    retiring.start()
    while None not in out._items:
        pass  # until the other thread has asked for the end
    out.submit(second.wait)
    event = out.record()
    first.set()
    retiring.join(60)
    assert not retiring.is_alive()
    assert not runtime.query(event)
    second.set()
    runtime.synchronize(event)


def test_a_thread_can_ask_for_its_own_end_without_waiting_for_itself(runtime: HostRuntime) -> None:
    out = stream(runtime)
    out.submit(out.retire)
    runtime.synchronize(out.record())


def test_the_last_user_to_go_ends_the_threads(runtime: HostRuntime) -> None:
    class User:
        pass

    first, second = User(), User()
    runtime.attach_user(first)
    runtime.attach_user(second)
    runtime.synchronize(stream(runtime).record())
    runtime.detach_user(first)
    assert stream(runtime)._thread is not None
    runtime.detach_user(second)
    assert stream(runtime)._thread is None
    runtime.detach_user(second)


# -- forks ----------------------------------------------------------------------------------------------------------


def in_a_process_of_its_own(program: str) -> str:
    """Runs a program and returns what it printed."""
    code = "import torch; torch.set_num_threads(1)\n" + textwrap.dedent(program)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_h28_a_fork_in_the_middle_of_a_transfer_leaves_the_child_with_streams_that_work() -> None:
    printed = in_a_process_of_its_own(
        """
        import os, threading
        from eager_offload import OffloadError
        from eager_offload.runtime.base import Direction
        from eager_offload.runtime.host import host_runtime

        runtime, cpu = host_runtime(), torch.device("cpu")
        streams = [runtime.transfer_stream(cpu, direction) for direction in Direction]
        reached, opened = threading.Event(), threading.Event()
        over = streams[0].record()
        runtime.synchronize(over)
        streams[0].submit(lambda: (reached.set(), opened.wait()))
        pending = [stream.record() for stream in streams for _ in range(2)]
        runtime.synchronize(pending[-1])
        reached.wait()
        holder = threading.Thread(target=streams[0]._lock.acquire)
        holder.start(); holder.join()
        child = os.fork()
        if child == 0:
            assert runtime.query(over), "what was over is over"
            runtime.synchronize(over)
            for event in pending[:2]:
                assert runtime.query(event), "nobody is left who could finish it"
                try:
                    runtime.synchronize(event)
                except OffloadError as error:
                    assert "under way in the parent process when it forked" in str(error)
                else:
                    os._exit(3)
            runtime.synchronize(pending[3])
            assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
            ran = []
            for stream in streams:
                assert stream is runtime.transfer_stream(cpu, Direction(stream.name.split("-")[1]))
                stream.submit(lambda: ran.append(threading.current_thread().name))
                runtime.synchronize(stream.record())
            assert ran == ["eager_offload-out", "eager_offload-in"], ran
            os._exit(0)
        streams[0]._lock.release()
        assert os.waitpid(child, 0)[1] == 0
        assert not pending[0].done
        opened.set()
        for event in pending:
            runtime.synchronize(event)
        print("parent goes on")
        """
    )
    assert printed == "parent goes on\n"
