"""Host memory by address: views, copies, file mappings, and slabs of anonymous pages."""

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

#: Alignment of blocks, slots and direct I/O in bytes.
PAGE = 4096

#: ``off_t`` of the C library's ``mmap``.
_OFFSET = ctypes.c_int64 if ctypes.sizeof(ctypes.c_void_p) == 8 else ctypes.c_long

#: The value on Linux and the BSDs; missing in Python's ``mmap``.
_MAP_FIXED = 0x10


def round_up(nbytes: int, unit: int) -> int:
    """Returns ``nbytes`` rounded up to a multiple of ``unit``, and at least ``unit``."""
    return max(-(-nbytes // unit), 1) * unit


def view_of(address: int, nbytes: int, owner: object = None) -> memoryview:
    """Returns a writable view of ``nbytes`` bytes at ``address``; the view and its slices keep ``owner`` alive."""
    # ctypes makes a type for every array length, and only the cyclic collector frees types. Lengths that are powers of
    # two need a few types only; the slice has the right length.
    extent = 1 << (nbytes - 1).bit_length() if nbytes else 1
    array = (ctypes.c_ubyte * extent).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]  # arrays of ctypes take any attribute
    return memoryview(array).cast("B")[:nbytes]


def move(target: int, source: int, nbytes: int) -> None:
    """Copies ``nbytes`` bytes between two addresses. Releases the GIL, and does not use torch's thread pool."""
    ctypes.memmove(target, source, nbytes)


class _Part(ctypes.Structure):
    _fields_: ClassVar = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def move_if_there(target: int, source: int, nbytes: int) -> None:
    """Copies from memory that its owner may unmap at any time.

    The kernel copies, at half the rate of ``move``, and reports an unmapped address, which would crash the process in
    ``move``. On systems without this call, the same as ``move``.

    Raises:
        OSError: the memory at ``source`` is unmapped; part of it may have been copied.
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
    """Maps a range of a file into memory (``MAP_SHARED``).

    Python's ``mmap`` keeps a descriptor open for each mapped file, and a step may have more tensors than a process may
    have descriptors. Thus ``mmap`` only reserves and frees the addresses, and the file is mapped over them.

    Args:
        descriptor: an open file, which may be closed before the mapping.
        offset: start of the range in bytes, a multiple of ``PAGE``.
        owner: an object to keep alive as long as the mapping.

    Raises:
        MemoryError: the system refused.
    """
    addresses = _anonymous(nbytes)
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(addresses))
    _map(start, nbytes, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset)
    return view_of(start, nbytes, (owner, addresses))


def is_in_page_cache(descriptor: int, offset: int) -> bool:
    """Returns whether the page cache has the page at ``offset`` of a file; ``False`` if that is unknown.

    Does not use a non-blocking read (``RWF_NOWAIT``), which starts a read-ahead that a fast disk may complete first.
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
    """Returns the resident bytes of a range of memory; all bytes if that is unknown."""
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
    """Returns a flat ``uint8`` tensor over its own zeroed pages, which are unmapped with the tensor's storage.

    The memory is page-aligned, and private (a forked child has a copy). Unlike with ``malloc``, the process shrinks
    when the tensor is freed, since glibc keeps freed blocks of such sizes.

    Args:
        huge: whether to request huge pages, which are faster if all of the slab is used and waste memory otherwise.
        inherited: whether a forked child has the pages; see [Note: pages that are pinned] in ``runtime/pinned.py``.

    Raises:
        MemoryError: the system has no room.
    """
    pages = _anonymous(nbytes)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # EINVAL from a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    if not inherited and hasattr(mmap, "MADV_DONTFORK"):
        with contextlib.suppress(OSError):  # without it, forks only take longer
            pages.madvise(mmap.MADV_DONTFORK)
    # Only the storage holds the mmap object, so the pages are unmapped with the storage.
    return torch.frombuffer(pages, dtype=torch.uint8)


#: Missing in the ``mmap`` module; needs Linux 5.14.
_MADV_POPULATE_WRITE = 23


def resident_slab(nbytes: int) -> Tensor:
    """Returns an ``anonymous_slab`` with all pages touched, so that the system counts them as used.

    Raises:
        MemoryError: the system has no room.
    """
    slab = anonymous_slab(nbytes)
    if sys.platform != "linux" or _system_calls().madvise(slab.data_ptr(), nbytes, _MADV_POPULATE_WRITE):
        ctypes.memset(slab.data_ptr(), 0, nbytes)
    return slab
