"""The tensors of one device that autograd saves: which storage each belongs to, and whether that may leave.

    take     selection's last questions, sharing, the step's table, the resident queue -> offloading.py starts the copy

What is here needs the lock, see ``SavedTensors``. Nothing here holds a saved storage strongly: see [Note: lifetime
belongs to handles].
"""

from __future__ import annotations

import abc
import itertools
import weakref
from collections.abc import Hashable

import torch
from torch import Tensor

from eager_offload._torch import module_reference, storage_key, version_of, weak_storage
from eager_offload.codecs.names import IDENTITY
from eager_offload.config import MIB, OffloadConfig
from eager_offload.eager.coding import coding_of
from eager_offload.eager.handles import SavedStorage, SavedView, StorageRecord
from eager_offload.eager.keeping import Keeping
from eager_offload.eager.offloading import Offloading
from eager_offload.eager.reloading import Reloading
from eager_offload.engine.transfer import AWAY, KEPT, LEAVING, WAITING, Transfer
from eager_offload.engine.transfers import FoundSlot, Lack, Transfers
from eager_offload.kernels.codecs import Workspaces
from eager_offload.marks import Mark, codec_here
from eager_offload.runtime.base import Layout
from eager_offload.runtime.host import HostRuntime
from eager_offload.schedule import AT_THE_EXIT, AWAITED_WINDOWS, ResidentQueue
from eager_offload.selection import footprint, root_of
from eager_offload.stats import KeepReason
from eager_offload.step_table import Fate, Kept, Step, StepRecord, StepScript, StepTable, StepTables

#: A storage that is saved over and over, as a mask is by every layer, is saved as a new one each time that it has left:
#: it may have been written in between. After this many times it has an owner that holds it while forward runs, so it
#: waits for the end of that, and all further saves share it. Beyond that it stays: moving it frees nothing.
_MOST_TIMES = 3

#: Bytes; of a storage that is at least so large it is asked how much of it is in memory.
_LARGE = 16 * MIB


