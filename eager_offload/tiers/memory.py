"""Host memory by address: views of it for system calls and for torch, and pages of one's own."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from eager_offload.tiers.numa import prefer_node

__all__ = [
    "PAGE",
    "FilePart",
    "anonymous_slab",
    "is_in_page_cache",
    "mapped_file",
    "move",
    "resident_slab",
    "round_up",
    "view_of",
]

#: Bytes; what blocks, slots and direct I/O are aligned to.
PAGE = 4096

#: ``off_t`` of the C library's ``mmap``.
_OFFSET = ctypes.c_int64 if ctypes.sizeof(ctypes.c_void_p) == 8 else ctypes.c_long

#: Of Linux and the BSDs alike; Python's ``mmap`` does not name it.
_MAP_FIXED = 0x10


def round_up(nbytes: int, grain: int) -> int:
    """``nbytes`` rounded up to a whole number of ``grain``s, at least one."""
    return max(-(-nbytes // grain), 1) * grain


def view_of(address: int, nbytes: int, owner: object = None) -> memoryview:
    """A writable view of ``nbytes`` bytes at ``address``; it and all its slices keep ``owner`` alive."""
    # ctypes makes a type for every array length, and a type is garbage that only the cyclic collector finds. With
    # powers of two there are never more than a few; the slice keeps everyone within the bytes that are really there.
    extent = 1 << (nbytes - 1).bit_length() if nbytes else 1
    array = (ctypes.c_ubyte * extent).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")[:nbytes]


def move(target: int, source: int, nbytes: int) -> None:
    """Copies ``nbytes`` bytes between two addresses, without the GIL and without torch's thread pool."""
    ctypes.memmove(target, source, nbytes)


class _Mapping:
    """Pages of a file among the process's addresses, until it dies; what lies on them keeps ``owner``."""

    __slots__ = ("_address", "_nbytes", "_owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._address, self._nbytes, self._owner = address, nbytes, owner

    def __del__(self) -> None:
        _system_calls().munmap(self._address, self._nbytes)


class FilePart(NamedTuple):
    """A range of an open file."""

    descriptor: int
    #: Bytes; a multiple of ``PAGE``.
    offset: int
    #: A multiple of ``PAGE`` too, but for the last part of several.
    nbytes: int


def mapped_file(parts: Sequence[FilePart], owner: object) -> memoryview:
    """Ranges of files as memory, one behind the other; shared with whoever else writes them, page by page.

    Not ``mmap.mmap``: that keeps a descriptor open for each mapping, and a step has more tensors than a process may
    have descriptors.

    Args:
        parts: of open files; the mapping outlives their descriptors.
        owner: stays alive for as long as the memory does.

    Raises:
        MemoryError: the system refused.
    """
    nbytes = sum(part.nbytes for part in parts)
    if len(parts) == 1:
        address = _map(None, parts[0], mmap.MAP_SHARED)
        return view_of(address, nbytes, _Mapping(address, nbytes, owner))
    address = _map(None, FilePart(-1, 0, nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # all addresses, for a start
    mapping, at = _Mapping(address, nbytes, owner), 0
    for part in parts:
        _map(address + at, part, mmap.MAP_SHARED | _MAP_FIXED)
        at += part.nbytes
    return view_of(address, nbytes, mapping)


def is_in_page_cache(descriptor: int, offset: int) -> bool:
    """Whether the page cache has the page at ``offset`` of an open file; ``False`` where the system does not tell.

    Not asked by a read that is not to wait (``RWF_NOWAIT``): that starts to read ahead, and a fast disk has the page
    there before the answer is given.
    """
    try:
        address = _map(None, FilePart(descriptor, offset, PAGE), mmap.MAP_SHARED)
    except MemoryError:  # some filesystems map no files
        return False
    mapping = _Mapping(address, PAGE, None)
    state = ctypes.c_ubyte(0)
    told = _system_calls().mincore(address, PAGE, ctypes.byref(state)) == 0
    del mapping
    return told and bool(state.value & 1)


def _map(address: int | None, part: FilePart, flags: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _system_calls().mmap(address, part.nbytes, protection, flags, part.descriptor, part.offset)
    if mapped in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise MemoryError(f"the system refused to map {part.nbytes} bytes of a file: {os.strerror(number)}")
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


def anonymous_slab(nbytes: int) -> Tensor:
    """A flat ``uint8`` tensor over pages of its own; they return to the system when the tensor's storage goes.

    Private: a forked child sees a copy, never later writes. Page-aligned; huge pages where the system offers them. The
    content is zero. glibc would keep freed blocks of this size class for itself, and the process would not shrink.

    Raises:
        MemoryError: the system has no room.
    """
    try:
        if hasattr(mmap, "MAP_ANONYMOUS"):
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            pages = mmap.mmap(-1, nbytes)
    except OSError as error:
        raise MemoryError(f"the system refused {nbytes} bytes of memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # EINVAL from a kernel without them; small pages do as well
            pages.madvise(mmap.MADV_HUGEPAGE)
    # The storage holds the mmap object, and nothing else does.
    return torch.frombuffer(pages, dtype=torch.uint8)


#: Not in the ``mmap`` module yet: Linux 5.14 takes it.
_MADV_POPULATE_WRITE = 23


def resident_slab(nbytes: int, *, node: int | None = None) -> Tensor:
    """An ``anonymous_slab`` whose pages are all there: what the system says of its memory counts them already.

    Args:
        node: of memory, where the pages come from if it has any; see ``numa.py``.

    Raises:
        MemoryError: the system has no room.
    """
    slab = anonymous_slab(nbytes)
    if node is not None:
        prefer_node(slab.data_ptr(), nbytes, node)
    if sys.platform != "linux" or _system_calls().madvise(slab.data_ptr(), nbytes, _MADV_POPULATE_WRITE):
        ctypes.memset(slab.data_ptr(), 0, nbytes)
    return slab
