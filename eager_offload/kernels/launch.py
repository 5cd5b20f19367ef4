"""How a kernel is spread over a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import gt, mod

import torch

from eager_offload.errors import CapabilityError, KernelError
from eager_offload.kernels.sizes import checked_sizes
from eager_offload.kernels.staging import StagingTree

#: Bytes of shared memory that a block may have where there is no device to ask: of compute capability 9.0, in the table
#: of technical specifications of the CUDA C++ programming guide.
_SHARED_BYTES = 227 << 10
#: Threads of a block, and those in its third dimension, in the same table, for each compute capability.
_THREADS, _THREADS_Z = 1024, 64
#: Blocks in each dimension of a grid, in the same table.
_BLOCKS = ((1 << 31) - 1, 65535, 65535)
#: Blocks of a cluster, of compute capability 9.0; other devices may have 8 at most.
_CLUSTER = 16

_Three = tuple[int, int, int]


@dataclass(frozen=True)
class LaunchSpec:
    """How many programs of a kernel run, and in what groups.

    What runs on a CPU takes of it what it has: an interpreter the grid, compiled torch code nothing.

    Args:
        grid: blocks in each of three dimensions.
        block: threads of a block, in each.
        cluster: blocks that run together; each number divides that of ``grid``.
        shared: scratch memory of a block: its layout, bytes, or ``None`` for none.

    Raises:
        KernelError: not three whole numbers from 1 on, more threads or blocks than CUDA has (1,024 threads in a block
            and 64 in its third dimension, 65,535 blocks in the second and third of a grid, 16 in a cluster), a grid
            that the cluster does not divide, or bytes below 0.
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
        grid, block, cluster, shared = self.grid, self.block, self.cluster, self.shared
        threads, together = math.prod(block), math.prod(cluster)
        if threads > _THREADS:
            raise _refused(f"{block=}", f"it has {threads:,} threads, and a block has {_THREADS:,} at most")
        if block[2] > _THREADS_Z:
            raise _refused(f"{block=}", f"a block has {_THREADS_Z} threads in its third dimension at most")
        if any(map(gt, grid, _BLOCKS)):
            most = "{:,}, {:,} and {:,}".format(*_BLOCKS)
            raise _refused(f"{grid=}", f"a grid has {most} blocks in its dimensions at most")
        if together > _CLUSTER:
            raise _refused(f"{cluster=}", f"it has {together:,} blocks, and a cluster has {_CLUSTER} at most")
        if any(map(mod, grid, cluster)):
            raise _refused(f"{grid=}, {cluster=}", "each number of the grid is a multiple of the cluster's")
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

    def check_device(self, device: torch.device) -> None:
        """Asks whether ``device`` can launch this.

        Raises:
            CapabilityError: it has less shared memory for a block.
        """
        limit = _shared_bytes(device)
        if self.shared_bytes > limit:
            raise CapabilityError(
                f"a block has {self.shared_bytes:,} bytes of shared memory, and {device} gives it {limit:,} at most: "
                "stage less at a time, or put what is not needed at once into a Union"
            )


def _refused(given: str, why: str) -> KernelError:
    return KernelError(f"LaunchSpec({given}) is not accepted: {why}")


def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _SHARED_BYTES
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _SHARED_BYTES))
