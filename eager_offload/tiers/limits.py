"""How much of this machine's memory and disks one process may take."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import psutil

__all__ = ["disk_budget", "host_budget", "local_ranks"]

#: The part of the memory that is available now that saved tensors may take. The other half is for what the process
#: still has to allocate itself: data loading, checkpoints on their way to disk, the page cache that feeds both.
HOST_FRACTION = 0.5
#: The part of a disk's free room that spill files may take. The rest is for the checkpoints that a run writes.
DISK_FRACTION = 0.75

#: What launchers call the number of processes that they started on this node: torchrun, Open MPI, MVAPICH2, Slurm.
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
)


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """How many processes share this node's memory and disks, by the launcher's word; 1 where there is none.

    A value that is no positive integer is passed over.
    """
    for name in _LOCAL_RANKS:
        value = environ.get(name, "").strip()
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return 1


def host_budget() -> int:
    """Bytes of host memory for this process's saved tensors: ``HOST_FRACTION`` of what is available, by rank."""
    return int(psutil.virtual_memory().available * HOST_FRACTION) // local_ranks()


def disk_budget(path: Path) -> int:
    """Bytes on the disk of ``path`` for this process's spill file: ``DISK_FRACTION`` of what is free, by rank.

    Raises:
        OSError: ``path`` cannot be looked at.
    """
    return int(shutil.disk_usage(path).free * DISK_FRACTION) // local_ranks()
