"""The tensors of one device that autograd saves: the lock, and all that waits.

hooks          call it for every tensor that may move                                          SavedTensors
Saving         decides, with the lock held, and starts what has to leave or to come back
Reloading      knows where the bytes of a saved tensor are
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from eager_offload._torch import current_backward, keeps_graph, profiled, profiler_is_on, storage_key, version_of
from eager_offload.config import OffloadConfig
from eager_offload.eager.handles import SavedStorage, SavedView
from eager_offload.eager.ownership import own_until_taken
from eager_offload.eager.saving import Saving
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import AWAY, KEPT
from eager_offload.errors import OffloadError, warn
from eager_offload.kernels.codecs import CODECS
from eager_offload.marks import Mark
from eager_offload.schedule import ResidentQueue
from eager_offload.stats import KeepReason
from eager_offload.step_table import Step, StepScript, StepTables


class SavedTensors(Saving):
    """The saved tensors of one device, and the lock that they need.

    What this class adds takes the lock of the offloader itself; what is of ``Saving`` is for those who hold it. An
    exception that is not the library's own crashes the offloader: see the note in ``engine/offloader.py``.
    """

    def __init__(
        self,
        offloader: DeviceOffloader,
        config: OffloadConfig,
        tables: StepTables | None = None,
        script: StepScript | None = None,
    ) -> None:
        super().__init__(offloader, config, tables, script)
        self.offloader = offloader

    # -- steps ------------------------------------------------------------------------------------------------------

    def new_queue(self) -> ResidentQueue:
        """Returns a queue of the newest bytes, for one thread."""
        with self.offloader.lock:
            return self.keeping.new_queue()

    def new_step(self, queue: ResidentQueue) -> Step:
        """Returns a step, for the thread of ``queue``."""
        with self.offloader.lock, self.offloader.locked():
            return self.begin_step(queue)

    def begin_forward(self, queue: ResidentQueue) -> None:
        """Begins a forward on the thread of ``queue``: what was learnt says how much of it stays."""
        offloader = self.offloader
        if not self.keeping.adapts or offloader.is_crashed or offloader.is_capturing():
            return
        with offloader.lock, offloader.locked():
            self.keeping.begin(queue)

    def begin_further_step(self, queue: ResidentQueue) -> None:
        """Begins another step in the same context; ``queue`` is the calling thread's."""
        failures = [] if self.offloader.is_capturing() else CODECS.compile_due()
        with self.offloader.lock:
            self._accounts.counters.begin()
        for reason in self._accounts.demoted("uncompiled_codec", failures):
            warn(reason)
        self.begin_forward(queue)

    # -- forward ----------------------------------------------------------------------------------------------------

    def save(
        self, tensor: Tensor, queue: ResidentQueue, packed_at: int, step: Step, mark: Mark | None
    ) -> SavedView | KeepReason:
        """Returns the handle of a tensor whose storage is to leave, or a reason where it has to stay after all.

        Arguments as for ``Saving.take``.
        """
        offloader = self.offloader
        if offloader.is_crashed:
            return KeepReason.FAILED
        if offloader.can_capture and offloader.refuses_saves():
            return KeepReason.REGION
        try:
            with offloader.lock:
                saved = self.take(tensor, queue, packed_at, step, mark)
                if packed_at <= queue.final_after or not isinstance(saved, SavedView) or saved.shares:
                    return saved
                lack = self.start_due(queue, packed_at)
            if lack is not None:
                offloader.go_on(lack, partial(self.start_due, queue, packed_at))
        except OffloadError:
            raise
        except BaseException:
            offloader.crash()
            raise
        return saved

    def may_know(self, tensor: Tensor, step: Step) -> bool:
        """Returns whether the storage of ``tensor`` might be known: a cheap question, before ``share``."""
        try:
            name = storage_key(tensor.untyped_storage())
            return name in self._names or name in step.kept
        except (NotImplementedError, RuntimeError):  # a wrapper without bytes of its own, inside a transform
            return False

    def share(self, tensor: Tensor, queue: ResidentQueue, packed_at: int, step: Step) -> SavedView | None:
        """Returns the handle of a tensor that would not leave for its own sake, but whose storage does; else ``None``.

        Arguments as for ``Saving.take``.
        """
        offloader = self.offloader
        if offloader.is_crashed or offloader.refuses_saves():
            return None
        with offloader.lock, offloader.locked():
            return self.take_small(tensor, queue, packed_at, step)

    def flush(self, queue: ResidentQueue, *, waits: bool = True) -> None:
        """Starts all that exceeds the newest bytes: the context is left, so every operator has run.

        Args:
            waits: for room in the window; else what finds none stays until something is saved again.
        """
        offloader = self.offloader
        if offloader.is_crashed or offloader.refuses_saves():
            return
        with offloader.crashing():
            with offloader.lock:
                offloader.poll()
                lack = self.start_due(queue, None)
                if self.keeping.readings is not None:
                    self.keeping.readings.note_exit()
            if lack is not None:
                offloader.go_on(lack, partial(self.start_due, queue, None), waits=waits)

    # -- backward ---------------------------------------------------------------------------------------------------

    def unpack(self, view: SavedView) -> Tensor:
        """Returns the saved tensor again, for the stream that is current now.

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
        readings = self.keeping.readings
        try:
            if readings is not None:
                with offloader.lock:
                    readings.note_ask()
            if profiler_is_on():
                with profiled("unpack"):
                    tensor = self._unpack(view)
            else:
                tensor = self._unpack(view)
        except (torch.OutOfMemoryError, MemoryError):
            tensor = None  # not while the error is handled, whose frames hold what is to go
        except OffloadError:
            raise
        except BaseException:
            offloader.crash()
            raise
        if tensor is None:
            with offloader.crashing():
                offloader.make_room(partial(self.reloading.drop_all_but, view.storage))
                tensor = self._unpack(view)
        if view.step.is_over and readings is not None and readings.awaits_end:
            with offloader.lock:
                readings.note_end()
        if view.original is not None and tensor is not view.original():
            tensor = view.original.like(tensor)
            own_until_taken(view.storage, tensor)
        return tensor

    def _unpack(self, view: SavedView) -> Tensor:
        """Returns the tensor once its bytes are there; brings back early what is expected next."""
        offloader, order, saved, step = self.offloader, self.order, view.storage, view.step
        runtime, reloading, record = offloader.runtime, self.reloading, saved.record
        if offloader.is_captured:
            offloader.send_one(lambda one: one is record or one in order.promised)
        with offloader.lock:
            offloader.poll()
            stream = runtime.current_stream(offloader.device)
            tensor = reloading.resident(view, stream)
            reload = None if tensor is not None else reloading.reload_for(saved, stream)
            if not offloader.is_crashed:
                if record.state is not AWAY:
                    reloading.stay_if_it_can(saved)
                if record.state is not KEPT:
                    record.ask(resident=reload is None)
                expected = step.asked(view.number, runtime.timestamp())
                if expected is not None:  # other than before
                    order.arrange(step.uses, expected)
                backward = current_backward()
                plan = order.ask(step.uses, view.use, backward)
                if reload is not None and reload is saved.reload and backward >= 0 and keeps_graph():
                    order.hold(view.use)
                if plan.drop or plan.bring:
                    reloading.follow(plan, record)
            if tensor is not None:
                if record not in order.promised:
                    reloading.drop(saved)
                return tensor
        assert reload is not None
        try:
            offloader.wait(reload.transfer, stream, "reload")
            with offloader.lock:
                offloader.take_up(reload.transfer)
                return reloading.hand_over(view, reload, stream)
        except BaseException:
            with offloader.lock:
                if saved.reload is reload:
                    saved.reload = record.reload = None
                offloader.release(reload.transfer)
            raise

    # -- what is there ----------------------------------------------------------------------------------------------

    def storages(self) -> list[SavedStorage]:
        """Returns every saved storage with a living handle."""
        with self.offloader.lock:
            return self.offloading.storages()
