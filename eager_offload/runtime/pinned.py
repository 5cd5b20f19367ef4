"""Pinned host memory: slabs that the device's copy engines read and write asynchronously.

[Note: two ways to pin]
If the driver can *register* memory, a slab is memory that this module maps, of an exact number of pages, and pins in
place. Otherwise torch's allocator pins, which rounds sizes up to a power of two and never frees; then each slab's size
is a power of two (``PowersOfTwo`` in ``tiers/pool.py``). Registering one page shows whether the driver can.

[Note: slabs are pinned whole]
One registration covers exactly one slab. Drivers refuse very large registrations, and refuse a copy that spans two of
them, so host memory is registered slab by slab, and a slot lies within one slab.

[Note: pages that are pinned]
A pinned page must not move while the device writes to it, so fork cannot share it copy-on-write. Since Linux 5.9 fork
copies all pinned private memory at once: about a second and a GiB per GiB, for each data-loader worker. Therefore a
child does not inherit the pages (``MADV_DONTFORK``, until the pages are unmapped). The library never touches a slab in
a child: there is no device, and unpack raises before it reads. The child must not unmap a slab either, because its own
memory may be at the same addresses: see ``LEFT_TO_THE_PARENT``. Memory that torch's allocator pins belongs to the
driver, and fork skips it anyway.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from eager_offload.errors import warn_once
from eager_offload.tiers.forking import LEFT_TO_THE_PARENT, FinalizerRecord
from eager_offload.tiers.limits import host_budget, host_headroom, pinning_limit
from eager_offload.tiers.memory import PAGE, anonymous_slab, resident_slab, view_of
from eager_offload.tiers.pool import ExactSizes, PowersOfTwo, SlabSizes
from eager_offload.torch_private.captures import host_registration

#: The largest slab that several requests share if sizes are exact, in bytes.
_SHARED_BYTES = 64 << 20
#: Bytes; some drivers refuse larger registrations.
_MOST_REGISTERED = 32 << 30
#: To measure how much memory can be pinned: bytes that are pinned at a time, and at most.
_PIECE, _MOST_TRIED = 256 << 20, 8 << 30
#: ``cudaHostRegisterPortable``: pinned for every device of the process.
_PORTABLE = 1


class _Owner:
    """Dies with the last view of a registered slab."""

    __slots__ = ("__weakref__",)


class _OwnerRecord(FinalizerRecord[_Owner]):
    """The pinned pages of an owner.

    [Note: unpinning]
    The garbage collector may drop the last view at any point of the program, but pages must be unpinned before they
    return to the system, by a call of the driver. So dead records are queued, and ``PinnedMemory.poll`` unpins them
    in calls that may use the driver.
    """

    __slots__ = ("pages",)
    pages: Tensor


class PinnedMemory:
    """Allocates pinned slabs. Thread-safe."""

    def __init__(self) -> None:
        #: Records of living slabs, and of slabs that have died: see [Note: finalizers] in `tiers/forking.py`.
        self._records: set[_OwnerRecord] = set()
        self.returned: deque[FinalizerRecord[_Owner]] = deque()
        self._lock = threading.Lock()
        self._registers: bool | None = None
        self._said: set[str] = set()
        #: How many slabs could not be pinned.
        self.refused = 0

    @property
    def sizes(self) -> SlabSizes:
        return ExactSizes(_SHARED_BYTES) if self._can_register() else PowersOfTwo()

    def allocate(self, nbytes: int) -> Tensor:
        """Returns a page-aligned slab (a flat ``uint8`` CPU tensor), pageable with one warning if it cannot be pinned.

        Raises:
            MemoryError: the system has no room.
        """
        try:
            return self.pin(nbytes)
        except RuntimeError as error:
            self.refused += 1
            reason, (cause, remedy) = str(error).partition("\n")[0], pinning_limit(self._registered_bytes, nbytes)
            warn_once(
                "pin",
                f"{nbytes} bytes of host memory could not be pinned ({reason}); offloading goes on with pageable "
                f"memory, and the host waits for each copy. The likely cause: {cause}. To change that, {remedy}; "
                "pin_memory=False says that it is meant so",
                self._said,
            )
        return self.pageable(nbytes)

    def pin(self, nbytes: int) -> Tensor:
        """Returns a page-aligned slab that is pinned, a flat ``uint8`` CPU tensor.

        Raises:
            MemoryError: the system has no room.
            RuntimeError: the driver refuses to pin it.
        """
        self.poll()
        with torch.inference_mode(False):
            return self._registered_slab(nbytes) if self._can_register() else self._torch_slab(nbytes)

    def pageable(self, nbytes: int) -> Tensor:
        """Returns a slab that is not pinned. Raises ``MemoryError`` if the system has no room."""
        with torch.inference_mode(False):
            return resident_slab(nbytes)

    def poll(self) -> None:
        """Unpins the slabs that have died in this process.

        If the driver refuses, it may still write to the pages: they are kept, the next poll tries again, and one
        warning says so.
        """
        refused = list[FinalizerRecord[_Owner]]()
        while self.returned:
            try:
                record = self.returned.popleft()
            except IndexError:  # another thread took it
                break
            assert isinstance(record, _OwnerRecord)
            if record not in self._records:
                continue
            try:
                unregister(record.pages.data_ptr())
            except RuntimeError as error:
                refused.append(record)
                reason = str(error).partition("\n")[0]
                warn_once(
                    "unpin",
                    f"{record.pages.nbytes} bytes of pinned host memory could not be unpinned ({reason}): they are "
                    "held until that works. After an error of the device it does not: start the process anew",
                    self._said,
                )
            else:
                self._records.discard(record)
        self.returned.extend(refused)

    def after_fork(self) -> None:
        """Frees the child's locks; the parent's slabs are not touched."""
        LEFT_TO_THE_PARENT.extend(self._records)
        self._records, self._lock = set(), threading.Lock()

    @property
    def _registered_bytes(self) -> int:
        return sum([record.pages.nbytes for record in list(self._records)])

    def _can_register(self) -> bool:
        with self._lock:
            if self._registers is None:
                page = anonymous_slab(PAGE, inherited=False)
                try:
                    register(page.data_ptr(), PAGE)
                    unregister(page.data_ptr())
                    self._registers = True
                except (NotImplementedError, RuntimeError):
                    self._registers = False
            return self._registers

    def _registered_slab(self, nbytes: int) -> Tensor:
        if nbytes > _MOST_REGISTERED:
            raise RuntimeError(f"one piece may have {_MOST_REGISTERED} bytes")
        pages = anonymous_slab(nbytes, inherited=False)
        owner = _Owner()
        record = _OwnerRecord(owner, self.returned.append)
        record.pages = pages
        self._records.add(record)
        try:
            register(pages.data_ptr(), nbytes)
        except Exception:  # not BaseException: after an interrupt the pages may be registered
            self._records.discard(record)
            raise
        return torch.frombuffer(view_of(pages.data_ptr(), nbytes, owner), dtype=torch.uint8)

    def _torch_slab(self, nbytes: int) -> Tensor:
        # torch's pinned memory starts at a page. Spare bytes would double a slab whose size is a power of two.
        slab = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        if slab.data_ptr() % PAGE == 0:
            return slab
        slab = torch.empty(nbytes + PAGE - 1, dtype=torch.uint8, device="cpu", pin_memory=True)
        start = -slab.data_ptr() % PAGE
        return slab[start : start + nbytes]


def register(address: int, nbytes: int) -> None:
    """Pins memory in place. Raises ``NotImplementedError`` or ``RuntimeError`` if that is impossible."""
    registration = host_registration()
    if registration is None:
        raise NotImplementedError("this torch cannot register memory")
    _check_code(registration.register(address, nbytes, _PORTABLE), f"cudaHostRegister of {nbytes} bytes")


def unregister(address: int) -> None:
    """Unpins the memory registered at ``address``. Raises ``RuntimeError`` if the driver refuses."""
    registration = host_registration()
    assert registration is not None
    _check_code(registration.unregister(address), "cudaHostUnregister")


def _check_code(code: object, call: str) -> None:
    """Raises ``RuntimeError`` if a driver call returned an error code."""
    if number := int(cast(int, code)):
        # The driver keeps the error, and the next kernel launch would report it. This launch clears the error.
        with suppress(RuntimeError):
            torch.empty(1, device=torch.accelerator.current_accelerator()).fill_(1)
        raise RuntimeError(f"{call} failed with error {number}")


@dataclass(frozen=True)
class Pinned:
    """How much host memory can be pinned at one time, and the limit that prevents more."""

    pinned_bytes: int
    refused: bool
    """Whether the driver has refused more."""
    bound_by: str = "no more was tried"
    remedy: str = ""


def measure_pinning() -> Pinned:
    """Pins memory in pieces of 256 MiB until the driver refuses, frees it, and names the limit.

    It stops at 8 GiB, which take seconds, or at half of the headroom of the machine and the process's control groups.
    """
    memory, slabs, most = PinnedMemory(), list[Tensor](), min(host_budget(), _MOST_TRIED)
    try:
        while (pinned := len(slabs) * _PIECE) + _PIECE <= most and host_budget() >= _PIECE:
            try:
                slabs.append(memory.pin(_PIECE))
            except (MemoryError, RuntimeError):
                return Pinned(pinned, True, *pinning_limit(pinned, _PIECE))
        limit = host_headroom().binding
    finally:
        slabs.clear()
        memory.poll()
        getattr(torch.accelerator, "empty_host_cache", bool)()  # of torch's allocator; 2.11 has no such call
    if pinned == _MOST_TRIED:
        return Pinned(pinned, False)
    name = "container" if limit.kind == "cgroup" else limit.kind
    return Pinned(pinned, False, f"{name}: {limit.reason}", limit.remedy)
