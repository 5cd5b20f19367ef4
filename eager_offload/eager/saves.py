"""The saved tensors of one device: finds or creates the storage of each save, and queues it for its offload.

References to saved storages are weak: see [Note: lifetime belongs to handles]. ``moves.py`` starts the due copies.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor

from eager_offload.config import MIB, OffloadConfig
from eager_offload.core.schedule import AFTER_CONTEXT, AWAITED_WINDOWS, PrefetchOrder, ResidentQueue
from eager_offload.core.selection import footprint
from eager_offload.core.step_table import Fate, Kept, Step, StepRecord, StepScript, StepTables
from eager_offload.eager.handles import SavedStorage, SavedView, StorageRecord
from eager_offload.eager.keeping import Keeping
from eager_offload.eager.moves import Moves
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import KEPT, WAITING
from eager_offload.errors import OffloadError
from eager_offload.marks import Mark
from eager_offload.stats import KeepReason
from eager_offload.torch_private.memory import base_of, storage_key, version_of, weak_storage

#: If a storage is saved again after its copy has started (e.g. a mask, by each layer), it gets a new ``SavedStorage``,
#: because it may have been written in between. After this many of them, the program evidently holds the storage during
#: forward, and moving it earlier would free nothing. So the last copy waits until the context exits. Later saves share
#: that copy, or are kept if they cannot share it.
_MOST_TIMES = 3

#: Bytes: of storages of this size or more, only the memory that they occupy (on a CPU, the pages that were touched)
#: counts in the queue.
_LARGE = 16 * MIB


class SavedTensors:
    """The saved tensors of one device.

    An exception that is not the library's own crashes the offloader: see the note in ``engine/offloader.py``.

    Args:
        tables: step tables of earlier steps.
        script: records the steps of a function that is captured, or compares them with the record.
    """

    def __init__(
        self,
        offloader: DeviceOffloader,
        config: OffloadConfig,
        tables: StepTables | None = None,
        script: StepScript | None = None,
    ) -> None:
        self.offloader, self.device = offloader, offloader.device
        self._runtime, self._accounts, self._windows = offloader.runtime, offloader.accounts, offloader.windows

        self.tables = StepTables(config.step_tables, self._accounts) if tables is None else tables
        self.script = script

        self.order = PrefetchOrder(self._windows.prefetch)
        self.keeping = Keeping(offloader, config, self.tables, self.order)
        self.moves = Moves(offloader, self.order, self.keeping)
        self._keys = itertools.count(1)
        #: The latest record of each storage, or of a part of a storage, by its key.
        self.names: dict[Hashable, StorageRecord] = {}
        self._steps: set[StepRecord] = set()
        self._weak = weakref.ref(self)

    # -- steps ------------------------------------------------------------------------------------------------------

    def new_queue(self) -> ResidentQueue:
        with self.offloader.lock:
            return self.keeping.new_queue()

    def new_step(self, queue: ResidentQueue) -> Step:
        with self.offloader.lock, self.offloader.locked():
            step = Step(self.tables)
            record = StepRecord(step, self.offloader.on_death)
            record.log, record.saves = step.log, self._weak
            self._steps.add(record)
            if self.script is not None:
                self.script.begin(step)
            self.keeping.note_step(step.log, queue)
            return step

    def begin_forward(self, queue: ResidentQueue) -> None:
        """Updates the limits for a forward on the thread of ``queue``."""
        offloader = self.offloader
        if not self.keeping.adapts or offloader.is_crashed or offloader.runtime.is_capturing(offloader.device):
            return
        with offloader.lock, offloader.locked():
            self.keeping.begin(queue)

    def begin_further_step(self, queue: ResidentQueue, *, counts: bool) -> None:
        """Begins another step in the same context; ``queue`` is the calling thread's.

        Args:
            counts: whether the previous step counts as one in the stats.
        """
        if counts:
            with self.offloader.lock:
                self._accounts.counters.begin()
        self.begin_forward(queue)

    def update(self, record: StepRecord) -> None:
        """Derives a table from a step whose graph has died. Callers hold the lock."""
        self._steps.discard(record)
        self.tables.update(record.log, self.keeping.link, self._windows)

    # -- saves ------------------------------------------------------------------------------------------------------

    def save(
        self, tensor: Tensor, queue: ResidentQueue, packed_at: int, step: Step, mark: Mark | None
    ) -> SavedView | KeepReason:
        """Returns the handle of a tensor whose storage will be offloaded, or the reason for which the tensor is kept.

        Args:
            tensor: strided, not empty, on this device.
            queue: the calling thread's.
            packed_at: the calling thread's autograd sequence number.
            step: the calling thread's current one.
            mark: the user's mark on the storage.
        """
        offloader = self.offloader
        if offloader.is_crashed:
            return KeepReason.FAILED
        if offloader.can_capture and offloader.refuses_saves():
            return KeepReason.REGION
        runtime = self._runtime
        try:
            storage, address = tensor.untyped_storage(), tensor.data_ptr()
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes, inside a transform
            return KeepReason.LAYOUT
        if not address or address % tensor.itemsize:
            return KeepReason.LAYOUT  # a `ZeroTensor` has no memory; a reload cannot have an unaligned address
        try:
            # The lock guards tables, queue and counters; the host waits only after it is released.
            with offloader.lock:
                offloader.poll()

                # 1. Share a saved storage with the same bytes.
                area = footprint(tensor, storage.nbytes())
                name: Hashable = storage_key(storage)
                if step.kept and mark is not Mark.PREFER and self._stays_again(tensor, storage, step):
                    return KeepReason.ALIVE
                if not area.whole:
                    whole = self._known(name, storage)
                    if whole is not None and self._may_share(whole, tensor, queue, packed_at):
                        return self._share(whole, tensor, step)
                    name = (name, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
                known = self._known(name, storage) if name in self.names else None
                if known is not None:
                    if self._may_share(known, tensor, queue, packed_at):
                        return self._share(known, tensor, step)
                    if known.times_saved == _MOST_TIMES:
                        return KeepReason.ALIVE
                if mark is Mark.KEEP:
                    return KeepReason.MARKED  # after sharing: a mark does not affect a copy that has started

                # 2. Log the save, and look up its row in the step's table.
                number = len(step.log.facts)
                first = known.first if known is not None and known.step is step else number
                facts = tensor.nbytes, area.nbytes, tensor.requires_grad, first
                row = step.save(facts, runtime.timestamp(), offloader.inflight_bytes)
                if step.log.known is not self.keeping.known:
                    self.keeping.use(step.log.known)
                if known is not None:
                    known.saved_anew = True
                    if known.record.queue is queue:  # its copy has not started: this save is on another stream
                        queue.on_resave(known.record, number)
                if row is not None and row.fate is Fate.KEEP:
                    if mark is not Mark.PREFER:
                        step.kept[name] = Kept(weak_storage(storage), number)
                        return KeepReason.ALIVE
                    step.log.alive.discard(number)  # moved against its row, so its liveness is measured again
                if step.table is None and queue.awaited:
                    queue.stop_awaiting()

                # 3. Create the handle, and queue the storage.
                stream = runtime.current_stream(self.device)
                saved = SavedStorage(next(self._keys), name, tensor, storage, area, self, stream, step, number)
                record, saved.first = saved.record, first
                saved.times_saved = 1 if known is None else known.times_saved + 1
                record.save(self._accounts.counters, tensor.nbytes, KeepReason.NEWEST, area.moved, storage)
                record.queue = queue
                self.names[name] = record
                offloader.records.add(record)
                view = SavedView(saved, tensor, step, number)
                last_save = None if row is None or row.last_save < 0 else row.last_save
                is_controlled = row is not None and self.tables.controller is not None
                if last_save is not None:
                    # Without waiting, the storage is copied again after its next save. With a controller the second
                    # copy would exceed the fraction, so more bytes may wait.
                    most = self._windows.inflight * (AWAITED_WINDOWS if is_controlled else 1)
                    if queue.awaiting_bytes + area.nbytes > most:
                        last_save = None
                # A kernel may use only a part of a workspace. On a CPU the workspace occupies only that part's memory,
                # and moving it frees no more.
                weight = runtime.memory_of(storage) if area.whole and area.nbytes >= _LARGE else None
                moves = row is not None and row.fate is Fate.MOVE and not step.stays
                if row is not None and step.stays and offloader.resident_bytes + area.nbytes <= self.tables.room:
                    weight = 0
                elif is_controlled:
                    weight = 0  # its row decides; it displaces no other storage
                rests = (is_controlled and not moves) or (row is not None and row.fate is Fate.REST)
                rests = rests and mark is not Mark.PREFER
                if rests:
                    step.log.kept += area.nbytes
                queue.push(
                    record,
                    area.nbytes,
                    AFTER_CONTEXT if saved.times_saved == _MOST_TIMES else packed_at,
                    urgent=mark is Mark.PREFER or (moves and self.keeping.leaves_early),
                    weight=weight,
                    last_save=last_save,
                    is_new=first == number,
                    rests=rests,
                )
                offloader.resident_bytes += area.nbytes
                if offloader.resident_bytes > self._accounts.counters.resident_bytes_peak:
                    self._accounts.counters.note_resident(offloader.resident_bytes)
                if self.keeping.readings is not None:
                    self.keeping.readings.note_save(step.log, number)
                if packed_at <= queue.final_after:
                    return view  # no queued storage is final yet
                lack = self.moves.start_due(queue, packed_at)
            if lack is not None:
                offloader.go_on(lack, partial(self.moves.start_due, queue, packed_at))
        except OffloadError:
            raise
        except BaseException:
            offloader.crash()
            raise
        return view

    def may_know(self, tensor: Tensor, step: Step) -> bool:
        """Returns whether ``share`` may find the storage of ``tensor``: a quick check."""
        try:
            name = storage_key(tensor.untyped_storage())
            return name in self.names or name in step.kept
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes, inside a transform
            return False

    def share(self, tensor: Tensor, queue: ResidentQueue, packed_at: int, step: Step) -> SavedView | None:
        """Returns a handle to a saved storage that contains ``tensor`` (waiting, offloaded or kept), or ``None``;
        arguments as for ``save``."""
        offloader = self.offloader
        if offloader.is_crashed or offloader.refuses_saves():
            return None
        with offloader.lock, offloader.locked():
            storage = tensor.untyped_storage()
            if self._stays_again(tensor, storage, step):
                return None
            whole = self._known(storage_key(storage), storage)
            if whole is None or tensor.numel() == 0 or tensor.data_ptr() % tensor.itemsize:
                return None
            if self._may_share(whole, tensor, queue, packed_at):
                return self._share(whole, tensor, step)
            if whole.record.state is WAITING or footprint(tensor, storage.nbytes()).whole:
                return None
        # Keeping this part would keep the whole storage alive, so offload the part.
        saved = self.save(tensor, queue, packed_at, step, None)
        return saved if isinstance(saved, SavedView) else None

    def flush(self, queue: ResidentQueue, *, waits: bool = True) -> None:
        """Starts all due copies when the context exits.

        Args:
            waits: whether to wait for room in the window; otherwise, the rest is left for the next save.
        """
        self.start_due(queue, None, waits=waits)
        if (readings := self.keeping.readings) is not None:
            with self.offloader.lock:
                readings.note_exit()

    def start_due(self, queue: ResidentQueue, sequence: int | None, *, waits: bool = True) -> None:
        """Starts the copies that are due at sequence number ``sequence`` of the thread; ``None``: the context exits."""
        offloader = self.offloader
        if offloader.is_crashed or offloader.refuses_saves():
            return
        with offloader.crashing():
            with offloader.lock:
                offloader.poll()
                lack = self.moves.start_due(queue, sequence)
            if lack is not None:
                offloader.go_on(lack, partial(self.moves.start_due, queue, sequence), waits=waits)

    def storages(self) -> list[SavedStorage]:
        with self.offloader.lock:
            return self.moves.storages()

    # -- with the lock held -----------------------------------------------------------------------------------------

    def _known(self, name: Hashable, storage: torch.UntypedStorage) -> SavedStorage | None:
        """Returns the saved storage under ``name``, if it belongs to ``storage``: an address may have a new owner."""
        record = self.names.get(name)
        saved = None if record is None else record()
        return saved if saved is not None and saved.origin() is storage else None

    def _may_share(self, saved: SavedStorage, tensor: Tensor, queue: ResidentQueue, packed_at: int) -> bool:
        """Returns whether the copy of ``saved`` has, or will have, the bytes that ``tensor`` must have at its unpack.

        [Note: sharing]
        Autograd saves by reference, so it is correct for unpack to return the bytes as they were at the save or later.
        Writes may be invisible (``.data``, NumPy and other libraries' kernels change no version). So:

        1. A kept storage serves every save.
        2. A copy that has started serves earlier saves only; a later save makes a new ``SavedStorage``. The
           exception: the tensor requires grad, and the operator whose save started the copy saves it again in the same
           version. Nothing ran in between, so the bytes are equal.
        3. A copy that has not started serves saves on the stream that it will be ordered after. If the bytes have been
           written between two saves, the version has changed too, and the unpack of the earlier save raises. A tensor
           that does not require grad may still be filled, so its save has to postpone the copy. Only the thread of the
           queue can do that; other threads share the copy only for tensors that require grad.
        """
        if saved.record.state is KEPT:
            return True
        if saved.record.state is not WAITING:
            started, base = saved.started, base_of(tensor)
            return (
                tensor.requires_grad
                and started == (queue, packed_at, version_of(tensor))
                and saved.root() is (tensor if base is None else base)
            )
        if self._runtime.current_stream(self.device) != saved.stream:
            return False
        if saved.record.queue is queue:
            queue.postpone(saved.record, packed_at)
            return True
        return tensor.requires_grad

    def _share(self, saved: SavedStorage, tensor: Tensor, step: Step) -> SavedView:
        counters, record, nbytes = self._accounts.counters, saved.record, tensor.nbytes
        if record.state is KEPT:
            counters.kept(record.kept, nbytes)
        else:
            counters.shared(nbytes)
            if counters is record.counters:
                record.shared_bytes += nbytes
        number = len(step.log.facts)
        owner = saved.first if saved.step is step else -1
        facts = nbytes, saved.footprint.nbytes, tensor.requires_grad, owner
        step.save(facts, self._runtime.timestamp(), self.offloader.inflight_bytes)
        if record.queue is not None and saved.step is step:
            record.queue.on_resave(record, number)
        if self.keeping.readings is not None:
            self.keeping.readings.note_save(step.log, number)
        return SavedView(saved, tensor, step, number)

    def _stays_again(self, tensor: Tensor, storage: torch.UntypedStorage, step: Step) -> bool:
        """Returns whether this step keeps ``storage`` because the program holds it; if so, logs the save."""
        kept = step.kept.get(storage_key(storage))
        if kept is None or kept.storage() is not storage:
            return False
        facts = tensor.nbytes, step.log.facts[kept.number][1], tensor.requires_grad, kept.number
        step.save(facts, self._runtime.timestamp(), self.offloader.inflight_bytes)
        return True
