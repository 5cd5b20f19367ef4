"""Where a hazard is run, and what may be left of it afterwards."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple, Self
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch._dynamo  # the first dispatch mode imports it, and would leave its caller's frames in a cycle

from eager_offload import Offload, OffloadStats
from eager_offload.eager.saves import SavedTensors
from eager_offload.engine.offloader import Census, DeviceOffloader
from eager_offload.runtime.base import Direction, Runtime
from eager_offload.runtime.host import TransferThread, host_runtime
from eager_offload.runtime.transfer_threads import HostEvent
from eager_offload.tiers.disk import DiskSlot
from tests.simulation.checker import AccessKind, Checker, Violation
from tests.simulation.simulated import SimulatedRuntime
from tests.threads import on_a_thread

#: Bytes: a window that no test fills.
_ALL = 256 << 20


class Backend(abc.ABC):
    """A runtime with a tier, and the offloads that a test made on it."""

    name: ClassVar[str]
    tier: ClassVar[str]

    def __init__(self) -> None:
        self.offloads: list[Offload] = []
        #: Threads for what compiled code of an earlier test moves, which end a while after it.
        self._others = threads_of_transfers()
        #: Set by a test whose program writes over what it saved. The copy may be reading it then, and no event orders
        #: the two: harmless, since those bytes are never read again, or their unpack raises, or it serves the original.
        self.sources_change = False

    @property
    @abc.abstractmethod
    def runtime(self) -> Runtime:
        """What moves the bytes."""

    def offload(self, **fields: Any) -> Offload:
        """An ``Offload`` that moves everything that can move, all at once, unless ``fields`` say otherwise."""
        windows = {"max_inflight_bytes": _ALL, "prefetch_bytes": _ALL}
        base = {"tier": self.tier, "min_bytes": 0, "keep_last_bytes": 0, **windows}
        offload = self._make({**base, **fields})
        self.offloads.append(offload)
        return offload

    def in_thread(self, work: Callable[[], object]) -> None:
        """Runs ``work`` in a thread of its own and raises what it raised."""
        threads = torch.get_num_threads()

        def watched() -> None:
            torch.set_num_threads(threads)  # or a first operator may be split among all cores: sums of other bits
            with self.watching():
                work()

        on_a_thread(watched)

    @abc.abstractmethod
    def watching(self) -> AbstractContextManager[object]:
        """What a further thread that computes has to be in."""

    @abc.abstractmethod
    def counting_events(self) -> AbstractContextManager[Callable[[], int]]:
        """Gives what counts the events of this runtime's that are alive, of those at least that are recorded inside."""

    @abc.abstractmethod
    def gate(self) -> AbstractContextManager[Gate]:
        """Holds every copy out back until it is opened; it is open at the end."""

    def assert_nothing_is_held(self) -> None:
        """After a test: every graph is gone, and so is what it held."""
        assert hooks_are_gone(), "saved-tensor hooks were left behind"
        for offload in self.offloads:
            assert_settled(offload)
            offload.close()
            offload.close()
        left = [one.name for one in threads_of_transfers() if one not in self._others]
        assert left == [], "a transfer thread outlived the last Offload"

    @abc.abstractmethod
    def _make(self, fields: dict[str, Any]) -> Offload: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        for offload in self.offloads:
            offload.close()


