"""A spill file: ranges of one unnamed file, written and read around the page cache."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from collections import deque
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from eager_offload.errors import OffloadError, TransferError
from eager_offload.tiers.extents import Extent, Extents
from eager_offload.tiers.forking import tell_after_fork
from eager_offload.tiers.memory import PAGE, anonymous_slab, mapped_file, move, round_up, view_of
from eager_offload.tiers.rawfile import RawFile

__all__ = ["Remains", "SpillFile"]

#: Bytes; the file grows by this much, or by the request where that is more.
_GROWTH = 64 << 20
#: Bytes a bounce buffer, and how many there may be: that many transfers run at once, the others wait for one.
_BOUNCE_BYTES = 4 << 20
_BOUNCE_BUFFERS = 4
#: Bytes written through the page cache before they are flushed and dropped from it.
_CACHED_BYTES = 16 << 20
#: How often a call may succeed without moving anything on before it counts as failed.
_PATIENCE = 8

#: What a filesystem says to a call that it does not offer.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)

_serial = itertools.count()


class Remains(NamedTuple):
    """What a slot leaves behind: its range, with what still has to be over, and how much of it was used."""

    extent: Extent
    nbytes: int


class _Bounce:
    """Aligned buffers, for bytes that direct I/O cannot take from where they are."""

    def __init__(self) -> None:
        self._permits = threading.BoundedSemaphore(_BOUNCE_BUFFERS)
        self._idle: deque[Tensor] = deque()

    def take(self) -> Tensor:
        self._permits.acquire()
        try:
            return self._idle.pop()
        except IndexError:
            pass
        try:
            return anonymous_slab(_BOUNCE_BYTES)
        except MemoryError:
            self._permits.release()
            raise

    def give(self, buffer: Tensor) -> None:
        # One stays for the next transfer; the others were needed for a moment.
        if not self._idle:
            self._idle.append(buffer)
        self._permits.release()

    def trim(self) -> None:
        """Gives idle buffers back to the system."""
        self._idle.clear()


class SpillFile:
    """Ranges of one file, which closes with the last reference. Reading and writing need no lock, the rest does.

    [Note: direct I/O]
    A buffered write would leave a copy in the page cache, and the memory that offloading frees would be gone again. So
    the file is opened for direct I/O where the filesystem takes it, which asks for alignment: offset and length are
    multiples of 4096 here always, and the alignment of the memory is found by trying. A source that has it (new kernels
    ask for very little) is written from where it is. A target is read in place only at a whole page: on a page that is
    shared with other data, the disk's write and a fork could cost that data its own latest write. What is left, and the
    odd end of every transfer, goes through a bounce buffer. Where direct I/O is refused, the cache is flushed and
    dropped behind each piece.

    Raises:
        OSError: the directory cannot take the file.
    """

    def __init__(self, directory: Path, file_type: type[RawFile]) -> None:
        self.directory = directory
        self.extents = Extents()
        #: Where slots end up; see [Note: slots give themselves back] in ``tiers/base.py``.
        self.returned: deque[Remains] = deque()
        #: What was carved and has no slot yet.
        self.carved: Extent | None = None
        self.name = ("spill file", next(_serial))
        #: Bytes in slots that are alive or not taken up yet; the tier counts.
        self.used = 0
        #: Whether this process is a child and the file its parent's.
        self.inherited = False
        self._raw = file_type(directory)
        self._bounce = _Bounce()
        #: What the address of a source has to be a multiple of, in bytes; ``None``: through the page cache.
        self.memory_alignment = self._probe()
        tell_after_fork(self)

    @property
    def length(self) -> int:
        """Bytes of the file."""
        return self.extents.length

    def room(self) -> int:
        """Bytes that are free in the file and on its disk."""
        return self.extents.free_bytes + shutil.disk_usage(self.directory).free

    def grow(self, nbytes: int, limit: int) -> bool:
        """Makes room for a range of ``nbytes`` at the end.

        Args:
            limit: by how much the file may grow, in bytes.

        Returns:
            Whether there was room on the disk.
        """
        need = nbytes - self.extents.free_at_end
        if need > limit:
            return False
        # Asking for what is not there would fill the disk to the brim for a moment, at the cost of everyone else on it.
        free = shutil.disk_usage(self.directory).free
        for step in (min(max(_GROWTH, need), limit // PAGE * PAGE), need):
            if step <= free and self._extend(step):
                self.extents.grow(step)
                return True
        return False

    def drain(self) -> None:
        """Takes up the slots that have died; when all have, gives the buffers of transfers back to the system."""
        if self.carved is not None:
            self.extents.release(self.carved.start, self.carved.nbytes, self.carved.fences)
            self.carved = None
        while self.returned:
            remains = self.returned[0]
            self.extents.release(remains.extent.start, remains.extent.nbytes, remains.extent.fences)
            self.used -= remains.nbytes
            del self.returned[0]
        if self.used == 0:
            self._bounce.trim()

    def write(self, extent: Extent, source: Tensor) -> None:
        """Writes all of ``source`` to the start of ``extent``.

        Raises:
            TransferError: the operating system refused.
        """
        self._transfer("write", extent, source)

    def read(self, extent: Extent, target: Tensor) -> None:
        """Reads the start of ``extent`` into all of ``target``.

        Raises:
            TransferError: the operating system refused.
        """
        self._transfer("read", extent, target)

    def mapping(self, extent: Extent, nbytes: int, owner: object) -> memoryview:
        """The first ``nbytes`` of ``extent`` as memory, which keeps ``owner``; what direct I/O writes shows there.

        Raises:
            MemoryError: the system refused.
        """
        return mapped_file(self._raw.descriptor, extent.start, nbytes, owner)

    def after_fork(self) -> None:
        """The child must not touch what its parent writes and reads, nor keep its room on the disk occupied."""
        self.inherited = True
        self._raw.close()

    # -- growing and probing --------------------------------------------------------------------------------------

    def _extend(self, nbytes: int) -> bool:
        length = self.length
        try:
            self._raw.allocate(length, nbytes)
        except OSError as error:
            if error.errno in _REFUSALS:
                # The filesystem cannot promise room; a write that finds none fails and is counted then.
                return self._try_truncate(length + nbytes)
            self._try_truncate(length)
            return False
        return True

    def _try_truncate(self, length: int) -> bool:
        try:
            self._raw.truncate(length)
        except OSError:
            return False
        return True

    def _probe(self) -> int | None:
        """The least alignment of memory that direct I/O takes here and does right; ``None`` where it takes none."""
        buffer = anonymous_slab(16 * PAGE)
        pages = view_of(buffer.data_ptr(), 16 * PAGE, buffer)
        target = pages[8 * PAGE : 12 * PAGE]
        for alignment in (64, 512, PAGE):
            source = pages[alignment : alignment + 4 * PAGE]
            source[:] = alignment.to_bytes(2, "little") * (2 * PAGE)
            try:
                self._raw.set_direct(True)
                written = self._raw.write_from(source, 0)
                if self._raw.read_into(target, 0) == written == len(source) and target == source:
                    return alignment
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
            finally:
                self._raw.truncate(0)
        self._raw.set_direct(False)
        return None

    # -- moving ---------------------------------------------------------------------------------------------------

    def _transfer(self, what: str, extent: Extent, tensor: Tensor) -> None:
        nbytes = tensor.numel()
        assert nbytes <= extent.nbytes
        if self.inherited:
            raise OffloadError(
                f"cannot {what} {nbytes} bytes on disk: they belong to the process that this one was forked from. "
                "What was saved before a fork can only be used by the parent; run forward and backward in one process."
            )
        address = tensor.data_ptr()
        try:
            if what == "write":
                self._write(address, nbytes, extent.start)
            else:
                self._read(address, nbytes, extent.start)
        except (OSError, MemoryError) as error:
            raise self._failed(what, nbytes, error) from error

    def _write(self, address: int, nbytes: int, offset: int) -> None:
        if self.memory_alignment is None:
            for at in range(0, nbytes, _CACHED_BYTES):
                piece = min(_CACHED_BYTES, nbytes - at)
                self._write_fully(view_of(address + at, piece), offset + at)
                self._raw.flush()
                self._raw.forget(offset + at, round_up(piece, PAGE))
            return
        done = 0
        if address % self.memory_alignment == 0 and nbytes >= PAGE:
            done = nbytes // PAGE * PAGE
            try:
                self._write_fully(view_of(address, done), offset)
            except OSError as error:
                if error.errno != errno.EINVAL or address % PAGE == 0:
                    raise
                # The probe's few pages passed and these did not: the device asks for more than it said.
                self.memory_alignment, done = PAGE, 0
        if done < nbytes:
            self._write_through_bounce(address + done, nbytes - done, offset + done)

    def _write_through_bounce(self, address: int, nbytes: int, offset: int) -> None:
        buffer = self._bounce.take()
        try:
            base = buffer.data_ptr()
            for at in range(0, nbytes, _BOUNCE_BYTES):
                piece = min(_BOUNCE_BYTES, nbytes - at)
                whole = round_up(piece, PAGE)
                view = view_of(base, whole)
                move(base, address + at, piece)
                view[piece:] = bytes(whole - piece)
                self._write_fully(view, offset + at)
        finally:
            self._bounce.give(buffer)

    def _read(self, address: int, nbytes: int, offset: int) -> None:
        if self.memory_alignment is None:
            for at in range(0, nbytes, _CACHED_BYTES):
                piece = min(_CACHED_BYTES, nbytes - at)
                self._read_fully(view_of(address + at, piece), offset + at)
                self._raw.forget(offset + at, round_up(piece, PAGE))
            return
        done = 0
        if address % PAGE == 0 and nbytes >= PAGE:
            done = nbytes // PAGE * PAGE
            self._read_fully(view_of(address, done), offset)
        if done == nbytes:
            return
        buffer = self._bounce.take()
        try:
            base = buffer.data_ptr()
            for at in range(done, nbytes, _BOUNCE_BYTES):
                piece = min(_BOUNCE_BYTES, nbytes - at)
                self._read_fully(view_of(base, round_up(piece, PAGE)), offset + at)
                move(address + at, base, piece)
        finally:
            self._bounce.give(buffer)

    def _write_fully(self, source: memoryview, offset: int) -> None:
        done = patience = 0
        while done < len(source):
            moved = self._raw.write_from(source[done:], offset + done)
            done, patience = self._after(done, moved, patience)

    def _read_fully(self, target: memoryview, offset: int) -> None:
        done = patience = 0
        while done < len(target):
            moved = self._raw.read_into(target[done:], offset + done)
            done, patience = self._after(done, moved, patience)

    def _after(self, done: int, moved: int, patience: int) -> tuple[int, int]:
        """Where a transfer goes on after a call that moved ``moved`` bytes, and how many calls have led nowhere."""
        reached = done + moved
        if self.memory_alignment is not None:
            # Direct I/O can only go on at a whole block; the rest of the last one is moved once more.
            reached = reached // PAGE * PAGE
        if reached > done:
            return reached, 0
        if patience == _PATIENCE:
            raise OSError(errno.EIO, "the call succeeds but moves no bytes")
        return done, patience + 1

    def _failed(self, what: str, nbytes: int, error: OSError | MemoryError) -> TransferError:
        number = error.errno if isinstance(error, OSError) else errno.ENOMEM
        if number in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some room there, lower disk_budget, or set disk_path to a directory on another disk"
        else:
            remedy = "check the disk (the kernel's log says more), or set disk_path to a directory on another one"
        reason = os.strerror(number) if number is not None else str(error)
        return TransferError(
            f"could not {what} {nbytes} bytes {'to' if what == 'write' else 'from'} the spill file in "
            f"{str(self.directory)!r}: {reason}. What to do: {remedy}.",
            errno=number,
            tier="disk",
            nbytes=nbytes,
        )
