"""Host memory by address: views of it for system calls and for torch, and pages of one's own."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

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
    """What ``process_vm_readv`` calls an ``iovec``."""

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
    """Returns the system call that reads a process's memory, for this one; ``None`` where there is none."""
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


class Span(NamedTuple):
    """A part of a range of bytes."""

    #: Counted from the beginning of the range.
    at: int
    nbytes: int


#: Bytes; what was never touched is left out where it is at least so long. More pieces would cost more than they save.
_LEAST_HOLE = 1 << 20
#: Bytes that are looked at in one go.
_LOOK = 2 << 20


def touched_spans(address: int, nbytes: int) -> list[Span]:
    """Returns the parts of a range of memory that hold anything: the others were never touched, and read as zeros.

    A kernel may ask for a workspace of which it then uses less than half (oneDNN's recurrent layers do): the rest takes
    no memory until it is touched. The system says which pages are there. One that is not may also be swapped out,
    or of a file, so what is left out is what is not there *and* reads as zeros; to read it takes no memory.

    Returns:
        In order; the whole range where the system does not say.
    """
    first, pages = _pages_there(address, nbytes)
    found, done = [], 0
    for hole in re.finditer(_NOT_THERE, pages):
        # Multiples of a page from the beginning of the range, which need not begin at a page.
        start = round_up(first + hole.start() * PAGE - address, PAGE)
        end = (first + hole.end() * PAGE - address) // PAGE * PAGE
        if end - start >= _LEAST_HOLE and _is_zero_if_there(address + start, end - start):
            if start > done:
                found.append(Span(done, start - done))
            done = end
    if done < nbytes:
        found.append(Span(done, nbytes - done))
    return found


def resident_bytes(address: int, nbytes: int) -> int:
    """Returns the bytes of a range of memory whose pages are there; all of them where the system does not say."""
    return nbytes - _pages_there(address, nbytes)[1].count(0) * PAGE


def _pages_there(address: int, nbytes: int) -> tuple[int, bytes]:
    """Returns the address of the first page that lies in a range, and for each of them 0 if it is not there.

    Nothing is said where the system does not say.
    """
    first = -(-address // PAGE) * PAGE
    size = (address + nbytes) // PAGE * PAGE - first
    if size <= 0 or mmap.PAGESIZE != PAGE:
        return first, b""
    pages = ctypes.create_string_buffer(size // PAGE)
    try:
        answered = _system_calls().mincore(first, size, pages) == 0
    except AttributeError:  # a system without it
        answered = False
    return first, pages.raw if answered else b""


#: In what ``mincore`` says, a byte for each page: as many pages that are not there as the shortest hole has.
_NOT_THERE = re.compile(rb"\x00{%d,}" % (_LEAST_HOLE // PAGE))


def clear(address: int, nbytes: int) -> None:
    """Fills a range of memory with zeros; pages that were never touched stay so."""
    for at in range(0, nbytes, _LOOK):
        size = min(_LOOK, nbytes - at)
        if not _is_zero(address + at, size):
            ctypes.memset(address + at, 0, size)


def _is_zero_if_there(address: int, nbytes: int) -> bool:
    """Returns ``_is_zero`` of memory that its owner may give back to the system meanwhile."""
    buffer = ctypes.create_string_buffer(_LEAST_HOLE)
    place = ctypes.addressof(buffer)
    try:
        for at in range(0, nbytes, _LEAST_HOLE):
            size = min(_LEAST_HOLE, nbytes - at)
            move_if_there(place, address + at, size)
            if not _is_zero(place, size):
                return False
    except OSError:
        return False  # the copy itself raises the error
    return True


def _is_zero(address: int, nbytes: int) -> bool:
    if ctypes.c_ubyte.from_address(address).value:
        return False
    compare = _system_calls().memcmp
    # Each byte with the next one; not all of the range in one call, since an exit or a fork would wait for it.
    return all(
        compare(address + at, address + at + 1, min(_LOOK, nbytes - 1 - at)) == 0 for at in range(0, nbytes - 1, _LOOK)
    )


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
    library.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _anonymous(nbytes: int) -> mmap.mmap:
    """Pages of the process's own, which go back to the system with the object."""
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


def resident_slab(nbytes: int, *, node: int | None = None) -> Tensor:
    """Returns an ``anonymous_slab`` whose pages are all there: what the system says of its memory counts them.

    Args:
        node: of memory, where the pages come from if it has any; see ``prefer_node``.

    Raises:
        MemoryError: the system has no room.
    """
    slab = anonymous_slab(nbytes)
    if node is not None:
        prefer_node(slab.data_ptr(), nbytes, node)
    if sys.platform != "linux" or _system_calls().madvise(slab.data_ptr(), nbytes, _MADV_POPULATE_WRITE):
        ctypes.memset(slab.data_ptr(), 0, nbytes)
    return slab


# -- nodes of memory --------------------------------------------------------------------------------------------------

#: The number of the system call by processor, as ``platform.machine`` names it. The C library has no name for it.
_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
_MPOL_PREFERRED = 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of_device(pci_address: str | None, root: Path = Path("/")) -> int | None:
    """Returns the node that a device is nearest to; ``None`` where it is not known or there is only one.

    Args:
        pci_address: such as ``0000:3b:00.0``.
        root: what stands in place of ``/``.
    """
    if pci_address is None:
        return None
    try:
        online = (root / "sys/devices/system/node/online").read_text().strip()
        node = int((root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # "0" is one node; several are written "0-1" or "0,2". A virtual machine may say -1 for a device: unknown.
    return node if node >= 0 and not online.isdecimal() else None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Has pages that were not touched yet come from ``node`` as long as it has any; whether the system took it.

    A machine with several sockets has several nodes of memory. A copy between a device and a node of another socket
    goes over the link between the two, which is slower and shared by all processes. What a process allocates comes from
    the node that its thread happens to run on, so pages for a device are bound to that device's node before they are
    first touched. It is a preference: where the node is full, or the system refuses (containers often do), pages come
    from where they would have come from anyway.

    Args:
        address: a multiple of the page size.
    """
    number = _MBIND.get(platform.machine())
    if number is None or sys.platform != "linux":
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    # The kernel reads one bit less than this says.
    arguments = (number, address, nbytes, _MPOL_PREFERRED, ctypes.addressof(mask), words * _WORD_BITS + 1, 0)
    syscall = _system_calls().syscall
    syscall.restype = ctypes.c_long
    return bool(syscall(*(ctypes.c_long(argument) for argument in arguments)) == 0)
