"""Device to tier: copies that are due start, arrive, and let their source go."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from eager_offload import marks
from eager_offload.eager.ground import Ground
from eager_offload.eager.handles import Reload, Remains, SavedStorage, State
from eager_offload.errors import OffloadError
from eager_offload.learning import Rate
from eager_offload.marks import Mark
from eager_offload.runtime.base import Direction, Event, Stream
from eager_offload.schedule import DelayLine, Window
from eager_offload.stats import KeepReason, Tally
from eager_offload.tiers.base import Slot, Tier

__all__ = ["Offloading"]


class _Leaving(NamedTuple):
    """An offload on its way. The storage may die before it arrives; its accounts are settled then."""

    ticket: int
    event: Event
    ref: weakref.ref[SavedStorage]
    nbytes: int
    logical_bytes: int
    tally: Tally
    #: Bytes that the link carries, and where they are counted as moved.
    moved: int
    link: Tally


class Offloading:
    """The offloads of one lane."""

    def __init__(self, ground: Ground, tiers: Sequence[Tier], window: int) -> None:
        self.tiers = tiers
        self.window = Window(window)
        self.rate = Rate()
        #: Whether a storage is asked for soon.
        self.expects: Callable[[int], bool] = lambda key: False
        self._ground = ground
        self._leaving: dict[int, _Leaving] = {}
        # Keys of storages whose fate was settled in one account before the other heard of it:
        self._asked: set[int] = set()  # asked for on their way, and so counted as forwarded
        self._buried: set[int] = set()  # died on their way, never asked for
        self._failed: set[int] = set()  # died and did not arrive, and have not been buried yet

    def __len__(self) -> int:
        """How many offloads are on their way."""
        return len(self._leaving)

    def start_due(self, line: DelayLine, sequence: int | None) -> None:
        """Starts what has to leave ``line`` now; see ``DelayLine.due``."""
        while (key := line.due(sequence)) is not None:
            saved = self._ground.storage(key)
            if saved is None:  # it died a moment ago
                self._ground.let_go(line.discard(key))
                continue
            if saved.state is State.WAITING:  # else an interrupt came right after its start
                self._start(saved)
            # Last, so that whatever interrupts the start leaves the storage in line.
            line.discard(key)
            saved.line = None

    def settle(self) -> None:
        """Takes up what has arrived; never blocks."""
        while (key := self.window.oldest) is not None:
            if not self._ground.runtime.query(self._leaving[key].event):
                return
            self._arrive(key)

    def synchronize(self) -> None:
        """Waits until nothing is on its way."""
        while (key := self.window.oldest) is not None:
            self._arrive(key)

    def asked(self, key: int) -> None:
        """A storage on its way was asked for, for the first time."""
        self._asked.add(key)

    def bury(self, remains: Remains) -> None:
        """An offloaded storage died without having been asked for."""
        if remains.key in self._failed:
            self._failed.discard(remains.key)  # it counts as kept
        elif remains.key in self._leaving:
            self._buried.add(remains.key)
        else:
            remains.tally.released_bytes += remains.logical_bytes

    def _start(self, saved: SavedStorage) -> None:
        """Starts the copy of a storage, or finds that it stays."""
        moved = saved.footprint.moved
        while not self.window.has_room(moved):
            self._make_room()
        storage = saved.aliases[0].untyped_storage()
        if storage.nbytes() < saved.footprint.start + saved.footprint.nbytes:
            self.keep(saved, KeepReason.LAYOUT)  # resized since it was saved
            return
        if marks.any_marks():
            if marks.mark_of(storage) is Mark.KEEP:
                self.keep(saved, KeepReason.MARKED)
                return
            marks.clear_mark(storage)
        slot = self._reserve(moved)
        if slot is None:
            self.keep(saved, KeepReason.BUDGET)
        else:
            self._send(saved, slot)

    def keep(self, saved: SavedStorage, reason: KeepReason) -> None:
        """A storage that has not started to leave stays, and with it every save that shares it."""
        saved.state, saved.kept = State.KEPT, reason
        saved.tally.reclassify(saved.logical_bytes, KeepReason.NEWEST, reason)
        saved.tally.unshare(saved.shared_bytes, reason)
        self._ground.let_go(saved.footprint.nbytes)

    def _send(self, saved: SavedStorage, slot: Slot) -> None:
        """Enqueues the copy into ``slot``."""
        ground, area = self._ground, saved.footprint
        if area.gathered:
            with ground.runtime.enter(saved.stream):  # gathering is compute, of the stream that made the tensor
                source = saved.source_bytes()
        else:
            source = saved.source_bytes()
        event = self._copy(source, slot, saved.stream)
        saved.slot, saved.state = slot, State.LEAVING
        saved.copied_version = saved.aliases[0]._version
        ticket = ground.registry.register(event, (source, saved.aliases, slot))
        window, tally = self.window, ground.accounts.tally
        self._leaving[saved.key] = _Leaving(
            ticket, event, saved.ref, area.nbytes, saved.logical_bytes, saved.tally, area.moved, tally
        )
        window.enter(saved.key, area.moved)
        saved.tally.reclassify(saved.logical_bytes, KeepReason.NEWEST, None)
        tally.bytes_out += area.moved
        if window.nbytes > tally.inflight_bytes_peak:
            tally.inflight_bytes_peak = window.nbytes

    def _copy(self, source: Tensor, slot: Slot, stream: Stream) -> Event:
        """Enqueues the copy behind the compute that made ``source`` and behind the slot's last uses."""
        runtime = self._ground.runtime
        ordering = runtime.record(stream)
        out = runtime.transfer_stream(self._ground.device, Direction.OUT)
        earlier = [fence.event for fence in slot.fences if not fence.passed()]
        return self._ground.copy(slot, source, slot, out, (ordering, *earlier))

    def _reserve(self, nbytes: int) -> Slot | None:
        """Room in the first tier that has it."""
        ground, tally = self._ground, self._ground.accounts.tally
        first = self.tiers[0]
        for tier in self.tiers:
            slot = tier.reserve(nbytes)
            if slot is not None:
                if tier is not first and tally.demote(f"{first.name}_to_{tier.name}"):
                    ground.tell(f"the {first.name} tier is full: saved tensors go to the {tier.name} tier as well")
                return slot
        if tally.demote("budget"):
            names = " and ".join(tier.name for tier in self.tiers)
            ground.tell(f"no room for {nbytes} bytes in the {names} tier: they stay on {ground.device}")
        return None

    def _make_room(self) -> None:
        """Waits until the oldest offload has arrived.

        [Note: a full window] The host waits, and the source goes when the event has completed. It would also be free to
        go once its allocating stream waits for the event, without the host; but that stream need not be the one that
        was current at pack (a batch that another stream loaded), and the allocator would hand its block out too early.
        """
        key = self.window.oldest
        assert key is not None
        started = time.perf_counter()
        self._arrive(key)
        self._ground.accounts.tally.stall_seconds += time.perf_counter() - started

    def _arrive(self, key: int) -> None:
        """Takes up an offload's completion, waiting for it if need be, and lets go of its source."""
        ground, leaving = self._ground, self._leaving[key]
        failure: OffloadError | None = None
        try:
            ground.registry.synchronize(leaving.ticket)
        except OffloadError as error:
            failure = error.with_traceback(None)  # it holds this frame, which holds the error: a cycle
        del self._leaving[key]
        self.window.leave(key)
        ground.let_go(leaving.nbytes)
        saved, asked, buried = leaving.ref(), key in self._asked, key in self._buried
        self._asked.discard(key)
        self._buried.discard(key)
        if failure is None:
            self.rate.add(leaving.moved, ground.runtime.seconds(leaving.event))
            if saved is not None:
                if self.expects(key) and not saved.footprint.gathered:
                    # It would have to come back at once: what backward expects next stays, as if it had come back.
                    saved.reload = Reload(saved.source_bytes(), leaving.event, None)
                    ground.hold(saved.reload.target.nbytes)
                saved.release_source()
                saved.state = State.AWAY
            elif buried:
                leaving.tally.released_bytes += leaving.logical_bytes
            return
        # The bytes did not arrive. The source is still alive, so nothing is lost: it stays.
        leaving.tally.reclassify(leaving.logical_bytes, None, KeepReason.FAILED)
        leaving.link.bytes_out -= leaving.moved
        if asked:  # which makes it no more forwarded than any other tensor that stays
            leaving.tally.forwarded_bytes -= leaving.logical_bytes
        if saved is not None:
            saved.state, saved.kept, saved.slot = State.KEPT, KeepReason.FAILED, None
            leaving.tally.unshare(saved.shared_bytes, KeepReason.FAILED)
        elif not asked and not buried:
            self._failed.add(key)
        if ground.accounts.tally.demote("write_failed"):
            ground.tell(f"offloading failed, the saved tensor stays on {ground.device}: {failure}")