class Gate:
    """Threads wait behind it."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._reached = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def pass_through(self) -> None:
        self._reached.set()
        assert self._opened.wait(60), "the gate was never opened"

    def wait_until_reached(self) -> None:
        """Returns when a thread stands before the gate."""
        assert self._reached.wait(60), "no thread came to the gate"


@contextmanager
def gate_before(owner: Any, name: str) -> Iterator[Gate]:
    """Holds back every call of a function of ``owner``, a class or a module, until the gate is opened."""
    gate, call = Gate(), getattr(owner, name)

    def gated(*arguments: Any) -> Any:
        gate.pass_through()
        return call(*arguments)

    setattr(owner, name, gated)
    try:
        yield gate
    finally:
        gate.open()
        setattr(owner, name, call)


def open_when_the_host_waits(gate: Gate, offload: Offload) -> None:
    """Opens the gate when the host waits for what is behind it."""
    gate.wait_until_reached()
    out = host_runtime().transfer_stream(torch.device("cpu"), Direction.OUT)
    assert isinstance(out, TransferThread)
    while not out.waiters:
        pass
    gate.open()


class DiskBackend(Backend):
    """The CPU device and the disk tier: real threads, real files."""

    name = "disk"
    tier = "disk"

    @property
    def runtime(self) -> Runtime:
        return host_runtime()

    def watching(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def counting_events(self) -> Iterator[Callable[[], int]]:
        alive: WeakSet[Any] = WeakSet()

        class Counted(HostEvent):
            """One that is counted as long as something holds it."""

            def __init__(self) -> None:
                alive.add(self)

        with patch(f"{HostEvent.__module__}.HostEvent", Counted):
            yield lambda: len(alive)

    def gate(self) -> AbstractContextManager[Gate]:
        return gate_before(DiskSlot, "write")

    def _make(self, fields: dict[str, Any]) -> Offload:
        return Offload(**fields)


class HostBackend(DiskBackend):
    """The CPU device and the host tier, which copies within host memory."""

    name = "host"
    tier = "host"


class SimulatedBackend(Backend):
    """Virtual streams: copies run as late as their ordering allows, and the happens-before checker reads along."""

    name = "simulated"
    tier = "host"

    def __init__(self, **rates: Any) -> None:
        self.simulated = SimulatedRuntime(**rates)
        self._checking = self.simulated.checked()
        super().__init__()
        self.checker: Checker | None = None

    @property
    def runtime(self) -> SimulatedRuntime:
        return self.simulated

    def watching(self) -> AbstractContextManager[object]:
        return self.simulated.watching()

    @contextmanager
    def counting_events(self) -> Iterator[Callable[[], int]]:
        assert self.checker is not None
        checker = self.checker
        yield lambda: checker.events

    @contextmanager
    def gate(self) -> Iterator[Gate]:
        # Nothing to hold back: a copy runs only when a thread waits for it.
        yield Gate()

    def assert_nothing_is_held(self) -> None:
        super().assert_nothing_is_held()
        self.assert_ordered()

    def assert_ordered(self) -> None:
        """Asserts that the checker found nothing so far."""
        if self.sources_change:
            self.checker.violations = [one for one in self.checker.violations if not changes_a_source(one)]
        self.checker.assert_clean()

    def __enter__(self) -> Self:
        self.checker = self._checking.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._checking.__exit__(*error)
        if error[0] is None:
            self.assert_ordered()

    def _make(self, fields: dict[str, Any]) -> Offload:
        return Offload(runtime=self.runtime, **fields)


def changes_a_source(found: Violation) -> bool:
    """Whether an operator of the program writes over what a copy out is reading; see ``Backend.sources_change``."""
    copy, change = found.earlier, found.later
    return (
        copy is not None
        and (copy.kind, copy.what) == (AccessKind.READ, "offload")
        and change.kind is AccessKind.WRITE
        and change.what.startswith("aten.")
    )


# -- what is left ---------------------------------------------------------------------------------------------------


def offloader_of(offload: Offload) -> DeviceOffloader:
    """The offloader of the one device, the CPU, which every test here runs on."""
    (offloader,) = offload._offloaders.all()
    return offloader


def saves_of(offload: Offload) -> SavedTensors:
    """The saved tensors of that device."""
    return offload._hooks.saved_tensors(offloader_of(offload).device)


class Tracked(NamedTuple):
    """How much is known of saved tensors; everything is 0 once all graphs are gone."""

    storages: int
    names: int
    promised: int
    promised_bytes: int


def tracked(saves: SavedTensors) -> Tracked:
    """What is known of at this moment."""
    with saves.offloader.lock:
        saves.offloader.poll()
        storages, order = saves.storages(), saves.order
        return Tracked(len(storages), len(saves.names), len(order.promised), order.promised_bytes)


def queued_bytes(offload: Offload) -> int:
    """What the calling thread has saved last and holds in its queues."""
    return sum(queue.nbytes for queue in offload._hooks.thread.queues.values())


def wait_until_nothing_is_held(offload: Offload, seconds: float = 60) -> None:
    """Returns when no handle of ``offload`` is alive, or after so many seconds.

    After an error in backward it is autograd's thread of the device that lets go of the graph last: when it turns to
    what it does next, which may be after ``backward`` has raised.
    """
    deadline = time.monotonic() + seconds
    offload.stats(synchronize=True)  # else what is held may be what is on its way
    while any(one.census().records for one in offload._offloaders.all()) and time.monotonic() < deadline:
        time.sleep(0.001)


def assert_settled(offload: Offload) -> OffloadStats:
    """Asserts that an ``Offload`` all of whose graphs are gone holds nothing; returns its stats."""
    if torch.accelerator.is_available():  # its threads of autograd let go of a graph whose backward has raised
        wait_until_nothing_is_held(offload)
    stats = offload.stats(synchronize=True)
    offload._hooks.thread.begin()  # else the last forward is still open
    offload._offloaders.poll()
    for offloader in offload._offloaders.all():
        assert offloader.census() == Census(0, 0, 0, 0), "something is still held"
        assert offloader.is_crashed or offloader.inflight_bytes == 0
        assert not offloader._leaving
        for tier in offloader.tiers:
            assert tier.used_bytes == 0, f"{tier.used_bytes} bytes are used in the {tier.name} tier"
    for saves in offload._hooks._saves.values():
        assert saves.offloader.is_crashed or tracked(saves) == Tracked(0, 0, 0, 0)
    assert queued_bytes(offload) == 0, "a queue holds bytes"
    if not stats.is_approximate:
        assert_balanced(stats)
        assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
    return stats


def assert_balanced(stats: OffloadStats) -> None:
    """Every save is counted exactly once, and nothing below zero."""
    assert stats.saved_bytes == stats.offloaded_bytes + stats.shared_bytes + sum(stats.kept_bytes.values())
    assert all(nbytes >= 0 for nbytes in stats.kept_bytes.values()), stats.kept_bytes
    assert min(stats.offloaded_bytes, stats.reloaded_bytes, stats.forwarded_bytes, stats.released_bytes) >= 0


def hooks_are_gone() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def threads_of_transfers() -> list[threading.Thread]:
    """The library's threads that are alive."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("eager_offload")]


def transfer_threads() -> list[str]:
    """The names of the library's threads that are alive."""
    return [thread.name for thread in threads_of_transfers()]