class Saving(abc.ABC):
    """The saved tensors of one device.

    Args:
        tables: of steps that were seen before; ``None``: none were.
        script: writes the steps down, or holds them to a script, in a function of which a graph is captured.
    """

    def __init__(
        self,
        transfers: Transfers,
        config: OffloadConfig,
        tables: StepTables | None = None,
        script: StepScript | None = None,
    ) -> None:
        self.transfers, self.device = transfers, transfers.device
        self._runtime, self._accounts, self._windows = transfers.runtime, transfers.accounts, transfers.windows
        self.rules, self.min_bytes = config.codec_rules, config.size("min_bytes")
        #: Of steps before they run.
        self.tables = StepTables(config.step_plans, self._accounts) if tables is None else tables
        self.script = script
        self.offloading = Offloading(transfers)
        self.reloading = Reloading(transfers, self.offloading)
        #: Along which the look-ahead brings storages back.
        self.order = self.reloading.order
        self.keeping = Keeping(transfers, config, self.tables, self.order)
        self._keys = itertools.count(1)
        self._names: dict[Hashable, StorageRecord] = {}
        self._steps: set[StepRecord] = set()
        self._weak = weakref.ref(self)
        #: Codecs compute in it.
        self.scratch = Workspaces(
            lambda nbytes, stream: transfers.runtime.allocate(Layout(nbytes), transfers.device, stream),
            holds=isinstance(transfers.runtime, HostRuntime),
        )

    def begin_step(self, queue: ResidentQueue) -> Step:
        """Returns a step of the thread of ``queue``."""
        step = Step(self.tables)
        record = StepRecord(step, self.transfers.on_death)
        record.log, record.saves = step.log, self._weak
        self._steps.add(record)
        if self.script is not None:
            self.script.begin(step)
        self.keeping.begin_step(step, queue)
        return step

    def give(self, table: StepTable) -> None:
        """Takes in a table of the user's."""
        self.tables.give(table)
        self.keeping.expect(table.movable_bytes, table.largest)

    def start_due(self, queue: ResidentQueue, sequence: int | None, found: FoundSlot | None = None) -> Lack | None:
        """Starts what has to leave ``queue`` now; see ``Offloading.start_due``."""
        lack = self.offloading.start_due(queue, sequence, found)
        self.keeping.grow(queue)
        return lack

    def take_small(self, tensor: Tensor, queue: ResidentQueue, packed_at: int, step: Step) -> SavedView | None:
        """Returns the handle of a small tensor whose storage leaves anyway; ``None`` where it does not.

        Arguments as for ``take``.
        """
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
        saved = self.take(tensor, queue, packed_at, step, None)  # a small part would hold all that has left
        return saved if isinstance(saved, SavedView) else None

    def take(
        self, tensor: Tensor, queue: ResidentQueue, packed_at: int, step: Step, mark: Mark | None
    ) -> SavedView | KeepReason:
        """Returns the handle of a saved tensor whose storage is to leave, or a reason where it has to stay after all.

        Args:
            tensor: strided, not empty, on this device.
            queue: the calling thread's.
            packed_at: the calling thread's autograd sequence number.
            step: the calling thread's current one.
            mark: that the user has put on its storage.
        """
        transfers, runtime = self.transfers, self._runtime
        try:
            storage, address = tensor.untyped_storage(), tensor.data_ptr()
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes of its own, inside a transform
            return KeepReason.LAYOUT
        if not address or address % tensor.itemsize:
            return KeepReason.LAYOUT  # zeros that are nowhere, or what cannot be rebuilt at such an address
        transfers.poll()
        area = footprint(tensor, storage.nbytes())
        name: Hashable = storage_key(storage)
        if step.kept and mark is not Mark.PREFER and self._stays_again(tensor, storage, step):
            return KeepReason.ALIVE
        if not area.whole:
            whole = self._known(name, storage)
            if whole is not None and self._may_share(whole, tensor, queue, packed_at):
                return self._share(whole, tensor, step)
            name = (name, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        known = self._known(name, storage) if name in self._names else None
        if known is not None:
            if self._may_share(known, tensor, queue, packed_at):
                return self._share(known, tensor, step)
            if known.times_saved == _MOST_TIMES:
                return KeepReason.ALIVE
        if mark is Mark.KEEP:
            return KeepReason.MARKED  # not before: a mark that comes after the copy has started changes nothing

        # The storage is not known, or not with the bytes that it has now.
        number = len(step.log.facts)
        first = known.first if known is not None and known.step is step else number
        stream, codec = runtime.current_stream(self.device), codec_here(self.rules)
        facts = tensor.nbytes, area.nbytes, tensor.requires_grad, first, codec
        row = step.save(*facts, runtime.timestamp(), transfers.inflight_bytes)
        if known is not None:
            known.saved_anew = True
            if known.record.queue is queue:  # on another stream
                queue.saved_again(known.record, number)
        if row is not None and row.fate is Fate.KEEP:
            if mark is not Mark.PREFER:
                step.kept[name] = Kept(weak_storage(storage), number)
                return KeepReason.ALIVE
            step.taken(number)
        if step.table is None and queue.awaited:
            queue.await_nothing()
        coding = coding_of(tensor, area, codec, self.min_bytes) if codec != IDENTITY or area.gathered else None
        if coding is not None and coding.may_be_refused and transfers.is_captured:
            coding = None  # a graph can go by no value
        saved = SavedStorage(next(self._keys), name, tensor, storage, area, coding, self, stream, step, number)
        record, saved.first = saved.record, first
        record.module = module_reference()
        saved.times_saved = 1 if known is None else known.times_saved + 1
        record.save(self._accounts.counters, tensor.nbytes, KeepReason.NEWEST, area.moved, storage)
        record.queue = queue
        self._names[name] = record
        transfers.records.add(record)
        view = self._view(saved, tensor, step, number)
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
        if row is not None and step.stays and transfers.resident_bytes + area.nbytes <= self.tables.room:
            weight = 0
        elif is_controlled:
            weight = 0  # it leaves as its row says, and pushes nothing out
        rests = is_controlled and not moves and mark is not Mark.PREFER
        if rests:
            step.log.kept += area.nbytes
        queue.push(
            record,
            area.nbytes,
            AT_THE_EXIT if saved.times_saved == _MOST_TIMES else packed_at,
            urgent=mark is Mark.PREFER or (moves and (self.keeping.leaves_early or step.is_given)),
            weight=weight,
            last_save=last_save,
            is_new=first == number,
            rests=rests,
        )
        transfers.resident_bytes += area.nbytes
        if transfers.resident_bytes > self._accounts.counters.resident_bytes_peak:
            self._accounts.counters.note_resident(transfers.resident_bytes)
        return view

    def _known(self, name: Hashable, storage: torch.UntypedStorage) -> SavedStorage | None:
        """The saved storage under ``name``, if it is of the very ``storage``: an address may have a new owner."""
        record = self._names.get(name)
        saved = None if record is None else record()
        return saved if saved is not None and saved.origin() is storage else None

    def _may_share(self, saved: SavedStorage, tensor: Tensor, queue: ResidentQueue, packed_at: int) -> bool:
        """Whether the bytes that ``saved`` has, or will have, are those that ``tensor`` has at its unpack.

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
            return saved.packed is None
        if saved.coding is not None and not saved.coding.serves(tensor, codec_here(self.rules), self.min_bytes):
            if saved.record.state is not WAITING:
                return False
            saved.be_exact()
        if saved.record.state is not WAITING:
            started = saved.started
            return (
                tensor.requires_grad
                and started == (queue, packed_at, version_of(tensor))
                and saved.root() is root_of(tensor)
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
        owner, codec = saved.first if saved.step is step else -1, codec_here(self.rules)
        facts = nbytes, saved.footprint.nbytes, tensor.requires_grad, owner, codec
        step.save(*facts, self._runtime.timestamp(), self.transfers.inflight_bytes)
        if record.queue is not None and saved.step is step:
            record.queue.saved_again(record, number)
        return self._view(saved, tensor, step, number)

    def _stays_again(self, tensor: Tensor, storage: torch.UntypedStorage, step: Step) -> bool:
        """Whether this step has left ``storage`` to the owner that keeps it alive; if so, notes one more save."""
        kept = step.kept.get(storage_key(storage))
        if kept is None or kept.storage() is not storage:
            return False
        facts = tensor.nbytes, step.log.facts[kept.number][1], tensor.requires_grad, kept.number, codec_here(self.rules)
        step.save(*facts, self._runtime.timestamp(), self.transfers.inflight_bytes)
        return True

    def _view(self, saved: SavedStorage, tensor: Tensor, step: Step, number: int) -> SavedView:
        coding, nbytes = saved.coding, saved.footprint.nbytes
        if coding is not None and coding.rounds:  # what may be refused comes back as it is
            nbytes = coding.nbytes
        view = SavedView(saved, tensor, step.uses.add(number, saved.record, nbytes), step, number)
        if saved.record.state is AWAY or saved.packed is not None:
            view.forget_bytes()
        else:
            saved.aliases.append(view.alias)
        if self.keeping.readings is not None:
            self.keeping.readings.note_save(step.log, number)
        return view

    @abc.abstractmethod
    def unpack(self, view: SavedView) -> Tensor:
        """Returns the saved tensor again, for the stream that is current now; takes the lock itself."""

    # -- in between, as transfers end and graphs go -------------------------------------------------------------------

    def on_arrival(self, saved: SavedStorage, transfer: Transfer) -> None:
        """Takes note that the bytes of a storage rest in a tier; its source is about to go."""
        if not self.transfers.is_crashed:
            if saved.record in self.order.promised:
                self.reloading.on_arrival(saved, transfer)
            if self.script is not None:
                self.script.note_moved(saved.step, saved.first)

    def forget_storage(self, record: StorageRecord) -> None:
        """Forgets a storage whose last view has died."""
        if self._names.get(record.name) is record:
            del self._names[record.name]
        if record in self.order.promised:
            self.order.forget(record)
        if record.queue is not None:
            nbytes = record.queue.discard(record)
            if record.state is WAITING:
                self.transfers.resident_bytes -= nbytes
        if record.state is LEAVING and self.transfers.cancel_copy_of(record):
            record.stay(KeepReason.NEWEST)
        if record.reload is not None:
            self.transfers.release(record.reload)
        record.queue = record.reload = None  # a trace may hold it

    def learn(self, record: StepRecord) -> None:
        """Takes in what a step has taught whose graph is gone."""
        self._steps.discard(record)
        if not self.transfers.records:
            self.scratch.clear()
        self.tables.learn(record.log, self.keeping.link, self._windows)
