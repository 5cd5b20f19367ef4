"""Host memory in slabs, handed out in exact sizes.

The allocators of torch round a pinned block up to a power of two and keep it, and allocating each block from the
system costs milliseconds when it has to be pinned. So memory is taken in slabs, cut to size here, and given back a slab
at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from eager_offload.errors import reentered
from eager_offload.tiers.base import MustGrow, Shortage, Slot
from eager_offload.tiers.extents import Extent
from eager_offload.tiers.finalizers import FinalizerRecord, Living
from eager_offload.tiers.forking import LEFT_TO_THE_PARENT, ForkSafeLock, tell_after_fork
from eager_offload.tiers.guard import NoHeadroomError
from eager_offload.tiers.memory import PAGE, anonymous_slab
from eager_offload.tiers.slabs import ExactSizes, HostSlot, HostSlotRecord, Quota, Slab, Slabs, SlabSizes

T = TypeVar("T")

#: Bytes; requests below a page share slabs of their own, cut to multiples of this.
_LINE = 64
#: An idle slab serves a request that is smaller by at most this part, while all such slack is below that part of what
#: is used.
_SLACK, _TOTAL_SLACK = 8, 32
#: Bytes; the largest slab of what is reserved. To pin it takes seconds, in which nothing can interrupt the process.
_RESERVED_BYTES = 16 << 30


class OverBudgetError(MemoryError):
    """What was asked for would go beyond what may be held."""


class _NewSlab(MustGrow):
    """A slab of ``wanted`` bytes is needed, or where the system has no room for that, one of ``least`` bytes."""

    def __init__(self, wanted: int, least: int) -> None:
        super().__init__(wanted, least)
        self.wanted, self.least = wanted, least


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

    Slots that die are taken up at the next call of any method; ``poll()`` is the call that does nothing else.

    [Note: what is reserved]
    Slabs that are taken before it is known what for are cut for requests of any size from a page on, where the slabs of
    a request's own have no room. Slots do not reach from one into the next, so there are few, and large.

    [Note: rest]
    After a graph is gone there may be no further call, so an arena of leases can be told to ``rest()``: it gives back
    what is idle and lets go of the other slabs, each of which is then held by the leases in it alone and goes back to
    the system with the last. The next lease begins anew, with slabs of its own, and ``wakes`` says so.

    [Note: quotas]
    Several tiers may share an arena, and what is idle in it serves all of them. Each has a budget for the slots that
    it has alive. The budgets bound all that the arena holds too: those that are pooled, since each is the same part of
    the same machine, as if they were one; those in bytes that a user gave, added up.

    [Note: growth]
    The system takes long to give a slab: its pages have to be there, and pinned. So the lock is not held meanwhile, and
    threads that need no slab go on. Another lock has one thread grow at a time. A second one that has waited for it
    looks again, since what is left of the new slab may do. No other thread makes ``held`` grow meanwhile, so a size
    that was within the limit before is within it after. The slab is added in the change that cuts the first slot from
    it. Until then it is a tensor of one thread, which nothing counts and which goes back with an interrupt.

    [Note: interrupted changes]
    A KeyboardInterrupt may come between any two statements. Where one came in the midst of a change, ``_is_changing``
    says so, and the next call makes anew what is free, and counts anew: what is alive is known by its records.

    Args:
        allocate_slab: takes bytes and returns a flat ``uint8`` CPU tensor of that size, page-aligned, whose memory goes
            back with its storage. Raises ``MemoryError`` or ``RuntimeError`` where there is none.
        slab_bytes: the largest slab that is shared.
        idle_bytes: how much idle memory is kept for reuse.
        sizes: how large slabs are, in place of ``slab_bytes``.
        admit: is asked before so many bytes are taken from the system, and raises ``NoHeadroomError`` where too little
            would be left. A quota that a user gave in bytes is given them all the same, and has the reason.
        given_back: is called when slabs have gone back to the system, with the arena's lock held.
        wakes: is called with the first lease and with the first one after a rest, with the arena's lock held.
    """

    def __init__(
        self,
        allocate_slab: Callable[[int], Tensor] = anonymous_slab,
        *,
        slab_bytes: int = 64 << 20,
        idle_bytes: int = 256 << 20,
        sizes: SlabSizes | None = None,
        admit: Callable[[int], object] = lambda _: None,
        given_back: Callable[[], object] = lambda: None,
        wakes: Callable[[], object] = lambda: None,
    ) -> None:
        self._allocate_slab = allocate_slab
        self._sizes = ExactSizes(slab_bytes) if sizes is None else sizes
        self._idle_bytes = idle_bytes
        self._admit = admit
        self._given_back = given_back
        self._wakes = wakes
        self._quotas: Living[Quota] = Living()
        #: What several tiers that want one arena know it by; ``None`` for one that is not to be shared.
        self.kind: Hashable = None
        #: Whether every tier has left it, so that it keeps nothing idle.
        self.is_closed = False
        self._lock = ForkSafeLock()
        #: Of the thread that takes a slab from the system; it comes before ``_lock``.
        self._growth = ForkSafeLock()
        self._reset()
        tell_after_fork(self)

    def _reset(self) -> None:
        #: Where slots end up, until ``poll``; see [Note: slots give themselves back] in ``tiers/base.py``.
        self.returned: deque[FinalizerRecord[Slot]] = deque()
        #: Of what is alive; see [Note: finalizers] in ``finalizers.py``.
        self._records: set[FinalizerRecord[Slot]] = set()
        #: Its ``append``, for the records: each would make another one.
        self._on_return = self.returned.append
        self._new_slabs()
        #: Bytes of all slabs; of what is alive, as it was asked for; by which slabs of one slot are larger than that.
        self._held = self._used = self._slack = 0
        self._is_changing = False
        self._rests = True
        #: Bytes of all requests so far.
        self.served_bytes = 0

    def _new_slabs(self) -> None:
        kinds = ("whole", "page", "line", "reserved")
        self._slabs = {kind: Slabs(kind, _LINE if kind == "line" else PAGE) for kind in kinds}
        #: Slabs without slots, the one that has been idle for longest first, and their bytes.
        self._idle: dict[Slab, None] = {}
        self._idle_now = 0

    def after_fork(self) -> None:
        """The child starts with an empty arena; it has slots from before the fork as copies, but for pinned ones."""
        LEFT_TO_THE_PARENT.extend([self.returned, self._records, self._slabs])
        self._reset()
        for quota in self._quotas:
            quota.reset()

    def join(self, quota: Quota) -> None:
        """From now on ``quota`` bounds what is held for it, and all that is held; see [Note: quotas]."""
        with self._lock.lock:
            self._quotas.add(quota)
            self.is_closed = False

    def leave(self, quota: Quota) -> None:
        """Its slots live on. What is idle and was only held for it goes back to the system. Idempotent."""
        with self._lock.lock:
            self._quotas.discard(quota)
            self.is_closed = not self._quotas
            self._poll()
            limit = self._limit(None)
            if limit is not None and self._held > limit:
                self._release_idle(max(self._idle_now - (self._held - limit), 0))

    def allocate(self, nbytes: int, *, limit: int | None = None, quota: Quota | None = None) -> HostSlot | None:
        """A slot of ``nbytes`` bytes, or ``None`` where ``limit``, ``quota`` or the system has no room.

        Args:
            limit: what the arena may hold with the new slot, in bytes.
            quota: whose it is; it is given the reason where there is no room.
        """
        try:
            return self.at_hand(nbytes, limit=limit, quota=quota)
        except MustGrow:
            self._refuse_growth_in_growth()
        try:
            return self._grown(partial(self.at_hand, nbytes, limit=limit, quota=quota), quota)
        except (MemoryError, RuntimeError) as error:
            note_refusal(error, quota)
            return None

    def at_hand(
        self, nbytes: int, *, limit: int | None = None, quota: Quota | None = None, memory: Tensor | None = None
    ) -> HostSlot | None:
        """The same of what is held already, and of ``memory``, which the system has given for it.

        Raises:
            MustGrow: there is room, but the system has to give a slab first.
        """
        lock = self._lock.lock
        if lock._is_owned():
            raise reentered()
        with lock:
            try:
                slab, extent = self._cut(nbytes, limit, quota, memory)
            except (MemoryError, RuntimeError) as error:
                note_refusal(error, quota)
                return None
            slot = HostSlot(slab, extent, nbytes, extent.fences, self._on_return)
            record: Any = slot.record  # here and below, `Any` in place of a `cast`, which would be a call
            self._register(record, slab, extent, quota)
            return slot

    def lease(self, nbytes: int) -> Tensor:
        """A flat ``uint8`` tensor of ``nbytes`` bytes that owns them: they go back when its storage dies.

        Views of it, and what autograd saves of it, keep the storage and so the bytes. The content is undefined.

        Raises:
            MemoryError, RuntimeError: the system has no room.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            return self._lease(nbytes)
        except MustGrow:
            self._refuse_growth_in_growth()
        return self._grown(partial(self._lease, nbytes))

    def _lease(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """The same; arguments and errors as for ``at_hand``."""
        lock = self._lock.lock
        if lock._is_owned():
            raise reentered()
        with lock:
            if self._rests:
                self._wakes()
                self._rests = False
            slab, extent = self._cut(nbytes, None, None, memory)
            assert not extent.fences, "memory that streams copy to and memory for leases come from different arenas"
            start = extent.start - slab.start
            view: Any = slab.buffer[start : start + nbytes]
            # The storage holds this very view until it is freed, so the view's death is the storage's.
            record = HostSlotRecord(view, self._on_return)
            record.nbytes, record.fences = nbytes, ()
            self._register(record, slab, extent, None)
        return torch.frombuffer(view, dtype=torch.uint8)

    def _refuse_growth_in_growth(self) -> None:
        if self._growth.is_held():  # see [Note: reentry] in forking.py
            raise reentered()

    def _grown(self, take: Callable[..., T], quota: Quota | None = None) -> T:
        """What ``take`` makes of a new slab for ``quota``: see [Note: growth]. Without the lock.

        Raises:
            MemoryError, RuntimeError: the system has no room.
        """
        with self._growth.lock:
            try:
                return take()
            except _NewSlab as slab:
                wanted, least = slab.wanted, slab.least
            return take(memory=self._new_memory(wanted, least, quota))

    def _new_memory(self, wanted: int, least: int, quota: Quota | None) -> Tensor:
        for size in dict.fromkeys((wanted, least)):  # a smaller one costs less than what is idle and was pinned
            try:
                return self._admitted(size, quota)
            except (MemoryError, RuntimeError):
                continue
        self.release_idle()
        return self._admitted(least, quota)

    def _admitted(self, nbytes: int, quota: Quota | None) -> Tensor:
        try:
            self._admit(nbytes)
        except NoHeadroomError as error:
            if quota is None or quota.pooled:
                raise
            quota.overdraft = error.shortage
        return self._allocate_slab(nbytes)

    @property
    def is_given(self) -> bool:
        """Whether users gave some of its budgets in bytes: what they hold stays, however short the machine is."""
        return any(not quota.pooled for quota in self._quotas)

    def raise_budget(self, quota: Quota, budget: int) -> None:
        """From now on ``quota`` may hold ``budget`` bytes, if that is more than before."""
        with self._lock.lock:
            quota.budget = max(quota.budget, budget)

    def take(self, nbytes: int, quota: Quota) -> None:
        """Takes memory from the system until ``quota`` has ``nbytes`` bytes, in slots or free; see the note.

        Raises:
            MemoryError, RuntimeError: its budget, the limit of all, or the system has no room for so much. What was
                taken before that stays.
        """
        if self._lock.is_held() or self._growth.is_held():
            raise reentered()
        with self._growth.lock:
            while (size := self._untaken(nbytes, quota)) > 0:
                memory = self._admitted(size, quota)
                with self._lock.lock:
                    self._is_changing = True
                    slab = self._slabs["reserved"].add(memory)
                    self._held += slab.nbytes
                    self._note_idle(slab)
                    self._idle_bytes = max(self._idle_bytes, nbytes)
                    self._is_changing = False

    def _untaken(self, nbytes: int, quota: Quota) -> int:
        """The size of the next slab to be reserved; 0 for none. Without the lock."""
        with self._lock.lock:
            self._poll()
            missing, limit = nbytes - (self._held - self._used + quota.used_bytes), self._limit(None)
            if missing <= 0:
                return 0
            if nbytes > quota.budget or (limit is not None and self._held + missing > limit):
                raise OverBudgetError(f"{nbytes} bytes would go beyond the budget of {quota.budget} bytes")
            return self._sizes.within(PAGE, min(missing + -missing % PAGE, _RESERVED_BYTES))

    def restart_peak(self, quota: Quota) -> None:
        """Measures anew how much of ``quota`` is used at most."""
        self.poll()
        with self._lock.lock:
            quota.peak_bytes = quota.used_bytes

    def poll(self) -> None:
        """Takes up the slots that have died and gives back to the system what is idle beyond ``idle_bytes``."""
        if not self._lock.is_held():  # in the midst of a change a later call does; see [Note: reentry] in forking.py
            with self._lock.lock:
                self._poll()

    def rest(self) -> None:
        """Keeps nothing until the next lease; see [Note: rest]. Only for an arena that nothing but leases come from."""
        with self._lock.lock:
            self._poll()
            self._release_idle(0)
            self._is_changing = True
            for record in self._records:
                cast(HostSlotRecord, record).slab.leave()
            self._new_slabs()
            self._is_changing, self._rests = False, True

    def release_idle(self, keep: int = 0) -> None:
        """Gives what is idle back to the system, but for ``keep`` bytes."""
        with self._lock.lock:
            self._poll()
            self._release_idle(keep)

    @property
    def used_bytes(self) -> int:
        """Bytes in slots and leases that are alive, as they were asked for."""
        self.poll()
        return self._used

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        self.poll()
        return self._held

    @property
    def idle_bytes(self) -> int:
        """Bytes of slabs in which nothing is alive."""
        self.poll()
        return self._idle_now

    def close(self) -> None:
        """Gives back what is idle, and keeps nothing idle from now on. Idempotent.

        Slots that die later go back at the next ``poll()``, or when the arena and the last of them are gone. Let all
        transfers end before the arena goes: nothing then asks whether the fences have passed.
        """
        with self._lock.lock:
            self.is_closed = True
            self._poll()

    # -- with the lock held ---------------------------------------------------------------------------------------

    def _cut(self, nbytes: int, limit: int | None, quota: Quota | None, memory: Tensor | None) -> tuple[Slab, Extent]:
        """Room for ``nbytes``; the change goes on until what it is for is registered.

        Args:
            memory: a slab that the system has given for it.

        Raises:
            OverBudgetError: there is none.
            _NewSlab: there would be in such a slab.
        """
        if self.returned or self._is_changing:
            self._poll()
        slabs = self._slabs["whole" if nbytes >= self._sizes.alone_from else "page" if nbytes >= PAGE else "line"]
        size = nbytes + -nbytes % slabs.alignment
        if quota is not None and quota.held_bytes + size > quota.budget:
            raise OverBudgetError(f"{nbytes} more bytes would go beyond the budget of {quota.budget} bytes")
        self._is_changing = True
        if memory is not None:  # nothing polls before it is cut: that would give it back if little may be idle
            slab = slabs.add(memory)
            self._held += slab.nbytes
            self._note_idle(slab)
        fitting = self._fitting(size, nbytes) if slabs.kind == "whole" else size
        extent = None if fitting is None else slabs.extents.allocate(fitting)
        if extent is None and nbytes >= PAGE:
            slabs = self._slabs["reserved"]
            extent = slabs.extents.allocate(size)
        if extent is None:
            self._is_changing = False
            raise self._new_slab(size, limit)
        self.served_bytes += nbytes
        return slabs.slabs[bisect_right(slabs.starts, extent.start) - 1], extent

    def _fitting(self, size: int, nbytes: int) -> int | None:
        """The size of the idle slab that serves a request which gets one of its own; ``None`` for a new one."""
        found = self._slabs["whole"].extents.smallest_free(size)
        if found is None or found == size:
            return found
        slack = found - nbytes
        affordable = self._slack + slack <= (self._used + nbytes) // _TOTAL_SLACK
        return found if slack <= size // _SLACK and affordable else None

    def _register(self, record: HostSlotRecord, slab: Slab, extent: Extent, quota: Quota | None) -> None:
        """What ``record`` watches is alive from now on."""
        record.slab, record.extent, record.quota = slab, extent, quota
        self._records.add(record)
        if slab.slots == 0:
            del self._idle[slab]
            self._idle_now -= slab.nbytes
        slab.slots += 1
        self._used += record.nbytes
        if slab.kind == "whole":
            self._slack += slab.nbytes - record.nbytes
        if quota is not None:
            used = quota.used_bytes = quota.used_bytes + record.nbytes
            if used > quota.peak_bytes:
                quota.peak_bytes = used
            quota.held_bytes += extent.nbytes
        self._is_changing = False

    def _new_slab(self, need: int, limit: int | None) -> _NewSlab:
        """A slab of the size that ``need`` calls for, or of a smaller one where that is all there is room for.

        Raises:
            OverBudgetError: there is none.
        """
        wanted, limit = self._sizes.wanted(need, self._held), self._limit(limit)
        if limit is not None and self._held + wanted > limit:
            self._release_idle(0)
            wanted = min(wanted, self._sizes.within(need, limit - self._held))
            if wanted <= 0:
                raise OverBudgetError(f"{need} more bytes would go beyond the limit of {limit} bytes")
        return _NewSlab(wanted, self._sizes.least(need))

    def _limit(self, limit: int | None) -> int | None:
        """The least of ``limit`` and of what the quotas come to; ``None`` where nothing bounds it."""
        quotas = list(self._quotas)
        if not quotas:
            return limit
        pooled = max((quota.budget for quota in quotas if quota.pooled), default=0)
        bound = pooled + sum(quota.budget for quota in quotas if not quota.pooled)
        return bound if limit is None else min(bound, limit)

    def _poll(self) -> None:
        if self._is_changing:
            self._recover()
        while self.returned:
            record: Any = self.returned[0]
            if record in self._records:
                self._is_changing = True
                slab, extent, quota = record.slab, record.extent, record.quota
                slab.slots -= 1
                self._used -= record.nbytes
                if slab.kind == "whole":
                    self._slack -= slab.nbytes - record.nbytes
                if quota is not None:
                    quota.used_bytes -= record.nbytes
                    quota.held_bytes -= extent.nbytes
                if not slab.is_left:
                    if record.fences is not extent.fences:
                        extent = Extent(extent.start, extent.nbytes, record.fences)
                    self._slabs[slab.kind].extents.release(extent)
                    if slab.slots == 0:
                        self._note_idle(slab)
                elif slab.slots == 0:
                    self._held -= slab.nbytes
                self._records.discard(record)
                self._is_changing = False
            self.returned.popleft()
        keep = 0 if self.is_closed else self._idle_bytes
        if self._idle_now > keep:
            self._release_idle(keep)

    def _note_idle(self, slab: Slab) -> None:
        self._idle[slab] = None
        self._idle_now += slab.nbytes

    def _release_idle(self, keep: int) -> None:
        """Returns idle slabs to the system, the oldest first, until ``keep`` idle bytes are left."""
        if self._let_go(keep):
            self._given_back()

    def _let_go(self, keep: int) -> bool:
        """Drops idle slabs that no transfer can touch any more; whether any. No reference to them is left then."""
        self._is_changing = True
        excess, found = self._idle_now - keep, []
        for slab in self._idle:
            if excess <= 0:
                break
            if self._slabs[slab.kind].extents.is_at_rest(slab.start, slab.nbytes):
                found.append(slab)
                excess -= slab.nbytes
        for slab in found:
            self._slabs[slab.kind].remove(slab)
            del self._idle[slab]
            self._idle_now -= slab.nbytes
            self._held -= slab.nbytes
        self._is_changing = False
        return bool(found)

    def _recover(self) -> None:
        """See [Note: interrupted changes]."""
        records = [cast(HostSlotRecord, one) for one in self._records]
        quotas = {*self._quotas, *[record.quota for record in records if record.quota is not None]}
        slabs = {record.slab for record in records}
        for kind, all_of_kind in self._slabs.items():
            taken = [record.extent for record in records if record.slab.kind == kind and not record.slab.is_left]
            slabs.update(all_of_kind.free_but_for(taken))
        for quota in quotas:
            quota.reset()
        self._held, self._used, self._slack = sum(slab.nbytes for slab in slabs), 0, 0
        self._idle, self._idle_now = {}, 0
        for slab in slabs:
            slab.slots = 0
            self._note_idle(slab)
        for record in records:
            self._register(record, record.slab, record.extent, record.quota)
        self._is_changing = False


def note_refusal(error: Exception, quota: Quota | None) -> None:
    """Tells ``quota`` why it is given nothing; its budget is the reason where no more is said."""
    if quota is None:
        return
    if isinstance(error, OverBudgetError):
        quota.refusal = None
    elif isinstance(error, NoHeadroomError):
        quota.refusal = error.shortage
    else:
        text = str(error).partition("\n")[0]
        remedy = "end other programs that take memory, or set a lower host_budget"
        quota.refusal = Shortage(f"the system refused it ({text})", remedy)
