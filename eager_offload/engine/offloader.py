"""The transfers of one device under a lock, for eager code and for compiled graphs.

``DeviceOffloader`` adds to ``Transfers`` the lock and every method that waits. Eager code decides at run time which
storages leave and return (``eager/``); for compiled code the graph has decided (``compile/``).

[Note: interrupts]
A KeyboardInterrupt, or an exception of a signal handler, may be raised between any two lines. The code is not ordered
to survive that: an offloader that is interrupted during a call has *crashed*. From then on no further bytes leave
through it, nothing is prefetched, and the counters are approximate. Saved tensors stay valid: a source is held until
its copy is known to be over, so a handle has its bytes either on the device or in a slot. The next outermost ``with``
makes a new offloader.
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
    """The amounts that an offloader tracks: all 0 once every graph is gone and every transfer is over."""

    #: Storages, views and host tensors that are alive, or whose end was not yet noticed.
    records: int
    in_flight: int
    resident_bytes: int
    used_bytes: int


class DeviceOffloader(Transfers):
    """The transfers of one device, with their lock.

    Methods defined here acquire the lock and may wait, so callers must not hold the lock; inherited methods require
    the lock, see ``locked``.
    """

    @contextmanager
    def locked(self) -> Iterator[Transfers]:
        """Yields the methods that require the lock: ``with device.lock, device.locked() as transfers:``.

        The caller's ``with`` names the lock because ``ForkSafeLock`` requires that. An exception other than an
        ``OffloadError`` crashes the offloader.
        """
        assert self.lock._is_owned()
        with self.crashing():
            yield self

    def census(self) -> Census:
        with self.lock, self.locked() as transfers:
            transfers.poll()
            used_bytes = sum(tier.used_bytes for tier in self.tiers)
            in_flight = len(self._queued) + len(self._out) + len(self._in)
            if self.is_crashed:  # deaths may be missed, and bytes are not counted any more
                alive = sum(record() is not None for record in self.records)
                return Census(alive, in_flight, 0, used_bytes)
            return Census(len(self.records), in_flight, self.resident_bytes, used_bytes)

    def refuse_call(self, what: str) -> None:
        """Raises an ``OffloadError`` during another call of this thread, or while the current stream is captured."""
        if self.lock._is_owned():  # see [Note: reentry] in tiers/forking.py
            raise reentered()
        if self.can_capture and self.runtime.is_capturing(self.device):
            raise captured(what)

    def crash(self) -> None:
        self.is_crashed = self.accounts.counters.is_approximate = True
        self.accounts.counters.live = LiveBytes()  # later deaths are not counted
        self._leaving = {}  # may contain a copy that has not started, which would hold its source

    @contextmanager
    def crashing(self) -> Iterator[None]:
        """Crashes the offloader on an exception that is not an ``OffloadError``."""
        try:
            yield
        except OffloadError:
            raise
        except BaseException:
            self.crash()
            raise

    def reserve(self, nbytes: int, fallback: str | None = None) -> Slot | None:
        """Returns a slot of the first tier that has room or can grow; ``None``, with a warning, if no tier can.
        ``fallback``: the warning's text on the bytes; by default it says that they stay."""
        for tier in self.tiers:
            try:
                with self.lock:  # so that a reentrant call (e.g. by a signal handler) is refused
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
        self, shortage: Shortage | None, start: Callable[[ReservedSlot | None], Shortage | None], *, waits: bool = True
    ) -> None:
        """Waits until due copies out can start, and starts them. Waits again if another thread takes the room first.

        Args:
            start: starts copies, with the lock held and the slot reserved for the first; returns the next shortage.
            waits: whether to wait for room in the window; otherwise copies without room do not start.
        """
        while shortage is not None:
            found = None
            if shortage.nbytes:
                found = ReservedSlot(shortage.nbytes, self.reserve(shortage.nbytes))
            elif not (waits and self.wait_for_room()):
                return
            with self.lock:
                shortage = None if self.is_crashed else start(found)

    def wait_for_room(self) -> bool:
        """Waits, without the lock, until the oldest copy out is over.

        [Note: a full window] The host waits, and the source is released when the event has completed. The host need not
        wait if the stream on which the source was allocated waited for the event instead: the source could then be
        released at once. But the library knows only the stream that was current at pack, which may be another one (e.g.
        for a batch that another stream loaded), and the allocator would then reuse the block too early.

        Returns:
            ``False`` if the copy belongs to the parent of a forked process, and will never end here.
        """
        with self.lock:
            oldest = next(iter(self._out), None)
        if oldest is not None:
            with suppress(OffloadError):  # `poll` handles the failure
                self.wait(oldest, None, "window is full", fills_window=True)
        with self.lock:
            self.poll()
            return oldest not in self._out

    def send_one(self, stays: Callable[[CountedBytes], bool]) -> None:
        """Does nothing: a source is released when its copy is over.

        Captured steps and their warm-ups override this to copy out and release the oldest queued source. Called when
        backward unpacks a tensor.

        Args:
            stays: selects the sources that must not be released, because backward needs them soon.
        """

    def wait(self, transfer: Transfer, stream: Stream | None, what: str, *, fills_window: bool = False) -> None:
        """Makes ``stream`` (``None``: the host) wait for a transfer, and counts the wait.

        On a CPU device the host waits in either case.

        Args:
            what: the name of the wait in traces.
            fills_window: whether the wait makes room for other copies out.

        Raises:
            OffloadError: the host already knows that the transfer failed.
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
        """Logs the time that the host and compute wait in the body.

        [Note: stalls] The host's wait is known when the host continues. On an asynchronous device compute's wait is
        not: timestamps of the stream before and after the wait give it, once the device has passed both. They are
        adjacent in the stream, so their difference is the time in which the stream waited for the transfer or ran out
        of work because the host waited. A stream that is busy throughout has not waited, however long the host did.
        Captures are not timed, because nothing runs in them.

        Args:
            stream: the stream that waits; ``None``: the host waits, and the current stream computes.
            event: the event of the awaited transfer; ``None`` while a tier grows, or for several transfers.
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
            assert seconds is not None, "moments of the host have always passed"
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
        return bool(self._queued)

    def poll_from_thread(self) -> bool:
        """Polls on behalf of a transfer thread, in case the program makes no further call. Returns ``False`` if another
        thread holds the lock: waiting could deadlock, since the holder may wait for this one."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            self.poll()
        finally:
            self.lock.release()
        return True

    def synchronize(self) -> None:
        """Waits until all transfers that have started or are queued are over, and compute has passed its waits."""
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
                return  # copies of a forked process's parent, which never end here
            awaited = remaining

    def make_room(self, drop: Callable[[], None] = lambda: None) -> None:
        """Frees device memory for a reload: waits for copies out, and has ``drop`` drop prefetched bytes under the
        lock."""
        with self._counting_wait(None):
            # Before `drop`, because the source of a promised storage is held as resident when its copy out completes.
            self.wait_until_left()
            with self.lock:
                self.poll()
                drop()
                returning = list(self._in)
            self.wait_until_over(returning)
        with self.lock:
            self.poll()

    def wait_until_over(self, transfers: Sequence[Transfer]) -> None:
        """Waits on the host for ``transfers``. A failure is raised later, to the caller that consumes the transfer."""
        for transfer in transfers:
            with suppress(OffloadError):
                self.runtime.synchronize(transfer.event)
