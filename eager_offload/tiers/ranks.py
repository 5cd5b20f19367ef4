"""How many processes of a run share this node, and which of them this one is.

The launcher says it, or the framework that has started them. Where neither does, all ranks of the run share what this
node has: a share that is too small costs room, and one that is too large may cost the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist

from eager_offload.errors import warn_once

#: The variables in which launchers give the number of processes that they started on this node: torchrun (and launchers
#: that start processes as it does), worker groups on Ray, Open MPI, and Hydra (MPICH, Intel MPI).
_NUMBERS = ("LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
#: Where all ranks meet, if they are all on this node.
_HERE = ("localhost", "127.0.0.1", "::1")


class Ranks(NamedTuple):
    """Ranks of a run that share this node."""

    number: int
    """At most this many."""
    is_guess: bool = False
    """Whether it is all of the run, since nothing tells where they are."""


#: What a framework has said that starts processes by itself; 0: nothing.
_reported = 0


def ranks_here(environ: Mapping[str, str] | None = None) -> Ranks:
    """Returns how many processes share this node's memory and disks; 1 where nothing says that there are more.

    A value that makes no sense is passed over.

    Args:
        environ: the environment; that of this process where it is left out.
    """
    environ = os.environ if environ is None else environ
    if number := next(filter(None, (_positive(environ.get(name, "")) for name in _NUMBERS)), _reported):
        return Ranks(number)
    has_group = dist.is_available() and dist.is_initialized()
    total = _positive(environ.get("WORLD_SIZE", "")) or (dist.get_world_size() if has_group else 1)
    is_here = environ.get("MASTER_ADDR", "").strip().lower() in _HERE  # started by hand, as by torch.multiprocessing
    return Ranks(total, is_guess=total > 1 and not is_here)


def local_ranks(environ: Mapping[str, str] | None = None) -> int:
    """Returns the number of ``ranks_here``."""
    return ranks_here(environ).number


def rank() -> int:
    """Returns which process of its run this is, as launchers like torchrun say; 0 without one."""
    return _positive(os.environ.get("RANK", ""))


def set_local_ranks(ranks: int) -> None:
    """Says how many processes share this node, for frameworks that start them without a launcher's variables.

    A launcher's word comes before it. 0 takes it back.
    """
    global _reported
    _reported = max(ranks, 0)


def warn_of_guess() -> None:
    """Warns, once in a process, if nothing tells how many ranks share this node."""
    if (found := ranks_here()).is_guess:
        warn_once(
            "ranks",
            f"nothing tells how many of the {found.number} processes of this run are on this node, so each takes its "
            "share of memory and disks as if all were. Set LOCAL_WORLD_SIZE to how many there are, or give "
            "host_budget and disk_budget in bytes",
        )


def _positive(text: str) -> int:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
