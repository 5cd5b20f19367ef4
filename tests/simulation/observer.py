"""Sees every operator that runs, names the memory it touches and writes that into the happens-before log.

[Note: addresses are handed out as a caching allocator does]
Whether a block that one stream gave up may be written by its next owner is where ordering goes wrong, and the memory
that torch's CPU allocator returns shows nothing of it. So each storage gets a range in a virtual address space of
the stream that allocated it, and the moment it dies that range goes to the next storage of that stream, best fit first.
Storages are named by identity. What died since is written before every operator and before every entry of the runtime.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from eager_offload.runtime.base import Runtime, Stream
from eager_offload.tiers.forking import FinalizerRecord
from eager_offload.torch_private.calls import OpOverload, TorchDispatchMode, schema_of
from eager_offload.torch_private.memory import is_fake, tensors_in
from tests.simulation.log import Allocated, ByteRegion, Entry, Freed, Log, Operation

#: Bytes; CUDA's caching allocator hands out multiples of it.
_GRANULARITY = 512

#: What is done with the work of one operator: its stream, its name, the bytes that it touches.
Work: TypeAlias = Callable[[Stream, str, int], None]


class OperatorObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types for it
    """A dispatch mode that logs the operators of all threads that have entered it, and gives storages their names.

    An operator reads its arguments, writes those that its schema marks, and allocates and writes what it returns, on
    the stream that is current. One that returns views of its arguments touches no bytes. Wrapper subclasses are asked
    to unwrap, so that their inner tensors are seen; other layouts and devices pass through without an entry.

    A storage that was there before (a parameter, a batch) belongs to ``home``, has a space of its own and is not
    counted in ``resident_bytes``; its range is not handed out again when it dies.
    """

    #: Other modes do not see what the library itself runs.
    sees_offloading = True

    def __init__(
        self, runtime: Runtime, log: Log, device: torch.device, home: Stream | None = None, work: Work | None = None
    ) -> None:
        """
        Args:
            log: where the operators go. The observer is a log as well, for what the runtime itself does.
            device: whose tensors are watched; the index does not matter.
            home: the stream that owns what was allocated before; the current one unless given.
            work: called for every operator that touches bytes.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares no types for it
        #: Bytes in storages that were allocated under observation and live, and the most there ever were.
        self.resident_bytes = 0
        self.peak_resident_bytes = 0
        self.runtime = runtime
        self._log = log
        self._device = device
        self._home = runtime.current_stream(device) if home is None else home
        self._work = work
        self._lock = threading.RLock()
        self._blocks: dict[int, _Block] = {}
        self._died: deque[_StorageRecord] = deque()
        self._pools: dict[Stream, _Pool] = {}
        self._inputs = 0

    def sweep(self) -> None:
        """Writes what has died since the last time."""
        with self._lock:
            while self._died:
                ref = self._died.popleft()
                # A block that got another range since is followed by another reference.
                if (block := self._blocks.get(ref.key)) is not None and block.ref is ref:
                    self._release(self._blocks.pop(ref.key))

    def write(self, entry: Entry) -> None:
        """An entry of the runtime's. What died comes before it, and so before what that entry orders."""
        self.sweep()
        self._log.write(entry)

    # -- naming, for the runtime ------------------------------------------------------------------------------------

    def region(self, tensor: Tensor) -> ByteRegion:
        """The bytes from the first to the last element of ``tensor``."""
        with self._lock:
            self.sweep()
            region = self._region(tensor)
        assert region is not None, f"{tensor.device} {tensor.layout} memory is not observed"
        return region

    def allocated(self, tensor: Tensor, stream: Stream, what: str) -> None:
        """Takes note of a new block that the runtime itself allocated."""
        with self._lock:
            self.sweep()
            if tensor.numel() > 0:
                self._place(tensor.untyped_storage(), stream, what)

    # -- operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type[Tensor]], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if any(map(is_fake, types)):
            return func(*args, **kwargs)  # DTensor asks such what shape a result has: there is nothing to see
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # the subclass unwraps, and its inner tensors come back here
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        operands = signature_of(func).operands(args, kwargs)
        with self._lock:
            self.sweep()
            for operand in operands:
                # Known from here on, or a view that the operator returns would pass for a new block.
                self._region(operand.tensor)
        result = func(*args, **kwargs)
        with self._lock:
            self._write_down(func, operands, tensors_in(result))
        return result

    def _write_down(self, func: OpOverload[..., Any], operands: Sequence[Operand], results: Sequence[Tensor]) -> None:
        stream = self.runtime.current_stream(self._device)
        what = str(func)
        reads = [region for o in operands if o.reads and (region := self._region(o.tensor, stream)) is not None]
        writes = [region for o in operands if o.writes and (region := self._region(o.tensor, stream)) is not None]
        fresh = [tensor for tensor in results if self._is_new(tensor)]
        for tensor in fresh:
            # Two results may share a storage.
            if self._is_new(tensor):
                self._place(tensor.untyped_storage(), stream, what)
        writes += [region for tensor in fresh if (region := self._region(tensor)) is not None]
        if results and not writes and all(self._watches(tensor) for tensor in results):
            return  # views of its arguments
        reads = [region for region in reads if region.stop > region.start]
        writes = [region for region in writes if region.stop > region.start]
        if reads or writes:
            self._log.write(Operation(stream, tuple(reads), tuple(writes), what))
            if self._work is not None:
                self._work(stream, what, sum(region.stop - region.start for region in (*reads, *writes)))

    # -- memory -------------------------------------------------------------------------------------------------------

    def _watches(self, tensor: Tensor) -> bool:
        if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
            return False
        return type(tensor) is Tensor or not is_fake(type(tensor))

    def _is_new(self, tensor: Tensor) -> bool:
        return self._watches(tensor) and self._find(tensor.untyped_storage()) is None

    def _find(self, storage: torch.UntypedStorage) -> _Block | None:
        block = self._blocks.get(id(storage))
        if block is not None and block.ref() is not storage:
            # Another storage was here, and it died in the midst of an operator.
            self.sweep()
            block = None
        return block

    def _region(self, tensor: Tensor, stream: Stream | None = None) -> ByteRegion | None:
        """The bytes of ``tensor``; a storage that is seen for the first time was there before.

        Args:
            stream: which owns the block from here on if its size has changed since it was last seen.
        """
        if not self._watches(tensor):
            return None
        storage = tensor.untyped_storage()
        block = self._find(storage)
        if block is None:
            block = self._adopt(storage)
        elif block.nbytes != storage.nbytes():
            self._release(self._blocks.pop(block.ref.key))
            block = self._place(storage, block.stream if stream is None else stream, "resize")
        first, nbytes = _span(tensor)
        start = block.region.start + first
        return ByteRegion(block.region.space, start, min(start + nbytes, block.region.stop))

    def _adopt(self, storage: torch.UntypedStorage) -> _Block:
        self._inputs += 1
        region = ByteRegion(f"input {self._inputs - 1}", 0, storage.nbytes())
        return self._follow(storage, self._home, region, observed=False)

    def _place(self, storage: torch.UntypedStorage, stream: Stream, what: str) -> _Block:
        pool = self._pools.setdefault(stream, _Pool(stream))
        nbytes = storage.nbytes()
        start = pool.take(nbytes)
        region = ByteRegion(pool, start, start + nbytes)
        block = self._follow(storage, stream, region, observed=True)
        self.resident_bytes += nbytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)
        if nbytes:
            self._log.write(Allocated(stream, region, what))
        return block

    def _follow(self, storage: torch.UntypedStorage, stream: Stream, region: ByteRegion, *, observed: bool) -> _Block:
        ref = _StorageRecord(storage, self._died.append)
        ref.key = id(storage)
        block = self._blocks[ref.key] = _Block(ref, stream, region, observed)
        return block

    def _release(self, block: _Block) -> None:
        if block.nbytes:
            self._log.write(Freed(block.stream, block.region, "the last reference went"))
        if block.observed:
            self._pools[block.stream].give(block.region.start, block.nbytes)
            self.resident_bytes -= block.nbytes


