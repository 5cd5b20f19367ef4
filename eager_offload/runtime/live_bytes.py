"""The bytes of saved tensors that are alive at a moment, for the peaks of the stats.

[Note: distinct storages]
Autograd holds a storage whole for as long as it holds a view of it, and a storage that the program holds too is on the
device whatever becomes of its saved tensors. So each storage counts once, with all of its bytes: without offload from
its first handle to its last one, and on the device for as long as it lives besides. A weak reference tells when it
dies; its callback only appends to a deque, see [Note: finalizers].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from eager_offload.tiers.forking import FinalizerRecord
from eager_offload.torch_private.memory import storage_key, storage_of

#: Handles of storages that have died, at most, before they are taken out of the count.
_MOST_DROPPED = 256


class LiveStorage(FinalizerRecord[torch.UntypedStorage]):
    """A weak reference to a storage of which handles hold views, or did when they were made."""

    __slots__ = ("handles", "key", "nbytes")
    key: int
    nbytes: int
    #: How many handles stand for tensors of it, be it that they have moved.
    handles: int


class LiveBytes:
    """The bytes of saved tensors that are alive. Callers hold the accounts' lock.

    It outlives the counters, which ``reset_stats()`` replaces within a step.
    """

    def __init__(self) -> None:
        #: Bytes that autograd would hold on the device without offload, and bytes that are there: of those storages,
        #: and of copies of their bytes that the library holds.
        self.without_offload = 0
        self.on_device = 0
        #: Storages that are alive, or whose end was not noticed yet.
        self._storages: dict[int, LiveStorage] = {}
        self._gone: deque[LiveStorage] = deque()
        #: Those of handles that have died, once for each.
        self.dropped: deque[LiveStorage] = deque()
        self._records: set[_KeptRecord] = set()
        self._finalized: deque[_KeptRecord] = deque()
        # Taken once, or each record would make another one.
        self._on_storage_death, self._on_death = self._gone.append, self._finalized.append

    def add(self, storage: torch.UntypedStorage) -> LiveStorage:
        """Counts ``storage``, of which a new handle stands for a tensor. It is in ``dropped`` once that has died."""
        key = storage_key(storage)
        found = self._storages.get(key)
        # A key may be that of another one, which has died; and what has died is not to add up.
        if (found is not None and self._gone) or len(self.dropped) > _MOST_DROPPED:
            self.poll()
            found = self._storages.get(key)
        if found is None:
            found = self._storages[key] = LiveStorage(storage, self._on_storage_death)
            found.key, found.nbytes, found.handles = key, storage.nbytes(), 1
            self.without_offload += found.nbytes
            self.on_device += found.nbytes
        else:
            found.handles += 1
        return found

    def keep(self, handle: object, tensor: Tensor, nbytes: int, reason: Any) -> None:
        """Counts ``tensor``, which ``handle`` holds on the device."""
        if self._finalized:
            self.poll()
        record = _KeptRecord(handle, self._on_death)
        record.reason = reason
        storage = storage_of(tensor)
        record.storage = None if storage is None else self.add(storage)
        record.nbytes = nbytes if record.storage is None or record.storage.handles == 1 else 0
        self._records.add(record)
        if record.storage is None:
            self.without_offload += nbytes
            self.on_device += nbytes

    def kept_by(self) -> Iterator[tuple[Any, int]]:
        """Yields the reason and the bytes of each saved tensor that stays."""
        self.poll()
        for record in self._records:
            yield record.reason, record.nbytes

    def poll(self) -> None:
        """Takes the bytes of handles and storages that have died out of the count."""
        gone = self._gone  # storages that have died, or whose last handle has
        while self._finalized:
            record = self._finalized.popleft()
            self._records.discard(record)
            if record.storage is not None:
                self.dropped.append(record.storage)
            else:
                self.without_offload -= record.nbytes
                self.on_device -= record.nbytes
        while self.dropped:
            storage = self.dropped.popleft()
            storage.handles -= 1
            if not storage.handles:
                self.without_offload -= storage.nbytes
                gone.append(storage)
        while gone:
            storage = gone.popleft()
            if self._storages.get(storage.key) is storage:  # else it has gone before, and another one may have its key
                del self._storages[storage.key]
                self.on_device -= storage.nbytes


class _KeptRecord(FinalizerRecord[object]):
    """A weak reference to the handle of a saved tensor that stays."""

    __slots__ = ("nbytes", "reason", "storage")
    storage: LiveStorage | None
    #: Bytes of the tensor, if no other handle held its storage before.
    nbytes: int
    #: The reason to stay.
    reason: Any
