"""The pool of bytes: ranges of slabs, handed out in exact sizes and used again.

The allocators of torch round a pinned block up to a power of two and keep it, and allocating each block from the
system costs milliseconds when it has to be pinned. So memory is taken in slabs, cut to size here, and given back a slab
at a time. ``Ranges`` says which bytes are free, for host memory and for spill files alike; ``Pool`` is that with the
slabs of host memory, what bounds them, and the slots and leases that own ranges.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from eager_offload.errors import reentered
from eager_offload.tiers.base import Fence, MustGrow, Shortage, Slot
from eager_offload.tiers.finalizers import FinalizerRecord, Living
from eager_offload.tiers.forking import LEFT_TO_THE_PARENT, ForkSafeLock, tell_after_fork
from eager_offload.tiers.guard import NoHeadroomError
from eager_offload.tiers.memory import PAGE, anonymous_slab
from eager_offload.tiers.slabs import ExactSizes, HostSlab, HostSlot, HostSlotRecord, Quota, Range, Slab, SlabSizes

S = TypeVar("S", bound=Slab)
T = TypeVar("T")

#: Bytes; requests below a page share slabs of their own, cut to multiples of this.
_LINE = 64
#: What a slab is for: one slot; slots from a page on, or below; what is reserved.
_WHOLE, _PAGES, _LINES, _RESERVED = "whole", "pages", "lines", "reserved"
#: An idle slab serves a request that is smaller by at most this part, while all such slack is below that part of what
#: is used.
_SLACK, _TOTAL_SLACK = 8, 32
#: Bytes; the largest slab of what is reserved. To pin it takes seconds, in which nothing can interrupt the process.
_RESERVED_BYTES = 16 << 30


#: Of what has the serial number of a slab and a start.
_PLACE = itemgetter(0, 1)


# -- which bytes are free -------------------------------------------------------------------------------------------


class Ranges(Generic[S]):
    """The free ranges of slabs that are cut in one way. Not thread-safe: the owner has a lock anyway.

    [Note: which bytes a request gets]
    A training step asks for the sizes of the step before. So a range that comes back is kept as it is, by size, with
    the uses of it that may not be over. A request takes

    1. the range of exactly its size that came back last: a dict lookup and a pop;
    2. else a part of the smallest free range that holds it and that nothing uses (the first of several);
    3. else the same, once ranges that came back and whose uses are over have been joined with their neighbours;
    4. else a part of the smallest range that is still in use: it waits for the uses of that range alone. If all were
       joined first, one reload at the end of a long free range would hold up every offload into it;
    5. else the same, once all that is free has been joined, whether it is in use or not.
    """

    __slots__ = ("_back", "_free", "_last")

    def __init__(self) -> None:
        #: What nothing uses, in order: size, serial number of the slab, start. Records would be a call each.
        self._free: list[tuple[int, int, int, S]] = []
        #: What came back and was not joined yet, by size.
        self._back: dict[int, list[Range[S]]] = {}
        #: The uses of what was taken last: after an interrupt, nothing else may know of them.
        self._last: tuple[Fence, ...] = ()

    @property
    def fences(self) -> tuple[Fence, ...]:
        """The uses that are not over of what is free or was taken last."""
        ranges = [one for same in self._back.values() for one in same]
        return pending([*self._last, *[fence for one in ranges for fence in one.fences]])

    def give(self, one: Range[S]) -> None:
        """Takes back a range with its uses, or takes up a new one."""
        self._back.setdefault(one.nbytes, []).append(one)

    def take(self, nbytes: int) -> Range[S] | None:
        """``nbytes`` bytes, with the fences to wait for before writing them, of which one may have passed.

        Returns:
            ``None`` if no range is large enough.
        """
        same = self._back.get(nbytes)
        if same:
            found = same[-1]
            self._last = found.fences
            same.pop()
            # Those that have passed do not add up.
            return found if len(found.fences) < 2 else found._replace(fences=pending(found.fences))
        for joined in ("nothing", "what is at rest", "all"):
            if joined != "nothing":
                self.join(used=joined == "all")
            at = bisect_left(self._free, (nbytes,))
            if at < len(self._free):
                size, serial, start, slab = self._free.pop(at)
                if size > nbytes:
                    insort(self._free, (size - nbytes, serial, start + nbytes, slab))
                return Range(slab, start, nbytes, ())
            if joined != "nothing" and (used := self._cut_used(nbytes)) is not None:
                return used
        return None

    def smallest(self, nbytes: int) -> int | None:
        """The size of the smallest range that holds ``nbytes``, as they are."""
        at = bisect_left(self._free, (nbytes,))
        sizes = [size for size, same in self._back.items() if size >= nbytes and same]
        return min([*sizes, *[one[0] for one in self._free[at : at + 1]]], default=None)

    def free_before(self, stop: int) -> int:
        """The bytes that are free right before ``stop``, of the only slab; where ``take`` has found no range."""
        free = [(start, nbytes) for nbytes, _, start, _ in self._free]
        back = [(one.start, one.nbytes) for same in self._back.values() for one in same]
        return max([nbytes for start, nbytes in free + back if start + nbytes == stop], default=0)

    def withdraw(self, slab: S) -> bool:
        """Takes out a slab that is free as a whole, if nothing uses it; after a ``join``."""
        at = bisect_left(self._free, (slab.nbytes, slab.serial))
        if at == len(self._free) or self._free[at][:2] != (slab.nbytes, slab.serial):
            return False
        del self._free[at]
        return True

    def join(self, *, used: bool = False) -> None:
        """Joins what came back with its free neighbours, if its uses are over; or whether they are or not."""
        self._last = ()  # it has an owner by now
        left: dict[int, list[Range[S]]] = {}
        found: list[tuple[int, int, int, S, tuple[Fence, ...]]] = []
        for nbytes, same in self._back.items():
            for at, one in enumerate(same):
                fences = pending(one.fences) if one.fences else ()
                if fences and not used:  # later ones are in use for longer, and each question is a call of the driver
                    left[nbytes] = same[at:]
                    break
                found.append((one.slab.serial, one.start, nbytes, one.slab, fences))
        if not found:
            return
        found += [(serial, start, nbytes, slab, ()) for nbytes, serial, start, slab in self._free]
        found.sort(key=_PLACE)
        joined: list[Range[S]] = []
        for _, start, nbytes, slab, fences in found:
            before = joined[-1] if joined else None
            if before is not None and before.slab is slab and before.start + before.nbytes == start:
                fences = pending(before.fences + fences) if before.fences else fences
                joined[-1] = Range(slab, before.start, before.nbytes + nbytes, fences)
            else:
                assert before is None or before.slab is not slab or before.start + before.nbytes < start, "given twice"
                joined.append(Range(slab, start, nbytes, fences))
        for one in joined:
            if one.fences:
                left.setdefault(one.nbytes, []).append(one)
        self._free = sorted([(one.nbytes, one.slab.serial, one.start, one.slab) for one in joined if not one.fences])
        self._back = left

    def _cut_used(self, nbytes: int) -> Range[S] | None:
        size = min([size for size, same in self._back.items() if size >= nbytes and same], default=0)
        if not size:
            return None
        slab, start, _, fences = self._back[size][-1]
        self._last = fences
        self._back[size].pop()
        if size > nbytes:
            self.give(Range(slab, start + nbytes, size - nbytes, fences))
        return Range(slab, start, nbytes, pending(fences))


def pending(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """The fences that have not passed, each once."""
    return tuple([fence for fence in dict.fromkeys(fences) if not fence.passed()])


# -- host memory ----------------------------------------------------------------------------------------------------


class OverBudgetError(MemoryError):
    """What was asked for would go beyond what may be held."""


class _NewSlab(MustGrow):
    """A slab of ``wanted`` bytes is needed, or where the system has no room for that, one of ``least`` bytes."""

    def __init__(self, wanted: int, least: int) -> None:
        super().__init__(wanted, least)
        self.wanted, self.least = wanted, least


class Pool:
    """Cuts slabs of host memory into slots and leases of exact sizes. Thread-safe.

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

    [Note: slabs that are left]
    Nothing more is cut from a slab that is *left*. It goes back to the system with the last slot in it, once the uses
    of all that was in it are over. All slabs are left in two cases.

    A pool of leases *rests*: after a graph is gone there may be no further call, so a slab is then held by the leases
    in it alone, and goes with the last without one. The next lease begins anew, and ``wakes`` says so.

    A pool *crashes*: an exception that is not the library's own, a KeyboardInterrupt say, comes in the midst of a
    change. What is free is not known then, but what is alive is, by its records, and which uses go on. So the next
    call counts what is alive and begins with new slabs.

    [Note: quotas]
    Several tiers may share a pool, and what is idle in it serves all of them. Each has a budget for the slots that
    it has alive. The budgets bound all that the pool holds too: those that are pooled, since each is the same part of
    the same machine, as if they were one; those in bytes that a user gave, added up.

    [Note: growth]
    The system takes long to give a slab: its pages have to be there, and pinned. So the lock is not held meanwhile, and
    threads that need no slab go on. Another lock has one thread grow at a time. A second one that has waited for it
    looks again, since what is left of the new slab may do. No other thread makes ``held`` grow meanwhile, so a size
    that was within the limit before is within it after. The slab is added in the change that cuts the first slot from
    it. Until then it is a tensor of one thread, which nothing counts and which goes back with an interrupt.

    Args:
        allocate_slab: takes bytes and returns a flat ``uint8`` CPU tensor of that size, page-aligned, whose memory goes
            back with its storage. Raises ``MemoryError`` or ``RuntimeError`` where there is none.
        slab_bytes: the largest slab that is shared.
        idle_bytes: how much idle memory is kept for reuse.
        sizes: how large slabs are, in place of ``slab_bytes``.
        admit: is asked before so many bytes are taken from the system, and raises ``NoHeadroomError`` where too little
            would be left. A quota that a user gave in bytes is given them all the same, and has the reason.
        given_back: is called when slabs have gone back to the system, with the pool's lock held.
        wakes: is called with the first lease and with the first one after a rest, with the pool's lock held.
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
        #: What several tiers that want one pool know it by; ``None`` for one that is not to be shared.
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
        #: See [Note: slabs that are left]; and the uses of what was in them.
        self._left: dict[HostSlab, None] = {}
        self._left_fences: tuple[Fence, ...] = ()
        #: Bytes of all slabs; of what is alive, as it was asked for; by which slabs of one slot are larger than that.
        self._held = self._used = self._slack = 0
        self._is_crashed = False
        self._rests = True
        #: Bytes of all requests so far.
        self.served_bytes = 0
        self._begin()

    def _begin(self) -> None:
        """With no slabs to cut from."""
        self._ranges = {kind: Ranges[HostSlab]() for kind in (_WHOLE, _PAGES, _LINES, _RESERVED)}
        self._slabs: dict[HostSlab, None] = {}
        #: Slabs without slots, the one that has been idle for longest first, and their bytes.
        self._idle: dict[HostSlab, None] = {}
        self._idle_now = 0

    def after_fork(self) -> None:
        """The child starts with an empty pool; it has slots from before the fork as copies, but for pinned ones."""
        LEFT_TO_THE_PARENT.extend([self.returned, self._records, self._slabs, self._left])
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
        with self._lock.lock, self._crashing():
            self._quotas.discard(quota)
            self.is_closed = not self._quotas
            self._poll()
            limit = self._limit(None)
            if limit is not None and self._held > limit:
                self._release_idle(max(self._idle_now - (self._held - limit), 0))

    def allocate(self, nbytes: int, *, limit: int | None = None, quota: Quota | None = None) -> HostSlot | None:
        """A slot of ``nbytes`` bytes, or ``None`` where ``limit``, ``quota`` or the system has no room.

        Args:
            limit: what the pool may hold with the new slot, in bytes.
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
                found = self._take(nbytes, limit, quota, memory)
                slot = HostSlot(found, nbytes, self._on_return, quota)
                self._records.add(slot.record)
            except MustGrow:
                raise
            except (MemoryError, RuntimeError) as error:
                self._is_crashed |= not isinstance(error, OverBudgetError)
                note_refusal(error, quota)
                return None
            except BaseException:
                self._is_crashed = True
                raise
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
            try:
                if self._rests:
                    self._wakes()
                    self._rests = False
                found = self._take(nbytes, None, None, memory)
                assert not found.fences, "memory that streams copy to and memory for leases come from different pools"
                view: Any = found.slab.buffer[found.start : found.start + nbytes]
                # The storage holds this very view until it is freed, so the view's death is the storage's.
                record = HostSlotRecord(view, self._on_return)
                record.nbytes, record.fences, record.range, record.quota = nbytes, (), found, None
                self._records.add(record)
            except (MustGrow, OverBudgetError):
                raise
            except BaseException:
                self._is_crashed = True
                raise
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

    def reserve(self, nbytes: int, quota: Quota) -> None:
        """Takes memory from the system until ``quota`` has ``nbytes`` bytes, in slots or free; see the note.

        Raises:
            MemoryError, RuntimeError: its budget, the limit of all, or the system has no room for so much. What was
                taken before that stays.
        """
        if self._lock.is_held() or self._growth.is_held():
            raise reentered()
        with self._growth.lock:
            while (size := self._unreserved(nbytes, quota)) > 0:
                memory = self._admitted(size, quota)
                with self._lock.lock, self._crashing():
                    self._idle_bytes = max(self._idle_bytes, nbytes)
                    self._add(memory, _RESERVED)

    def _unreserved(self, nbytes: int, quota: Quota) -> int:
        """The size of the next slab to be reserved; 0 for none. Without the lock."""
        with self._lock.lock, self._crashing():
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
            with self._lock.lock, self._crashing():
                self._poll()

    def rest(self) -> None:
        """Keeps nothing until the next lease; see [Note: slabs that are left]. Only for a pool of leases alone."""
        with self._lock.lock, self._crashing():
            self._poll()
            self._release_idle(0)
            self._left |= self._slabs
            for slab in self._left:
                slab.leave()
            self._begin()
            self._rests = True

    def release_idle(self, keep: int = 0) -> None:
        """Gives what is idle back to the system, but for ``keep`` bytes."""
        with self._lock.lock, self._crashing():
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

        Slots that die later go back at the next ``poll()``, or when the pool and the last of them are gone. Let all
        transfers end before the pool goes: nothing then asks whether the fences have passed.
        """
        with self._lock.lock, self._crashing():
            self.is_closed = True
            self._poll()

    # -- with the lock held ---------------------------------------------------------------------------------------

    @contextmanager
    def _crashing(self) -> Iterator[None]:
        """Around a change: an exception that is not the pool's own crashes it."""
        try:
            yield
        except (MustGrow, OverBudgetError):
            raise
        except BaseException:
            self._is_crashed = True
            raise

    def _take(self, nbytes: int, limit: int | None, quota: Quota | None, memory: Tensor | None) -> Range[HostSlab]:
        """Takes a range for ``nbytes`` and counts it; the caller registers its record.

        Args:
            memory: a slab that the system has given for it.

        Raises:
            OverBudgetError: there is no room.
            _NewSlab: there would be in such a slab.
        """
        if self.returned or self._left or self._is_crashed:
            self._poll()
        kind = _PAGES if nbytes >= PAGE else _LINES
        if nbytes >= self._sizes.alone_from:
            kind = _WHOLE
        size = nbytes + -nbytes % (PAGE if kind != _LINES else _LINE)
        if quota is not None and quota.held_bytes + size > quota.budget:
            raise OverBudgetError(f"{nbytes} more bytes would go beyond the budget of {quota.budget} bytes")
        if memory is not None:  # nothing polls before it is cut: that would give it back if little may be idle
            self._add(memory, kind)
        ranges = self._ranges[kind]
        fitting = self._fitting(size, nbytes) if kind == _WHOLE else size
        found = None if fitting is None else ranges.take(fitting)
        if found is None and kind != _LINES:
            found = self._ranges[_RESERVED].take(size)
        if found is None:
            raise self._new_slab(size, limit)
        slab = found.slab
        if slab.slots == 0:
            del self._idle[slab]
            self._idle_now -= slab.nbytes
        slab.slots += 1
        self.served_bytes += nbytes
        self._used += nbytes
        if slab.kind == _WHOLE:
            self._slack += slab.nbytes - nbytes
        if quota is not None:
            quota.held_bytes += found.nbytes
            used = quota.used_bytes = quota.used_bytes + nbytes
            if used > quota.peak_bytes:
                quota.peak_bytes = used
        return found

    def _fitting(self, size: int, nbytes: int) -> int | None:
        """The size of the idle slab that serves a request which gets one of its own; ``None`` for a new one."""
        found = self._ranges[_WHOLE].smallest(size)
        if found is None or found == size:
            return found
        slack = found - nbytes
        affordable = self._slack + slack <= (self._used + nbytes) // _TOTAL_SLACK
        return found if slack <= size // _SLACK and affordable else None

    def _add(self, memory: Tensor, kind: str) -> None:
        """Takes up what the system has given."""
        slab = HostSlab(memory, kind)
        self._slabs[slab] = self._idle[slab] = None
        self._ranges[kind].give(Range(slab, 0, slab.nbytes, ()))
        self._held += slab.nbytes
        self._idle_now += slab.nbytes

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
        if self._is_crashed:
            self._begin_after_a_crash()
        if self.returned:
            self._take_back()
        if self._left and self._let_left_go():
            self._given_back()
        keep = 0 if self.is_closed else self._idle_bytes
        if self._idle_now > keep:
            self._release_idle(keep)

    def _take_back(self) -> None:
        """Takes up what has died."""
        while self.returned:
            record: Any = self.returned[0]
            if record in self._records:
                found = record.range
                slab = found.slab
                slab.slots -= 1
                self._used -= record.nbytes
                if slab.kind == _WHOLE:
                    self._slack -= slab.nbytes - record.nbytes
                if (quota := record.quota) is not None:
                    quota.used_bytes -= record.nbytes
                    quota.held_bytes -= found.nbytes
                if slab in self._left:
                    self._left_fences += record.fences
                else:
                    if record.fences is not found.fences:
                        found = Range(slab, found.start, found.nbytes, record.fences)
                    self._ranges[slab.kind].give(found)
                    if slab.slots == 0:
                        self._idle[slab] = None
                        self._idle_now += slab.nbytes
                self._records.discard(record)
            self.returned.popleft()

    def _release_idle(self, keep: int) -> None:
        """Returns idle slabs to the system, the oldest first, until ``keep`` idle bytes are left."""
        if self._let_idle_go(keep):
            self._given_back()

    def _let_idle_go(self, keep: int) -> bool:
        """Drops idle slabs that no transfer can touch any more; whether any. No reference to them is left then."""
        excess, found = self._idle_now - keep, False
        for kind in {slab.kind for slab in self._idle} if excess > 0 else ():
            self._ranges[kind].join()
        for slab in list(self._idle):
            if excess <= 0:
                break
            if self._ranges[slab.kind].withdraw(slab):
                del self._slabs[slab], self._idle[slab]
                self._idle_now -= slab.nbytes
                self._held -= slab.nbytes
                excess -= slab.nbytes
                found = True
        return found

    def _let_left_go(self) -> bool:
        """The same for slabs that are left; see the note."""
        self._left_fences = pending(self._left_fences)
        empty = [] if self._left_fences else [slab for slab in self._left if slab.slots == 0]
        for slab in empty:
            del self._left[slab]
            self._held -= slab.nbytes
        return bool(empty)

    def _begin_after_a_crash(self) -> None:
        """See [Note: slabs that are left]."""
        dead = [record for record in self._records if record() is None]
        fences = [fence for record in dead for fence in cast(HostSlotRecord, record).fences]
        fences += [fence for ranges in self._ranges.values() for fence in ranges.fences]
        self._left_fences = pending([*self._left_fences, *fences])
        self._records.difference_update(dead)
        records = [cast(HostSlotRecord, record) for record in self._records]
        self._left |= self._slabs | dict.fromkeys([record.range.slab for record in records])
        self._held, self._used, self._slack = sum(slab.nbytes for slab in self._left), 0, 0
        for slab in self._left:
            slab.slots = 0
        for quota in {*self._quotas, *[record.quota for record in records if record.quota is not None]}:
            quota.reset()
        for record in records:
            slab, quota = record.range.slab, record.quota
            slab.slots += 1
            self._used += record.nbytes
            if slab.kind == _WHOLE:
                self._slack += slab.nbytes - record.nbytes
            if quota is not None:
                quota.used_bytes += record.nbytes
                quota.held_bytes += record.range.nbytes
        self._begin()
        self._is_crashed = False


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
