"""The pool of host memory: slabs that are cut into slots and leases of exact sizes, and used again.

The allocators of torch round a pinned block up to a power of two and keep it, and allocating each block from the
system costs milliseconds when it has to be pinned. So memory is taken in slabs, cut to size here, and given back a slab
at a time. ``Ranges`` says which bytes are free.

[Note: quotas]
Several tiers may share a pool, and what is idle in it serves all of them. A budget in bytes that a user gave bounds
the slots of one tier that are alive, and all budgets, if each is in bytes, added up what the pool holds. Budgets that
follow the machine are one, however many have it: it is asked before a slab is taken (``HostBound``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, cast, overload

import torch
from torch import Tensor

from eager_offload.errors import HostAllocationUnderCaptureError, OffloadError, reentered
from eager_offload.tiers.base import Fence, MustGrow, Range, Ranges, Shortage, Slab, Slot, SlotRecord, pending
from eager_offload.tiers.forking import LEFT_TO_THE_PARENT, FinalizerRecord, ForkSafeLock, Living, tell_after_fork
from eager_offload.tiers.limits import HostBound, NoRoomError
from eager_offload.tiers.memory import PAGE, anonymous_slab, move, move_if_there, view_of

#: A new shared slab is at most this part of what is held, so that the empty rest of the newest one stays small.
_SHARE = 32
#: Bytes up to which a slab is taken for several requests: smaller ones would cost more in calls than they save in room.
_LEAST = 1 << 20


# -- how large a slab is --------------------------------------------------------------------------------------------


class ExactSizes:
    """How large slabs are, in bytes, where the system gives what is asked for, to the page.

    Args:
        most: bytes; the largest slab that is taken for several requests.
    """

    def __init__(self, most: int) -> None:
        self._most = most

    def wanted(self, need: int, held: int) -> int:
        """Returns the size of the slab that ``need``, in whole pages, calls for while ``held`` are held."""
        most = min(max(held // _SHARE, _LEAST), self._most)
        return max(most // need, 1) * need

    def within(self, need: int, room: int) -> int:
        """Returns the largest size up to ``room``, or 0 where none holds ``need``."""
        return room // need * need

    def least(self, need: int) -> int:
        """Returns the smallest size that holds ``need``."""
        return need


class PowersOfTwo:
    """The same where it rounds everything up to a power of two, as torch's allocator of pinned memory does.

    Nothing is rounded if a power of two is asked for, so every slab is one. What is left over behind the last whole
    multiple of a request serves smaller ones at best, so a slab is so large that this is at most a 20th of it, as long
    as it does not double what is held (nor goes beyond 1 GiB at first): the end of the last slab is empty too.
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


#: What a pool asks the system for.
SlabSizes: TypeAlias = ExactSizes | PowersOfTwo


def _power_of_two(nbytes: int) -> int:
    """Returns the smallest one that is not below ``nbytes``, and not below a page."""
    return max(1 << max(nbytes - 1, 0).bit_length(), PAGE)


# -- slabs ----------------------------------------------------------------------------------------------------------


class HostSlab(Slab):
    """Host memory."""

    __slots__ = ("address", "buffer", "slots", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.numel())
        self.tensor = tensor
        self.address = tensor.data_ptr()
        #: The bytes as a buffer; slices of it keep the memory.
        self.buffer = view_of(self.address, self.nbytes, tensor)
        #: How many slots are alive in it.
        self.slots = 0

    def retire(self) -> None:
        """Lets go of the memory, which the slices of the buffer alone have from now on. Idempotent."""
        with suppress(AttributeError):
            del self.tensor, self.buffer


# -- slots ----------------------------------------------------------------------------------------------------------


class HostSlotRecord(SlotRecord):
    """What a slot leaves behind, or a tensor that owned its bytes."""

    __slots__ = ("quota",)
    quota: Quota | None


class HostSlot(Slot):
    """``nbytes`` bytes of host memory, at a multiple of ``PAGE``. ``Pool.take`` makes it."""

    tier: ClassVar[str] = "host"
    writes_storages = True
    __slots__ = ("slab", "start")
    slab: HostSlab
    start: int

    @property
    def address(self) -> int:
        """Where the bytes are; a slot does not move."""
        return self.slab.address + self.start

    @property
    def tensor(self) -> Tensor:
        """The bytes as a flat ``uint8`` CPU tensor, for copies by a stream; it does not keep the slot alive."""
        return self.slab.tensor[self.start : self.start + self.nbytes]

    def write(self, source: Tensor | torch.UntypedStorage) -> None:
        assert not isinstance(source, Tensor) or source.numel() == self.nbytes
        move_if_there(self.address, source.data_ptr(), self.nbytes)

    def read(self, target: Tensor) -> None:
        assert target.numel() == self.nbytes
        move(target.data_ptr(), self.address, self.nbytes)

    def memory(self) -> memoryview:
        return view_of(self.address, self.nbytes, self)


