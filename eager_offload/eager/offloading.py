"""Device to tier: copies that are due start, arrive, and let their source go."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from eager_offload import marks
from eager_offload.eager.ground import Ground
from eager_offload.eager.handles import Reload, Remains, SavedStorage, State
from eager_offload.errors import OffloadError
from eager_offload.learning import Rate
from eager_offload.marks import Mark
from eager_offload.runtime.base import Direction, Event
from eager_offload.schedule import DelayLine, Window
from eager_offload.stats import KeepReason, Tally
from eager_offload.tiers.base import Slot, Tier

__all__ = ["Offloading"]


@dataclass(slots=True)
class _Leaving:
    """An offload on its way. The storage may die before it arrives; its accounts are settled then."""

    ref: weakref.ref[SavedStorage]
    nbytes: int
    logical_bytes: int
    tally: Tally
    #: Bytes that the link carries, and where they are counted as moved.
    moved: int
    link: Tally
    event: Event = None
    ticket: int | None = None
    # What became of the storage in one account before the other heard of it:
    asked: bool = False
    """It was asked for on its way, and so counted as forwarded."""
    buried: bool = False
    """It died on its way, never asked for."""


class Offloading:
    """The offloads of one lane."""

    def __init__(self, ground: Ground, tiers: Sequence[Tier], window: int) -> None:
        self.tiers = tiers
        self.window = Window(window)
        self.rate = Rate()
        #: Whether a storage is asked for soon.
        self.expects: Callable[[int], bool] = lambda key: False
        self._ground = ground
        self._leaving: dict[int, _Leaving] = {}  # the one that left first in front
        self._failed: dict[int, None] = {}  # keys of those that died and did not arrive, and have not been buried yet

    def __len__(self) -> int:
        """How many offloads are on their way."""
        return len(self._leaving)

    def start_due(self, line: DelayLine, sequence: int | None) -> None:
        """Starts what has to leave ``line`` now; see ``DelayLine.due``."""
        while (key := line.due(sequence)) is not None:
            saved = self._ground.storage(key)
            if saved is None:  # it died a moment ago
                nbytes = line.discard(key)
                if key not in self._leaving:  # else it arrives yet: an interrupt came right after its start
                    self._ground.resident_bytes -= nbytes
                continue
            if saved.state is State.WAITING:  # else an interrupt came right after its start
                self._start(saved)
            # Last, so that whatever interrupts the start leaves the storage in line.
            line.discard(key)
            saved.line = None

    def settle(self) -> None:
        """Takes up what has arrived; never blocks."""
        while self._leaving:
            key = next(iter(self._leaving))
            if not self._ground.runtime.query(self._leaving[key].event):
                return
            self._arrive(key)

    def synchronize(self) -> None:
        """Waits until nothing is on its way."""
        while self._leaving:
            self._arrive(next(iter(self._leaving)))

    def asked(self, key: int) -> None:
        """A storage on its way was asked for, for the first time."""
        self._leaving[key].asked = True

    def bury(self, remains: Remains) -> None:
        """An offloaded storage died without having been asked for."""
        if remains.key in self._failed:
            del self._failed[remains.key]  # it counts as kept
        elif remains.key in self._leaving:
            self._leaving[remains.key].buried = True
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
        slot = self._ground.reserve(self.tiers, moved)
        if slot is None:
            self.keep(saved, KeepReason.BUDGET)
        else:
            self._send(saved, slot)

    def keep(self, saved: SavedStorage, reason: KeepReason) -> None:
        """A storage that has not started to leave stays, and with it every save that shares it."""
        saved.tally.reclassify(saved.logical_bytes, KeepReason.NEWEST, reason, shared_bytes=saved.shared_bytes)
        saved.state, saved.kept = State.KEPT, reason  # no call in between: see [Note: interrupts] in ground.py
        self._ground.resident_bytes -= saved.footprint.nbytes
        if (recorder := self._ground.accounts.recorder) is not None:
            recorder.stays(saved.key)

    def _send(self, saved: SavedStorage, slot: Slot) -> None:
        """Enqueues the copy into ``slot``."""
        ground, area = self._ground, saved.footprint
        if area.gathered:
            with ground.runtime.enter(saved.stream):  # gathering is compute, of the stream that made the tensor
                source = saved.source_bytes()
        else:
            source = saved.source_bytes()
        window, tally, taken = self.window, ground.accounts.tally, saved.tally
        leaving = _Leaving(saved.ref, area.nbytes, saved.logical_bytes, taken, area.moved, tally)
        self._copy(saved, source, slot, leaving)
        # [Note: interrupts] in ground.py: it is on its way, and no call stands between that and whoever has to know.
        self._leaving[saved.key] = leaving
        saved.slot, saved.state = slot, State.LEAVING
        saved.copied_version = saved.aliases[0]._version
        taken.kept_bytes[KeepReason.NEWEST] -= leaving.logical_bytes
        taken.offloaded_bytes += leaving.logical_bytes
        taken.offloaded_tensors += 1
        tally.bytes_out += leaving.moved
        window.enter(saved.key, area.moved)
        if window.nbytes > tally.inflight_bytes_peak:
            tally.inflight_bytes_peak = window.nbytes

    def _copy(self, saved: SavedStorage, source: Tensor, slot: Slot, leaving: _Leaving) -> None:
        """Enqueues the copy behind the compute that made ``source`` and behind the slot's last uses."""
        runtime = self._ground.runtime
        ordering = runtime.record(saved.stream)
        out = runtime.transfer_stream(self._ground.device, Direction.OUT)
        earlier = [fence.event for fence in slot.fences if not fence.passed()]
        self._ground.copy(
            slot,
            source,
            slot,
            out,
            (ordering, *earlier),
            keepalive=(source, saved.aliases, slot),
            transfer=leaving,
            what="offload",
            key=saved.key,
        )

    def _make_room(self) -> None:
        """Waits until the oldest offload has arrived.

        [Note: a full window] The host waits, and the source goes when the event has completed. It would also be free to
        go once its allocating stream waits for the event, without the host; but that stream need not be the one that
        was current at pack (a batch that another stream loaded), and the allocator would hand its block out too early.
        """
        recorder = self._ground.accounts.recorder
        waiting = None if recorder is None else recorder.waits(self._ground, None)
        started = time.perf_counter()
        self._arrive(next(iter(self._leaving)))
        waited, tally = time.perf_counter() - started, self._ground.accounts.tally
        tally.stall_seconds += waited
        tally.window_stall_seconds += waited
        if waiting is not None:
            waiting.over("window is full")

    def _arrive(self, key: int) -> None:
        """Takes up an offload's completion, waiting for it if need be, and lets go of its source.

        See [Note: interrupts] in ``ground.py``: it counts as on its way until all that may be done twice is done.
        """
        ground, leaving = self._ground, self._leaving[key]
        failure: OffloadError | None = None
        try:
            ground.runtime.synchronize(leaving.event)
        except OffloadError as error:
            failure = error.with_traceback(None)  # it holds this frame, which holds the error: a cycle
        ground.registry.forget(leaving.ticket)
        self.window.leave(key)
        saved = leaving.ref()
        if failure is not None:
            self._fail(key, leaving, saved)
            if ground.accounts.tally.demote("write_failed"):
                ground.tell(f"offloading failed, the saved tensor stays on {ground.device}: {failure}")
            return
        if saved is not None:
            if saved.reload is None and self.expects(key) and not saved.footprint.gathered:
                # It would have to come back at once: what backward expects next stays, as if it had come back.
                reload = Reload(saved.source_bytes(), leaving.event, None)
                saved.reload = reload
                ground.resident_bytes += reload.target.nbytes
                ground.note_peak()
            saved.state = State.AWAY  # first: from here on nobody looks for bytes in an alias
            saved.release_source()
        seconds = ground.runtime.seconds(leaving.event)
        self.rate.add(leaving.moved, seconds)
        leaving.link.out_seconds += seconds or 0.0
        del self._leaving[key]
        ground.resident_bytes -= leaving.nbytes
        if leaving.buried:
            leaving.tally.released_bytes += leaving.logical_bytes

    def _fail(self, key: int, leaving: _Leaving, saved: SavedStorage | None) -> None:
        """The bytes did not arrive. The source is still alive, so nothing is lost: it stays."""
        tally, shared_bytes = leaving.tally, 0 if saved is None else saved.shared_bytes
        tally.reclassify(leaving.logical_bytes, None, KeepReason.FAILED, shared_bytes=shared_bytes)
        del self._leaving[key]
        self._ground.resident_bytes -= leaving.nbytes
        leaving.link.bytes_out -= leaving.moved
        if leaving.asked:  # which makes it no more forwarded than any other tensor that stays
            tally.forwarded_bytes -= leaving.logical_bytes
        if saved is not None:
            saved.state, saved.kept, saved.slot = State.KEPT, KeepReason.FAILED, None
            if (recorder := self._ground.accounts.recorder) is not None:
                recorder.stays(key)
        elif not leaving.asked and not leaving.buried:
            self._failed[key] = None
