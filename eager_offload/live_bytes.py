"""The bytes of saved tensors that are alive at a moment, for the peaks of the stats."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from eager_offload._torch import module_reference, storage_key, storage_of
from eager_offload.tiers.finalizers import FinalizerRecord


class LiveBytes:
    """The bytes of saved tensors that are alive. Callers hold the accounts' lock.

    It outlives the counters, which ``reset_stats()`` replaces within a step.
    """

    def __init__(self) -> None:
        #: Bytes that autograd would hold on the device without offload, and the part of them that stays.
        self.without_offload = 0
        self.kept = 0
        self._records: set[_KeptRecord] = set()
        self._finalized: deque[_KeptRecord] = deque()
        self._on_death = self._finalized.append  # or each record would make another one
        #: How many handles hold each storage that stays.
        self._holders: dict[Hashable, int] = {}

    def keep(self, handle: object, tensor: Tensor, nbytes: int, reason: Any) -> None:
        """Counts ``tensor``, which ``handle`` holds on the device. Of several handles of a storage, the first
        counts."""
        if self._finalized:
            self.poll()
        record = _KeptRecord(handle, self._on_death)
        record.reason, record.module = reason, module_reference()
        storage = storage_of(tensor)
        record.name = record if storage is None else storage_key(storage)
        holders = self._holders.get(record.name, 0)
        self._holders[record.name] = holders + 1
        record.nbytes = 0 if holders else nbytes
        self._records.add(record)
        self.kept += record.nbytes
        self.without_offload += record.nbytes

    def kept_by(self) -> Iterator[tuple[Any, Module | None, int]]:
        """Yields the reason, the module and the bytes of each saved tensor that stays."""
        self.poll()
        for record in self._records:
            yield record.reason, record.module(), record.nbytes

    def poll(self) -> None:
        """Takes the bytes of handles that have died out of the count."""
        while self._finalized:
            record = self._finalized.popleft()
            self._records.discard(record)
            self._holders[record.name] -= 1
            if not self._holders[record.name]:
                del self._holders[record.name]
            self.kept -= record.nbytes
            self.without_offload -= record.nbytes


class _KeptRecord(FinalizerRecord[object]):
    """A weak reference to the handle of a saved tensor that stays."""

    __slots__ = ("module", "name", "nbytes", "reason")
    name: Hashable
    nbytes: int
    #: The reason to stay, and the module that saved it.
    reason: Any
    module: Callable[[], Module | None]
