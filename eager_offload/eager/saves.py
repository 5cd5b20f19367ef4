"""The tensors of one device that autograd saves: which storage each belongs to, and whether that may leave.

    save      sharing, the step's table, the resident queue -> moves.py starts the copies that are due
    forget    the last handle of a storage has gone

Nothing here holds a saved storage strongly: see [Note: lifetime belongs to handles].
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

#: A storage that is saved over and over, as a mask is by every layer, is saved as a new one each time that it has left:
#: it may have been written in between. After this many times it has an owner that holds it while forward runs, so it
#: waits for the end of that, and all further saves share it. Beyond that it stays: moving it frees nothing.
_MOST_TIMES = 3

#: Bytes; of a storage that is at least so large it is asked how much of it is in memory.
_LARGE = 16 * MIB


class SavedTensors:
    """The saved tensors of one device.

    An exception that is not the library's own crashes the offloader: see the note in ``engine/offloader.py``.

    Args:
        tables: of steps that were seen before; ``None``: none were.
        script: writes the steps down, or holds them to a script, in a function of which a graph is captured.
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
        #: Of steps before they run.
        self.tables = StepTables(config.step_tables, self._accounts) if tables is None else tables
        self.script = script
        #: Along which the look-ahead brings storages back.
        self.order = PrefetchOrder(self._windows.prefetch)
        self.keeping = Keeping(offloader, config, self.tables, self.order)
        self.moves = Moves(offloader, self.order, self.keeping)
        self._keys = itertools.count(1)
        #: The last save of each storage, or of a part of it, by what names that.
        self.names: dict[Hashable, StorageRecord] = {}
        self._steps: set[StepRecord] = set()
        self._weak = weakref.ref(self)

    # -- steps ------------------------------------------------------------------------------------------------------

    def new_queue(self) -> ResidentQueue:
        """Returns a queue of the newest bytes, for one thread."""
        with self.offloader.lock:
            return self.keeping.new_queue()

    def new_step(self, queue: ResidentQueue) -> Step:
        """Returns a step of the thread of ``queue``."""
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
        """Begins a forward on the thread of ``queue``: what was learnt says how much of it stays."""
        offloader = self.offloader
        if not self.keeping.adapts or offloader.is_crashed or offloader.runtime.is_capturing(offloader.device):
            return
        with offloader.lock, offloader.locked():
            self.keeping.begin(queue)

    def begin_further_step(self, queue: ResidentQueue, *, counts: bool) -> None:
        """Begins another step in the same context; ``queue`` is the calling thread's.

        Args:
            counts: whether the one before counts by itself.
        """
        if counts:
            with self.offloader.lock:
                self._accounts.counters.begin()
        self.begin_forward(queue)

    def update(self, record: StepRecord) -> None:
        """Takes in what a step has taught whose graph is gone; needs the lock."""
        self._steps.discard(record)
        self.tables.update(record.log, self.keeping.link, self._windows)

    # -- saves ------------------------------------------------------------------------------------------------------

    def save(
        self, tensor: Tensor, queue: ResidentQueue, packed_at: int, step: Step, mark: Mark | None
    ) -> SavedView | KeepReason:
        """Returns the handle of a tensor whose storage is to leave, or a reason where it has to stay after all.

        Args:
            tensor: strided, not empty, on this device.
            queue: the calling thread's.
            packed_at: the calling thread's autograd sequence number.
            step: the calling thread's current one.
            mark: that the user has put on its storage.
        """
        offloader = self.offloader
        if offloader.is_crashed:
            return KeepReason.FAILED
        if offloader.can_capture and offloader.refuses_saves():
            return KeepReason.REGION
        runtime = self._runtime
        try:
            storage, address = tensor.untyped_storage(), tensor.data_ptr()
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes of its own, inside a transform
            return KeepReason.LAYOUT
        if not address or address % tensor.itemsize:
            return KeepReason.LAYOUT  # zeros that are nowhere, or what cannot be rebuilt at such an address
        try:
            # The tables, the queue and the counters are the threads' together; the host waits without the lock only.
            with offloader.lock:
                offloader.poll()

                # 1. A storage that is known, with the bytes that it has now, serves this save too.
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
                    return KeepReason.MARKED  # not before: a mark that comes after the copy has started changes nothing

                # 2. Else it is a row of the step, of which a like step may tell what becomes of it.
                number = len(step.log.facts)
                first = known.first if known is not None and known.step is step else number
                facts = tensor.nbytes, area.nbytes, tensor.requires_grad, first
                row = step.save(facts, runtime.timestamp(), offloader.inflight_bytes)
                if step.log.known is not self.keeping.known:
                    self.keeping.use(step.log.known)
                if known is not None:
                    known.saved_anew = True
                    if known.record.queue is queue:  # on another stream
                        queue.on_resave(known.record, number)
                if row is not None and row.fate is Fate.KEEP:
                    if mark is not Mark.PREFER:
                        step.kept[name] = Kept(weak_storage(storage), number)
                        return KeepReason.ALIVE
                    step.log.alive.discard(number)  # it is taken against its row: whether it lives will be seen
                if step.table is None and queue.awaited:
                    queue.stop_awaiting()

                # 3. It is taken: its handle, and its place in the queue.
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
                    # Where a controller says how much moves, what left twice would be too much.
                    most = self._windows.inflight * (AWAITED_WINDOWS if is_controlled else 1)
                    if queue.awaiting_bytes + area.nbytes > most:
                        last_save = None
                # A workspace of which a kernel uses a part takes no more than that, and to move it frees no more.
                weight = runtime.memory_of(storage) if area.whole and area.nbytes >= _LARGE else None
                moves = row is not None and row.fate is Fate.MOVE and not step.stays
                if row is not None and step.stays and offloader.resident_bytes + area.nbytes <= self.tables.room:
                    weight = 0
                elif is_controlled:
                    weight = 0  # it leaves as its row says, and pushes nothing out
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
                    return view  # nothing that may leave is final yet
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
        """Returns whether the storage of ``tensor`` might be known: a cheap question, before ``share``."""
        try:
            name = storage_key(tensor.untyped_storage())
            return name in self.names or name in step.kept
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes of its own, inside a transform
            return False

    def share(self, tensor: Tensor, queue: ResidentQueue, packed_at: int, step: Step) -> SavedView | None:
        """Returns the handle of a tensor that would not leave for its own sake, but whose storage does; else ``None``.

        Arguments as for ``save``.
        """
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
        saved = self.save(tensor, queue, packed_at, step, None)  # a small part would hold all that has left
        return saved if isinstance(saved, SavedView) else None

    def flush(self, queue: ResidentQueue, *, waits: bool = True) -> None:
        """Starts all that exceeds the newest bytes: the context is left, so every operator has run.

        Args:
            waits: for room in the window; else what finds none stays until something is saved again.
        """
        self.start_due(queue, None, waits=waits)
        if (readings := self.keeping.readings) is not None:
            with self.offloader.lock:
                readings.note_exit()

    def start_due(self, queue: ResidentQueue, sequence: int | None, *, waits: bool = True) -> None:
        """Starts what is due by that sequence number of the thread, or all that exceeds the newest bytes; see
        ``flush``."""
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
        """Returns every saved storage with a living handle."""
        with self.offloader.lock:
            return self.moves.storages()

    # -- with the lock held -----------------------------------------------------------------------------------------

    def _known(self, name: Hashable, storage: torch.UntypedStorage) -> SavedStorage | None:
        """Returns the saved storage under ``name``, if it is of the very ``storage``: an address may have a new
        owner."""
        record = self.names.get(name)
        saved = None if record is None else record()
        return saved if saved is not None and saved.origin() is storage else None

    def _may_share(self, saved: SavedStorage, tensor: Tensor, queue: ResidentQueue, packed_at: int) -> bool:
        """Returns whether the bytes that ``saved`` has, or will have, are those that ``tensor`` has at its unpack.

        [Note: sharing]
        Autograd saves by reference: a save means the bytes of its own time or later ones, however they came to be
        written (`.data`, NumPy and kernels of others change no version). So a copy serves only saves that were made
        before it started, and what is saved later is saved anew. (What is written so after a copy has started is not
        seen by those earlier saves, once the original is gone.) The one exception is a save by the operator whose
        saves set the copy off, of the same version: nothing else can have run in between. Before, a storage may be
        shared on the stream that the copy will be ordered after: the copy takes what is there by then, and if that is
        not what an earlier save meant, the earlier one's version has changed and its unpack raises. A save that does
        not require grad may be filled yet, so it postpones the copy; only the thread that counts the sequence numbers
        can do that. A storage that stays serves everyone.
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
        """Returns whether this step has left ``storage`` to the owner that keeps it alive; if so, notes one more
        save."""
        kept = step.kept.get(storage_key(storage))
        if kept is None or kept.storage() is not storage:
            return False
        facts = tensor.nbytes, step.log.facts[kept.number][1], tensor.requires_grad, kept.number
        step.save(facts, self._runtime.timestamp(), self.offloader.inflight_bytes)
        return True
