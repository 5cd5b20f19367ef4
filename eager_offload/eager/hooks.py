"""The pack hook, which autograd calls for every tensor that it saves."""

from __future__ import annotations

import itertools
import sys
import threading
from contextlib import nullcontext
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from eager_offload import contexts, marks
from eager_offload.config import OffloadConfig
from eager_offload.core.schedule import ResidentQueue
from eager_offload.core.selection import is_parameter, logical_bytes, reason_to_stay
from eager_offload.core.step_table import Step, StepTable
from eager_offload.eager.handles import KeptTensor, SavedView, detached_for_keeping
from eager_offload.eager.mutations import ChangeableTensor
from eager_offload.eager.saves import SavedTensors
from eager_offload.eager.subclasses import WrappedTensor, pack_wrapper
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.errors import reentered
from eager_offload.marks import Mark
from eager_offload.stats import Accounts, KeepReason
from eager_offload.torch_private.autograd import (
    allowing_changes,
    autograd_sequence,
    current_autograd_node,
    profiled,
    profiler_is_on,
)
from eager_offload.torch_private.calls import (
    dispatch_modes,
    function_modes,
    is_tracing,
    without_caller_modes,
    without_torch_function,
)
from eager_offload.torch_private.memory import storage_of, version_of

#: What autograd holds in place of a saved tensor.
Packed: TypeAlias = KeptTensor | SavedView | WrappedTensor | ChangeableTensor

#: Reasons for which a kept tensor adds no device memory, or an unknown amount: the stats do not follow these tensors.
_UNTRACKED = frozenset({KeepReason.PARAMETER, KeepReason.DEVICE, KeepReason.LAYOUT})

_sequences = itertools.count(1)
#: Less than every sequence number: the tensor is final.
_WHOLE = -1


class ThreadState:
    """The state of one thread in one ``Offload``."""

    def __init__(self) -> None:
        #: Identifies the thread's current step.
        self.sequence = next(_sequences)
        #: The number of tensors packed in the step; ``begin`` sets it to 0. It starts at 1, because it is unknown for a
        #: step during which the ``Offload`` was closed.
        self.packed = 1
        self.queues: dict[SavedTensors, ResidentQueue] = {}
        self.steps: dict[SavedTensors, Step] = {}
        #: While a step is captured: the hooks that replace the ``Hooks`` to which this state belongs.
        self.captured: Hooks | None = None

    def begin(self) -> None:
        self.sequence = next(_sequences)
        self.packed = 0
        self.steps = {}
        queues = list(self.queues.items())  # a copy: a signal handler may begin a forward here
        if any(saves.offloader.is_crashed for saves, _ in queues):
            queues = [one for one in queues if not one[0].offloader.is_crashed]
            self.queues = dict(queues)
        for saves, queue in queues:
            saves.begin_forward(queue)

    def queue(self, saves: SavedTensors) -> ResidentQueue:
        queue = self.queues.get(saves)
        if queue is None:
            queue = self.queues.setdefault(saves, saves.new_queue())
            saves.begin_forward(queue)
        return queue

    def step_of(self, saves: SavedTensors) -> Step:
        """Returns the current step on one device; creates the step and its queue if needed."""
        step, phase = self.steps.get(saves), contexts.thread.phase
        if step is not None and (step.phase is not phase or (step.is_over and phase is None)):
            self.sequence = next(_sequences)
            saves.begin_further_step(self.queue(saves), counts=step.log.makes_table)
            step = None
        if step is None:
            step = self.steps[saves] = saves.new_step(self.queue(saves))
            step.phase, step.log.makes_table = phase, phase is None or phase.is_step
        return step


