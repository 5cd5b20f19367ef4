"""Register, wait, synchronize: a completion is taken up once, and what a copy needs lives until then."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

import pytest
import torch

import eager_offload as eo
from eager_offload.runtime.base import Direction
from eager_offload.runtime.host import HostEvent, HostRuntime, TransferThread
from eager_offload.runtime.registry import Registry

CPU = torch.device("cpu")


class Keepalive:
    """Stands for the source and the target of a copy."""


class Transfers(NamedTuple):
    """A runtime of the CPU device, its stream out, the stream of compute, and a registry."""

    runtime: HostRuntime
    out: TransferThread
    compute: object
    registry: Registry
    gates: list[threading.Event]

    def gate(self) -> threading.Event:
        """What an operation may wait for; open at the end at the latest, or a test that fails would never end."""
        self.gates.append(threading.Event())
        return self.gates[-1]

    def start(self, operation: Callable[[], object]) -> tuple[int, weakref.ref[Keepalive], HostEvent]:
        """Enqueues ``operation`` and registers its completion: the ticket, the keepalive, the event."""
        keepalive = Keepalive()
        event = self.out.submit(operation)
        return self.registry.register(event, keepalive), weakref.ref(keepalive), event

    def take_up(self, ticket: int, how: str) -> None:
        if how == "wait":
            self.registry.wait(ticket, self.compute)
        else:
            self.registry.synchronize(ticket)


@pytest.fixture
def transfers() -> Iterator[Transfers]:
    runtime = HostRuntime()
    out = runtime.transfer_stream(CPU, Direction.OUT)
    assert isinstance(out, TransferThread)
    gates: list[threading.Event] = []
    yield Transfers(runtime, out, runtime.current_stream(CPU), Registry(runtime), gates)
    for gate in gates:
        gate.set()
    out.retire()


def fail(error: BaseException) -> Callable[[], object]:
    def operation() -> None:
        raise error

    return operation


@pytest.mark.parametrize("how", ["wait", "synchronize"])
def test_a_wait_takes_the_registration_up_and_ends_the_keepalive(transfers: Transfers, how: str) -> None:
    opened = transfers.gate()
    ticket, kept, event = transfers.start(opened.wait)
    registry = transfers.registry
    assert registry.tickets() == [ticket]
    assert not registry.arrived(ticket)
    assert kept() is not None
    opened.set()
    transfers.take_up(ticket, how)
    assert event.done
    assert kept() is None
    assert len(registry) == 0


def test_a_transfer_that_has_arrived_stays_registered_until_somebody_takes_it_up(transfers: Transfers) -> None:
    ticket, kept, event = transfers.start(lambda: None)
    event.wait()
    assert transfers.registry.arrived(ticket)
    assert transfers.registry.arrived(ticket)
    assert kept() is not None
    assert len(transfers.registry) == 1
    transfers.registry.wait(ticket, transfers.compute)
    assert kept() is None


@pytest.mark.parametrize("how", ["wait", "synchronize", "arrived"])
def test_a_second_wait_is_an_error_that_says_what_to_pair(transfers: Transfers, how: str) -> None:
    registry = transfers.registry
    ticket, _, _ = transfers.start(lambda: None)
    other, kept, _ = transfers.start(lambda: None)
    registry.wait(ticket, transfers.compute)
    again = {
        "wait": lambda: registry.wait(ticket, transfers.compute),
        "synchronize": lambda: registry.synchronize(ticket),
        "arrived": lambda: registry.arrived(ticket),
    }[how]
    with pytest.raises(eo.OffloadError, match=f"transfer {ticket}, but nothing is pending.*pairs with exactly one"):
        again()
    assert kept() is not None, "the others are not concerned"
    registry.synchronize(other)


def test_a_wait_for_what_was_never_registered_is_the_same_error(transfers: Transfers) -> None:
    with pytest.raises(eo.OffloadError, match="nothing is pending"):
        transfers.registry.wait(0, transfers.compute)


def test_a_ticket_is_never_given_twice_so_that_a_new_transfer_is_not_taken_for_an_old_one(transfers: Transfers) -> None:
    seen = set()
    for _ in range(100):
        ticket, _, _ = transfers.start(lambda: None)
        transfers.registry.synchronize(ticket)
        seen.add(ticket)
    assert len(seen) == 100


def test_registrations_are_taken_up_in_any_order(transfers: Transfers) -> None:
    started = [transfers.start(lambda: None) for _ in range(5)]
    assert transfers.registry.tickets() == [ticket for ticket, _, _ in started]
    for ticket, kept, _ in (started[index] for index in (3, 0, 4, 1, 2)):
        transfers.registry.wait(ticket, transfers.compute)
        assert kept() is None
    assert transfers.registry.tickets() == []


@pytest.mark.parametrize("how", ["wait", "synchronize"])
def test_a_failure_reaches_the_one_who_waits_and_ends_the_registration(transfers: Transfers, how: str) -> None:
    error = eo.TransferError("no", errno=5, tier="disk", nbytes=3)
    ticket, kept, event = transfers.start(fail(error))
    event.wait()
    assert transfers.registry.arrived(ticket), "by failure"
    with pytest.raises(eo.TransferError, match="no") as raised:
        transfers.take_up(ticket, how)
    assert (raised.value.errno, raised.value.tier, raised.value.nbytes) == (5, "disk", 3)
    assert len(transfers.registry) == 0
    del raised
    assert event.error is error
    assert kept() is None, "the event outlives the wait, and must not hold on to who waited"


@pytest.mark.parametrize("how", ["wait", "synchronize"])
def test_h10_an_interrupt_in_a_wait_keeps_the_keepalive_of_a_copy_that_goes_on(transfers: Transfers, how: str) -> None:
    opened = transfers.gate()
    ticket, kept, event = transfers.start(opened.wait)
    registry, main = transfers.registry, threading.main_thread().ident
    assert threading.current_thread() is threading.main_thread()
    assert main is not None
    arrived = threading.Event()

    def interrupt() -> None:
        while not (transfers.out.waiters or arrived.is_set()):
            pass  # until the main thread stands in its wait
        while not arrived.wait(0.1):  # again: one that comes right before a system call does not end it
            signal.pthread_kill(main, signal.SIGINT)

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if not arrived.is_set():
            arrived.set()
            raise KeyboardInterrupt

    interrupter, handler = threading.Thread(target=interrupt), signal.signal(signal.SIGINT, on_interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            transfers.take_up(ticket, how)
    finally:
        arrived.set()
        interrupter.join()
        signal.signal(signal.SIGINT, handler)
    assert not event.done
    assert kept() is not None
    assert registry.tickets() == [ticket]
    opened.set()
    registry.wait(ticket, transfers.compute)
    assert kept() is None


def test_a_registry_that_dies_leaves_the_keepalives_to_the_runtime_until_the_copies_are_over(
    transfers: Transfers,
) -> None:
    opened = transfers.gate()
    runtime, registry = transfers.runtime, Registry(transfers.runtime)
    mine = transfers._replace(registry=registry)
    (_, first, over), (_, second, running) = mine.start(lambda: None), mine.start(opened.wait)
    (_, third, last) = mine.start(lambda: None)
    over.wait()
    del registry, mine
    runtime.tidy()
    assert first() is None, "over already"
    assert second() is not None
    assert third() is not None
    opened.set()
    last.wait()
    assert running.done
    runtime.tidy()
    assert second() is None
    assert third() is None


def test_runtimes_tidy_in_several_threads_at_once(transfers: Transfers) -> None:
    """Two objects share one runtime and no lock: what one finds left behind may be gone when it reaches for it."""
    runtime, caught = transfers.runtime, []
    done = transfers.out.record()
    done.wait()
    start = threading.Barrier(3)

    def tidy() -> None:
        start.wait()
        try:
            for _ in range(3000):
                runtime.leave_behind(done, None)
                runtime.tidy()
        except BaseException as error:
            caught.append(error)

    threads = [threading.Thread(target=tidy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not caught
    runtime.tidy()
    assert not runtime._left_behind


def test_tidying_what_another_thread_has_just_taken_is_no_error(transfers: Transfers) -> None:
    class Snatched(type(transfers.runtime._left_behind)):  # type: ignore[misc]
        """Empty by the time somebody reaches into it."""

        def __bool__(self) -> bool:
            return True

    transfers.runtime._left_behind = Snatched()
    transfers.runtime.tidy()


def test_threads_register_and_take_up_without_a_lock(transfers: Transfers) -> None:
    registry, caught = transfers.registry, []
    handed: list[list[int]] = [[] for _ in range(4)]
    registered = threading.Barrier(4)

    def work(mine: int) -> None:
        try:
            for _ in range(200):
                handed[mine].append(transfers.start(lambda: None)[0])
            registered.wait()
            for ticket in handed[(mine + 1) % 4]:  # an accelerator's backward takes up what another thread registered
                registry.wait(ticket, transfers.compute)
        except BaseException as error:
            caught.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not caught
    assert len({ticket for tickets in handed for ticket in tickets}) == 800
    assert len(registry) == 0
