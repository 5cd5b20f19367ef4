"""Tier to device: what is asked for comes back, and what is expected next comes early."""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

import torch
from torch import Tensor

from eager_offload._torch import weak_storage
from eager_offload.eager.ground import Ground
from eager_offload.eager.handles import Reload, Returned, SavedStorage, SavedView, State
from eager_offload.eager.offloading import Offloading
from eager_offload.errors import OffloadError
from eager_offload.learning import Rate
from eager_offload.runtime.base import Direction, Layout, Stream
from eager_offload.schedule import Plan, PrefetchOrder
from eager_offload.stats import KeepReason

__all__ = ["Reloading"]


class _Issued(NamedTuple):
    """A tensor for autograd, and where in its storage the footprint begins."""

    tensor: Tensor
    first_byte: int


class Reloading:
    """The reloads of one lane."""

    def __init__(self, ground: Ground, offloading: Offloading, prefetch_bytes: int) -> None:
        self.order = PrefetchOrder(prefetch_bytes)
        self.rate = Rate()
        self._ground = ground
        self._offloading = offloading
        offloading.expects = self.order.holds
        self._orphans: list[Reload] = []  # reloads that nobody asked for and that may still be running

    def __len__(self) -> int:
        """How many reloads that nobody wants any more are still running."""
        return len(self._orphans)

    def give(self, view: SavedView) -> Tensor:
        """The saved tensor again, for the stream that is current now; brings back early what is expected next."""
        ground, saved = self._ground, view.storage
        reload: Reload | None = None
        ticket: int | None = None
        waits = False
        try:
            with ground.accounts.lock:
                stream = ground.runtime.current_stream(ground.device)
                tensor = self._resident(view, stream)
                if tensor is None:
                    reload = self._reload_for(saved, stream)
                self._note_asked(saved, forwarded=reload is None)
                self._follow_lesson(view, stream)
                self._follow(self.order.unpacked(view.position), saved.key)
                if reload is None:
                    assert tensor is not None
                    if not self.order.holds(saved.key):
                        self.drop(saved.key)
                    return tensor
                ticket, reload.ticket, waits = reload.ticket, None, True
            self._await(reload, ticket, stream)
            waits = False
            with ground.accounts.lock:
                if ticket is not None:
                    seconds = ground.runtime.seconds(reload.event)
                    self.rate.add(reload.target.nbytes, seconds)
                    ground.accounts.tally.in_seconds += seconds or 0.0
                return self._hand_over(view, reload, stream)
        except BaseException:
            if reload is not None:
                with ground.accounts.lock:
                    if waits:
                        reload.ticket = ticket  # where it was a KeyboardInterrupt, the copy goes on
                        if saved.reload is reload:
                            saved.reload = None
                    if saved.reload is not reload:
                        self.abandon(reload)
            raise

    def _hand_over(self, view: SavedView, reload: Reload, stream: Stream) -> Tensor:
        """What was reloaded belongs to autograd from here on, unless more of it is expected to be asked for."""
        saved = view.storage
        issued = self._issue(view, reload, stream)
        expected = self.order.holds(saved.key)
        if saved.reload is reload and not expected:
            saved.returned = Returned(weak_storage(issued.tensor.untyped_storage()), issued.first_byte)
            saved.reload = None
        if saved.reload is not reload:
            self._let_go(reload)
            if not expected:
                self.drop(saved.key)  # the one on the stream of the pack, which this stream could not use
        return issued.tensor

    def settle(self) -> None:
        """Lets go of the targets of reloads that nobody wanted, once nothing can write to them any more."""
        if self._orphans:
            self._orphans = [orphan for orphan in self._orphans if not self._ended(orphan)]

    def synchronize(self) -> None:
        """Waits until nothing that nobody wants is on its way."""
        for orphan in self._orphans:
            with contextlib.suppress(OffloadError):
                self._ground.runtime.synchronize(orphan.event)
        self.settle()

    def drop(self, key: int | None) -> None:
        """A storage that was brought back early is not expected soon any more."""
        saved = None if key is None else self._ground.storage(key)
        if saved is not None and saved.reload is not None:
            self.abandon(saved.reload)
            saved.reload = None  # last: see [Note: interrupts] in ground.py

    def abandon(self, reload: Reload) -> None:
        """A reload is not wanted any more; its target goes when its copy can no longer write to it."""
        self._let_go(reload)
        if reload.ticket is not None:
            self._orphans.append(reload)

    def _let_go(self, reload: Reload) -> None:
        """Once for each reload, however many threads wait for it."""
        if reload.held:
            reload.held = False
            self._ground.resident_bytes -= reload.target.nbytes

    def _ended(self, orphan: Reload) -> bool:
        if not self._ground.runtime.query(orphan.event):
            return False
        self._ground.registry.forget(orphan.ticket)  # a failed read of bytes that nobody asked for harms nobody
        orphan.ticket = None
        return True

    def _note_asked(self, saved: SavedStorage, *, forwarded: bool) -> None:
        """Settles how a storage came out, the first time that it is asked for."""
        if saved.state is State.WAITING:  # backward has come to it, so that to move it now would be in vain
            assert saved.line is not None
            self._offloading.keep(saved, KeepReason.NEWEST)
            saved.line.discard(saved.key)
            saved.line = None
        elif saved.state is not State.KEPT and not saved.asked:
            if saved.state is State.LEAVING:
                self._offloading.asked(saved.key)
            saved.asked = True
            if forwarded:
                saved.tally.forwarded_bytes += saved.logical_bytes
            else:
                saved.tally.reloaded_bytes += saved.logical_bytes

    def _follow_lesson(self, view: SavedView, stream: Stream) -> None:
        """Has what is expected next be what was asked for next the last time."""
        forward = view.forward
        expected = forward.asked(view.number, self._ground.runtime.clock(stream))
        if expected is not None:
            self.order.arrange(forward.sequence, expected)

    def _resident(self, view: SavedView, stream: Stream) -> Tensor | None:
        """The tensor, if its bytes are on the device: not gone yet, kept alive by someone else, or back already."""
        saved = view.storage
        if saved.state is not State.AWAY:
            return view.alias.detach()
        storage, first_byte = saved.origin(), saved.footprint.start
        if storage is not None and storage.nbytes() >= first_byte + saved.footprint.nbytes:
            # A part of a storage tells nothing: other parts of it that were saved may hold all of it.
            if saved.footprint.whole and not saved.asked and saved.reload is None:
                saved.forward.was_alive(saved.number)
            return view.over(storage, first_byte)
        if saved.returned is not None and stream == saved.stream:
            storage = saved.returned.storage()
            if storage is not None:
                return view.over(storage, saved.returned.first_byte)
        return None

    def _follow(self, plan: Plan, current: int) -> None:
        """Carries out what the prefetch order says; ``current`` is being handed out and sees to itself."""
        for key in plan.drop:
            if key != current:
                self.drop(key)
        for key in plan.bring:
            saved = self._ground.storage(key)
            if saved is None or saved.state is not State.AWAY or saved.reload is not None:
                continue
            if saved.origin() is not None or (saved.returned is not None and saved.returned.storage() is not None):
                continue
            try:
                saved.reload = self._bring(saved, saved.stream, "prefetch")
            except (torch.OutOfMemoryError, MemoryError):
                return  # prefetch is a hint: what is needed now may still fit

    def _reload_for(self, saved: SavedStorage, stream: Stream) -> Reload:
        """The reload that ``stream`` can wait for: the shared one on the stream of the pack, else one of its own."""
        shared = stream == saved.stream
        if shared and saved.reload is not None:
            return saved.reload
        try:
            reload = self._bring(saved, stream, "reload")
        except (torch.OutOfMemoryError, MemoryError):
            self._make_room(saved)
            reload = self._bring(saved, stream, "reload")
        if shared:
            saved.reload = reload
        return reload

    def _make_room(self, needed: SavedStorage) -> None:
        """The device is full, and ``needed`` has to come back: whatever the library itself holds there goes."""
        self._offloading.synchronize()  # first: what is expected stays when its copy arrives
        for key in list(self._ground.storages):
            if key != needed.key:
                self.drop(key)
        self.synchronize()

    def _bring(self, saved: SavedStorage, stream: Stream, what: str) -> Reload:
        """Enqueues a reload into a new target that belongs to ``stream``; ``what`` is for traces."""
        ground, slot = self._ground, saved.slot
        runtime = ground.runtime
        assert slot is not None
        assert saved.state is State.AWAY, "the host knows that the bytes have arrived: no stream has to wait for that"
        target = runtime.allocate(saved.target_layout, ground.device, stream)
        # [Note: the block's last owner] An allocator hands out a block whose last owner's kernels may still be queued
        # on `stream`. The transfer stream writes to it, so it waits for an event recorded after the allocation.
        allocated = runtime.record(stream)
        back = runtime.transfer_stream(ground.device, Direction.IN)
        tally, reload = ground.accounts.tally, Reload(target, None, None, held=False)
        ground.copy(
            target, slot, slot, back, (allocated,), keepalive=(target, slot), transfer=reload, what=what, key=saved.key
        )
        # [Note: interrupts] in ground.py: no call stands between the copy and whoever has the reload from here.
        reload.held = True
        ground.resident_bytes += target.nbytes
        tally.bytes_in += target.nbytes
        if ground.resident_bytes > tally.resident_bytes_peak:
            tally.resident_bytes_peak = ground.resident_bytes
        return reload

    def _await(self, reload: Reload, ticket: int | None, stream: Stream) -> None:
        """Makes ``stream`` wait for a reload; on a CPU device the host waits, without the lock."""
        ground = self._ground
        recorder, waiting = ground.accounts.recorder, None
        started = None
        if not ground.runtime.query(reload.event):
            if recorder is not None:
                waiting = recorder.waits(ground, stream)
            started = time.perf_counter()
        if ticket is None:
            ground.runtime.wait(stream, reload.event)
        else:
            ground.registry.wait(ticket, stream)
        if waiting is not None:
            waiting.over("reload")
        if started is not None:
            with ground.accounts.lock:
                ground.accounts.tally.stall_seconds += time.perf_counter() - started

    def _issue(self, view: SavedView, reload: Reload, stream: Stream) -> _Issued:
        target = reload.target
        area = view.storage.footprint
        if not area.gathered:
            first_byte = int(target.storage_offset())
            return _Issued(view.over(target.untyped_storage(), first_byte), first_byte)
        layout = Layout(area.nbytes, view.storage.phase)
        try:
            place = self._ground.runtime.allocate(layout, self._ground.device, stream)
        except (torch.OutOfMemoryError, MemoryError):
            self._make_room(view.storage)
            place = self._ground.runtime.allocate(layout, self._ground.device, stream)
        return _Issued(view.scatter(target, place), int(place.storage_offset()))
