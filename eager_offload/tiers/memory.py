"""Host memory by address: views of it for system calls and for torch, and pages of one's own."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

#: Bytes; what blocks, slots and direct I/O are aligned to.
PAGE = 4096

#: ``off_t`` of the C library's ``mmap``.
_OFFSET = ctypes.c_int64 if ctypes.sizeof(ctypes.c_void_p) == 8 else ctypes.c_long

#: Of Linux and the BSDs alike; Python's ``mmap`` does not name it.
_MAP_FIXED = 0x10


def round_up(nbytes: int, unit: int) -> int:
    """Returns ``nbytes`` rounded up to a whole number of ``unit``s, at least one."""
    return max(-(-nbytes // unit), 1) * unit


def view_of(address: int, nbytes: int, owner: object = None) -> memoryview:
    """Returns a writable view of ``nbytes`` bytes at ``address``; it and all its slices keep ``owner`` alive."""
    # ctypes makes a type for every array length, and a type is garbage that only the cyclic collector finds. With
    # powers of two there are never more than a few; the slice ends where the bytes do.
    extent = 1 << (nbytes - 1).bit_length() if nbytes else 1
    array = (ctypes.c_ubyte * extent).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]  # arrays of ctypes take any attribute
    return memoryview(array).cast("B")[:nbytes]


def move(target: int, source: int, nbytes: int) -> None:
    """Copies ``nbytes`` bytes between two addresses, without the GIL and without torch's thread pool."""
    ctypes.memmove(target, source, nbytes)


class _Part(ctypes.Structure):
    _fields_: ClassVar = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def move_if_there(target: int, source: int, nbytes: int) -> None:
    """Does the same from memory that its owner may give back to the system meanwhile.

    The kernel copies, at half the rate of ``move``, and reports an address that is gone; reading it here would end the
    process. Where there is no such call, this is ``move``.

    Raises:
        OSError: the memory at ``source`` is gone; part of it may have been copied.
    """
    read, done = _reader(), 0
    if read is None:
        move(target, source, nbytes)
        return
    while done < nbytes:
        here, there = _Part(target + done, nbytes - done), _Part(source + done, nbytes - done)
        moved = read(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if moved <= 0:
            number = ctypes.get_errno() or errno.EFAULT
            raise OSError(number, os.strerror(number))
        done += moved


@cache
def _reader() -> Callable[..., int] | None:
    read: Any = getattr(_system_calls(), "process_vm_readv", None)
    if read is None:
        return None
    read.restype = ctypes.c_ssize_t
    part, ulong = ctypes.POINTER(_Part), ctypes.c_ulong
    read.argtypes = [ctypes.c_int, part, ulong, part, ulong, ulong]
    source, target = ctypes.c_ubyte(1), ctypes.c_ubyte(0)
    here, there = _Part(ctypes.addressof(target), 1), _Part(ctypes.addressof(source), 1)
    moved = read(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return read if moved == target.value == 1 else None


def mapped_file(descriptor: int, offset: int, nbytes: int, owner: object) -> memoryview:
    """Maps a range of a file as memory, shared with all other uses of the file, page by page.

    ``mmap.mmap`` of a file would keep a descriptor open for each mapping, and a step has more tensors than a process
    may have descriptors. So it takes addresses without a file, and gives them back; the file is mapped in their place.

    Args:
        descriptor: of an open file; the mapping outlives it.
        offset: where the range begins, in bytes; a multiple of ``PAGE``.
        owner: stays alive for as long as the memory does.

    Raises:
        MemoryError: the system refused.
    """
    addresses = _anonymous(nbytes)
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(addresses))
    _map(start, nbytes, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset)
    return view_of(start, nbytes, (owner, addresses))


def is_in_page_cache(descriptor: int, offset: int) -> bool:
    """Returns whether the page cache has the page at ``offset`` of a file; ``False`` where the system does not say.

    Not asked by a read that is not to wait (``RWF_NOWAIT``): that starts to read ahead, and a fast disk has the page
    there before the answer is given.
    """
    try:
        address = _map(None, PAGE, mmap.MAP_SHARED, descriptor, offset)
    except MemoryError:  # some filesystems map no files
        return False
    try:
        state = ctypes.c_ubyte(0)
        answered = _system_calls().mincore(address, PAGE, ctypes.byref(state)) == 0
    finally:
        _system_calls().munmap(address, PAGE)
    return answered and bool(state.value & 1)


def resident_bytes(address: int, nbytes: int) -> int:
    """Returns the bytes of a range of memory whose pages are there; all of them where the system does not say."""
    first = -(-address // PAGE) * PAGE
    size = (address + nbytes) // PAGE * PAGE - first
    if size <= 0 or mmap.PAGESIZE != PAGE:
        return nbytes
    pages = ctypes.create_string_buffer(size // PAGE)
    try:
        answered = _system_calls().mincore(first, size, pages) == 0
    except AttributeError:  # a system without it
        answered = False
    return nbytes - pages.raw.count(0) * PAGE if answered else nbytes


def _map(address: int | None, nbytes: int, flags: int, descriptor: int, offset: int) -> int:
    mapped = _system_calls().mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if mapped in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise MemoryError(f"the system refused to map {nbytes} bytes of a file: {os.strerror(number)}")
    return cast(int, mapped)


@cache
def _system_calls() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, _OFFSET]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _anonymous(nbytes: int) -> mmap.mmap:
    try:
        if hasattr(mmap, "MAP_ANONYMOUS"):
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mmap.mmap(-1, nbytes)
    except OSError as error:
        raise MemoryError(f"the system refused {nbytes} bytes of memory: {error}") from error


def anonymous_slab(nbytes: int, *, huge: bool = True, inherited: bool = True) -> Tensor:
    """Returns a flat ``uint8`` tensor over pages of its own, which go back to the system with its storage.

    Private: a forked child sees a copy, never later writes. Page-aligned. The content is zero. glibc would keep freed
    blocks of this size class for itself, and the process would not shrink.

    Args:
        huge: whether to ask for huge pages, which cost less where all of it is used and take more where it is not.
        inherited: whether a forked child has the pages; see [Note: pages that are pinned].

    Raises:
        MemoryError: the system has no room.
    """
    pages = _anonymous(nbytes)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # EINVAL from a kernel without them; small pages do as well
            pages.madvise(mmap.MADV_HUGEPAGE)
    if not inherited and hasattr(mmap, "MADV_DONTFORK"):
        with contextlib.suppress(OSError):  # a fork only takes longer then
            pages.madvise(mmap.MADV_DONTFORK)
    # The storage holds the mmap object, and nothing else does.
    return torch.frombuffer(pages, dtype=torch.uint8)


#: Not in the ``mmap`` module yet: Linux 5.14 takes it.
_MADV_POPULATE_WRITE = 23


def resident_slab(nbytes: int) -> Tensor:
    """Returns an ``anonymous_slab`` whose pages are all there: what the system says of its memory counts them.

    Raises:
        MemoryError: the system has no room.
    """
    slab = anonymous_slab(nbytes)
    if sys.platform != "linux" or _system_calls().madvise(slab.data_ptr(), nbytes, _MADV_POPULATE_WRITE):
        ctypes.memset(slab.data_ptr(), 0, nbytes)
    return slab
