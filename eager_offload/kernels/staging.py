"""The launch of a kernel: grid, block, and the layout of shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import gt
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from eager_offload.errors import KernelError
from eager_offload.kernels.signature import check_dtype, checked_sizes, is_whole


@dataclass(frozen=True)
class Slot:
    """An array in shared memory.

    Args:
        shape: its sizes; ``()`` is a single element.
        dtype: of its elements.
        align: the alignment of its address in bytes: a power of two, at least the size of an element.

    Raises:
        KernelError: a size is not a whole number of at least 0, or ``dtype`` or ``align`` is not accepted.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    align: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_sizes("Slot", "shape", self.shape, 0))
        check_dtype("Slot", self.dtype)
        least = self.dtype.itemsize
        if not is_whole(self.align) or self.align < least or self.align & (self.align - 1):
            raise KernelError(
                f"Slot(align={self.align!r}) is not accepted for {self.dtype}: it is a power of two, at least {least}"
            )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class _Members:
    """The immutable, ordered members of a tree or union."""

    members: Mapping[str, Any] | Sequence[Any]

    def __post_init__(self) -> None:
        members: object = self.members
        name = type(self).__name__
        if isinstance(members, str) or not isinstance(members, Mapping | Sequence) or not members:
            raise KernelError(f"{name}({members!r}) is not accepted: it has members, in a sequence or by their names")
        for path, member in _items(members):
            if not isinstance(path, str) or not path or "." in path:  # so that paths are unique
                raise KernelError(f"{name} has a member {path!r}: names are texts, not empty, with no dot in them")
            if not isinstance(member, Slot | Union | StagingTree):
                kinds = "Slot, Union and StagingTree"
                raise KernelError(f"{name} has {member!r} as its member {path!r}: members are {kinds}")
        same = MappingProxyType(dict(members)) if isinstance(members, Mapping) else tuple(members)
        object.__setattr__(self, "members", same)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Members) or type(other) is not type(self):
            return NotImplemented
        return _items(self.members) == _items(other.members)

    def __hash__(self) -> int:
        return hash(tuple(_items(self.members)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be copied or pickled.
        return type(self), (dict(self.members) if isinstance(self.members, Mapping) else self.members,)

    @property
    def align(self) -> int:
        return max(int(member.align) for _, member in _items(self.members))


@dataclass(frozen=True, eq=False)
class Union(_Members):
    """Members that share one address, of which one is in use at a time; the size is that of the largest.

    Args:
        members: slots, trees and unions, at least one; a mapping names them, without dots.

    Raises:
        KernelError: there is no member, a member has another type, or a name has a dot.
    """

    @property
    def nbytes(self) -> int:
        return max(int(member.nbytes) for _, member in _items(self.members))


@dataclass(frozen=True, eq=False)
class StagingTree(_Members):
    """Members that lie one after another in order, without gaps.

    Padding is never added, because the layout of shared memory affects speed. A member that would be misaligned is an
    error, which tells by how many bytes.

    Args:
        members: slots, unions and trees, at least one; a mapping names them, without dots; a sequence numbers them.

    Raises:
        KernelError: there is no member, a member has another type or would be misaligned, or a name has a dot.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for _ in _slots(self, "", 0):
            pass

    @property
    def nbytes(self) -> int:
        return sum(int(member.nbytes) for _, member in _items(self.members))

    @property
    def offsets(self) -> dict[str, int]:
        """The offset of each slot in bytes, by its path, such as ``"tiles.a"`` or ``"0.1"``."""
        return {path: offset for path, _, offset in _slots(self, "", 0)}

    def place(self, buffer: Tensor) -> dict[str, Tensor]:
        """Returns the slots as views of ``buffer``, by path; the members of a union overlap.

        Args:
            buffer: contiguous bytes (``uint8``), at least ``nbytes``, at a multiple of ``align``.

        Raises:
            KernelError: the buffer is of another type, too small or misaligned.
        """
        given: object = buffer
        if not isinstance(given, Tensor) or buffer.layout is not torch.strided or buffer.is_nested:
            raise KernelError(f"the scratch buffer is {buffer!r}: give a tensor of contiguous bytes")
        if buffer.dtype is not torch.uint8 or not buffer.is_contiguous() or buffer.numel() < self.nbytes:
            raise KernelError(
                f"the scratch buffer has {tuple(buffer.shape)}, {buffer.dtype}, strides {buffer.stride()}; give at "
                f"least {self.nbytes} contiguous elements of torch.uint8"
            )
        if buffer.data_ptr() % self.align:
            raise KernelError(
                f"the scratch buffer begins {buffer.data_ptr() % self.align} bytes behind a multiple of {self.align}, "
                "which the widest of its slots needs"
            )
        flat = buffer.view(-1)
        return {
            path: flat[offset : offset + slot.nbytes].view(slot.dtype).view(slot.shape)
            for path, slot, offset in _slots(self, "", 0)
        }


def _items(members: Mapping[Any, Any] | Sequence[Any]) -> list[tuple[Any, Any]]:
    if isinstance(members, Mapping):
        return list(members.items())
    return [(str(number), member) for number, member in enumerate(members)]


def _slots(node: Union | StagingTree, path: str, offset: int) -> Iterator[tuple[str, Slot, int]]:
    """Yields the slots in order with paths and offsets; raises for a misaligned one."""
    for name, member in _items(node.members):
        full = f"{path}.{name}" if path else name
        if isinstance(member, Slot):
            if off := offset % member.align:
                raise KernelError(
                    f"the slot {full!r} would begin at byte {offset}, {off} behind a multiple of its alignment "
                    f"{member.align}: put wider slots in front, or a Slot(({member.align - off},), torch.uint8, "
                    "align=1) before it"
                )
            yield full, member, offset
        else:
            yield from _slots(member, full, offset)
        if isinstance(node, StagingTree):
            offset += member.nbytes


#: CUDA's limits, for all compute capabilities: threads of a block, and threads in its third dimension.
_THREADS, _THREADS_Z = 1024, 64
#: Blocks in each dimension of a grid.
_BLOCKS = ((1 << 31) - 1, 65535, 65535)

_Three = tuple[int, int, int]


@dataclass(frozen=True)
class LaunchSpec:
    """The grid, block and shared memory of a launch.

    Only ``impl="cuda"`` uses it; torch operators ignore it.

    Args:
        grid: blocks in each of three dimensions.
        block: threads of a block in each dimension.
        cluster: blocks of a cluster in each dimension. Not supported yet: ``impl="cuda"`` refuses clusters of more than
            one block.
        shared: shared memory of a block: its layout, its bytes, or ``None``.

    Raises:
        KernelError: not three whole numbers of at least 1, more threads or blocks than CUDA allows (1,024 threads in a
            block and 64 in its third dimension, 65,535 blocks in the second and third dimension of a grid), or negative
            bytes.
    """

    grid: _Three
    block: _Three
    cluster: _Three = (1, 1, 1)
    shared: StagingTree | int | None = None

    def __post_init__(self) -> None:
        for name in ("grid", "block", "cluster"):
            given = checked_sizes("LaunchSpec", name, getattr(self, name), 1)
            object.__setattr__(self, name, given)
            if len(given) != 3:
                raise _refused(f"{name}={given}", "it is three whole numbers")
        grid, block, shared = self.grid, self.block, self.shared
        threads = math.prod(block)
        if threads > _THREADS:
            raise _refused(f"{block=}", f"it has {threads:,} threads, and a block has {_THREADS:,} at most")
        if block[2] > _THREADS_Z:
            raise _refused(f"{block=}", f"a block has {_THREADS_Z} threads in its third dimension at most")
        if any(map(gt, grid, _BLOCKS)):
            most = "{:,}, {:,} and {:,}".format(*_BLOCKS)
            raise _refused(f"{grid=}", f"a grid has {most} blocks in its dimensions at most")
        if isinstance(shared, bool) or not isinstance(shared, StagingTree | int | None):
            raise _refused(f"{shared=}", "it is a StagingTree, bytes or None")
        if self.shared_bytes < 0:
            raise _refused(f"{shared=}", "bytes are not below 0")

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        return self.shared.nbytes if isinstance(self.shared, StagingTree) else self.shared or 0


def _refused(given: str, why: str) -> KernelError:
    return KernelError(f"LaunchSpec({given}) is not accepted: {why}")