class _StorageRecord(FinalizerRecord[torch.UntypedStorage]):
    """A weak reference to a storage, which still knows which it was when that is gone."""

    __slots__ = ("key",)
    #: The object's address, which another storage may get as soon as this reference is dead.
    key: int


@dataclass(frozen=True, slots=True)
class _Block:
    """A storage that lives, as far as the observer has seen."""

    ref: _StorageRecord
    #: Whose allocator it came from.
    stream: Stream
    region: ByteRegion
    #: Whether its allocation was seen.
    observed: bool

    @property
    def nbytes(self) -> int:
        return self.region.stop - self.region.start


class _Pool:
    """The address space of one stream: a range that was given back goes to the next request, best fit first."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        #: What is free, in order, as the ends of ranges; no two of them meet.
        self._free: list[tuple[int, int]] = []
        self._end = 0

    def __str__(self) -> str:
        return f"memory of {self._stream}"

    def take(self, nbytes: int) -> int:
        """Where ``nbytes`` bytes begin; the range is taken until it is given back."""
        if nbytes == 0:
            return 0
        needed = _rounded(nbytes)
        fits = [(stop - start, place) for place, (start, stop) in enumerate(self._free) if stop - start >= needed]
        if not fits:
            self._end += needed
            return self._end - needed
        place = min(fits)[1]
        start, stop = self._free[place]
        self._free[place : place + 1] = [(start + needed, stop)] if start + needed < stop else []
        return start

    def give(self, start: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        stop, place = start + _rounded(nbytes), bisect_left(self._free, (start, start))
        if place < len(self._free) and self._free[place][0] == stop:
            stop = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            place -= 1
            start = self._free.pop(place)[0]
        self._free.insert(place, (start, stop))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _GRANULARITY) * _GRANULARITY


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and how far it is from there to the end of the last one."""
    if tensor.numel() == 0:
        return 0, 0
    if tensor.is_nested:
        return 0, tensor.untyped_storage().nbytes()
    size = tensor.element_size()
    last = sum((length - 1) * int(stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) * size, (last + 1) * size


# -- what operators do with their arguments, by their schemas ---------------------------------------------------------


class Operand(NamedTuple):
    """A tensor that an operator was called with."""

    tensor: Tensor
    reads: bool
    writes: bool


#: Arguments that an operator writes in training although its schema does not say so.
_STATISTICS = ("running_mean", "running_var")
_UNMARKED = dict.fromkeys(("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"), _STATISTICS)


class OperatorSignature(NamedTuple):
    """What an operator's schema says about its arguments."""

    names: tuple[str, ...]
    written: frozenset[str]
    written_in_training: tuple[str, ...]
    #: It looks at sizes only: a factory, or a view in place.
    metadata_only: bool

    def operands(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Operand]:
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        written = self.written
        if self.written_in_training and named.get("training", named.get("train")):
            written = written.union(self.written_in_training)
        return [
            Operand(tensor, reads=not self.metadata_only and name not in written, writes=name in written)
            for name, value in named.items()
            for tensor in tensors_in(value)
        ]


@cache
def signature_of(func: OpOverload[..., Any]) -> OperatorSignature:
    schema = schema_of(func)
    in_place_view = torch.Tag.inplace_view in func.tags
    name = schema.name.rpartition("::")[2]
    marked = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return OperatorSignature(
        names=tuple(argument.name for argument in schema.arguments),
        written=frozenset() if in_place_view else frozenset(marked),
        written_in_training=_UNMARKED.get(schema.name, ()),
        metadata_only=in_place_view or name.startswith("new_") or name.endswith("_like"),
    )
