"""The threads of the host runtime: when they start and end, and what a fork leaves of them."""

from __future__ import annotations

import textwrap
import threading

import pytest
import torch

from eager_offload import Offload
from eager_offload.runtime import transfer_threads
from eager_offload.runtime.host import HostRuntime
from eager_offload.tiers.forking import OwnThread, helped_by
from tests import test_host_runtime
from tests.hazards.backends import Gate
from tests.processes import python
from tests.test_host_runtime import raising, stream
from tests.threads import on_a_thread

runtime = test_host_runtime.runtime


# -- the life of a thread -------------------------------------------------------------------------------------------


def test_a_thread_starts_with_the_first_operation_and_ends_by_itself_when_it_is_idle(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stream(runtime)
    assert out._thread is None, "no thread without work"
    monkeypatch.setattr(transfer_threads, "_IDLE_SECONDS", 0.01)
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


def test_what_a_copy_takes_of_the_processor_counts_threads_that_work_for_it(runtime: HostRuntime) -> None:
    helper = OwnThread(lambda: None, "helper")

    def copy() -> None:
        helper.start()
        helper.join()
        assert 0 < helper.processor_seconds < 60
        helper.processor_seconds = 60.0
        helped_by([helper])

    out = stream(runtime)
    helped, alone = out.submit(copy), out.submit(lambda: None)
    runtime.synchronize(alone)
    assert runtime.processor_seconds(helped) >= 60
    assert 0 <= runtime.processor_seconds(alone) < 60


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


def test_h28_before_a_process_ends_a_pause_is_waited_for_and_no_other_begins(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_threads, "_PAUSE_SECONDS", 0.0)
    out, gate, pauses = stream(runtime), Gate(), list[str]()

    def pause() -> None:
        gate.pass_through()
        pauses.append("over")

    monkeypatch.setattr(out, "pauses", pause)
    runtime.synchronize(out.submit(lambda: None))
    gate.wait_until_reached()
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    out.stop()
    assert pauses == ["over"]
    opener.join()
    runtime.synchronize(out.submit(lambda: None))
    out.close()
    assert pauses == ["over"]


ENDS = textwrap.dedent("""
    import atexit, threading

    def look():  # the last of all that happens at exit, since it was registered first
        alive = [thread.name for thread in threading.enumerate() if thread.name.startswith("eager_offload")]
        print(alive, sorted(carried_out))

    carried_out = []
    atexit.register(look)

    import time
    from functools import partial
    from eager_offload.runtime.transfer_threads import TransferThread

    def work(thread, begun):
        begun.set()
        while not thread._stops:
            time.sleep(1e-3)
        carried_out.append(thread.name)

    threads = [TransferThread("eager_offload-out"), TransferThread("eager_offload-write")]
    for thread in threads:
        begun = threading.Event()
        thread.submit(partial(work, thread, begun))
        thread.submit(partial(carried_out.append, "what was still to come"))
        begun.wait()
""")


def test_h28_the_threads_end_before_the_interpreter_does_with_what_they_are_at() -> None:
    ran = python("-c", ENDS)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[] ['eager_offload-out', 'eager_offload-write']\n", "")


def test_h40_a_poll_waits_for_no_thread_that_is_inside() -> None:
    offload = Offload(tier="disk", min_bytes=0, keep_last_bytes=0)
    with offload:
        loss = torch.randn(64, 64, requires_grad=True).sin().sin().sum()
    (offloader,) = offload._offloaders.all()
    with offload._accounts.lock:
        assert not on_a_thread(offloader.poll_from_thread)
    assert offloader.poll_from_thread()
    del loss
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("eager_offload"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_h47_without_threads_the_one_that_enqueues_carries_it_out_in_order(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ran = stream(runtime), []
    with monkeypatch.context() as patched:
        refuse_threads(patched)
        first = out.submit(lambda: ran.append(threading.current_thread()))
        assert first.done
        failed = out.submit(raising(OSError(5, "broken")))
        with pytest.raises(OSError, match="broken"):
            runtime.synchronize(failed)
        with pytest.raises(KeyboardInterrupt):
            out.submit(raising(KeyboardInterrupt()))
        assert out.record().done
        assert runtime.ran_inline(first)
    assert ran == [threading.current_thread()]
    later = out.submit(lambda: ran.append(threading.current_thread()))
    runtime.synchronize(later)
    assert ran[-1].name == "eager_offload-out", "a thread is tried again"
    assert not runtime.ran_inline(later)


def test_work_that_comes_in_the_moment_of_going_idle_is_done(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_threads, "_IDLE_SECONDS", 0.0)
    out, ran = stream(runtime), []
    for number in range(500):
        out.submit(lambda number=number: ran.append(number))
    runtime.synchronize(out.record())
    assert ran == list(range(500))


def test_a_thread_that_dozes_is_not_woken_by_work_but_by_a_thread_that_waits_for_it(
    runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_threads, "_DOZE_SECONDS", 3600.0)
    out, ran = stream(runtime), []
    for number in range(20):
        runtime.synchronize(out.submit(lambda number=number: ran.append(number)))
        while not out._dozes:
            pass
        first = out.submit(lambda: ran.append(None))
        assert out._bell.empty(), "it was not rung"
        assert not runtime.query(first)
        runtime.synchronize(first)
        assert ran == [number, None]
        ran.clear()


def test_a_thread_that_sleeps_is_woken_by_work(runtime: HostRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_threads, "_DOZE_SECONDS", 0.0)
    monkeypatch.setattr(transfer_threads, "_IDLE_SECONDS", 3600.0)
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


# -- forks ----------------------------------------------------------------------------------------------------------
