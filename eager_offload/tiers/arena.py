"""Host memory in slabs, handed out in exact sizes; and the host tier over it.

The allocators of torch round a pinned block up to a power of two and keep it, and allocating each block from the
system costs milliseconds when it has to be pinned. So memory is taken in slabs, cut to size here, and given back a slab
at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from eager_offload.tiers.base import Fence, Region, Slot, Tier
from eager_offload.tiers.extents import Extent
from eager_offload.tiers.forking import tell_after_fork
from eager_offload.tiers.memory import PAGE, anonymous_slab, move, round_up, view_of
from eager_offload.tiers.slabs import ExactSizes, Idle, Slab, SlabSizes, Space

__all__ = ["Arena", "HostSlot", "HostTier", "anonymous_slab"]

#: Bytes; requests below a page share slabs of their own, cut to multiples of this.
_LINE = 64
#: An idle slab serves a request that is smaller by at most this part, while all such slack is below that part of what
#: is used.
_SLACK, _TOTAL_SLACK = 8, 32


class _Remains(NamedTuple):
    """What a slot leaves behind."""

    slab: Slab
    start: int
    held: int
    nbytes: int
    fences: tuple[Fence, ...]


class _Lease(weakref.ref[memoryview]):
    """Watches the view that a leased tensor's storage holds, and owns the slot under it."""

    __slots__ = ("slot",)
    slot: HostSlot
    # By identity: a weak reference hashes what it refers to, and a writable memoryview has no hash.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _Returns:
    """Where slots and leases end up; see [Note: slots give themselves back] in ``tiers/base.py``."""

    __slots__ = ("leases", "slots")

    def __init__(self) -> None:
        self.slots: deque[_Remains] = deque()
        self.leases: deque[weakref.ref[memoryview]] = deque()


class HostSlot(Slot):
    """``nbytes`` bytes of host memory, at a multiple of 4096 (of 64 where there are fewer than 4096 of them)."""

    tier: ClassVar[str] = "host"
    __slots__ = ("_held", "_returns", "_slab", "_start")
    #: Set when it is handed out; one without was lost to an interrupt before, and gives nothing back.
    _held: int

    def __init__(self, slab: Slab, extent: Extent, nbytes: int, returns: _Returns) -> None:
        super().__init__(nbytes, extent.fences)
        self._slab = slab
        #: Within the slab; bytes.
        self._start = extent.start - slab.start
        self._returns = returns

    @property
    def address(self) -> int:
        """Where the bytes are; a slot does not move."""
        return self._slab.address + self._start

    @property
    def tensor(self) -> Tensor:
        """The bytes as a flat ``uint8`` CPU tensor, for copies by a stream; it does not keep the slot alive."""
        return self._slab.tensor[self._start : self._start + self.nbytes]

    @property
    def region(self) -> Region:
        return Region(("host slab", self._slab.serial), self._start, self._start + self.nbytes)

    def write(self, source: Tensor) -> None:
        assert source.numel() == self.nbytes
        move(self.address, source.data_ptr(), self.nbytes)

    def read(self, target: Tensor) -> None:
        assert target.numel() == self.nbytes
        move(target.data_ptr(), self.address, self.nbytes)

    def memory(self) -> memoryview:
        return view_of(self.address, self.nbytes, self)

    def view(self) -> memoryview:
        """The bytes as a buffer that keeps the slab, but not the slot."""
        return self._slab.buffer[self._start : self._start + self.nbytes]

    def __del__(self) -> None:
        try:
            remains = _Remains(self._slab, self._start, self._held, self.nbytes, self.fences)
        except AttributeError:
            return
        self._returns.slots.append(remains)


#: What a forked child must neither use nor give back: a driver that only the parent can talk to may have pinned it.
_inherited: list[object] = []


