"""The tensors of one device that autograd saves: which storage each belongs to, and whether that may leave.

    save     selection's last questions, sharing, the resident queue   -> offloading.py starts the copy
    unpack   the version check                                         -> reloading.py brings the bytes back

Nothing here holds a saved storage strongly: see [Note: lifetime belongs to handles].
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor

from eager_offload._torch import (
    module_reference,
    profiled,
    profiler_is_on,
    storage_key,
    version_of,
    weak_storage,
)
from eager_offload.codecs.names import IDENTITY
from eager_offload.config import MIB, OffloadConfig
from eager_offload.eager.coding import coding_of
from eager_offload.eager.device_budget import DeviceBudget
from eager_offload.eager.exposure import Exposure
from eager_offload.eager.handles import SavedStorage, SavedView, StorageRecord, ViewRecord
from eager_offload.eager.measuring import StepMeasures
from eager_offload.eager.offloading import Offloading
from eager_offload.eager.ownership import own_until_taken
from eager_offload.eager.reloading import Reloading
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import AWAY, KEPT, LEAVING, WAITING, Transfer
from eager_offload.engine.transfers import FoundSlot, Lack
from eager_offload.errors import OffloadError
from eager_offload.kernels.codecs import CODECS, Workspaces
from eager_offload.marks import Mark, codec_here
from eager_offload.runtime.base import Layout, Stream
from eager_offload.runtime.host import HostRuntime
from eager_offload.schedule import AT_THE_EXIT, ResidentQueue
from eager_offload.selection import footprint, root_of
from eager_offload.stats import KeepReason
from eager_offload.step_table import Fate, Kept, Link, Step, StepRecord, StepScript, StepTable, StepTables
from eager_offload.tiers.finalizers import Living

#: A storage that is saved over and over, as a mask is by every layer, is saved as a new one each time that it has left:
#: it may have been written in between. After this many times it has an owner that holds it while forward runs, so it
#: waits for the end of that, and all further saves share it. Beyond that it stays: moving it frees nothing.
_MOST_TIMES = 3

#: Bytes; of a storage that is at least so large it is asked how much of it is in memory.
_LARGE = 16 * MIB


class SavedTensors:
    """The saved tensors of one device. Public methods take the lock of its offloader.

    An exception that is not the library's own crashes the offloader: see the note in ``engine/offloader.py``.

    Args:
        tables: what is known of steps, where something is.
        script: what the steps are written down in, or held to, of a function of which a graph is captured.
    """

    def __init__(
        self,
        offloader: DeviceOffloader,
        config: OffloadConfig,
        tables: StepTables | None = None,
        script: StepScript | None = None,
    ) -> None:
        self.offloader = offloader
        self.device, self._runtime, self._accounts = offloader.device, offloader.runtime, offloader.accounts
        self._offloading = Offloading(offloader)
        self.rules, self.min_bytes = config.codec_rules, config.size("min_bytes")
        #: What is known of steps before they run.
        self.tables = StepTables(config.step_plans, self._accounts) if tables is None else tables
        self.script = script
        self._measures = StepMeasures(offloader)
        self._config, self._windows = config, offloader.windows
        #: The most of the newest bytes that stay where neither a budget nor a limit of the slowdown says it.
        self._queue_bytes = keep = config.newest_bytes(self._windows.prefetch)
        budget = config.device_budget
        #: What bounds the device; ``None`` for nothing.
        self.budget = None if budget is None else DeviceBudget(offloader, budget, keep, config.written("device_budget"))
        limit, setting = config.slowdown, config.says_slowdown
        #: What says how much has to stay for steps to take no longer; ``None`` where they may.
        self.exposure = None if limit is None else Exposure(offloader, limit, keep, setting)
        self._reloading = Reloading(offloader, self._offloading)
        self.order = self._reloading.order
        self._queues: Living[ResidentQueue] = Living()
        #: Not by the time that steps took, where a graph is captured of one.
        self._learns_what_stays = config.learns_what_stays and not offloader.is_captured
        #: Whether what was learnt to leave does so at once.
        self._leaves_early = self.exposure is not None or self._learns_what_stays
        self._use_windows()
        self._keys = itertools.count(1)
        self._names: dict[Hashable, StorageRecord] = {}
        self._steps: set[StepRecord] = set()
        self._weak = weakref.ref(self)
        self.scratch = Workspaces(
            lambda nbytes, stream: offloader.runtime.allocate(Layout(nbytes), offloader.device, stream),
            holds=isinstance(offloader.runtime, HostRuntime),
        )

    def new_queue(self) -> ResidentQueue:
        """A queue of the newest bytes, for one thread."""
        queue = ResidentQueue(self.keep)
        self._queues.add(queue)
        return queue

    @property
    def keep(self) -> int:
        """The most bytes of the newest that stay, for each thread."""
        kept = [one.keep for one in (self.budget, self.exposure) if one is not None]
        return min(kept, default=self._queue_bytes)

    def new_step(self, sequence: int) -> Step:
        """A step, for one thread; ``sequence`` names it in the prefetch order."""
        with self.offloader.crashing():
            step = Step(sequence, self.tables)
            record = StepRecord(step, self.offloader.on_death)
            record.log, record.saves = step.log, self._weak
            self._steps.add(record)
            if self.script is not None:
                self.script.begin(step)
            if self.exposure is not None:
                self.exposure.note_forward()
            return step

    def begin_forward(self, queue: ResidentQueue) -> None:
        """A forward begins on the thread of ``queue``: what was learnt says how much stays in it, and is on its way."""
        offloader, budget, exposure, message = self.offloader, self.budget, self.exposure, ""
        learns, is_planned = budget is not None or exposure is not None, self._accounts.counters.plan is not None
        if not (learns or is_planned or self._windows.is_auto) or offloader.is_crashed or offloader.is_capturing():
            return
        with offloader.lock, offloader.crashing():
            if self._windows.begin(queue.movable, queue.largest):
                self._use_windows()
            queue.begin_step()
            self._tell_windows()
            if is_planned:
                self._measures.begin()
            if not learns:
                return
            offloader.poll()
            if budget is not None:
                budget.begin()
                message = budget.warning()
            if exposure is not None:
                most = self.tables.most_bytes
                exposure.begin(queue, most if budget is None else min(most, budget.keep))
            keep = queue.limit = self._accounts.counters.keep_last_bytes = self.keep
            if exposure is not None:
                self.tables.keep(keep, self._queue_bytes)
        if message:  # with the lock not held: a warnings.showwarning is the user's
            self.offloader.warn(message)

    def _use_windows(self) -> None:
        """The windows are others than before. The lock is held."""
        prefetch = self.order.limit = self._windows.prefetch
        self._queue_bytes = self._config.newest_bytes(prefetch)
        self.tables.room = self._config.small_step_bytes(prefetch) if self._learns_what_stays else 0
        for queue in self._queues:
            queue.limit = self.keep
        self._tell_windows()

    def _tell_windows(self) -> None:
        counters, windows = self._accounts.counters, self._windows
        counters.max_inflight_bytes, counters.prefetch_bytes = windows.inflight, windows.prefetch

    def kept_newest(self) -> int:
        """Bytes of the newest that stay now, of all threads. The lock is held."""
        return sum(queue.nbytes for queue in self._queues)

    def begin_step(self, queue: ResidentQueue) -> None:
        """What is saved next is another step's, in the same context; ``queue`` is the calling thread's."""
        failures = [] if self.offloader.is_capturing() else CODECS.compile_due()
        with self.offloader.lock:
            self._accounts.counters.begin()
        for reason in self._accounts.demoted("uncompiled_codec", failures):
            self.offloader.warn(reason)
        self.begin_forward(queue)

    def storages(self) -> list[SavedStorage]:
        """Every saved storage with a living handle."""
        with self.offloader.lock:
            return self._offloading.storages()

    # -- forward ----------------------------------------------------------------------------------------------------

    def save(
        self, tensor: Tensor, queue: ResidentQueue, packed_at: int, step: Step, mark: Mark | None
    ) -> SavedView | KeepReason:
        """The handle of a saved tensor whose storage is to leave; a reason where it has to stay after all.

        Args:
            tensor: strided, not empty, on this device.
            queue: the calling thread's.
            packed_at: the calling thread's autograd sequence number.
            step: the calling thread's current one.
            mark: what the user asked of its storage.
        """
        offloader = self.offloader
        if offloader.is_crashed:
            return KeepReason.FAILED
        if offloader.can_capture and offloader.refuses_saves():
            return KeepReason.REGION
        try:
            with offloader.lock:
                saved = self._save(tensor, queue, packed_at, step, mark)
                if packed_at <= queue.final_after or not isinstance(saved, SavedView) or saved.shares:
                    return saved
                lack = self._start_due(queue, packed_at)
            if lack is not None:
                offloader.go_on(lack, partial(self._start_due, queue, packed_at))
        except OffloadError:
            raise
        except BaseException:
            offloader.crash()
            raise
        return saved

    def may_know(self, tensor: Tensor, step: Step) -> bool:
        """Whether the storage of ``tensor`` might be known: a cheap question, before ``share`` asks it for good."""
        try:
            name = storage_key(tensor.untyped_storage())
            return name in self._names or name in step.kept
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes of its own, inside a transform
            return False

    def share(self, tensor: Tensor, queue: ResidentQueue, packed_at: int, step: Step) -> SavedView | None:
        """The handle of a tensor that would not leave for its own sake, but whose storage does; else ``None``.

        Arguments as for ``save``.
        """
        offloader = self.offloader
        if offloader.is_crashed or offloader.refuses_saves():
            return None
        with offloader.lock, offloader.crashing():
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
            saved = self._save(tensor, queue, packed_at, step, None)  # a small part would hold all that has left
            return saved if isinstance(saved, SavedView) else None

    def flush(self, queue: ResidentQueue, *, waits: bool = True) -> None:
        """The context is left: every operator has run, so all that exceeds the newest bytes leaves.

        Args:
            waits: for room in the window; else what finds none stays until something is saved again.
        """
        offloader = self.offloader
        if offloader.is_crashed or offloader.refuses_saves():
            return
        with offloader.crashing():
            with offloader.lock:
                offloader.poll()
                lack = self._start_due(queue, None)
                if self.budget is not None:
                    self.budget.note_kept(self.kept_newest())
            if lack is not None:
                offloader.go_on(lack, partial(self._start_due, queue, None), waits=waits)

    def _start_due(self, queue: ResidentQueue, sequence: int | None, found: FoundSlot | None = None) -> Lack | None:
        """Starts what has to leave ``queue`` now."""
        lack = self._offloading.start_due(queue, sequence, found)
        if not self._windows.is_known and self._windows.grow(queue.largest):
            self._use_windows()
        return lack

    def _save(
        self, tensor: Tensor, queue: ResidentQueue, packed_at: int, step: Step, mark: Mark | None
    ) -> SavedView | KeepReason:
        offloader, runtime = self.offloader, self._runtime
        try:
            storage, address = tensor.untyped_storage(), tensor.data_ptr()
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes of its own, inside a transform
            return KeepReason.LAYOUT
        if not address or address % tensor.itemsize:
            return KeepReason.LAYOUT  # zeros that are nowhere, or what cannot be rebuilt at such an address
        offloader.poll()
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
        now = runtime.clock()
        facts = tensor.nbytes, area.nbytes, tensor.requires_grad, first, codec
        row = step.save(*facts, now, offloader.inflight_bytes)
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
        coding = (
            coding_of(tensor, area, codec, self.rules, self.min_bytes) if codec != IDENTITY or area.gathered else None
        )
        if coding is not None and coding.may_be_refused and offloader.is_captured:
            coding = None  # a graph can go by no value
        saved = SavedStorage(next(self._keys), name, tensor, storage, area, coding, self, stream, step, number)
        record, saved.first = saved.record, first
        record.module = module_reference()
        saved.times_saved = 1 if known is None else known.times_saved + 1
        autograd_bytes = area.nbytes if known is None else 0
        record.save(self._accounts.counters, tensor.nbytes, KeepReason.NEWEST, area.nbytes, autograd_bytes)
        record.queue = queue
        self._names[name] = record
        offloader.records.add(record)
        view = self._view(saved, tensor, step, number)
        last_save = None if row is None or row.last_save < 0 else row.last_save
        if last_save is not None and queue.awaiting_bytes + area.nbytes > self._windows.inflight:
            last_save = None
        # A workspace of which a kernel uses a part takes no more than that, and to move it frees no more.
        weight = runtime.memory_of(storage) if area.whole and area.nbytes >= _LARGE else None
        moves = row is not None and row.fate is Fate.MOVE and not step.stays
        if row is not None and step.stays and offloader.resident_bytes + area.nbytes <= self.tables.room:
            weight = 0
        elif moves and self.exposure is not None:
            weight = 0  # it pushes nothing out of what is to stay
        queue.push(
            record,
            area.nbytes,
            AT_THE_EXIT if saved.times_saved == _MOST_TIMES else packed_at,
            urgent=mark is Mark.PREFER or (moves and (self._leaves_early or step.is_given)),
            weight=weight,
            last_save=last_save,
            is_new=first == number,
        )
        offloader.hold(area.nbytes)
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
        owner, stream = saved.first if saved.step is step else -1, self._runtime.current_stream(self.device)
        self._note(step, tensor, saved.footprint.nbytes, owner, stream, codec_here(self.rules))
        if record.queue is not None and saved.step is step:
            record.queue.saved_again(record, number)
        return self._view(saved, tensor, step, number)

    def _stays_again(self, tensor: Tensor, storage: torch.UntypedStorage, step: Step) -> bool:
        """Whether this step has left ``storage`` to the owner that keeps it alive; if so, notes one more save."""
        kept = step.kept.get(storage_key(storage))
        if kept is None or kept.storage() is not storage:
            return False
        stream, nbytes = self._runtime.current_stream(self.device), step.log.facts[kept.number][1]
        self._note(step, tensor, nbytes, kept.number, stream, codec_here(self.rules))
        return True

    def _note(self, step: Step, tensor: Tensor, nbytes: int, owner: int, stream: Stream, codec: str) -> None:
        """Logs a save of a known storage, with ``nbytes`` bytes; written out in ``_save``, where it would be a call."""
        runtime, ahead = self._runtime, self.offloader.inflight_bytes
        now = runtime.clock()
        step.save(tensor.nbytes, nbytes, tensor.requires_grad, owner, codec, now, ahead)

    def _view(self, saved: SavedStorage, tensor: Tensor, step: Step, number: int) -> SavedView:
        position = next(self._keys)
        coding, nbytes = saved.coding, saved.footprint.nbytes
        if coding is not None and coding.rounds:  # what may be refused comes back as it is
            nbytes = coding.nbytes
        self.order.add(position, saved.record, nbytes, step.sequence)
        view = SavedView(saved, tensor, position, step, number)
        record = ViewRecord(view, self.offloader.on_death)
        record.position, record.saves = position, self._weak
        self.offloader.records.add(record)
        step.positions[number] = position
        if saved.record.state is AWAY or saved.packed is not None:
            view.forget_bytes()
        else:
            saved.aliases.append(view.alias)
        if self.budget is not None:
            self.budget.note_save()
        return view

    # -- backward ---------------------------------------------------------------------------------------------------

    def unpack(self, view: SavedView) -> Tensor:
        """The saved tensor again, for the stream that is current now.

        Raises:
            SavedTensorModifiedError: it was changed in place after it was saved.
            TransferError, CorruptionError: its bytes did not come back.
            OffloadError: the current stream is being captured.
        """
        offloader = self.offloader
        if offloader.can_capture or offloader.lock._is_owned():  # else nothing is refused
            offloader.refuse_call("backward asked for a tensor that was offloaded")
        if version_of(view.alias) != view.version:  # `check_version`, which would be a call
            view.check_version()
        try:
            if self.budget is not None:
                with offloader.lock:
                    self.budget.note_ask()
            if profiler_is_on():
                with profiled("unpack"):
                    tensor = self._reloading.unpack(view)
            else:
                tensor = self._reloading.unpack(view)
        except (torch.OutOfMemoryError, MemoryError):
            tensor = None  # not while the error is handled, whose frames hold what is to go
        except OffloadError:
            raise
        except BaseException:
            offloader.crash()
            raise
        if tensor is None:
            with offloader.crashing():
                self._reloading.make_room(view)
                tensor = self._reloading.unpack(view)
        if view.step.is_over and self._measures.is_in_step:
            with offloader.lock:
                self._measures.end(self._accounts.counters)
        if view.original is not None and tensor is not view.original():
            tensor = view.original.like(tensor)
            own_until_taken(view.storage, tensor)
        return tensor

    # -- in between: called with the lock held ------------------------------------------------------------------------

    def on_arrival(self, saved: SavedStorage, transfer: Transfer) -> None:
        """The bytes of a storage rest in a tier, and its source is about to go."""
        if not self.offloader.is_crashed:
            self._reloading.on_arrival(saved, transfer)
            if self.script is not None:
                self.script.note_moved(saved.step, saved.first)

    def drop(self, record: StorageRecord) -> None:
        """No use of a storage is expected soon any more."""
        self._reloading.drop(record())

    def forget_storage(self, record: StorageRecord) -> None:
        """The last view of a storage has died."""
        if self._names.get(record.name) is record:
            del self._names[record.name]
        if record.queue is not None:
            nbytes = record.queue.discard(record)
            if record.state is WAITING:
                self.offloader.resident_bytes -= nbytes
        if record.state is LEAVING and self.offloader.cancel_copy_of(record):
            record.stay(KeepReason.NEWEST)
        if record.reload is not None:
            self.offloader.release(record.reload)
        record.queue = record.reload = None  # a trace may hold it

    def release_scratch(self) -> None:
        """Lets go of what codecs compute in, unless some graph is alive."""
        if not self.offloader.records:
            self.scratch.clear()

    def give(self, table: StepTable) -> None:
        """Takes in a table of the user's. The lock is held."""
        self.tables.give(table)
        if self._windows.begin(table.movable_bytes, table.largest):
            self._use_windows()

    def learn(self, record: StepRecord) -> None:
        """A step is over, and its graph is gone."""
        self._steps.discard(record)
        self.release_scratch()
        out = self.offloader.out_rate.value
        self.tables.learn(record.log, None if out is None else Link(out, self.offloader.in_rate.value or out))
