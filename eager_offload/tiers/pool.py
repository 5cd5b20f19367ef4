"""A pool of host memory: cuts slabs into slots and leases of exact sizes, and reuses them.

torch's allocators round a pinned block up to a power of two and keep it, and pinning each block by itself takes
milliseconds. So the pool takes memory in slabs, cuts them to size (``Ranges``), and frees whole slabs.

[Note: quotas]
Several tiers may share a pool and its idle memory. A budget in bytes limits the living slots of its tier. If all
budgets are in bytes, their sum limits the memory of the pool. Automatic budgets count as one, which is checked before
each new slab (``HostBound``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, cast, overload

import torch
from torch import Tensor

from eager_offload.errors import HostAllocationUnderCaptureError, OffloadError, reentered
from eager_offload.tiers.base import (
    Cutter,
    Fence,
    MustGrow,
    NoRoomError,
    Range,
    Ranges,
    Shortage,
    Slab,
    Slot,
    SlotRecord,
    pending,
)
from eager_offload.tiers.forking import LEFT_TO_THE_PARENT, FinalizerRecord, Living, tell_after_fork
from eager_offload.tiers.limits import HostBound
from eager_offload.tiers.memory import PAGE, anonymous_slab, move, move_if_there, view_of

#: A new slab for several requests is at most a 32nd of the memory held, so that the unused rest of the newest is small.
_SHARE = 32
#: ... but at least this many bytes: smaller slabs cost more in system calls than they save in memory.
_LEAST = 1 << 20


class ExactSizes:
    """Slab sizes for a system that allocates exact sizes; ``most`` bytes at most for several requests."""

    def __init__(self, most: int) -> None:
        self._most = most

    def wanted(self, need: int, held: int) -> int:
        """Returns the preferred size of a new slab for requests of ``need`` bytes, with ``held`` bytes in the pool."""
        most = min(max(held // _SHARE, _LEAST), self._most)
        return max(most // need, 1) * need

    def within(self, need: int, room: int) -> int:
        """Returns the largest size up to ``room``, or 0 if that is less than ``need``."""
        return room // need * need

    def least(self, need: int) -> int:
        """Returns the smallest possible size for ``need`` bytes."""
        return need


class PowersOfTwo:
    """Slab sizes for a system that rounds up to powers of two, as torch's allocator of pinned memory does.

    Every slab is a power of two, so that rounding wastes nothing. A slab ends in an unused rest unless its size is a
    multiple of the request; only smaller requests can use the rest. The size is the smallest power of two whose rest is
    at most a 20th of it. If that would more than double a pool (and exceed 1 GiB), the size with the smallest relative
    rest is taken.
    """

    _LEAST, _SHARE, _FREELY = 1 << 20, 8, 1 << 30
    _LEFT_OVER = 20

    def wanted(self, need: int, held: int) -> int:
        most = max(self._FREELY, _power_of_two(held + 1) // 2)
        best = size = max(self.least(need), min(max(_power_of_two(held // self._SHARE), self._LEAST), self._FREELY))
        while size <= most:
            if size % need * self._LEFT_OVER <= size:
                return size
            if size % need * best < best % need * size:
                best = size
            size *= 2
        return best

    def within(self, need: int, room: int) -> int:
        size = _power_of_two(room + 1) // 2
        return size if size >= need else 0

    def least(self, need: int) -> int:
        return _power_of_two(need)


SlabSizes: TypeAlias = ExactSizes | PowersOfTwo


def _power_of_two(nbytes: int) -> int:
    """Returns the smallest power of two that is at least ``nbytes`` and at least a page."""
    return max(1 << max(nbytes - 1, 0).bit_length(), PAGE)


class HostSlab(Slab):
    __slots__ = ("address", "buffer", "slots", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.numel())
        self.tensor = tensor
        self.address = tensor.data_ptr()
        #: A buffer over the bytes, whose slices keep the memory alive.
        self.buffer = view_of(self.address, self.nbytes, tensor)
        #: Number of living slots and leases.
        self.slots = 0

    def retire(self) -> None:
        """Drops the memory, so that only slices of the buffer (leases) keep it alive. Idempotent."""
        with suppress(AttributeError):
            del self.tensor, self.buffer


class HostSlotRecord(SlotRecord):
    """The record of a slot or a lease."""

    __slots__ = ("quota",)
    quota: Quota | None


class HostSlot(Slot):
    """``nbytes`` bytes of host memory, aligned to ``PAGE``; made by ``Pool.take``."""

    tier: ClassVar[str] = "host"
    writes_storages = True
    __slots__ = ("slab", "start")
    slab: HostSlab
    start: int

    @property
    def address(self) -> int:
        return self.slab.address + self.start

    @property
    def tensor(self) -> Tensor:
        """The bytes as a flat ``uint8`` CPU tensor, for copies by a stream. Does not keep the slot alive."""
        return self.slab.tensor[self.start : self.start + self.nbytes]

    def write(self, source: Tensor | torch.UntypedStorage) -> None:
        assert not isinstance(source, Tensor) or source.numel() == self.nbytes
        move_if_there(self.address, source.data_ptr(), self.nbytes)

    def read(self, target: Tensor) -> None:
        assert target.numel() == self.nbytes
        move(target.data_ptr(), self.address, self.nbytes)

    def memory(self) -> memoryview:
        return view_of(self.address, self.nbytes, self)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Quota:
    """The memory of one tier in a pool, in bytes, and its budget. Guarded by the pool's lock."""

    #: Limit in bytes; ``None`` for an automatic budget (``HostBound``).
    budget: int | None
    #: The shortage to report if the budget is used up.
    over: Shortage
    #: The reason for the last refusal.
    refusal: Shortage = field(init=False)
    #: Whether a request was refused since ``HostTier`` last looked at the limits.
    is_refused: bool = False
    #: Highest ``used_bytes`` since ``restart_peak``.
    peak_bytes: int = 0
    #: The reason why ``HostBound`` would have refused memory that the budget in bytes allowed.
    overdraft: Shortage | None = None
    #: Bytes of living slots: requested, and rounded up to pages.
    used_bytes: int = 0
    held_bytes: int = 0

    def __post_init__(self) -> None:
        self.refusal = self.over

    def refuse(self, error: Exception) -> None:
        """Records that a request was refused, and why."""
        self.is_refused = True
        if isinstance(error, NoRoomError):
            self.refusal = error.shortage
        else:
            text = str(error).partition("\n")[0]
            remedy = "end other programs that take memory, or set a lower host_budget"
            self.refusal = Shortage(f"the system refused it ({text})", remedy)


