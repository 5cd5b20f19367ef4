"""One device's saved bytes on their way, for eager code and for compiled graphs: the lock, and all that waits.

    eager code      decides at run time which saved storage leaves and which comes back    (``eager/``)
    compiled code   was told by its graph                                                  (``compile/``)
    both            take the lock for what ``Transfers`` does, and wait without it          DeviceOffloader

[Note: an interrupt is a crash of the offloader]
A KeyboardInterrupt, or what a signal handler raises, may come between any two lines. No code is ordered for that: an
offloader in whose midst one came is *crashed*. From then on nothing more leaves through it, nothing is brought back
early, and the counters are approximate. What its graphs own stays theirs: a source is held until its copy is known to
be over, so a handle has its bytes either on the device or in a slot. The next outermost ``with`` has a new offloader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from eager_offload.engine.transfer import CountedBytes, Transfer
from eager_offload.engine.transfer_log import Waited
from eager_offload.engine.transfers import ReservedSlot, Shortage, Transfers
from eager_offload.errors import OffloadError, captured, reentered
from eager_offload.runtime.base import Event, Stream
from eager_offload.stats import LiveBytes
from eager_offload.tiers.base import MustGrow, Slot


class Census(NamedTuple):
    """How much an offloader knows of; everything is 0 once all graphs are gone and transfers are over."""

    #: Storages, views and host tensors that are alive, or whose end was not noticed yet.
    records: int
    in_flight: int
    resident_bytes: int
    used_bytes: int


class DeviceOffloader(Transfers):
    """The transfers of one device, and the lock that they need.

    What this class adds takes the lock itself where it needs it. The host waits in it, so whoever calls it does not
    hold the lock; what is of ``Transfers`` is for those who do, see ``locked``.
    """

    @contextmanager
    def locked(self) -> Iterator[Transfers]:
        """Hands out what needs the lock: ``with device.lock, device.locked() as transfers:``.

        The ``with`` needs the lock itself: see ``ForkSafeLock``. What is raised inside crashes the offloader, unless it
        is the library's own.
        """
        assert self.lock._is_owned()
        with self.crashing():
            yield self

    def census(self) -> Census:
        """Returns what is known of at this moment."""
        with self.lock, self.locked() as transfers:
            transfers.poll()
            used_bytes = sum(tier.used_bytes for tier in self.tiers)
            in_flight = len(self._queued) + len(self._out) + len(self._in)
            if self.is_crashed:  # not all that has died is known, and bytes are not counted any more
                alive = sum(record() is not None for record in self.records)
                return Census(alive, in_flight, 0, used_bytes)
            return Census(len(self.records), in_flight, self.resident_bytes, used_bytes)

    def refuse_call(self, what: str) -> None:
        """Refuses to begin something in the midst of a call, or while the current stream is captured.

        Raises:
            OffloadError: it is so.
        """
        if self.lock._is_owned():  # see [Note: reentry] in tiers/forking.py
            raise reentered()
        if self.can_capture and self.runtime.is_capturing(self.device):
            raise captured(what)

    def crash(self) -> None:
        """An exception that is not the library's own has come in the midst of a call: see the note."""
        self.is_crashed = self.accounts.counters.is_approximate = True
        self.accounts.counters.live = LiveBytes()  # what dies from here on is not counted
        self._leaving = {}  # one may be in here that has not started, and would hold its source

    @contextmanager
    def crashing(self) -> Iterator[None]:
        """Around what must not be left half done: an exception that is not the library's own crashes it."""
        try:
            yield
        except OffloadError:
            raise
        except BaseException:
            self.crash()
            raise

    # -- out --------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, fallback: str | None = None) -> Slot | None:
        """Returns room in the first tier that has it or can grow for it.

        Args:
            fallback: what becomes of the bytes where none has, for the warning; ``None``: they stay where they are.

        Returns:
            ``None`` where none has, which is counted and warned of.
        """
        for tier in self.tiers:
            try:
                with self.lock:  # what calls in the midst of it, a signal handler say, is to be refused
                    slot = tier.at_hand(nbytes)
            except MustGrow:
                with self._counting_wait(None):
                    slot = tier.reserve(nbytes)
                tier.warn(self.accounts.said)
            if slot is not None:
                if tier is not self.tiers[0]:
                    with self.lock:
                        self._note_tier(tier)
                return slot
        with self.lock:
            self._note_no_room(nbytes, fallback)
        return None

    def go_on(
        self, lack: Shortage | None, start: Callable[[ReservedSlot | None], Shortage | None], *, waits: bool = True
    ) -> None:
        """Waits for what copies out lack, and starts them; other threads may take the room meanwhile.

        Args:
            start: starts them, in the lock, with what was found for the first; returns what is lacking next.
            waits: for room in the window; else what finds none does not start.
        """
        while lack is not None:
            found = None
            if lack.nbytes:
                found = ReservedSlot(lack.nbytes, self.reserve(lack.nbytes))
            elif not (waits and self.wait_for_room()):
                return
            with self.lock:
                lack = None if self.is_crashed else start(found)

    def wait_for_room(self) -> bool:
        """Waits until the oldest copy out is over. Other threads have no part in the wait.

        [Note: a full window] The host waits, and the source goes when the event is over. It would also be free to go
        once its allocating stream waits for the event, without the host; but that stream need not be the one that was
        current at pack (a batch that another stream loaded), and the allocator would hand its block out too early.

        Returns:
            ``False`` where it is of a process that this one was forked from, and never will be.
        """
        with self.lock:
            oldest = next(iter(self._out), None)
        if oldest is not None:
            with suppress(OffloadError):  # `poll` sees to that
                self.wait(oldest, None, "window is full", fills_window=True)
        with self.lock:
            self.poll()
            return oldest not in self._out

    def send_one(self, stays: Callable[[CountedBytes], bool]) -> None:
        """Backward asks for something: lets go of one source that is on its way out and that ``stays`` does not name.

        Outside of captures each goes when its copy is over.
        """

    # -- either way -------------------------------------------------------------------------------------------------

    def wait(self, transfer: Transfer, stream: Stream | None, what: str, *, fills_window: bool = False) -> None:
        """Makes ``stream`` wait for a transfer, or where that is ``None`` the host; the wait is counted.

        On a CPU device the host waits for its own stream.

        Args:
            what: is waited for, for traces.
            fills_window: whether it is waited for so that others may leave.

        Raises:
            OffloadError: the transfer failed, and the host knows that already.
        """
        runtime, event = self.runtime, transfer.event
        if runtime.query(event):
            if runtime.may_have_failed(event):
                runtime.synchronize(event)
            return
        with self._counting_wait(stream, event, what=what, fills_window=fills_window):
            runtime.wait(stream, event) if stream is not None else runtime.synchronize(event)

    @contextmanager
    def _counting_wait(
        self, stream: Stream | None, event: Event = None, *, what: str = "", fills_window: bool = False
    ) -> Iterator[None]:
        """Logs what the host and compute wait inside.

        [Note: stalls] What the host has waited is known when it goes on. What compute has waited is not, where a device
        lies behind its host: timestamps of the stream on either side of the wait tell it, once the device has passed
        both. They are next to each other in the stream, so they lie apart by what the stream waited for the transfer,
        or had nothing to do while the host waited; a stream that is busy until then has not waited, whatever the host
        did. Nothing is timed in a capture, in which nothing runs.

        Args:
            stream: that waits; ``None``: the host does, and what computes is the current one.
            event: of a transfer that is waited for; ``None``: a tier grows, or all of several transfers are.
            what: as in ``Waited``.
        """
        runtime, counters = self.runtime, self.accounts.counters
        compute = runtime.current_stream(self.device) if stream is None else stream
        before = None if runtime.has_one_stream or runtime.is_capturing(self.device) else runtime.moment(compute)
        called = runtime.moment(None)
        try:
            yield
        finally:
            returned = runtime.moment(None)
            seconds = runtime.seconds_between(called, returned)
            assert seconds is not None, "the host's moments have come"
            after = None if before is None else runtime.moment(compute)
            if runtime.has_one_stream:  # compute is the host
                before, after = called, returned
            with self.lock:
                if stream is None or runtime.has_host_wait(event):
                    counters.host_wait_seconds += seconds
                if before is not None:
                    waited = Waited(self.device, runtime, what, fills_window, before, after, called, counters)
                    self.transfer_log.write(waited)

    def holds_copies(self) -> bool:
        """Returns whether there are copies out that no stream was given yet."""
        return bool(self._queued)

    def poll_from_thread(self) -> bool:
        """``poll``, for a transfer thread: there may be no further call. ``False`` where another thread is inside.

        It does not wait for the lock, whose holder may be waiting for the thread.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            self.poll()
        finally:
            self.lock.release()
        return True

    def synchronize(self) -> None:
        """Waits until nothing is on its way and compute has passed its waits, but for what starts meanwhile."""
        with self.crashing():
            self.wait_until_left()
            with self.lock:
                pending, waits = list(self._in), self.transfer_log.uncounted()
            self.wait_until_over(pending)
            self.runtime.synchronize_kept()
            for wait in waits:
                wait.synchronize()
            with self.lock:
                self.poll()

    def wait_until_left(self) -> None:
        """The host waits until nothing is on its way out."""
        with self.lock:
            self.poll()
            awaited = {*self._queued, *self._out}
        while awaited:
            with self.lock:
                started = list(self._out)
            self.wait_until_over(started)
            with self.lock:
                self.poll()
                remaining = awaited.intersection((*self._queued, *self._out))
            if len(remaining) == len(awaited):
                return  # copies of the process that this one was forked from: they never end
            awaited = remaining

    def make_room(self, drop: Callable[[], None] = lambda: None) -> None:
        """The device is full, and something has to come back: what the library itself holds there goes.

        Args:
            drop: lets go of what was brought back early, in the lock.
        """
        with self._counting_wait(None):
            self.wait_until_left()  # first: what is expected stays when its copy arrives
            with self.lock:
                self.poll()
                drop()
                returning = list(self._in)
            self.wait_until_over(returning)
        with self.lock:
            self.poll()

    def wait_until_over(self, transfers: Sequence[Transfer]) -> None:
        """The host waits for ``transfers``; the caller that takes one up gets its failure."""
        for transfer in transfers:
            with suppress(OffloadError):
                self.runtime.synchronize(transfer.event)