class _Threads(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()


class Devices(Protocol):
    """Maps each device to its offloader."""

    def of(self, device: torch.device) -> DeviceOffloader | KeepReason:
        """Returns the offloader of ``device``, or the reason for which its tensors are kept."""


class Hooks:
    """The pack hook of one ``Offload``."""

    def __init__(self, config: OffloadConfig, accounts: Accounts, offloaders: Devices) -> None:
        self._config = config
        self._min_bytes = config.size("min_bytes")
        #: Whether tensors that are saved outside of the modules of ``only`` are kept.
        self._is_limited = bool(config.only)
        #: Whether inputs of checkpoints move first: true with a budget, unless only hidden copies are allowed.
        self._sends_inputs_first = config.device_budget is not None and not config.is_free
        self._accounts = accounts
        self._offloaders = offloaders
        self._saves: dict[torch.device, SavedTensors] = {}
        #: By the user's plan: the fraction of the movable bytes that moves in each step with a table.
        self.fraction: float | None = None
        self._threads = _Threads()

    def restart(self) -> None:
        """Drops the state of all threads, after the offloaders were closed."""
        self._saves, self._threads = {}, _Threads()

    @property
    def thread(self) -> ThreadState:
        """The calling thread's state."""
        return self._threads.state

    def drop_crashed(self) -> None:
        """Drops crashed offloaders, so that new ones replace them."""
        with self._accounts.lock:
            self._saves = {device: one for device, one in self._saves.items() if not one.offloader.is_crashed}

    def serve(self, saves: SavedTensors) -> None:
        """Registers ``saves`` as the saved tensors of its device."""
        self._saves[saves.device] = saves

    def saved_tensors(self, device: torch.device) -> SavedTensors | KeepReason:
        """Returns the saved tensors of ``device``, or the reason for which its tensors are kept.

        Raises:
            ConfigError: the configuration cannot work with this device.
        """
        offloader = self._offloaders.of(device)
        if isinstance(offloader, KeepReason):
            return offloader
        with self._accounts.lock:
            saves = self._saves.get(device)
            if saves is None or saves.offloader is not offloader:
                saves = self._saves[device] = SavedTensors(offloader, self._config)
                if self.fraction is not None:
                    saves.keeping.move(self.fraction)
        return saves

    def pack(self, tensor: Tensor, *, is_unseen: bool = False, packed_at: int | None = None) -> Packed:
        """Returns the handle of a saved tensor. Autograd calls this hook while it records the operator.

        Args:
            is_unseen: whether modes, ``__torch_function__`` and the profiler were dealt with already.
            packed_at: the sequence number of the operator that may still fill the tensor; ``None``: the current one.
        """
        if not is_unseen:
            kind = type(tensor)
            is_other = kind is not Tensor and kind is not Parameter
            if is_other or dispatch_modes() or function_modes() or profiler_is_on():
                return self._pack_unseen(tensor, packed_at)
        if self._accounts.lock._is_owned():  # see [Note: reentry] in tiers/forking.py
            raise reentered()
        thread = self._threads.state
        thread.packed += 1
        if thread.captured is not None:
            return thread.captured.pack(tensor, is_unseen=True, packed_at=packed_at)
        packed: KeptTensor | SavedView | WrappedTensor | None = None
        mark = None
        if marks.standing and (storage := storage_of(tensor)) is not None:
            mark = marks.mark_of(storage)
        reason = reason_to_stay(tensor, self._min_bytes, preferred=mark is Mark.PREFER)
        if reason is None:
            saves = self._saves.get(tensor.device) or self.saved_tensors(tensor.device)
            if isinstance(saves, KeepReason):
                reason = saves
            elif marks.inside.has_to_stay(self._is_limited):
                reason = KeepReason.REGION
            elif isinstance(current_autograd_node(), torch.autograd.function.BackwardCFunction):
                # Reentrant checkpointing recomputes inside the backward of its own Python node, and needs the saves at
                # once. Graphs of `create_graph=True` are built by torch's own nodes, and their saves move.
                reason = KeepReason.NEWEST
            else:
                step = thread.steps.get(saves)
                if step is None or step.is_over or step.phase is not contexts.thread.phase:
                    step = thread.step_of(saves)
                sequence = autograd_sequence() if packed_at is None else packed_at
                saved = saves.save(tensor, thread.queues[saves], sequence, step, mark)
                if isinstance(saved, SavedView):
                    packed = saved
                    if self._sends_inputs_first and _is_checkpoint_input():
                        step.log.first.add(step.log.facts[saved.number][3])
                else:
                    reason = saved
        elif reason is KeepReason.SMALL and thread.queues:
            packed = self._share(tensor, thread, packed_at)
        elif reason is KeepReason.LAYOUT:
            packed = pack_wrapper(tensor, self.pack, self._accounts)
        if packed is None:
            assert reason is not None
            packed = self._keep(tensor, reason)
        return packed

    def _pack_unseen(self, tensor: Tensor, packed_at: int | None) -> Packed:
        """Packs ``tensor`` with modes and ``__torch_function__`` disabled, and in a profiler range if profiling."""
        if not (dispatch_modes() or function_modes()):
            with profiled("pack") if profiler_is_on() else nullcontext(), without_torch_function():
                return self.pack(tensor, is_unseen=True, packed_at=packed_at)
        if is_tracing():
            self.thread.packed += 1
            with without_torch_function():
                return self._keep(tensor, KeepReason.PARAMETER if is_parameter(tensor) else KeepReason.LAYOUT)
        changes = allowing_changes()
        with without_caller_modes(), without_torch_function():
            packed = self.pack(tensor, is_unseen=True, packed_at=packed_at)
            assert not isinstance(packed, ChangeableTensor), "only this method makes one"
            return packed if changes is None else ChangeableTensor(tensor, packed, changes)

    def hold(self, tensor: Tensor) -> Packed:
        """Returns the handle of a tensor that the caller holds, and starts due copies. The tensor must be final."""
        packed = self.pack(tensor, packed_at=_WHOLE)
        hooks = self.thread.captured or self
        for saves, queue in list(hooks.thread.queues.items()):
            saves.start_due(queue, autograd_sequence())
        return packed

    def last_table(self, device: torch.device | None) -> StepTable | None:
        """Returns the table that the last matching step followed, or ``None`` if no step has matched.

        Args:
            device: only steps of this device; ``None``: of any device.
        """
        for saves in list(self._saves.values()):
            own = saves.device
            is_meant = device is None or (device.type == own.type and len({device.index, own.index} - {None}) < 2)
            if saves.tables.last is not None and is_meant:
                return saves.tables.last
        return None

    def leave(self, *, waits: bool) -> None:
        """Starts all due copies when a context exits, since every operator has run.

        Args:
            waits: whether to wait for room in the window; otherwise, the rest is left for the next save.
        """
        for saves, queue in list(self.thread.queues.items()):
            saves.flush(queue, waits=waits)

    def _keep(self, tensor: Tensor, reason: KeepReason) -> KeptTensor:
        """Returns the handle of a kept tensor, and counts the tensor."""
        accounts, nbytes = self._accounts, logical_bytes(tensor)
        held = detached_for_keeping(tensor)
        handle = KeptTensor(held, version_of(tensor), reason)
        is_followed = reason not in _UNTRACKED
        if reason is KeepReason.SMALL:  # the stats follow only small views that keep a large storage alive
            storage = storage_of(tensor) if tensor._is_view() else None
            is_large = storage is not None and storage.nbytes() >= max(self._min_bytes, 1)
            is_followed = is_large and not is_parameter(tensor)
        with accounts.lock:
            counters = accounts.counters
            counters.kept(reason, nbytes)
            if is_followed:
                counters.live.keep(handle, held, nbytes, reason)
                counters.note_live()
        return handle

    def _share(self, tensor: Tensor, thread: ThreadState, packed_at: int | None) -> SavedView | None:
        """Returns a handle that shares the saved storage of a small view; ``None``: the view has to be kept.

        A kept view would hold the whole storage on the device.
        """
        if marks.inside.has_to_stay(self._is_limited):
            return None
        for saves, queue in list(thread.queues.items()):  # a copy: the garbage collector may call a hook here
            step = thread.step_of(saves)
            if saves.may_know(tensor, step):
                return saves.share(tensor, queue, autograd_sequence() if packed_at is None else packed_at, step)
        return None


def _is_checkpoint_input() -> bool:
    """Returns whether ``torch_remat`` marks the tensor that is packed now as the input of a checkpoint."""
    remat = sys.modules.get("torch_remat")  # not imported only to ask
    if remat is None:
        return False
    try:
        return bool(remat.current_saved_tensor_info().kind is remat.SavedTensorKind.CHECKPOINT_INPUT)
    except (AttributeError, RuntimeError):  # an earlier release; or a pack by autograd itself
        return False