# -- quotas -----------------------------------------------------------------------------------------------------------


class Quota:
    """What one tier holds of a pool, and the most that it may hold; the pool's lock guards it. All in bytes.

    Args:
        budget: the most; ``None`` where it follows the machine, as ``HostBound`` says.
        over: what to tell where the budget has no more.
    """

    __slots__ = (
        *("__weakref__", "budget", "held_bytes", "is_refused", "over", "overdraft", "peak_bytes", "refusal"),
        "used_bytes",
    )

    def __init__(self, budget: int | None, over: Shortage) -> None:
        self.budget = budget
        self.over = over
        #: Why it was last given nothing.
        self.refusal = over
        #: Whether it was given nothing since ``HostTier`` last looked at what the machine has left.
        self.is_refused = False
        #: The most that ``used_bytes`` has been.
        self.peak_bytes = 0
        #: Why the machine should not give all of the budget, once it has given more than it should.
        self.overdraft: Shortage | None = None
        #: In slots that are alive, as they were asked for; and with rounding.
        self.used_bytes = self.held_bytes = 0

    def refuse(self, error: Exception) -> None:
        """Notes why it is given nothing."""
        self.is_refused = True
        if isinstance(error, NoRoomError):
            self.refusal = error.shortage
        else:
            text = str(error).partition("\n")[0]
            remedy = "end other programs that take memory, or set a lower host_budget"
            self.refusal = Shortage(f"the system refused it ({text})", remedy)


# -- the pool ---------------------------------------------------------------------------------------------------------

Owner = TypeVar("Owner")

#: Where what asks has no quota of its own.
_FULL = Shortage("all that the pool may hold is in use", "raise host_budget")
#: Bytes; the largest slab of what is reserved. To pin it takes seconds, in which nothing can interrupt the process.
_RESERVED_BYTES = 16 << 30