class Arena:
    """Cuts slabs of host memory into slots of exact sizes. Thread-safe.

    [Note: how slabs are cut]
    A request of half of ``slab_bytes`` or more gets a slab of its own, of exactly its size. Smaller ones share: best
    fit over the holes of all shared slabs, and if there is none, a new slab whose size is a whole multiple of the
    request that called for it (a step's tensors are mostly alike, so nothing is left over at its end) and at most a
    32nd of what is held already (so that the last, half-empty slab weighs little). Requests below a page are cut to 64
    bytes in slabs of their own, where they cannot spoil the others' alignment.

    A slab without slots is idle. Idle slabs are kept up to ``idle_bytes``, since the next step asks for the same sizes
    again; beyond that the oldest go back to the system, none before its fences have passed. All that is idle goes
    back before a request fails. Where the system rounds sizes up, ``sizes`` says so, and all slabs are shared.

    Slots that die are taken up at the next call of any method; ``drain()`` is the call that does nothing else.

    [Note: handing out]
    A KeyboardInterrupt may come after any call. So a range is written down as carved without a call between that and
    its allocation, and counted as handed out in the same way once its slot is there; what is still written down
    the next time goes back. What died is taken out of its queue last, when all else is done that may be done twice.

    Args:
        allocate_slab: takes bytes and returns a flat ``uint8`` CPU tensor of that size, page-aligned, whose memory goes
            back with its storage. Raises ``MemoryError`` or ``RuntimeError`` where there is none.
        slab_bytes: the largest slab that is shared.
        idle_bytes: how much idle memory is kept for reuse.
        sizes: how large slabs are, in place of ``slab_bytes``.
    """

    def __init__(
        self,
        allocate_slab: Callable[[int], Tensor] = anonymous_slab,
        *,
        slab_bytes: int = 64 << 20,
        idle_bytes: int = 256 << 20,
        sizes: SlabSizes | None = None,
    ) -> None:
        self._allocate_slab = allocate_slab
        self._sizes = ExactSizes(slab_bytes) if sizes is None else sizes
        self._idle_bytes = idle_bytes
        self._reset()
        tell_after_fork(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._returns = _Returns()
        self._leases: set[weakref.ref[memoryview]] = set()
        self._pages = Space(PAGE)
        self._lines = Space(_LINE)
        self._idle = Idle()
        # What was carved and has no slot yet; see [Note: handing out].
        self._carved: Extent | None = None
        self._carved_from: Space = self._pages
        self._held = 0
        #: Most bytes held at one time since ``restart_peak``.
        self.peak_bytes = 0
        self._used = self._slack = self._slabs = 0

    def after_fork(self) -> None:
        """The child starts with an empty arena; slots from before the fork stay readable there, as copies."""
        _inherited.extend([self._returns, self._leases, self._pages, self._lines, self._idle])
        self._reset()

    def allocate(self, nbytes: int, *, limit: int | None = None) -> HostSlot | None:
        """A slot of ``nbytes`` bytes, or ``None`` where ``limit`` or the system has no room.

        Args:
            limit: what the arena may hold with the new slot, in bytes.
        """
        with self._lock:
            try:
                return self._carve(nbytes, limit)
            except (MemoryError, RuntimeError):
                return None

    def lease(self, nbytes: int) -> Tensor:
        """A flat ``uint8`` tensor of ``nbytes`` bytes that owns them: they go back when its storage dies.

        Views of it, and what autograd saves of it, keep the storage and so the bytes. The content is undefined.

        Raises:
            MemoryError, RuntimeError: the system has no room.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            slot = self._carve(nbytes, None)
            assert not slot.fences, "memory that streams copy to and memory for leases come from different arenas"
            view = slot.view()
            # The storage holds this very view until it is freed, so the view's death is the storage's.
            lease = _Lease(view, self._returns.leases.append)
            lease.slot = slot
            self._leases.add(lease)
        return torch.frombuffer(view, dtype=torch.uint8)

    def drain(self) -> None:
        """Takes up the slots that have died and gives back to the system what is idle beyond ``idle_bytes``."""
        with self._lock:
            self._drain()

    def trim(self) -> None:
        """Gives everything that is idle back to the system."""
        with self._lock:
            self._drain()
            self._give_back(0)

    @property
    def has_returns(self) -> bool:
        """Whether ``drain`` would find something; takes no lock."""
        return bool(self._returns.slots or self._returns.leases)

    @property
    def used_bytes(self) -> int:
        """Bytes in slots and leases that are alive, as they were asked for."""
        with self._lock:
            self._drain()
            return self._used

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        with self._lock:
            self._drain()
            return self._held

    def restart_peak(self) -> None:
        """Starts measuring the peak anew, from what is held now."""
        with self._lock:
            self._drain()
            self.peak_bytes = self._held

    @property
    def slabs(self) -> int:
        """How many slabs are held."""
        with self._lock:
            self._drain()
            return self._slabs

    def close(self) -> None:
        """Gives back what is idle, and keeps nothing idle from now on. Idempotent.

        Slots that die later go back at the next ``drain()``, or when the arena and the last of them are gone. Let all
        transfers end before the arena goes: nothing then asks whether the fences have passed.
        """
        with self._lock:
            self._idle_bytes = 0
            self._drain()

    # -- with the lock held ---------------------------------------------------------------------------------------

    def _carve(self, nbytes: int, limit: int | None) -> HostSlot:
        self._drain()
        if self._sizes.alone(nbytes):
            slab = self._whole_slab(nbytes, limit)
            return self._hand_out(slab, Extent(0, slab.nbytes, slab.fences), nbytes)
        space = self._pages if nbytes >= PAGE else self._lines
        size = round_up(nbytes, space.grain)
        extent = space.extents.allocate(size)
        if extent is None:
            memory = self._new_memory(size, limit)
            held = self._held + memory.numel()
            space.add(memory)
            self._held, self._slabs = held, self._slabs + 1
            extent = space.extents.allocate(size)
            assert extent is not None
        self._carved, self._carved_from = extent, space
        return self._hand_out(space.slab_at(extent.start), extent, nbytes)

    def _hand_out(self, slab: Slab, extent: Extent, nbytes: int) -> HostSlot:
        slot, is_idle = HostSlot(slab, extent, nbytes, self._returns), slab in self._idle
        slot._held = extent.nbytes
        self._carved = None
        slab.slots += 1
        self._used += nbytes
        if slab.space is None:
            self._slack += slab.nbytes - nbytes
            if not is_idle:
                self._held += slab.nbytes
                self._slabs += 1
        if self._held > self.peak_bytes:
            self.peak_bytes = self._held
        if is_idle:
            self._idle.remove(slab)
        return slot

    def _whole_slab(self, nbytes: int, limit: int | None) -> Slab:
        size = round_up(nbytes, PAGE)
        slab = self._idle.smallest_whole(size)
        if slab is not None:
            slack = slab.nbytes - nbytes
            affordable = self._slack + slack <= (self._used + nbytes) // _TOTAL_SLACK
            if slab.nbytes == size or (slack <= size // _SLACK and affordable):
                return slab
        return Slab(self._new_memory(size, limit), None, 0)

    def _new_memory(self, need: int, limit: int | None) -> Tensor:
        """A slab of the size that ``need`` calls for, or of a smaller one where that is all there is room for."""
        wanted = self._sizes.wanted(need, self._held)
        if limit is not None and self._held + wanted > limit:
            self._give_back(0)
            wanted = min(wanted, self._sizes.within(need, limit - self._held))
            if wanted <= 0:
                raise MemoryError(f"{need} more bytes would go beyond the limit of {limit} bytes")
        try:
            return self._allocate_slab(wanted)
        except (MemoryError, RuntimeError):
            self._give_back(0)
            return self._allocate_slab(self._sizes.least(need))

    def _drain(self) -> None:
        returns = self._returns
        while returns.leases:
            # This drops the lease and with it the slot, which lands among the dead ones.
            self._leases.discard(returns.leases[0])
            del returns.leases[0]
        if self._carved is not None:
            self._carved_from.extents.release(self._carved.start, self._carved.nbytes, self._carved.fences)
            self._carved = None
        while returns.slots:
            self._take_back(returns.slots[0])
        if self._idle.nbytes > self._idle_bytes:
            self._give_back(self._idle_bytes)

    def _take_back(self, remains: _Remains) -> None:
        slab = remains.slab
        if slab.slots == 1:
            self._idle.add(slab)
        if slab.space is None:
            slab.fences = remains.fences
            self._slack -= slab.nbytes - remains.nbytes
        else:
            slab.space.extents.release(slab.start + remains.start, remains.held, remains.fences)
        slab.slots -= 1
        self._used -= remains.nbytes
        del self._returns.slots[0]

    def _give_back(self, keep: int) -> None:
        """Returns idle slabs to the system until ``keep`` idle bytes are left."""
        for slab in self._idle.oldest_at_rest(keep):
            if slab.space is not None:
                slab.space.remove(slab)
            self._idle.remove(slab)
            self._held -= slab.nbytes
            self._slabs -= 1


class HostTier(Tier):
    """Host memory, up to ``budget`` bytes held from the system.

    Args:
        arena: where the memory comes from; the budget bounds all that it holds.
        budget: bytes.
    """

    name: ClassVar[str] = "host"

    def __init__(self, arena: Arena, budget: int) -> None:
        self._arena = arena
        self._budget = budget

    def reserve(self, nbytes: int) -> HostSlot | None:
        return self._arena.allocate(nbytes, limit=self._budget)

    @property
    def used_bytes(self) -> int:
        return self._arena.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._arena.peak_bytes

    def restart_peak(self) -> None:
        self._arena.restart_peak()

    @property
    def held_bytes(self) -> int:
        return self._arena.held_bytes

    def drain(self) -> None:
        """Takes up the slots that have died and gives back to the system what is idle beyond the arena's allowance."""
        self._arena.drain()

    def close(self) -> None:
        self._arena.close()