Owner = TypeVar("Owner")

#: Reported for a request without a quota.
_FULL = Shortage("all that the pool may hold is in use", "raise host_budget")
#: Largest slab of ``reserve``, in bytes. Pinning it takes seconds, during which the process cannot be interrupted.
_RESERVED_BYTES = 16 << 30


class Pool(Cutter):
    """Cuts slabs of host memory into slots and leases of exact sizes. Thread-safe.

    [Note: cutting slabs]
    A request is rounded up to whole pages and takes a free range, or a part of one: see [Note: choosing a range] in
    ``base.py``. If none is large enough, the pool allocates a slab for as many such requests as fit into held/32 and
    into ``slab_bytes``, but at least one. Most tensors of a step have equal sizes, so such a slab has no unused end,
    and the last, partly empty slab is small. Slots do not span slabs.

    A slab without slots is idle. Up to ``idle_bytes`` of idle slabs are kept, since the next step requests the same
    sizes. Beyond that the oldest are freed, each after its fences have passed. Before a request fails, all are freed.

    Dead slots are collected at the next call of any method; ``poll()`` does nothing else.

    [Note: retired slabs]
    No slot is cut from a *retired* slab. It is freed after its last slot is returned and all copies that use it have
    finished. All slabs retire in two cases:

    1. A pool of leases *rests*. After a graph is gone, no further call may follow, so only its leases keep a slab
       alive, and the last lease frees it. The next lease starts with a new slab and calls ``on_first_use``.
    2. A pool *crashes*: a foreign exception (e.g. KeyboardInterrupt) interrupts a change. The free ranges are then
       unknown, but the records tell which slots are alive and which fences are pending. The next call recounts the
       living slots and starts with new slabs.

    [Note: growth]
    Allocating a slab is slow, because its pages are touched and pinned. We want other threads to continue, so the
    pool's lock is not held; a second lock lets one thread grow the pool at a time. A thread that has waited for this
    lock first tries the rest of the new slab. Since only one thread increases ``held``, a size that was within the
    limit before the allocation is within it afterwards. The slab joins the pool in the same change that cuts its first
    slot. Until then it is an uncounted tensor of one thread, which an interrupt frees.

    Args:
        allocate_slab: returns a flat, page-aligned ``uint8`` CPU tensor of the given size, whose memory is freed with
            its storage. Raises ``MemoryError`` or ``RuntimeError`` if there is none.
        slab_bytes: size of the largest slab for several requests.
        idle_bytes: idle memory that is kept for reuse, in bytes.
        sizes: slab sizes, in place of ``slab_bytes``.
        bound: admits or refuses each slab. For a quota in bytes a refusal is only recorded, as its ``overdraft``.
        on_freed: called after slabs were freed, with the pool's lock held.
        on_first_use: called for the first slot or lease, and the first after a rest, with the pool's lock held.
    """

    def __init__(
        self,
        allocate_slab: Callable[[int], Tensor] = anonymous_slab,
        *,
        slab_bytes: int = 64 << 20,
        idle_bytes: int = 256 << 20,
        sizes: SlabSizes | None = None,
        bound: HostBound | None = None,
        on_freed: Callable[[], object] = lambda: None,
        on_first_use: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self._allocate_slab = allocate_slab
        self._sizes = ExactSizes(slab_bytes) if sizes is None else sizes
        self._idle_bytes = idle_bytes
        self.bound = bound
        self._on_freed = on_freed
        self._on_first_use = on_first_use
        self._quotas: Living[Quota] = Living()
        #: Key by which tiers find a shared pool; ``None`` if the pool is private.
        self.kind: Hashable = None
        #: Whether all tiers have unregistered, so that no idle memory is kept.
        self.is_closed = False
        self._reset()
        if bound is not None:
            bound.join(self)
        tell_after_fork(self)

    def _reset(self) -> None:
        #: Records of dead slots and leases, until ``poll``: see [Note: slots give themselves back] in ``base.py``.
        self.returned: deque[FinalizerRecord[Slot]] = deque()
        #: Records of living slots and leases: see [Note: finalizers] in ``forking.py``.
        self._records: set[FinalizerRecord[Slot]] = set()
        #: Stored, since each attribute access makes another bound method.
        self._on_return = self.returned.append
        #: See [Note: retired slabs], with the fences of dead slots in these slabs.
        self._retired: dict[HostSlab, None] = {}
        self._retired_fences: tuple[Fence, ...] = ()
        #: Bytes of all slabs; bytes requested by living slots and leases.
        self._held = self._used = 0
        #: Bytes of the slab that a thread is allocating.
        self.coming = 0
        self._is_crashed = False
        self._rests = True
        #: Bytes of all requests so far.
        self.served_bytes = 0
        self._begin()

    def _begin(self) -> None:
        self._ranges = Ranges[HostSlab]()
        self._slabs: dict[HostSlab, None] = {}
        #: Bytes of slabs without slots: now, and at least since ``restart_idle``.
        self._idle_now = self.least_idle = 0

    def after_fork(self) -> None:
        """Empties the pool of the child, which has copies of earlier slots unless their pages are pinned."""
        LEFT_TO_THE_PARENT.extend([self.returned, self._records, self._slabs, self._retired])
        self._reset()
        for quota in self._quotas:
            quota.used_bytes = quota.held_bytes = 0

    def register(self, quota: Quota) -> None:
        with self._lock.lock:
            self._quotas.add(quota)
            self.is_closed = False

    def unregister(self, quota: Quota) -> None:
        """Removes a quota and frees idle memory that exceeds the remaining budgets. Slots live on. Idempotent."""
        with self._lock.lock, self._crashing():
            self._quotas.discard(quota)
            self.is_closed = not self._quotas
            self._poll()
            limit = self._limit()
            if limit is not None and self._held > limit:
                self._poll(max(self._idle_now - (self._held - limit), 0))
            if self.bound is not None:
                self.bound.update()

    def allocate(self, nbytes: int, quota: Quota | None = None) -> HostSlot | None:
        """Returns a slot of ``nbytes`` bytes, or ``None`` (for a reason that ``quota`` records)."""
        try:
            return self._grown(partial(self.take, nbytes, quota), quota)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, OffloadError) and not isinstance(error, HostAllocationUnderCaptureError):
                raise
            if quota is not None:
                quota.refuse(error)
            return None

    def lease(self, nbytes: int) -> Tensor:
        """Returns a flat ``uint8`` tensor of ``nbytes`` bytes, which return to the pool when its storage dies.

        The content is undefined.

        Raises:
            MemoryError, RuntimeError: the system has no room.
        """
        return self._grown(partial(self.take, nbytes, leased=True))  # type: ignore[return-value]  # of its first overload

    @overload
    def take(self, nbytes: int, quota: Quota | None = None, *, memory: Tensor | None = None) -> HostSlot | None: ...

    @overload
    def take(self, nbytes: int, *, leased: Literal[True], memory: Tensor | None = None) -> Tensor: ...

    def take(
        self, nbytes: int, quota: Quota | None = None, *, leased: bool = False, memory: Tensor | None = None
    ) -> HostSlot | Tensor | None:
        """Returns ``nbytes`` bytes of existing slabs, or of ``memory``; ``None`` if ``quota`` has no room.

        Args:
            quota: records the reason for a refusal.
            leased: whether to return a tensor as ``lease`` does, instead of a slot.
            memory: a new slab to add to the pool.

        Raises:
            MustGrow: there is room, but a new slab has to be allocated first.
            MemoryError, RuntimeError: without a quota: there is no room, or the pool has crashed.
        """
        if leased and nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        lock = self._lock.lock
        if lock._is_owned():
            raise reentered()
        with lock:
            try:
                if self.returned or self._retired or self._is_crashed:
                    self._poll()
                if self._rests:
                    self._on_first_use()
                    self._rests = False
                size = nbytes + -nbytes % PAGE
                if quota is not None and quota.budget is not None and quota.held_bytes + size > quota.budget:
                    raise NoRoomError(quota.over)
                if memory is not None:  # no poll before the cut: it might free the new slab as idle
                    self._add(memory)
                same = self._ranges.back.get(size) or self._ranges.fit(size)
                if not same:
                    raise self._new_slab(size, quota)
                found = same[-1]
                owner: HostSlot | Tensor
                slab, start, fences = found.slab, found.start, found.fences
                if leased:
                    assert not fences, "memory that streams copy to and memory for leases come from different pools"
                    # The storage keeps this view alive, so the view dies with the storage.
                    view: Any = slab.buffer[start : start + nbytes]
                    owner, record = torch.frombuffer(view, dtype=torch.uint8), HostSlotRecord(view, self._on_return)
                else:
                    owner = slot = HostSlot.__new__(HostSlot)  # saves the call of `Slot.__init__`
                    record = slot.record = HostSlotRecord(slot, self._on_return)
                    slot.nbytes, slot.slab, slot.start = nbytes, slab, start
                record.nbytes, record.range, record.quota = nbytes, found, quota
                record.fences = fences if len(fences) < 2 else pending(fences)  # so that passed fences do not pile up
                self._records.add(record)
                same.pop()  # only after the record is stored: an interrupt between would lose the range's fences
                if slab.slots == 0:
                    idle = self._idle_now = self._idle_now - slab.nbytes
                    if idle < self.least_idle:
                        self.least_idle = idle
                slab.slots += 1
                self.served_bytes += nbytes
                self._used += nbytes
                if quota is not None:
                    quota.held_bytes += size
                    used = quota.used_bytes = quota.used_bytes + nbytes
                    if used > quota.peak_bytes:
                        quota.peak_bytes = used
                return owner
            except MustGrow:
                raise
            except BaseException as error:
                self._is_crashed |= not isinstance(error, NoRoomError)
                if (
                    quota is None
                    or isinstance(error, OffloadError)
                    or not isinstance(error, MemoryError | RuntimeError)
                ):
                    raise
                self._count_lack(error)
                quota.refuse(error)
                return None

    def _grown(self, take: Callable[..., Owner], quota: Quota | None = None) -> Owner:
        """Calls ``take``, with a new slab if it raises ``MustGrow``: see [Note: growth].

        Raises:
            MemoryError, RuntimeError: the system has no room.
        """
        try:
            return take()
        except MustGrow:
            growth = self._growth
        if growth.is_held():  # see [Note: reentry] in forking.py
            raise reentered()
        with growth.lock:
            try:
                return take()
            except MustGrow as slab:
                wanted, least = slab.args
            with self._growing():
                return take(memory=self._new_memory(wanted, least, quota))

    def _new_memory(self, wanted: int, least: int, quota: Quota | None) -> Tensor:
        # The smaller size comes before freeing idle slabs: pinning that memory again would cost more.
        for size in dict.fromkeys((wanted, least)):
            with suppress(MemoryError, RuntimeError):
                return self._admitted(size, quota)
        self.release_idle()
        return self._admitted(least, quota)

    def _admitted(self, nbytes: int, quota: Quota | None) -> Tensor:
        if self.bound is not None:
            given = quota is not None and quota.budget is not None
            try:
                self.bound.admit(nbytes, self, given=given)
            except NoRoomError as error:
                if quota is None or not given:
                    raise
                quota.overdraft = error.shortage
        return self._allocate_slab(nbytes)

    @contextmanager
    def _growing(self) -> Iterator[None]:
        """Tells the bound that the allocation of a slab has ended, with or without a slab."""
        try:
            yield
        except NoRoomError as error:
            self._count_lack(error)
            raise
        finally:
            self.coming = 0
            if self.bound is not None:
                self.bound.update()

    def _count_lack(self, error: BaseException) -> None:
        """Counts refused bytes as lacking, if the bound refused them: called once the smallest size was refused too."""
        if self.bound is not None and isinstance(error, NoRoomError) and error.lacked:
            self.bound.lack(error.lacked)

    @property
    def bytes_by_machine(self) -> int | None:
        """Bytes held under automatic budgets; ``None`` if the pool has no such budget."""
        held = self._held - sum([one.held_bytes for one in self._quotas if one.budget is not None])
        return held if self._limit() is None and (held or self._quotas) else None

    @property
    def is_user_provided(self) -> bool:
        """Whether any quota has a budget in bytes: its memory is kept even if the machine runs short."""
        return any(quota.budget is not None for quota in self._quotas)

    def reserve(self, nbytes: int, quota: Quota) -> None:
        """Allocates slabs until ``quota`` has ``nbytes`` bytes in slots or free.

        Raises:
            MemoryError, RuntimeError: the budgets or the system have no room. Slabs allocated before are kept.
        """
        if self._lock.is_held() or self._growth.is_held():
            raise reentered()
        with self._growth.lock, self._growing():
            while True:
                with self._lock.lock, self._crashing():
                    self._poll()
                    missing, limit = nbytes - (self._held - self._used + quota.used_bytes), self._limit()
                    if missing <= 0:
                        return
                    if limit is not None and self._held + missing > limit:
                        raise NoRoomError(quota.over)
                    size = self._sizes.within(PAGE, min(missing + -missing % PAGE, _RESERVED_BYTES))
                memory = self._admitted(size, quota)
                with self._lock.lock, self._crashing():
                    self._idle_bytes = max(self._idle_bytes, nbytes)
                    self._add(memory)

    def restart_peak(self, quota: Quota) -> None:
        self.poll()
        with self._lock.lock:
            quota.peak_bytes = quota.used_bytes

    def rest(self) -> None:
        """Retires all slabs until the next lease: see [Note: retired slabs]. For pools of leases only."""
        with self._lock.lock, self._crashing():
            self._poll(0)
            self._retired |= self._slabs
            for slab in self._retired:
                slab.retire()
            self._begin()
            self._rests = True

    def release_idle(self, keep: int = 0) -> None:
        """Frees idle slabs down to ``keep`` bytes."""
        with self._lock.lock, self._crashing():
            self._poll(keep)

    def restart_idle(self) -> None:
        """Restarts ``least_idle`` from the bytes that are idle now."""
        with self._lock.lock:
            self.least_idle = self._idle_now

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        self.poll()
        return self._held

    @property
    def idle_bytes(self) -> int:
        """Bytes of slabs without living slots or leases."""
        self.poll()
        return self._idle_now

    # -- inside the lock ------------------------------------------------------------------------------------------

    def _add(self, memory: Tensor) -> None:
        slab = HostSlab(memory)
        self._slabs[slab] = None
        self._ranges.back[slab.nbytes].append(Range(slab, 0, slab.nbytes))
        self._held += slab.nbytes
        self._idle_now += slab.nbytes

    def _limit(self) -> int | None:
        """Returns the sum of the budgets in bytes; ``None`` if one of them is automatic or there is none."""
        quotas = list(self._quotas)
        budgets = [quota.budget for quota in quotas if quota.budget is not None]
        return sum(budgets) if budgets and len(budgets) == len(quotas) else None

    def _new_slab(self, need: int, quota: Quota | None) -> MustGrow:
        """Returns the preferred size of a new slab, capped by the limit, and the smallest size that holds ``need``.

        Raises:
            NoRoomError: the limit leaves no room for ``need``.
        """
        wanted, limit = self._sizes.wanted(need, self._held), self._limit()
        if limit is not None and self._held + wanted > limit:
            self._poll(0)
            wanted = min(wanted, self._sizes.within(need, limit - self._held))
            if wanted <= 0:
                raise NoRoomError(_FULL if quota is None else quota.over)
        elif self.bound is not None and quota is not None and quota.budget is None:
            self.bound.refuse_again(need)
        return MustGrow(wanted, self._sizes.least(need))

    def _poll(self, keep: int | None = None) -> None:
        """Collects dead slots, frees retired slabs, and frees idle slabs down to ``keep`` or ``idle_bytes``."""
        if self._is_crashed:
            self._begin_after_a_crash()
        while self.returned:
            record: Any = self.returned[0]
            if record in self._records:
                found = record.range
                slab = found.slab
                slab.slots -= 1
                self._used -= record.nbytes
                if (quota := record.quota) is not None:
                    quota.used_bytes -= record.nbytes
                    quota.held_bytes -= found.nbytes
                if slab in self._retired:
                    self._retired_fences += record.fences
                else:
                    found.fences = record.fences
                    self._ranges.back[found.nbytes].append(found)
                    if slab.slots == 0:
                        self._idle_now += slab.nbytes
                self._records.discard(record)
            self.returned.popleft()
        most, held = 0 if self.is_closed else self._idle_bytes, self._held
        keep = most if keep is None else min(keep, most)
        if self._retired:  # see [Note: retired slabs]
            self._retired_fences = pending(self._retired_fences)
            for left in [] if self._retired_fences else [left for left in self._retired if left.slots == 0]:
                del self._retired[left]
                self._held -= left.nbytes
        if self._idle_now > keep:  # free idle slabs, the oldest first, once their fences have passed
            self._ranges.join()
            for idle in [idle for idle in self._slabs if idle.slots == 0]:
                if self._idle_now <= keep:
                    break
                if self._ranges.withdraw(idle):
                    del self._slabs[idle]
                    self._idle_now -= idle.nbytes
                    self.least_idle = min(self.least_idle, self._idle_now)
                    self._held -= idle.nbytes
        if self._held < held:
            self._on_freed()
            if self.bound is not None:
                self.bound.forget()

    def _begin_after_a_crash(self) -> None:
        """Recounts living slots and retires all slabs: see [Note: retired slabs]."""
        dead = [record for record in self._records if record() is None]
        fences = [fence for record in dead for fence in cast(HostSlotRecord, record).fences]
        fences += [fence for same in self._ranges.back.values() for one in same for fence in one.fences]
        self._retired_fences = pending([*self._retired_fences, *fences])
        self._records.difference_update(dead)
        records = [cast(HostSlotRecord, record) for record in self._records]
        self._retired |= self._slabs | dict.fromkeys([record.range.slab for record in records])
        self._held, self._used = sum(slab.nbytes for slab in self._retired), 0
        for slab in self._retired:
            slab.slots = 0
        for quota in {*self._quotas, *[record.quota for record in records if record.quota is not None]}:
            quota.used_bytes = quota.held_bytes = 0
        for record in records:
            slab, quota = record.range.slab, record.quota
            slab.slots += 1
            self._used += record.nbytes
            if quota is not None:
                quota.used_bytes += record.nbytes
                quota.held_bytes += record.range.nbytes
        self._begin()
        self._is_crashed = False
