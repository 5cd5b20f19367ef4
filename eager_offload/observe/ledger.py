"""Who saved what, while a trace runs: the saved tensors by operation and module, and the bytes that they hold.

[Note: handles that tell]
While a trace runs, autograd is given a ``RecordedHandle`` around each handle. It learns the operation when backward
comes to it, and its end is the end of the saved tensor. After the trace it only hands on. Its finalizer appends to a
deque, as all finalizers of the library do.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from eager_offload._torch import autograd_sequence, is_wrapper, weak_storage
from eager_offload.eager.handles import KeptTensor, SavedView, State
from eager_offload.eager.subclasses import WrappedTensor
from eager_offload.observe.trace import SavedGroup
from eager_offload.selection import is_parameter, plain_tensors
from eager_offload.stats import KeepReason

__all__ = ["MOST", "Handle", "Ledger", "Outcome", "ParcelRecord", "RecordedHandle", "Save"]

Handle: TypeAlias = KeptTensor | SavedView | WrappedTensor
_OF_GRAPHS = "compiled graph"
#: Slices, samples and saves each, beyond which a trace only counts: a viewer could not show them, and memory is finite.
MOST = 1 << 20


class Outcome(NamedTuple):
    """What became of a saved tensor, or of a plain one inside it."""

    outcome: str
    reason: str
    nbytes: int


class _Held:
    """The bytes of a storage that saved tensors hold together."""

    __slots__ = ("count", "name", "nbytes", "origin", "stays")

    def __init__(
        self, nbytes: int, origin: weakref.ref[torch.UntypedStorage] | None = None, name: Hashable = None
    ) -> None:
        self.nbytes = nbytes
        #: What the ledger finds them by; a later storage may have the same.
        self.name = name
        self.origin = origin
        #: How many saves hold them.
        self.count = 0
        #: Whether autograd itself keeps them on the device.
        self.stays = False


class Save:
    """One call of pack."""

    __slots__ = ("device", "handle", "held", "module", "node", "operation", "outcomes", "thread")

    def __init__(self, module: str, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.operation = ""
        #: The autograd node that saves: its number in the count of the thread.
        self.node = autograd_sequence() - 1
        self.thread = threading.get_ident()
        self.held: list[_Held] = []
        self.handle: weakref.ref[RecordedHandle] | None = None
        #: Once that is settled.
        self.outcomes: list[Outcome] = []


class _Unpacks(Protocol):
    def unpack(self, handle: RecordedHandle) -> Tensor:
        """The saved tensor again."""


class RecordedHandle:
    """What autograd holds while a trace runs, and for as long as it holds it; see the note."""

    __slots__ = ("__weakref__", "_ledger", "inner", "nbytes", "save")

    def __init__(self, inner: Handle, nbytes: int, save: Save, ledger: Ledger) -> None:
        self.inner = inner
        self.nbytes = nbytes
        self.save = save
        self._ledger = ledger

    def unpack(self) -> Tensor:
        listener = self._ledger.listener
        return self.inner.unpack() if listener is None else listener.unpack(self)

    def __del__(self) -> None:
        try:
            ledger = self._ledger
        except AttributeError:  # `__init__` was interrupted
            return
        if ledger.listener is not None:
            ledger.died.append(_Death(self.save, list(self.outcomes())))

    def outcomes(self) -> Iterator[Outcome]:
        """What has become of it so far."""
        inner = self.inner
        if isinstance(inner, KeptTensor):
            yield Outcome("kept", inner.reason.value, self.nbytes)
        elif isinstance(inner, SavedView):
            yield _outcome_of(inner)
        else:
            yield from (_outcome_of(view) for view in inner.views())


class ParcelRecord:
    """What a parcel owns while a trace runs: when it goes, so does that."""

    __slots__ = ("__weakref__", "_ledger", "nbytes", "reason", "save")

    def __init__(self, nbytes: int, reason: str, save: Save, ledger: Ledger) -> None:
        self.nbytes = nbytes
        #: Why it stays; empty for what left.
        self.reason = reason
        self.save = save
        self._ledger = ledger

    def __del__(self) -> None:
        try:
            ledger = self._ledger
        except AttributeError:  # `__init__` was interrupted
            return
        if ledger.listener is not None:
            ledger.died.append(_Death(self.save, [self.outcome()]))

    def outcome(self) -> Outcome:
        return Outcome("kept" if self.reason else "offloaded", self.reason, self.nbytes)


class _Death(NamedTuple):
    save: Save
    outcomes: list[Outcome]


class Ledger:
    """All saves of a trace. Whoever calls a method holds the accounts' lock."""

    def __init__(self, listener: _Unpacks) -> None:
        #: Who unpacks, as long as the trace runs.
        self.listener: _Unpacks | None = listener
        self.died: deque[_Death] = deque()
        #: Bytes of distinct storages that living saved tensors hold, or would hold if nothing was moved; and those of
        #: them that autograd itself keeps on the device.
        self.without_offload = 0
        self.kept_bytes = 0
        #: Saves that are not told of, since there were too many. Their bytes count while they live.
        self.dropped = 0
        self._saves: list[Save] = []
        self._parcels: list[weakref.ref[ParcelRecord]] = []
        self._held: dict[Hashable, _Held] = {}
        self._by_key: dict[int, Save] = {}
        self._of_graphs: list[tuple[str, Outcome]] = []

    def add(self, tensor: Tensor, handle: Handle, nbytes: int, save: Save) -> RecordedHandle:
        """Takes note of a saved tensor; returns what autograd is to hold in place of ``handle``."""
        recorded = RecordedHandle(handle, nbytes, save, self)
        save.handle = weakref.ref(recorded)
        told = self._tells(save)
        stays = isinstance(handle, KeptTensor)
        if isinstance(handle, SavedView):
            if told:
                self._by_key.setdefault(handle.storage.key, save)
            stays = handle.storage.state is State.KEPT
        if not (isinstance(handle, KeptTensor) and handle.reason is KeepReason.PARAMETER):
            plain = plain_tensors(tensor) if is_wrapper(tensor) else (tensor,)
            for one in plain:
                if one.layout is torch.strided and not is_parameter(one):
                    self._hold(save, one.untyped_storage(), stays=stays)
        return recorded

    def add_parcel(self, nbytes: int, reason: str, save: Save) -> ParcelRecord:
        """Takes note of what a graph offloads; returns what its parcel is to own."""
        save.operation = _OF_GRAPHS
        record = ParcelRecord(nbytes, reason, save, self)
        if self._tells(save):
            self._parcels.append(weakref.ref(record))
        save.held = [_Held(nbytes)]
        save.held[0].count = 1
        self.without_offload += nbytes
        return record

    def add_kept_by_graph(self, module: str, reason: str, nbytes: int) -> None:
        """Takes note of bytes that a graph keeps."""
        if len(self._of_graphs) < MOST:
            self._of_graphs.append((module, Outcome("kept", reason, nbytes)))
        else:
            self.dropped += 1

    def of_key(self, key: int | None) -> Save | None:
        """The save that took the storage ``key``."""
        return None if key is None else self._by_key.get(key)

    def stays(self, key: int) -> None:
        """The storage ``key`` was to leave, and stays with autograd."""
        save = self._by_key.get(key)
        if save is not None:
            for held in save.held:
                self._keep(held)

    def drain(self) -> None:
        """Takes up what has died."""
        while self.died:
            death = self.died[0]
            death.save.outcomes = death.outcomes
            held_by_it = death.save.held
            for held in held_by_it:
                held.count -= 1
                if not held.count:
                    self.without_offload -= held.nbytes
                    self.kept_bytes -= held.nbytes if held.stays else 0
            death.save.held = []
            del self.died[0]
            for held in held_by_it:
                if not held.count and self._held.get(held.name) is held:
                    del self._held[held.name]

    def close(self) -> list[SavedGroup]:
        """Ends it; who saved what, most bytes first."""
        self.drain()
        for save in self._saves:
            handle = None if save.handle is None else save.handle()
            if handle is not None:
                save.outcomes = list(handle.outcomes())
        for record in filter(None, (ref() for ref in self._parcels)):
            record.save.outcomes = [record.outcome()]
        groups: dict[tuple[str, str, str, str], tuple[int, int]] = {}
        found = [(save.operation, save.module, outcome) for save in self._saves for outcome in save.outcomes]
        found += [(_OF_GRAPHS, module, outcome) for module, outcome in self._of_graphs]
        for operation, module, (outcome, reason, nbytes) in found:
            key = operation, module, outcome, reason
            count, total = groups.get(key, (0, 0))
            groups[key] = count + 1, total + nbytes
        self.listener = None
        self._saves, self._held = [], {}
        return sorted(
            (SavedGroup(*key, count=count, nbytes=total) for key, (count, total) in groups.items()),
            key=lambda group: -group.nbytes,
        )

    def _tells(self, save: Save) -> bool:
        """Takes ``save`` among those that the trace tells of, as long as they are not too many."""
        if len(self._saves) < MOST:
            self._saves.append(save)
            return True
        self.dropped += 1
        return False

    def _hold(self, save: Save, storage: torch.UntypedStorage, *, stays: bool) -> None:
        name = storage._cdata
        held = self._held.get(name)
        if held is None or not held.count or held.origin is None or held.origin() is not storage:
            held = self._held[name] = _Held(storage.nbytes(), weak_storage(storage), name)
            self.without_offload += held.nbytes
        held.count += 1
        save.held.append(held)
        if stays:
            self._keep(held)

    def _keep(self, held: _Held) -> None:
        if not held.stays and held.count:
            held.stays = True
            self.kept_bytes += held.nbytes


def _outcome_of(view: SavedView) -> Outcome:
    storage, nbytes = view.storage, view.size.numel() * view.dtype.itemsize
    if storage.kept is not None:
        return Outcome("kept", storage.kept.value, nbytes)
    if storage.forward is not view.forward or storage.number != view.number:
        return Outcome("shared", "", nbytes)
    if storage.state is State.WAITING:
        return Outcome("kept", KeepReason.NEWEST.value, nbytes)
    return Outcome("offloaded", "", nbytes)
