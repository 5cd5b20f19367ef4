"""The saved-tensor log of a trace: by operation and module, what became of each, and the bytes that they hold.

[Note: handles that report]
While a trace runs, autograd is given a ``RecordedHandle`` around each handle. It learns the operation when backward
comes to it, and its end is the end of the saved tensor. After the trace it only hands on.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from eager_offload._torch import is_wrapper, storage_key, storage_of, weak_storage
from eager_offload.eager.handles import KeptTensor, SavedView, StorageRecord
from eager_offload.eager.hooks import Packed
from eager_offload.engine.transfer import State
from eager_offload.selection import is_parameter, plain_tensors
from eager_offload.stats import KeepReason
from eager_offload.tiers.finalizers import FinalizerRecord
from eager_offload.trace_file import SavedGroup

_BY_GRAPHS = "compiled graph"


class SaveOutcome(NamedTuple):
    """What became of a saved tensor, or of a plain one inside it."""

    outcome: str
    reason: str
    nbytes: int


def _kept_outcome(reason: str, nbytes: int) -> SaveOutcome:
    return SaveOutcome("kept" if reason else "offloaded", reason, nbytes)


def _outcome_of_view(record: StorageRecord, shares: bool, nbytes: int) -> SaveOutcome:
    """The record knows the state of a storage whether or not that is still alive."""
    if record.state is State.KEPT:
        return _kept_outcome(record.kept.value, nbytes)
    if shares:
        return SaveOutcome("shared", "", nbytes)
    return _kept_outcome(KeepReason.NEWEST.value if record.state is State.WAITING else "", nbytes)


@dataclass(eq=False, slots=True)
class _StorageBytes:
    """The bytes of a storage that saved tensors hold together."""

    nbytes: int
    origin: weakref.ref[torch.UntypedStorage] | None
    #: What the log finds them by; a later storage may have the same.
    name: Hashable
    #: How many saves hold them.
    count: int = 0
    #: Whether autograd itself keeps them on the device.
    stays: bool = False


@dataclass(eq=False, slots=True)
class SaveEntry:
    """A saved tensor, or what a graph saved at once."""

    module: str
    device: torch.device
    operation: str = ""
    holds: list[_StorageBytes] = field(default_factory=list)
    #: By which it is known what became of it.
    outcomes: list[Callable[[], SaveOutcome]] = field(default_factory=list)


@dataclass(eq=False, slots=True, weakref_slot=True)
class RecordedHandle:
    """What autograd holds while a trace runs, and for as long as it holds it; see the note."""

    inner: Packed
    save: SaveEntry
    log: SaveEntries

    def unpack(self) -> Tensor:
        unpack = self.log.unpack
        return self.inner.unpack() if unpack is None else unpack(self)


class GraphSave:
    """What the bytes that a graph moves own while a trace runs: it goes when they do."""

    __slots__ = ("__weakref__", "_nbytes", "_save")

    def __init__(self, nbytes: int, reason: str, save: SaveEntry) -> None:
        self._nbytes = nbytes
        self._save = save
        self.stays(reason)

    def stays(self, reason: str) -> None:
        """Why they stay; empty for what left."""
        self._save.outcomes = [partial(_kept_outcome, reason, self._nbytes)]


class _SaveRecord(FinalizerRecord[RecordedHandle | GraphSave]):
    """A weak reference to what lives as long as a save does."""

    __slots__ = ("save",)
    save: SaveEntry


class SaveEntries:
    """All saves of a trace. The accounts' lock is held in every call.

    Args:
        unpack: gives a saved tensor again, as long as the trace runs.
        add: takes a save among those that the trace shows; false where they are too many.
    """

    def __init__(self, unpack: Callable[[RecordedHandle], Tensor], add: Callable[[SaveEntry], bool]) -> None:
        self.unpack: Callable[[RecordedHandle], Tensor] | None = unpack
        self._add = add
        self._alive: set[_SaveRecord] = set()
        self._finalized: deque[_SaveRecord] = deque()
        #: Bytes of distinct storages that living saved tensors hold, or would hold if nothing was moved; and those of
        #: them that autograd itself keeps on the device.
        self.without_offload = 0
        self.kept_bytes = 0
        self._storages: dict[Hashable, _StorageBytes] = {}
        self._by_key: dict[int, SaveEntry] = {}

    def add(self, tensor: Tensor, handle: Packed, nbytes: int, save: SaveEntry) -> RecordedHandle:
        """Takes note of a saved tensor; returns what autograd is to hold in place of ``handle``."""
        recorded, stays = RecordedHandle(handle, save, self), isinstance(handle, KeptTensor)
        self._watch(recorded, save)
        if isinstance(handle, KeptTensor):
            save.outcomes = [partial(_kept_outcome, handle.reason.value, nbytes)]
        else:
            views = [handle] if isinstance(handle, SavedView) else handle.views()
            save.outcomes = [
                partial(_outcome_of_view, one.storage.record, one.shares, one.size.numel() * one.dtype.itemsize)
                for one in views
            ]
        is_shown = self._add(save)
        if isinstance(handle, SavedView):
            if is_shown:
                self._by_key.setdefault(handle.storage.record.key, save)
            stays = handle.storage.record.state is State.KEPT
        if not (isinstance(handle, KeptTensor) and handle.reason is KeepReason.PARAMETER):
            for one in plain_tensors(tensor) if is_wrapper(tensor) else (tensor,):
                if (storage := storage_of(one)) is not None and not is_parameter(one):
                    self._hold(save, storage, stays=stays)
        return recorded

    def add_by_graph(self, nbytes: int, reason: str, save: SaveEntry) -> GraphSave:
        """Takes note of what a graph offloads; returns what its bytes are to own."""
        owned, save.operation = GraphSave(nbytes, reason, save), _BY_GRAPHS
        self._watch(owned, save)
        self._add(save)
        save.holds = [_StorageBytes(nbytes, None, None, count=1)]
        self.without_offload += nbytes
        return owned

    def add_kept_by_graph(self, reason: str, nbytes: int, save: SaveEntry) -> None:
        """Takes note of bytes that a graph keeps."""
        save.operation, save.outcomes = _BY_GRAPHS, [partial(_kept_outcome, reason, nbytes)]
        self._add(save)

    def saved_by(self, key: int | None) -> SaveEntry | None:
        """The save that offloaded the storage ``key``."""
        return None if key is None else self._by_key.get(key)

    def stays(self, key: int) -> None:
        """The storage ``key`` was to leave, and stays with autograd."""
        for held in self._by_key[key].holds if key in self._by_key else ():
            self._keep(held)

    def poll(self) -> None:
        """Takes up what has died."""
        while self._finalized:
            gone = self._finalized.popleft()
            self._alive.discard(gone)
            for held in gone.save.holds:
                held.count -= 1
                if not held.count:
                    self.without_offload -= held.nbytes
                    self.kept_bytes -= held.nbytes if held.stays else 0
                    if self._storages.get(held.name) is held:
                        del self._storages[held.name]
            gone.save.holds = []

    def close(self) -> None:
        """No handle reports from here on."""
        self.unpack = None
        self._storages = {}
        self._alive.clear()

    def _watch(self, owner: RecordedHandle | GraphSave, save: SaveEntry) -> None:
        record = _SaveRecord(owner, self._finalized.append)
        record.save = save
        self._alive.add(record)

    def _hold(self, save: SaveEntry, storage: torch.UntypedStorage, *, stays: bool) -> None:
        name = storage_key(storage)
        held = self._storages.get(name)
        if held is None or not held.count or held.origin is None or held.origin() is not storage:
            held = self._storages[name] = _StorageBytes(storage.nbytes(), weak_storage(storage), name)
            self.without_offload += held.nbytes
        held.count += 1
        save.holds.append(held)
        if stays:
            self._keep(held)

    def _keep(self, held: _StorageBytes) -> None:
        if not held.stays and held.count:
            held.stays = True
            self.kept_bytes += held.nbytes


def groups_of(saves: list[SaveEntry]) -> tuple[SavedGroup, ...]:
    """Which operation of which module saved what, most bytes first."""
    groups: dict[tuple[str, str, str, str], tuple[int, int]] = {}
    for save in saves:
        for outcome, reason, nbytes in (one() for one in save.outcomes):
            key = save.operation, save.module, outcome, reason
            count, total = groups.get(key, (0, 0))
            groups[key] = count + 1, total + nbytes
    found = (SavedGroup(*key, count=count, nbytes=total) for key, (count, total) in groups.items())
    return tuple(sorted(found, key=lambda group: -group.nbytes))
