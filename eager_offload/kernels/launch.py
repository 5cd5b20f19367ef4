"""How a kernel is spread over a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import gt

from eager_offload.errors import KernelError
from eager_offload.kernels.sizes import checked_sizes
from eager_offload.kernels.staging import StagingTree

#: Threads of a block, and those in its third dimension, in the same table, for each compute capability.
_THREADS, _THREADS_Z = 1024, 64
#: Blocks in each dimension of a grid, in the same table.
_BLOCKS = ((1 << 31) - 1, 65535, 65535)

_Three = tuple[int, int, int]


@dataclass(frozen=True)
class LaunchSpec:
    """How many programs of a kernel run, and in what groups.

    ``impl="cuda"`` launches all of it, torch operators nothing.

    Args:
        grid: blocks in each of three dimensions.
        block: threads of a block, in each.
        cluster: blocks that run together. Nothing launches clusters so far: ``impl="cuda"`` refuses one of more than
            one block.
        shared: scratch memory of a block: its layout, bytes, or ``None`` for none.

    Raises:
        KernelError: not three whole numbers from 1 on, more threads or blocks than CUDA has (1,024 threads in a block
            and 64 in its third dimension, 65,535 blocks in the second and third of a grid), or bytes below 0.
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
        """Scratch memory of a block, in bytes."""
        if isinstance(self.shared, StagingTree):
            return self.shared.nbytes
        return self.shared or 0


def _refused(given: str, why: str) -> KernelError:
    return KernelError(f"LaunchSpec({given}) is not accepted: {why}")
