"""Pack and unpack: what autograd calls for every saved tensor."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from eager_offload import marks
from eager_offload._torch import (
    autograd_sequence,
    current_autograd_node,
    detached,
    is_wrapper,
    profiled,
    profiler_is_on,
)
from eager_offload.eager.handles import KeptTensor, SavedView
from eager_offload.eager.lane import Lane
from eager_offload.eager.subclasses import WrappedTensor, Wrappers
from eager_offload.errors import OffloadError
from eager_offload.learning import Forward
from eager_offload.marks import Mark
from eager_offload.schedule import DelayLine
from eager_offload.selection import plain_tensors, reason_to_stay, root_of
from eager_offload.stats import Accounts, KeepReason

__all__ = ["Hooks", "Session", "logical_bytes", "unpack"]

_sequences = itertools.count(1)


class Session(threading.local):
    """What one thread has going with one ``Offload``."""

    def __init__(self) -> None:
        #: Names the thread's current forward.
        self.sequence = next(_sequences)
        #: How many tensors were packed in it.
        self.packed = 0
        self.lines: dict[Lane, DelayLine] = {}
        self._forwards: dict[Lane, Forward] = {}

    def begin(self) -> None:
        """A new forward begins."""
        self.sequence = next(_sequences)
        self.packed = 0
        self._forwards = {}

    def line(self, lane: Lane) -> DelayLine:
        line = self.lines.get(lane)
        if line is None:
            line = self.lines[lane] = lane.new_line()
        return line

    def forward(self, lane: Lane) -> Forward:
        """The current forward, as far as it concerns one device."""
        forward = self._forwards.get(lane)
        if forward is not None and forward.is_over:
            self.sequence, forward = next(_sequences), None
        if forward is None:
            forward = self._forwards[lane] = lane.new_forward(self.sequence)
        return forward


class Hooks:
    """The pack hook of one ``Offload``, and what it needs to decide."""

    def __init__(
        self, min_bytes: int, accounts: Accounts, lane_of: Callable[[torch.device], Lane | None], session: Session
    ) -> None:
        self._min_bytes = min_bytes
        self._accounts = accounts
        self._lane_of = lane_of
        self._wrappers = Wrappers(accounts)
        self.session = session

    def pack(self, tensor: Tensor) -> KeptTensor | SavedView | WrappedTensor:
        """Decides about a saved tensor; called by autograd while the operator that saves it is recorded."""
        if profiler_is_on():
            with profiled("pack"):
                return self._pack(tensor)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> KeptTensor | SavedView | WrappedTensor:
        session = self.session
        session.packed += 1
        mark = _mark_of(tensor) if marks.any_marks() else None
        reason = reason_to_stay(tensor, self._min_bytes, preferred=mark is Mark.PREFER)
        if reason is None:
            taken = self._take(tensor, mark, session)
            if isinstance(taken, SavedView):
                return taken
            reason = taken
        elif reason is KeepReason.SMALL and session.lines and (shared := self._share(tensor, session)) is not None:
            return shared
        elif reason is KeepReason.LAYOUT and (wrapped := self._wrappers.pack(tensor, self)) is not None:
            return wrapped
        if tensor.is_meta and isinstance(root_of(tensor), Parameter):
            raise OffloadError(
                "the model's parameters are on the meta device and hold no values, so there is nothing to train: "
                "materialize it first, with model.to_empty(device=...) and its weights"
            )
        accounts = self._accounts
        with accounts.lock:
            accounts.tally.kept(reason, logical_bytes(tensor))
        # A leaf that requires grad is held itself, so that `leaf.data = ...` stays visible; see the note in handles.py
        # for why nothing else is.
        if tensor.requires_grad and tensor.is_leaf:
            held = tensor
        else:
            held = tensor.detach() if type(tensor) is Tensor else detached(tensor)
        return KeptTensor(held, tensor._version, reason)

    def _take(self, tensor: Tensor, mark: Mark | None, session: Session) -> SavedView | KeepReason:
        lane = self._lane_of(tensor.device)
        if lane is None:
            return KeepReason.DEVICE
        if marks.in_no_offload_region():
            return KeepReason.REGION
        if _in_recomputation():
            return KeepReason.NEWEST
        return lane.take(tensor, session.line(lane), autograd_sequence(), session.forward(lane), mark)

    def _share(self, tensor: Tensor, session: Session) -> SavedView | None:
        """A small tensor whose storage leaves anyway goes with it: kept, it would hold all of that on the device."""
        if marks.in_no_offload_region():
            return None
        for lane, line in session.lines.items():
            forward = session.forward(lane)
            if lane.may_know(tensor, forward):
                return lane.share(tensor, line, autograd_sequence(), forward)
        return None

    def again(self, view: SavedView, tensor: Tensor) -> SavedView | None:
        """One more save of the bytes that ``view`` has; ``None`` where such a save is not to leave."""
        lane, session = self._lane_of(tensor.device), self.session
        if lane is None or lane is not view.storage.lane or marks.in_no_offload_region():
            return None
        return lane.again(view, tensor, session.forward(lane))


def unpack(handle: KeptTensor | SavedView | WrappedTensor) -> Tensor:
    """Gives a saved tensor back; called by autograd when backward needs it, each time that it does."""
    return handle.unpack()


def _mark_of(tensor: Tensor) -> Mark | None:
    try:
        return marks.mark_of(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper without bytes of its own
        return None


def _in_recomputation() -> bool:
    """Whether a function that recomputes its forward in backward is doing so.

    Reentrant checkpointing runs the forward again inside the backward of its own node and asks for the result at once.
    A graph that backward builds with ``create_graph=True`` is made by torch's own nodes, and moves like any other.
    """
    node = current_autograd_node()
    return node is not None and isinstance(node, torch.autograd.function.BackwardCFunction)


def logical_bytes(tensor: Tensor) -> int:
    """The bytes that the stats count for a saved tensor that stays."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter and is_wrapper(tensor):
        return sum(map(logical_bytes, plain_tensors(tensor)))  # its own number may be that of all processes together
    try:
        return tensor.nbytes
    except (NotImplementedError, RuntimeError):  # some layouts have no such number
        return tensor.numel() * tensor.element_size()
