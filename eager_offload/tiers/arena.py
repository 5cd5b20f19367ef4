"""Host memory in slabs, handed out in exact sizes.

The allocators of torch round a pinned block up to a power of two and keep it, and allocating each block from the
system costs milliseconds when it has to be pinned. So memory is taken in slabs, cut to size here, and given back a slab
at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from eager_offload.tiers.base import Shortage
from eager_offload.tiers.extents import Extent
from eager_offload.tiers.forking import tell_after_fork
from eager_offload.tiers.guard import NoHeadroomError
from eager_offload.tiers.hostslots import HostSlot, Lease, Remains, Returns, Share
from eager_offload.tiers.memory import PAGE, anonymous_slab, round_up
from eager_offload.tiers.slabs import ExactSizes, Idle, Slab, SlabSizes, Space

__all__ = ["Arena", "HostSlot", "OverBudgetError", "anonymous_slab"]

#: Bytes; requests below a page share slabs of their own, cut to multiples of this.
_LINE = 64
#: An idle slab serves a request that is smaller by at most this part, while all such slack is below that part of what
#: is used.
_SLACK, _TOTAL_SLACK = 8, 32

#: What a forked child must neither use nor give back: a driver that only the parent can talk to may have pinned it.
_inherited: list[object] = []


class OverBudgetError(MemoryError):
    """What was asked for would go beyond what may be held."""


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

    [Note: shares]
    Several tiers may share an arena, and what is idle in it serves all of them. Each has a budget for the slots that
    it has alive. The budgets bound all that the arena holds too: those that are pooled, since each is the same part of
    the same machine, as if they were one; those in bytes that a user gave, added up.

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
        given_back: is called when slabs have gone back to the system, with the arena's lock held.
    """

    def __init__(
        self,
        allocate_slab: Callable[[int], Tensor] = anonymous_slab,
        *,
        slab_bytes: int = 64 << 20,
        idle_bytes: int = 256 << 20,
        sizes: SlabSizes | None = None,
        given_back: Callable[[], object] = lambda: None,
    ) -> None:
        self._allocate_slab = allocate_slab
        self._sizes = ExactSizes(slab_bytes) if sizes is None else sizes
        self._idle_bytes = idle_bytes
        self._given_back = given_back
        self._shares: weakref.WeakSet[Share] = weakref.WeakSet()
        self._is_closed = False
        self._reset()
        tell_after_fork(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._returns = Returns()
        self._leases: set[weakref.ref[memoryview]] = set()
        self._pages = Space(PAGE)
        self._lines = Space(_LINE)
        self._idle = Idle()
        # What was carved and has no slot yet; see [Note: handing out].
        self._carved: Extent | None = None
        self._carved_from: Space = self._pages
        self._held = 0
        self._used = self._slack = self._slabs = 0
        #: Bytes of all requests so far.
        self.served_bytes = 0

    def after_fork(self) -> None:
        """The child starts with an empty arena; slots from before the fork stay readable there, as copies."""
        _inherited.extend([self._returns, self._leases, self._pages, self._lines, self._idle])
        self._reset()
        for share in list(self._shares):
            share.reset()

    def join(self, share: Share) -> None:
        """From now on ``share`` bounds what is held for it, and all that is held; see [Note: shares]."""
        with self._lock:
            self._shares.add(share)
            self._is_closed = False

    def leave(self, share: Share) -> None:
        """Its slots live on. What is idle and was only held for it goes back to the system. Idempotent."""
        with self._lock:
            self._shares.discard(share)
            self._is_closed = not self._shares
            self._drain()
            limit = self._limit(None)
            if limit is not None and self._held > limit:
                self._give_back(max(self._idle.nbytes - (self._held - limit), 0))

    def allocate(self, nbytes: int, *, limit: int | None = None, share: Share | None = None) -> HostSlot | None:
        """A slot of ``nbytes`` bytes, or ``None`` where ``limit``, ``share`` or the system has no room.

        Args:
            limit: what the arena may hold with the new slot, in bytes.
            share: whose it is; is told the reason where there is no room.
        """
        with self._lock:
            try:
                return self._carve(nbytes, limit, share)
            except (MemoryError, RuntimeError) as error:
                if share is not None:
                    share.refusal = _why(error)
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
            slot = self._carve(nbytes, None, None)
            assert not slot.fences, "memory that streams copy to and memory for leases come from different arenas"
            view = slot.view()
            # The storage holds this very view until it is freed, so the view's death is the storage's.
            lease = Lease(view, self._returns.leases.append)
            lease.slot = slot
            self._leases.add(lease)
        return torch.frombuffer(view, dtype=torch.uint8)

    def drain(self) -> None:
        """Takes up the slots that have died and gives back to the system what is idle beyond ``idle_bytes``."""
        with self._lock:
            self._drain()

    def trim(self, keep: int = 0) -> None:
        """Gives what is idle back to the system, but for ``keep`` bytes."""
        with self._lock:
            self._drain()
            self._give_back(keep)

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

    @property
    def idle_bytes(self) -> int:
        """Bytes of slabs in which nothing is alive."""
        with self._lock:
            self._drain()
            return self._idle.nbytes

    @property
    def is_closed(self) -> bool:
        """Whether everyone has left it, so that it keeps nothing idle."""
        return self._is_closed

    @property
    def held_now(self) -> int:
        """Bytes of all slabs, whatever has died in them meanwhile; takes no lock."""
        return self._held

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
            self._is_closed = True
            self._drain()

    # -- with the lock held ---------------------------------------------------------------------------------------

    def _carve(self, nbytes: int, limit: int | None, share: Share | None) -> HostSlot:
        self._drain()
        space = self._pages if nbytes >= PAGE else self._lines
        size = round_up(nbytes, space.grain)
        if share is not None and share.held_bytes + size > share.budget:
            raise OverBudgetError(f"{nbytes} more bytes would go beyond the budget of {share.budget} bytes")
        if self._sizes.alone(nbytes):
            slab = self._whole_slab(nbytes, limit)
            return self._hand_out(slab, Extent(0, slab.nbytes, slab.fences), nbytes, share)
        extent = space.extents.allocate(size)
        if extent is None:
            memory = self._new_memory(size, limit)
            held = self._held + memory.numel()
            space.add(memory)
            self._held, self._slabs = held, self._slabs + 1
            extent = space.extents.allocate(size)
            assert extent is not None
        self._carved, self._carved_from = extent, space
        return self._hand_out(space.slab_at(extent.start), extent, nbytes, share)

    def _hand_out(self, slab: Slab, extent: Extent, nbytes: int, share: Share | None) -> HostSlot:
        slot, is_idle = HostSlot(slab, extent, nbytes, self._returns, share), slab in self._idle
        slot.held = extent.nbytes
        self._carved = None
        slab.slots += 1
        self._used += nbytes
        self.served_bytes += nbytes
        if share is not None:
            share.used_bytes += nbytes
            share.held_bytes += extent.nbytes
        if slab.space is None:
            self._slack += slab.nbytes - nbytes
            if not is_idle:
                self._held += slab.nbytes
                self._slabs += 1
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
        wanted, limit = self._sizes.wanted(need, self._held), self._limit(limit)
        if limit is not None and self._held + wanted > limit:
            self._give_back(0)
            wanted = min(wanted, self._sizes.within(need, limit - self._held))
            if wanted <= 0:
                raise OverBudgetError(f"{need} more bytes would go beyond the limit of {limit} bytes")
        least = self._sizes.least(need)
        for size in dict.fromkeys((wanted, least)):  # a smaller one costs less than what is idle and was pinned
            try:
                return self._allocate_slab(size)
            except (MemoryError, RuntimeError):
                continue
        self._give_back(0)
        return self._allocate_slab(least)

    def _limit(self, limit: int | None) -> int | None:
        """The least of ``limit`` and of what the shares come to; ``None`` where nothing bounds it."""
        if not self._shares:
            return limit
        pooled = added = 0
        for share in self._shares:
            if share.pooled:
                pooled = max(pooled, share.budget)
            else:
                added += share.budget
        return pooled + added if limit is None else min(pooled + added, limit)

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
        keep = 0 if self._is_closed else self._idle_bytes
        if self._idle.nbytes > keep:
            self._give_back(keep)

    def _take_back(self, remains: Remains) -> None:
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
        if remains.share is not None:
            remains.share.used_bytes -= remains.nbytes
            remains.share.held_bytes -= remains.held
        del self._returns.slots[0]

    def _give_back(self, keep: int) -> None:
        """Returns idle slabs to the system until ``keep`` idle bytes are left."""
        if self._let_go(keep):
            self._given_back()

    def _let_go(self, keep: int) -> int:
        """Drops idle slabs; how many. No reference is left when this returns."""
        found = self._idle.oldest_at_rest(keep)
        for slab in found:
            if slab.space is not None:
                slab.space.remove(slab)
            self._idle.remove(slab)
            self._held -= slab.nbytes
            self._slabs -= 1
        return len(found)


def _why(error: Exception) -> Shortage | None:
    """What a user is told of the error that a slot was refused with; ``None`` where a budget is the reason."""
    if isinstance(error, OverBudgetError):
        return None
    if isinstance(error, NoHeadroomError):
        return error.shortage
    text = str(error).partition("\n")[0]
    return Shortage(
        f"the system refused it ({text})", "end other programs that take memory, or set a lower host_budget"
    )
