"""The tensors of one device that autograd saves: which storage each belongs to, and whether that may leave.

    save     selection's last questions, sharing, the resident queue   -> offloading.py starts the copy
    unpack   the version check                                         -> reloading.py brings the bytes back

Nothing here holds a saved storage strongly: see [Note: lifetime belongs to handles].
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import cast

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
from eager_offload.computed_plan import ComputedPlan
from eager_offload.config import MIB, OffloadConfig
from eager_offload.eager.coding import coding_of
from eager_offload.eager.device_budget import DeviceBudget
from eager_offload.eager.exposure import Exposure
from eager_offload.eager.followed import FollowedStorage
from eager_offload.eager.following import Run
from eager_offload.eager.handles import KeptTensor, SavedStorage, SavedView, StorageRecord, ViewRecord
from eager_offload.eager.measuring import StepMeasures
from eager_offload.eager.offloading import Offloading
from eager_offload.eager.ownership import own_until_taken
from eager_offload.eager.plans import KnownPlan, Recording, StepPlans, Turn
from eager_offload.eager.reloading import Reloading
from eager_offload.engine.offloader import DeviceOffloader, FoundSlot, Lack
from eager_offload.engine.transfer import AWAY, KEPT, LEAVING, WAITING, Transfer
from eager_offload.errors import OffloadError
from eager_offload.kernels.codecs import CODECS, Workspaces
from eager_offload.learning import Decision, Forward, ForwardRecord, Kept, LearnedForwards, Link
from eager_offload.marks import Mark, codec_here
from eager_offload.runtime.base import Layout, Stream
from eager_offload.runtime.host import HostRuntime
from eager_offload.schedule import AT_THE_EXIT, ResidentQueue
from eager_offload.selection import Footprint, footprint, root_of
from eager_offload.stats import KeepReason
from eager_offload.step_plan import StepPlan
from eager_offload.step_recorder import StepRecorder
from eager_offload.tiers.base import Slot
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
    """

    def __init__(self, offloader: DeviceOffloader, config: OffloadConfig) -> None:
        self.offloader = offloader
        self.device, self._runtime, self._accounts = offloader.device, offloader.runtime, offloader.accounts
        self._offloading = Offloading(offloader)
        self.rules, self.min_bytes = config.codec_rules, config.size("min_bytes")
        self.plans = StepPlans(config.step_plans, self.rules, self._accounts, StepMeasures(offloader))
        self._config, self._windows = config, offloader.windows
        #: The most of the newest bytes that stay where neither a budget nor a limit of the slowdown says it.
        self._queue_bytes = keep = config.newest_bytes(self._windows.prefetch)
        budget = config.device_budget
        #: What bounds the device; ``None`` for nothing.
        self.budget = None if budget is None else DeviceBudget(offloader, budget, keep, config.written("device_budget"))
        limit, setting = config.slowdown, config.says_slowdown
        #: What says how much has to stay for steps to take no longer; ``None`` where they may.
        self.exposure = None if limit is None else Exposure(offloader, limit, keep, setting)
        offloader.idle_slots.add(self.plans)
        self._reloading = Reloading(self._offloading, self.plans)
        self.order = self._reloading.order
        self._learned = LearnedForwards()
        self._queues: Living[ResidentQueue] = Living()
        #: Whether an automatic window says how many of the newest bytes stay.
        self._window_says_what_stays = config.learns_what_stays and config.prefetch_bytes == "auto"
        self._learns_what_stays = config.learns_what_stays
        self._use_windows()
        self._keys = itertools.count(1)
        self._names: dict[Hashable, StorageRecord] = {}
        self._forwards: set[ForwardRecord] = set()
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

    def new_forward(self, sequence: int, recorder: StepRecorder | None) -> Forward:
        """A forward, for one thread; ``sequence`` names it in the prefetch order."""
        with self.offloader.crashing():
            forward = Forward(sequence, self._learned)
            record = ForwardRecord(forward, self.offloader.on_death)
            record.log, record.saves = forward.log, self._weak
            forward.recorder = record.recorder = recorder
            if recorder is not None and self._window_says_what_stays and not self._windows.is_known:
                recorder.is_early = True  # the next one of its kind keeps less
            self._forwards.add(record)
            if self.exposure is not None:
                self.exposure.note_forward()
            return forward

    def begin_forward(self, queue: ResidentQueue) -> None:
        """A forward begins on the thread of ``queue``: what was learnt says how much stays in it, and is on its way."""
        offloader, budget, exposure, message = self.offloader, self.budget, self.exposure, ""
        self.plans.enter()
        learns = budget is not None or exposure is not None
        if not (learns or self._windows.is_auto) or offloader.is_crashed or offloader.is_capturing():
            return
        with offloader.lock, offloader.crashing():
            if self._windows.begin(queue.movable, queue.largest):
                self._use_windows()
            queue.begin_step()
            self._tell_windows()
            if not learns:
                return
            offloader.poll()
            before = self.keep
            if budget is not None:
                budget.begin()
                message = budget.warning()
            if exposure is not None:
                if self._accounts.preparing:
                    exposure.pause()  # its waits are those of the window, and none of a replay's
                else:
                    most = self._learned.most_bytes
                    exposure.begin(queue, most if budget is None else min(most, budget.keep))
            keep = queue.limit = self._accounts.counters.keep_last_bytes = self.keep
            if keep != before:
                self.plans.forget_all()
            if exposure is not None:
                self._learned.keep(keep, self._queue_bytes)
        if message:  # with the lock not held: a warnings.showwarning is the user's
            self.offloader.warn(message)

    def _use_windows(self) -> None:
        """The windows are others than before. The lock is held."""
        prefetch = self.order.limit = self._windows.prefetch
        self._queue_bytes = self._config.newest_bytes(prefetch)
        self._learned.room = self._config.small_step_bytes(prefetch)
        for queue in self._queues:
            queue.limit = self.keep
        self._tell_windows()

    def _tell_windows(self) -> None:
        counters, windows = self._accounts.counters, self._windows
        counters.max_inflight_bytes, counters.prefetch_bytes = windows.inflight, windows.prefetch

    @property
    def _leaves_early(self) -> bool:
        """Whether what was learnt to leave does so at once: not by the time that steps took, where one is prepared for
        a capture."""
        return self.exposure is not None or (self._learns_what_stays and not self._accounts.preparing)

    def kept_newest(self) -> int:
        """Bytes of the newest that stay now, of all threads. The lock is held."""
        return sum(queue.nbytes for queue in self._queues) + sum(run.waiting_bytes for run in self.plans.runs)

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
        self, tensor: Tensor, queue: ResidentQueue, packed_at: int, forward: Forward, mark: Mark | None
    ) -> SavedView | KeepReason:
        """The handle of a saved tensor whose storage is to leave; a reason where it has to stay after all.

        Args:
            tensor: strided, not empty, on this device.
            queue: the calling thread's.
            packed_at: the calling thread's autograd sequence number.
            forward: the calling thread's current one.
            mark: what the user asked of its storage.
        """
        offloader = self.offloader
        if offloader.is_crashed:
            return KeepReason.FAILED
        if offloader.can_capture and offloader.is_capturing():
            return KeepReason.REGION
        try:
            with offloader.lock:
                saved = self._save(tensor, queue, packed_at, forward, mark)
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

    def may_know(self, tensor: Tensor, forward: Forward) -> bool:
        """Whether the storage of ``tensor`` might be known: a cheap question, before ``share`` asks it for good."""
        try:
            name = storage_key(tensor.untyped_storage())
            return name in self._names or name in forward.kept
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes of its own, inside a transform
            return False

    def share(self, tensor: Tensor, queue: ResidentQueue, packed_at: int, forward: Forward) -> SavedView | None:
        """The handle of a tensor that would not leave for its own sake, but whose storage does; else ``None``.

        Arguments as for ``save``.
        """
        offloader = self.offloader
        if offloader.is_crashed or offloader.is_capturing():
            return None
        with offloader.lock, offloader.crashing():
            storage = tensor.untyped_storage()
            if self._stays_again(storage, forward):
                return None
            whole = self._known(storage_key(storage), storage)
            if whole is None or tensor.numel() == 0 or tensor.data_ptr() % tensor.itemsize:
                return None
            if self._may_share(whole, tensor, queue, packed_at):
                return self._share(whole, tensor, forward)
            if whole.record.state is WAITING or footprint(tensor, storage.nbytes()).whole:
                return None
            saved = self._save(tensor, queue, packed_at, forward, None)  # a small part would hold all that has left
            return saved if isinstance(saved, SavedView) else None

    def flush(self, queue: ResidentQueue, *, waits: bool = True) -> None:
        """The context is left: every operator has run, so all that exceeds the newest bytes leaves.

        Args:
            waits: for room in the window; else what finds none stays until something is saved again.
        """
        offloader = self.offloader
        if offloader.is_crashed or offloader.is_capturing():
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
        """Starts what has to leave ``queue`` beside the newest bytes of forwards that follow a plan."""
        beside = 0
        if self.plans.last is not None:
            beside = sum([run.waiting_bytes for run in self.plans.runs if run.queue is queue])
        lack = self._offloading.start_due(queue, sequence, beside, found)
        if not self._windows.is_known and self._windows.grow(queue.largest):
            self._use_windows()
        return lack

    def _save(
        self, tensor: Tensor, queue: ResidentQueue, packed_at: int, forward: Forward, mark: Mark | None
    ) -> SavedView | KeepReason:
        try:
            storage, address = tensor.untyped_storage(), tensor.data_ptr()
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes of its own, inside a transform
            return KeepReason.LAYOUT
        if not address or address % tensor.itemsize:
            return KeepReason.LAYOUT  # zeros that are nowhere, or what cannot be rebuilt at such an address
        self.offloader.poll()
        area = footprint(tensor, storage.nbytes())
        name: Hashable = storage_key(storage)
        if forward.kept and mark is not Mark.PREFER and self._stays_again(storage, forward):
            return KeepReason.ALIVE
        if not area.whole:
            whole = self._known(name, storage)
            if whole is not None and self._may_share(whole, tensor, queue, packed_at):
                return self._share(whole, tensor, forward)
            name = (name, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        known = self._known(name, storage)
        if known is not None:
            if self._may_share(known, tensor, queue, packed_at):
                return self._share(known, tensor, forward)
            if known.times_saved == _MOST_TIMES:
                return KeepReason.ALIVE
        if mark is Mark.KEEP:
            return KeepReason.MARKED  # not before: a mark that comes after the copy has started changes nothing
        return self._save_anew(tensor, storage, name, area, known, queue, packed_at, forward, mark)

    def _save_anew(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        name: Hashable,
        area: Footprint,
        known: SavedStorage | None,
        queue: ResidentQueue,
        packed_at: int,
        forward: Forward,
        mark: Mark | None,
    ) -> SavedView | KeepReason:
        """A storage that is not known, or not with the bytes that it has now; ``known`` is the same one, earlier."""
        offloader = self.offloader
        number = len(forward.log.sizes)
        first = known.first if known is not None and known.forward is forward else number
        stream = self._runtime.current_stream(self.device)
        decision = self._note(forward, area.nbytes, first, stream)
        if known is not None:
            known.saved_anew = True
            if known.record.queue is queue:  # on another stream
                queue.saved_again(known.record, number)
        if decision is Decision.ALIVE:
            if mark is not Mark.PREFER:
                forward.kept[name] = Kept(weak_storage(storage), number)
                return KeepReason.ALIVE
            forward.taken(number)
        if first == number:
            queue.count(area.nbytes)
        if (learned := forward.learned) is None:
            queue.await_nothing()
        codec = codec_here(self.rules)
        coding = coding_of(tensor, area, codec, self.min_bytes) if codec != IDENTITY or area.gathered else None
        saved = SavedStorage(next(self._keys), name, tensor, storage, area, coding, self, stream, forward, number)
        record, saved.first = saved.record, first
        record.module = module_reference()
        saved.times_saved = 1 if known is None else known.times_saved + 1
        autograd_bytes = area.nbytes if known is None else 0
        record.save(self._accounts.counters, tensor.nbytes, KeepReason.NEWEST, area.nbytes, autograd_bytes)
        record.queue = queue
        self._names[name] = record
        offloader.records.add(record)
        view = self._view(saved, tensor, forward, number)
        last_save = None if learned is None else learned.last_saves.get(number)
        if last_save is not None and queue.awaiting_bytes + area.nbytes > self._windows.inflight:
            last_save = None
        # A workspace of which a kernel uses a part takes no more than that, and to move it frees no more.
        weight = self._runtime.memory_of(storage) if area.whole and area.nbytes >= _LARGE else None
        if decision is Decision.FITS and offloader.resident_bytes + area.nbytes <= self._learned.room:
            weight = 0
        elif decision is Decision.LEAVE and self.exposure is not None:
            weight = 0  # it pushes nothing out of what is to stay
        queue.push(
            record,
            area.nbytes,
            AT_THE_EXIT if saved.times_saved == _MOST_TIMES else packed_at,
            urgent=mark is Mark.PREFER or (decision is Decision.LEAVE and self._leaves_early),
            weight=weight,
            last_save=last_save,
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

    def _share(self, saved: SavedStorage, tensor: Tensor, forward: Forward) -> SavedView:
        counters, record, nbytes = self._accounts.counters, saved.record, tensor.nbytes
        if record.state is KEPT:
            counters.kept(record.kept, nbytes)
        else:
            counters.shared(nbytes)
            if counters is record.counters:
                record.shared_bytes += nbytes
        number = len(forward.log.sizes)
        owner = saved.first if saved.forward is forward else -1
        self._note(forward, saved.footprint.nbytes, owner, self._runtime.current_stream(self.device))
        if record.queue is not None and saved.forward is forward:
            record.queue.saved_again(record, number)
        return self._view(saved, tensor, forward, number)

    def _stays_again(self, storage: torch.UntypedStorage, forward: Forward) -> bool:
        """Whether this forward has left ``storage`` to the owner that keeps it alive; if so, notes one more save."""
        kept = forward.kept.get(storage_key(storage))
        if kept is None or kept.storage() is not storage:
            return False
        stream = self._runtime.current_stream(self.device)
        self._note(forward, forward.log.sizes[kept.number], kept.number, stream)
        return True

    def _note(self, forward: Forward, nbytes: int, owner: int, stream: Stream) -> Decision:
        """The forward's next save; arguments as for ``Forward.save``."""
        runtime = self._runtime
        now = runtime.moment(stream if runtime.knows_moments else None)
        assert isinstance(now, float)
        return forward.save(nbytes, owner, now, self.offloader.inflight_bytes)

    def _view(self, saved: SavedStorage, tensor: Tensor, forward: Forward, number: int) -> SavedView:
        position = next(self._keys)
        coding, nbytes = saved.coding, saved.footprint.nbytes
        if coding is not None and coding.rounds:  # what may be refused comes back as it is
            nbytes = coding.nbytes
        self.order.add(position, saved.record, nbytes, forward.sequence)
        view = SavedView(saved, tensor, position, forward, number)
        record = ViewRecord(view, self.offloader.on_death)
        record.position, record.saves = position, self._weak
        self.offloader.records.add(record)
        forward.positions[number] = position
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
            if self.budget is not None and view.run is None:
                with offloader.lock:
                    self.budget.note_ask()
            if profiler_is_on():
                with profiled("unpack"):
                    tensor = self._reloading.unpack(view)
            else:
                tensor = self._reloading.unpack(view)
        except (OffloadError, torch.OutOfMemoryError, MemoryError):
            raise
        except BaseException:
            offloader.crash()
            raise
        if view.original is not None and tensor is not view.original():
            tensor = view.original.like(tensor)
            own_until_taken(view.storage, tensor)
        return tensor

    # -- in between: called with the lock held ------------------------------------------------------------------------

    def on_arrival(self, saved: SavedStorage, transfer: Transfer) -> None:
        """The bytes of a storage rest in a tier, and its source is about to go."""
        if not self.offloader.is_crashed:
            self._reloading.on_arrival(saved, transfer)

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

    def learn(self, record: ForwardRecord) -> None:
        """A forward is over, and its graph is gone."""
        self._forwards.discard(record)
        self.release_scratch()
        out = self.offloader.out_rate.value
        self._learned.learn(record.log, None if out is None else Link(out, self.offloader.in_rate.value or out))
        if (recording := cast(Recording | None, record.recorder)) is not None:
            self.plans.learn(recording)

    # -- forwards that follow a plan ----------------------------------------------------------------------------------

    def give(self, plan: StepPlan, computed: ComputedPlan | None) -> None:
        """Takes in a plan that the user has; arguments as for ``StepPlans.give``. The lock is held."""
        self.plans.give(plan, computed)
        if self._windows.begin(plan.movable_bytes, plan.largest):
            self._use_windows()

    def begin_run(
        self,
        tensor: Tensor,
        before: Turn | None,
        queue: ResidentQueue,
        sequence: int,
        keep: Callable[[Tensor, KeepReason, int], KeptTensor],
    ) -> Run | Recording | None:
        """What a forward follows whose first save is ``tensor``, or what writes down what it does, if anything.

        Args:
            before: the calling thread's last forward.
            queue: the calling thread's.
            sequence: names the forward in the prefetch order.
            keep: makes the handle of a tensor that stays.
        """
        offloader, plans = self.offloader, self.plans
        if offloader.is_crashed or offloader.is_capturing() or self._accounts.observer is not None:
            return None
        with offloader.crashing():
            with offloader.lock:
                offloader.poll()
                known = plans.fitting(tensor, before)
                if known is None:
                    if not plans.records(self._learned.most_alike()):
                        return None
                    plans.release_sets()
                    return Recording()
                if not plans.has_room(known, queue):
                    known.release_idle()
                    return None
                if not plans.begin(known):
                    return Recording(known)
            slots = self._slots(known)
            with offloader.lock:
                if slots is None:
                    plans.has_no_slots()
                    return None
                if known.is_forgotten or offloader.is_crashed:  # while a tier grew
                    return None
                run = Run(known, [*slots], self, keep, queue, sequence)
                plans.follow(run, known)
                if self.exposure is not None:
                    self.exposure.note_forward()
                return run

    def _slots(self, known: KnownPlan) -> list[Slot] | None:
        """Room for all that a plan offloads; ``None`` where no tier has it. The lock is not held."""
        with self.offloader.lock:
            for tier in self.offloader.tiers:  # with what the last step has given back
                tier.release_idle()
            with suppress(IndexError):  # there is none, or another thread was faster
                slots = known.idle.pop()
                for tier in self.offloader.tiers:
                    tier.note_reuse(sum([slot.nbytes for slot in slots if slot.tier == tier.name]))
                return slots
            for run in self.plans.runs:
                if run.is_mostly_gone:  # a program may keep a little of each step, a metric say
                    run.release_slots()
        slots = []
        for nbytes in known.plan.slots:
            slot = self.offloader.room(nbytes)
            if slot is None:
                return None
            slots.append(slot)
        return slots

    def make_room(self, nbytes: int) -> None:
        """Ends promises that are overdue, so that a run may promise ``nbytes``. The lock is held."""
        self._reloading.make_room(nbytes)

    def whole_of(self, tensor: Tensor) -> SavedStorage | None:
        """The saved storage that ``tensor`` is a part of, where that was to leave whole. The lock is held."""
        storage = tensor.untyped_storage()
        return self._known(storage_key(storage), storage)

    def adopt(self, run: Run) -> None:
        """From here on the step of ``run`` is unknown. The lock is held."""
        run.is_over = True
        run.record.slots = []
        for weak in run.views:
            if (view := weak()) is not None:
                self.adopt_view(view, run)
        run.record.forget_all(self.offloader)
        if run.known.is_forgotten:
            self._learned.forget_how_many()

    def adopt_view(self, view: SavedView, run: Run) -> None:
        """A handle of a run that is over is as one of an unknown step. The lock is held."""
        if view.run is None:
            return
        followed = cast(FollowedStorage, view.storage)
        saved, is_promised = followed.adopted, followed.number in run.record.promised
        if saved is None:
            saved = self._adopt_storage(followed, run)
        nbytes, forward = saved.footprint.nbytes, run.forward
        number = len(forward.log.sizes)
        forward.save(nbytes, None if view.number == followed.number else saved.first, 0.0, 0)
        position = next(self._keys)
        self.order.add(position, saved.record, nbytes, forward.sequence)
        if is_promised or self.order.holds(saved.record):
            self.order.promise(position)
        record = ViewRecord(view, self.offloader.on_death)
        record.position, record.saves = position, self._weak
        self.offloader.records.add(record)
        forward.positions[number] = position
        view.storage, view.number, view.position, view.run = saved, number, position, None

    def _adopt_storage(self, followed: FollowedStorage, run: Run) -> SavedStorage:
        """The storage of a run as one of an unknown step, in the state that it is in."""
        origin = followed.origin()
        name: Hashable = next(self._keys) if origin is None else storage_key(origin)
        saved = followed.as_unknown(next(self._keys), name, run.forward)
        record, queue = saved.record, run.queue
        self._names[name] = record
        self.offloader.records.add(record)
        if record.state is WAITING:
            queue.push(record, saved.footprint.nbytes, followed.packed_at)
            record.queue = queue
        return saved