class Pool:
    """Cuts slabs of host memory into slots and leases of exact sizes. Thread-safe.

    [Note: how slabs are cut]
    A request, rounded up to whole pages, takes a free range of its size, else a part of the smallest that holds it: see
    ``base.py``. If there is none, a new slab is taken for as many such requests as go into a 32nd of what is held
    already and into ``slab_bytes``, or for one: a step's tensors are mostly alike, so nothing is left over at its end,
    and the last, half-empty slab weighs little. Slots do not reach from one slab into the next.

    A slab without slots is idle. Idle slabs are kept up to ``idle_bytes``, since the next step asks for the same sizes
    again; beyond that the oldest slabs go back to the system, none before its fences have passed. All that is idle goes
    back before a request fails.

    Slots that die are taken up at the next call of any method; ``poll()`` is the call that does nothing else.

    [Note: retired slabs]
    Nothing more is cut from a slab that is *left*. It goes back to the system with the last slot in it, once the uses
    of all that was in it are over. All slabs are left in two cases.

    A pool of leases *rests*: after a graph is gone there may be no further call, so a slab is then held by the leases
    in it alone, and goes with the last without one. The next lease begins anew, and ``on_first_use`` says so.

    A pool *crashes*: an exception that is not the library's own, a KeyboardInterrupt say, comes in the midst of a
    change. What is free is not known then, but what is alive is, by its records, and which uses go on. So the next
    call counts what is alive and begins with new slabs.

    [Note: growth]
    The system takes long to give a slab: its pages have to be there, and pinned. So the lock is not held meanwhile, and
    threads that need no slab go on. Another lock has one thread grow at a time. A second one that has waited for it
    looks again, since what is left of the new slab may do. No other thread makes ``held`` grow meanwhile, so a size
    that was within the limit before is within it after. The slab is added in the change that cuts the first slot from
    it. Until then it is a tensor of one thread, which nothing counts and which goes back with an interrupt.

    Args:
        allocate_slab: takes bytes and returns a flat ``uint8`` CPU tensor of that size, page-aligned, whose memory goes
            back with its storage. Raises ``MemoryError`` or ``RuntimeError`` where there is none.
        slab_bytes: the largest slab that is taken for several requests.
        idle_bytes: how much idle memory is kept for reuse.
        sizes: how large slabs are, in place of ``slab_bytes``.
        bound: is asked before bytes are taken from the system. A quota that a user gave in bytes is given what it
            refuses all the same, and has the reason.
        given_back: is called when slabs have gone back to the system, inside the pool's lock.
        wakes: is called with the first slot or lease and with the first after a rest, inside the pool's lock.
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
        self._allocate_slab = allocate_slab
        self._sizes = ExactSizes(slab_bytes) if sizes is None else sizes
        self._idle_bytes = idle_bytes
        self.bound = bound
        self._on_freed = on_freed
        self._on_first_use = on_first_use
        self._quotas: Living[Quota] = Living()
        #: What several tiers that want one pool know it by; ``None`` for one that is not to be shared.
        self.kind: Hashable = None
        #: Whether every tier has left it, so that it keeps nothing idle.
        self.is_closed = False
        self._lock = ForkSafeLock()
        #: Of the thread that takes a slab from the system; it comes before ``_lock``.
        self._growth = ForkSafeLock()
        self._reset()
        if bound is not None:
            bound.join(self)
        tell_after_fork(self)

    def _reset(self) -> None:
        #: Where slots end up, until ``poll``; see [Note: slots give themselves back] in ``tiers/base.py``.
        self.returned: deque[FinalizerRecord[Slot]] = deque()
        #: Of what is alive; see [Note: finalizers] in ``forking.py``.
        self._records: set[FinalizerRecord[Slot]] = set()
        #: Its ``append``, for the records: each would make another one.
        self._on_return = self.returned.append
        #: See [Note: retired slabs], and the uses of what was in them.
        self._retired: dict[HostSlab, None] = {}
        self._retired_fences: tuple[Fence, ...] = ()
        #: Bytes of all slabs; of what is alive, as it was asked for.
        self._held = self._used = 0
        #: Of the slab that a thread is about to take.
        self.coming = 0
        self._is_crashed = False
        self._rests = True
        #: Bytes of all requests so far.
        self.served_bytes = 0
        self._begin()

    def _begin(self) -> None:
        self._ranges = Ranges[HostSlab]()
        self._slabs: dict[HostSlab, None] = {}
        #: Bytes of those without slots; and the least since ``restart_idle``.
        self._idle_now = self.least_idle = 0

    def after_fork(self) -> None:
        """Starts the child with an empty pool; it has slots from before the fork as copies, but for pinned ones."""
        LEFT_TO_THE_PARENT.extend([self.returned, self._records, self._slabs, self._retired])
        self._reset()
        for quota in self._quotas:
            quota.used_bytes = quota.held_bytes = 0

    def register(self, quota: Quota) -> None:
        """Has ``quota`` bound what is held for it, and all that is held: see [Note: quotas]."""
        with self._lock.lock:
            self._quotas.add(quota)
            self.is_closed = False

    def unregister(self, quota: Quota) -> None:
        """Its slots live on. What is idle and was only held for it goes back to the system. Idempotent."""
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
        """Returns a slot of ``nbytes`` bytes, or ``None`` where ``quota`` or the system has no room.

        Args:
            quota: whose it is; it is given the reason where there is no room.
        """
        try:
            return self._grown(partial(self.take, nbytes, quota), quota)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, OffloadError) and not isinstance(error, HostAllocationUnderCaptureError):
                raise
            if quota is not None:
                quota.refuse(error)
            return None

    def lease(self, nbytes: int) -> Tensor:
        """Returns a flat ``uint8`` tensor of ``nbytes`` bytes that owns them: they go back when its storage dies.

        Views of it, and what autograd saves of it, keep the storage and so the bytes. The content is undefined.

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
        """Returns ``nbytes`` bytes of what is held already, or of ``memory``; ``None`` where ``quota`` has no room.

        Args:
            quota: whose they are; it is given the reason where there is no room.
            leased: whether a tensor is to own them, as in ``lease``, in place of a slot.
            memory: a slab that the system has given for it.

        Raises:
            MustGrow: there is room, but the system has to give a slab first.
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
                if memory is not None:  # nothing polls before it is cut: that would give it back if little may be idle
                    self._add(memory)
                same = self._ranges.back.get(size) or self._ranges.fit(size)
                if not same:
                    raise self._new_slab(size, quota)
                found = same[-1]
                owner: HostSlot | Tensor
                slab, start, fences = found.slab, found.start, found.fences
                if leased:
                    assert not fences, "memory that streams copy to and memory for leases come from different pools"
                    # The storage holds this very view until it is freed, so the view's death is the storage's.
                    view: Any = slab.buffer[start : start + nbytes]
                    owner, record = torch.frombuffer(view, dtype=torch.uint8), HostSlotRecord(view, self._on_return)
                else:
                    owner = slot = HostSlot.__new__(HostSlot)  # the `__init__` of `Slot` would be a call more
                    record = slot.record = HostSlotRecord(slot, self._on_return)
                    slot.nbytes, slot.slab, slot.start = nbytes, slab, start
                record.nbytes, record.range, record.quota = nbytes, found, quota
                record.fences = fences if len(fences) < 2 else pending(fences)  # what is over does not add up
                self._records.add(record)
                same.pop()
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
                quota.refuse(error)
                return None

    def _grown(self, take: Callable[..., Owner], quota: Quota | None = None) -> Owner:
        """Returns what ``take`` makes of what is held, else of a new slab for ``quota``: see [Note: growth].

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
            try:
                return take(memory=self._new_memory(wanted, least, quota))
            finally:
                self._told()

    def _new_memory(self, wanted: int, least: int, quota: Quota | None) -> Tensor:
        for size in dict.fromkeys((wanted, least)):  # a smaller one costs less than what is idle and was pinned
            try:
                return self._admitted(size, quota)
            except (MemoryError, RuntimeError):
                continue
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

    def _told(self) -> None:
        """Tells the bound that no slab is about to be taken any more: it is held, or there is none."""
        self.coming = 0
        if self.bound is not None:
            self.bound.update()

    @property
    def bytes_by_machine(self) -> int | None:
        """Bytes that it holds by budgets that follow the machine; ``None`` where it has no such budget."""
        held = self._held - sum([one.held_bytes for one in self._quotas if one.budget is not None])
        return held if self._limit() is None and (held or self._quotas) else None

    @property
    def is_user_provided(self) -> bool:
        """Whether users gave some of its budgets in bytes: what they hold stays, however short the machine is."""
        return any(quota.budget is not None for quota in self._quotas)

    def reserve(self, nbytes: int, quota: Quota) -> None:
        """Takes memory from the system until ``quota`` has ``nbytes`` bytes, in slots or free.

        Raises:
            MemoryError, RuntimeError: its budget, the limit of all, or the system has no room for so much. What was
                taken before that stays.
        """
        if self._lock.is_held() or self._growth.is_held():
            raise reentered()
        with self._growth.lock:
            try:
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
            finally:
                self._told()

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
        """Keeps nothing until the next lease; see [Note: retired slabs]. Only for a pool of leases alone."""
        with self._lock.lock, self._crashing():
            self._poll(0)
            self._retired |= self._slabs
            for slab in self._retired:
                slab.retire()
            self._begin()
            self._rests = True

    def release_idle(self, keep: int = 0) -> None:
        """Gives what is idle back to the system, but for ``keep`` bytes."""
        with self._lock.lock, self._crashing():
            self._poll(keep)

    def restart_idle(self) -> None:
        """Measures anew how much is idle at least."""
        with self._lock.lock:
            self.least_idle = self._idle_now

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

    # -- inside the lock ------------------------------------------------------------------------------------------

    @contextmanager
    def _crashing(self) -> Iterator[None]:
        try:
            yield
        except (MustGrow, NoRoomError):
            raise
        except BaseException:
            self._is_crashed = True
            raise

    def _add(self, memory: Tensor) -> None:
        slab = HostSlab(memory)
        self._slabs[slab] = None
        self._ranges.back[slab.nbytes].append(Range(slab, 0, slab.nbytes))
        self._held += slab.nbytes
        self._idle_now += slab.nbytes

    def _limit(self) -> int | None:
        """Returns the bytes that the quotas allow in all; ``None`` where only the machine bounds them."""
        quotas = list(self._quotas)
        budgets = [quota.budget for quota in quotas if quota.budget is not None]
        return sum(budgets) if budgets and len(budgets) == len(quotas) else None

    def _new_slab(self, need: int, quota: Quota | None) -> MustGrow:
        """Returns the size of the slab that ``need`` calls for, or of a smaller one where that is all there is room
        for, and the least that will do where the system has no room for it.

        Raises:
            NoRoomError: there is none.
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
        """Takes up what has died, and gives slabs back to the system: see the notes.

        Args:
            keep: how many idle bytes are kept, if fewer than usual.
        """
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
        if self._idle_now > keep:  # idle slabs that no transfer can touch any more go
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
        """Counts what is alive, and leaves all slabs: see [Note: retired slabs]."""
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
