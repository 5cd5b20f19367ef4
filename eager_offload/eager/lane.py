"""The saved tensors of one device: takes them in, gives them back, and notices what has happened in between.

    take     selection's last questions, sharing, the delay line       -> offloading.py carries the copy out
    give     the version check                                         -> reloading.py brings the bytes back
    settle   handles that went, transfers that arrived

A lane holds no saved storage strongly: see [Note: lifetime belongs to handles].
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eager_offload._torch import profiled, profiler_is_on, weak_storage
from eager_offload.config import OffloadConfig
from eager_offload.eager.ground import Ground
from eager_offload.eager.handles import Remains, SavedStorage, SavedView, State
from eager_offload.eager.offloading import Offloading
from eager_offload.eager.reloading import Reloading
from eager_offload.learning import Advice, Forward, Kept, Lessons, Link, Notes
from eager_offload.marks import Mark
from eager_offload.runtime.base import Direction, Runtime
from eager_offload.schedule import AT_THE_EXIT, DelayLine
from eager_offload.selection import footprint, root_of
from eager_offload.stats import Accounts, KeepReason
from eager_offload.tiers.base import Tier
from eager_offload.transfers import Transfers

__all__ = ["Census", "Lane"]

#: A storage that does not require grad and is saved over and over, as a mask is by every layer, is taken anew each time
#: that it has left: it might have been filled in between. Taken this many times, it is held by someone while forward
#: runs, so it waits for the end of that, and all further saves share it. Beyond that it stays: moving it frees nothing.
_MOST_TAKES = 3


class Census(NamedTuple):
    """How much a lane knows of; everything is 0 once all graphs are gone and transfers are over."""

    storages: int
    names: int
    uses: int
    promised_bytes: int
    leaving: int
    orphans: int
    pending: int
    resident_bytes: int
    used_bytes: int


class Lane:
    """The saved tensors of one device. Public methods take the lock of ``accounts``."""

    def __init__(
        self, device: torch.device, runtime: Runtime, tiers: Sequence[Tier], config: OffloadConfig, accounts: Accounts
    ) -> None:
        self.device = device
        self.runtime = runtime
        self.tiers = tiers
        self.graveyard: deque[int | Remains | Notes] = deque()
        self._lessons = Lessons()
        self._accounts = accounts
        self._ground = Ground(device, runtime, accounts)
        self._offloading = Offloading(self._ground, tiers, config.size("max_inflight_bytes"))
        self._reloading = Reloading(self._ground, self._offloading, config.size("prefetch_bytes"))
        self._order = self._reloading.order
        #: What compiled code asks for.
        self.transfers = Transfers(self._ground, tiers)
        self._delay_bytes = config.delay_bytes
        self._learns_what_stays = config.keep_last_bytes == "auto"
        self._keys = itertools.count(1)
        self._names: dict[Hashable, weakref.ref[SavedStorage]] = {}

    def new_line(self) -> DelayLine:
        """A delay line, for one thread."""
        return DelayLine(self._delay_bytes)

    def new_forward(self, sequence: int) -> Forward:
        """A forward, for one thread; ``sequence`` names it in the prefetch order."""
        return Forward(sequence, self._lessons, self.graveyard.append)

    @property
    def inflight_bytes(self) -> int:
        """Bytes on their way out."""
        return self._offloading.window.nbytes

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device that the library holds: newest, on their way out, brought back and not asked for yet."""
        return self._ground.resident_bytes

    def census(self) -> Census:
        """What is known of at this moment."""
        with self._accounts.lock:
            self.settle()
            return Census(
                storages=len(self._ground.storages),
                names=len(self._names),
                uses=len(self._order),
                promised_bytes=self._order.promised_bytes,
                leaving=len(self._offloading),
                orphans=len(self._reloading),
                pending=len(self._ground.registry),
                resident_bytes=self._ground.resident_bytes,
                used_bytes=sum(tier.used_bytes for tier in self.tiers),
            )

    def take(
        self, tensor: Tensor, line: DelayLine, packed_at: int, forward: Forward, mark: Mark | None
    ) -> SavedView | KeepReason:
        """Takes a saved tensor in; a reason where it has to stay after all.

        Args:
            tensor: strided, not empty, on this lane's device.
            line: the calling thread's delay line.
            packed_at: the calling thread's autograd sequence number.
            forward: the calling thread's current one.
            mark: what the user asked of its storage.
        """
        with self._accounts.lock:
            return self._take(tensor, line, packed_at, forward, mark)

    def _take(
        self, tensor: Tensor, line: DelayLine, packed_at: int, forward: Forward, mark: Mark | None
    ) -> SavedView | KeepReason:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes of its own, inside a transform
            return KeepReason.LAYOUT
        if tensor.data_ptr() % tensor.itemsize:
            return KeepReason.LAYOUT  # cannot be rebuilt at such an address
        self.settle()
        area = footprint(tensor, storage.nbytes())
        name: Hashable = storage._cdata
        if mark is not Mark.PREFER and self._stays_again(storage, forward):
            return KeepReason.ALIVE
        if not area.whole:
            whole = self._known(name, storage)
            if whole is not None and self._may_share(whole, tensor, line, packed_at):
                return self._share(whole, tensor, forward)
            name = (name, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        known = self._known(name, storage)
        if known is not None:
            if self._may_share(known, tensor, line, packed_at):
                return self._share(known, tensor, forward)
            if known.takes == _MOST_TAKES:
                return KeepReason.ALIVE
        if mark is Mark.KEEP:
            return KeepReason.MARKED  # not before: a mark that comes after the copy has started changes nothing
        stream, tally = self.runtime.current_stream(self.device), self._accounts.tally
        number = len(forward.notes.sizes)
        advice = self._note(forward, area.nbytes, None)
        if advice is Advice.ALIVE:
            if mark is not Mark.PREFER:
                forward.kept[name] = Kept(weak_storage(storage), number)
                return KeepReason.ALIVE
            forward.taken(number)
        saved = SavedStorage(next(self._keys), name, tensor, area, self, stream, tally, forward, number)
        saved.takes = 1 if known is None or tensor.requires_grad else known.takes + 1
        saved.line = line
        self._ground.storages[saved.key] = saved.ref
        self._names[name] = saved.ref
        view = self._view(saved, tensor, forward, number)
        tally.kept(KeepReason.NEWEST, saved.logical_bytes)
        urgent = mark is Mark.PREFER or (advice is Advice.LEAVE and self._learns_what_stays)
        may_be_filled = AT_THE_EXIT if saved.takes == _MOST_TAKES else packed_at
        line.push(saved.key, area.nbytes, None if tensor.requires_grad else may_be_filled, urgent=urgent)
        self._ground.resident_bytes += area.nbytes  # no call in between: see [Note: interrupts] in ground.py
        self._ground.note_peak()
        self._offloading.start_due(line, packed_at)
        return view

    def may_know(self, tensor: Tensor, forward: Forward) -> bool:
        """Whether the storage of ``tensor`` might be known: a cheap question, before ``share`` asks it for good."""
        try:
            name = tensor.untyped_storage()._cdata
            return name in self._names or name in forward.kept
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes of its own, inside a transform
            return False

    def share(self, tensor: Tensor, line: DelayLine, packed_at: int, forward: Forward) -> SavedView | None:
        """Lets a tensor that would not be taken for its own sake share what is taken; arguments as for ``take``."""
        with self._accounts.lock:
            storage = tensor.untyped_storage()
            if self._stays_again(storage, forward):
                return None
            whole = self._known(storage._cdata, storage)
            if whole is None or tensor.numel() == 0 or tensor.data_ptr() % tensor.itemsize:
                return None
            return self._share(whole, tensor, forward) if self._may_share(whole, tensor, line, packed_at) else None

    def again(self, view: SavedView, tensor: Tensor, forward: Forward) -> SavedView:
        """One more save of what ``view`` covers: the caller knows that ``tensor`` has those bytes, and final."""
        with self._accounts.lock:
            return self._share(view.storage, tensor, forward)

    def flush(self, line: DelayLine) -> None:
        """The context is left: every operator has run, so all that exceeds the newest bytes leaves."""
        with self._accounts.lock:
            self.settle()
            self._offloading.start_due(line, None)

    def _known(self, name: Hashable, storage: torch.UntypedStorage) -> SavedStorage | None:
        """The saved storage under ``name``, if it is of the very ``storage``: an address may have a new owner."""
        ref = self._names.get(name)
        saved = None if ref is None else ref()
        return saved if saved is not None and saved.origin() is storage else None

    def _may_share(self, saved: SavedStorage, tensor: Tensor, line: DelayLine, packed_at: int) -> bool:
        """Whether the bytes that ``saved`` has, or will have, are those that ``tensor`` has at its unpack.

        [Note: sharing]
        Before its copy starts, a storage may be shared on the stream that the copy will be ordered after: the copy
        takes what is there by then, and if that is not what an earlier save meant, the earlier one's version has
        changed and its unpack raises. A save that does not require grad may be filled yet, so it postpones the copy;
        only the thread that counts the sequence numbers can do that. Afterwards the copy serves only a tensor that was
        final at pack, of the same version counter, that has not changed since. A storage that stays serves everyone.
        """
        if saved.state is State.KEPT:
            return True
        if saved.state is State.WAITING:
            if self.runtime.current_stream(self.device) != saved.stream:
                return False
            if tensor.requires_grad:
                return True
            if saved.line is not line:
                return False
            line.postpone(saved.key, packed_at)
            return True
        return tensor.requires_grad and saved.root() is root_of(tensor) and saved.copied_version == tensor._version

    def _share(self, saved: SavedStorage, tensor: Tensor, forward: Forward) -> SavedView:
        tally, nbytes = self._accounts.tally, tensor.nbytes
        if saved.kept is not None:
            tally.kept(saved.kept, nbytes)
        else:
            tally.shared(nbytes)
            if tally is saved.tally:
                saved.shared_bytes += nbytes
        number = len(forward.notes.sizes)
        self._note(forward, saved.footprint.nbytes, saved.number if saved.forward is forward else -1)
        return self._view(saved, tensor, forward, number)

    def _stays_again(self, storage: torch.UntypedStorage, forward: Forward) -> bool:
        """Whether this forward has left ``storage`` to whoever keeps it alive; if so, notes one more save of it."""
        kept = forward.kept.get(storage._cdata)
        if kept is None or kept.storage() is not storage:
            return False
        self._note(forward, forward.notes.sizes[kept.number], kept.number)
        return True

    def _note(self, forward: Forward, nbytes: int, owner: int | None) -> Advice:
        """The forward's next save; arguments as for ``Forward.save``."""
        now = self.runtime.clock(self.runtime.current_stream(self.device))
        return forward.save(nbytes, owner, now, self._offloading.window.nbytes)

    def _view(self, saved: SavedStorage, tensor: Tensor, forward: Forward, number: int) -> SavedView:
        position = next(self._keys)
        view = SavedView(saved, tensor, position, forward, number)
        forward.has_handle(number, position)
        if saved.state is State.AWAY:
            view.forget_bytes()
        else:
            saved.aliases.append(view.alias)
        self._order.add(position, saved.key, saved.footprint.nbytes, forward.sequence)
        return view

    # -- backward -------------------------------------------------------------------------------------------------

    def give(self, view: SavedView) -> Tensor:
        """The saved tensor again, for the stream that is current now.

        Raises:
            SavedTensorModifiedError: it was changed in place after it was saved.
            TransferError, CorruptionError: its bytes did not come back.
        """
        view.check_version()
        if profiler_is_on():
            with profiled("unpack"):
                self.settle()
                return self._reloading.give(view)
        self.settle()
        return self._reloading.give(view)

    # -- in between -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Notices handles that went and transfers that arrived; never blocks."""
        with self._accounts.lock:
            self.runtime.tidy()
            graveyard = self.graveyard
            while graveyard:
                gone = graveyard[0]
                if isinstance(gone, int):
                    self._reloading.drop(self._order.remove(gone))
                elif isinstance(gone, Notes):
                    self._lessons.learn(gone, self._link())
                else:
                    self._bury(gone)
                del graveyard[0]  # last: see [Note: interrupts] in ground.py
            self._offloading.settle()
            self._reloading.settle()
            self.transfers.settle()

    def synchronize(self) -> None:
        """Waits until nothing is on its way, but for reloads that are still expected to be asked for."""
        with self._accounts.lock:
            self.settle()
            self._offloading.synchronize()
            self._reloading.synchronize()
            self.transfers.synchronize()
            self.runtime.finish()
            self.settle()

    def _link(self) -> Link | None:
        """What the link to the tiers does; ``None`` as long as nothing has used it."""
        if not self._offloading.rate.nbytes:
            return None
        out = self._offloading.rate.value
        if out is not None:
            return Link(out, self._reloading.rate.value or out)
        try:  # transfers that cannot be timed
            out = self.runtime.bandwidth(self.device, Direction.OUT)
            back = self.runtime.bandwidth(self.device, Direction.IN)
        except (torch.OutOfMemoryError, MemoryError):
            return None  # a device that is full to the last byte is not measured now
        return Link(out, back)

    def _bury(self, remains: Remains) -> None:
        """Settles the accounts of a storage whose last handle is gone; an interrupt may have kept it from them.

        What may not be done twice comes last: see [Note: interrupts] in ``ground.py``.
        """
        self._ground.storages.pop(remains.key, None)
        if self._names.get(remains.name) is remains.ref:
            del self._names[remains.name]
        if remains.line is not None:
            nbytes = remains.line.discard(remains.key)
            if remains.state is State.WAITING:
                self._ground.resident_bytes -= nbytes
        if remains.reload is not None:
            self._reloading.abandon(remains.reload)
        if remains.state in (State.LEAVING, State.AWAY) and not remains.asked:
            self._offloading.bury(remains)
