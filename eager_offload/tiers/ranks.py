"""How many processes of a run share this node, and which of them this one is.

The launcher says it, or the framework that has started them; else the process group, by what its ranks say in its
store; else where they meet. Where nothing tells, all ranks of the run share what this node has: a share
that is too small costs room, and one that is too large may cost the run.

[Note: roll call]
Nothing in torch says which ranks share a node, and a collective cannot be started where it is asked: by one rank alone,
in the midst of a step. The store of the process group takes no other rank's part: an operation is a message to its
server and back. Each rank adds itself once to two of its counters, of its node and of all nodes. Whoever reads both
knows how many have said that they are elsewhere. All others count as here, so that what a rank takes for its share is
never too much; it is more with the next look, when others have spoken.

Both counters go up one after the other, the node's first, and are read in the opposite order: a rank of this node that
speaks in between counts as here twice, and never as elsewhere.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from eager_offload._torch import default_store
from eager_offload.tiers.cgroups import read
from eager_offload.tiers.forking import tell_after_fork

#: What launchers call the number of processes that they started on this node: torchrun (and what starts processes as it
#: does), worker groups on Ray, Open MPI, MVAPICH2 and 3, Hydra (MPICH, Intel MPI), Cray's PALS, IBM's JSM, Horovod, and
#: those that call it as Horovod's guides do. The one that started this very process comes first: a torchrun that Slurm
#: has started knows better than Slurm.
_NUMBERS = (
    "LOCAL_WORLD_SIZE",
    "RAY_LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MVP_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "LOCAL_SIZE",
)
#: What they call the number of processes on all nodes.
_TOTALS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE")
#: Slurm's, of the step that this process belongs to.
_SLURM_STEP = ("SLURM_STEP_TASKS_PER_NODE",)
#: What was asked for, and of the whole job. The one process that runs the script of ``sbatch`` has these too: they say
#: how many there are only to what ``srun`` has started, which has the number of a step.
_SLURM_JOB = ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_SLURM_STEP_NUMBERS = ("SLURM_STEP_ID", "SLURM_STEPID")
#: Where all ranks meet, if they are all on this node.
_HERE = ("localhost", "127.0.0.1", "::1")
#: ``4(x2)``: two nodes in a row with four each.
_RUN = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
#: What the keys of the library in a store begin with.
_KEY = "eager_offload/ranks"


class Ranks(NamedTuple):
    """Ranks of a run that share this node."""

    number: int
    """At most this many."""
    is_guess: bool = False
    """Whether it is all of the run, since nothing tells where they are."""


#: What a framework has said that starts processes by itself; 0: nothing.
_reported = 0
#: Whether the user has been told that nobody has counted the ranks of this node.
_has_warned = False


def ranks_here(environ: Mapping[str, str] | None = None) -> Ranks:
    """Returns how many processes share this node's memory and disks; 1 where nothing says that there are more.

    A value that makes no sense is passed over.

    Args:
        environ: the environment; that of this process where it is left out.
    """
    environ = os.environ if environ is None else environ
    if number := _counted(environ) or _reported:
        return Ranks(number)
    total = next(filter(None, (_positive(environ.get(name, "")) for name in _TOTALS)), 0)
    meeting = environ.get("MASTER_ADDR", "").strip()
    if total and meeting.lower() in _HERE:  # started by hand, as by torch.multiprocessing.spawn
        return Ranks(total)
    if (found := _roll_call.ranks()) is not None:
        return found
    return Ranks(total or 1, is_guess=total > 1 and not (meeting and is_this_node(meeting)))


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


def warning_of_guess() -> str | None:
    """Returns what the user is to be told, once in a process, where nothing tells how many ranks share this node."""
    global _has_warned
    if _has_warned or not (found := ranks_here()).is_guess:
        return None
    _has_warned = True
    return (
        f"nothing tells how many of the {found.number} processes of this run are on this node, so each takes its share "
        "of memory and disks as if all were. Set LOCAL_WORLD_SIZE to how many there are, or give host_budget and "
        "disk_budget in bytes"
    )


# -- what a launcher says ----------------------------------------------------------------------------------------------


def _counted(environ: Mapping[str, str]) -> int:
    """Returns what a launcher says; 0 where none does."""
    for name in _NUMBERS:
        if ranks := _positive(environ.get(name, "")):
            return ranks
    in_step = any(environ.get(name) for name in _SLURM_STEP_NUMBERS)
    for name in (*_SLURM_STEP, *(_SLURM_JOB if in_step else ())):
        if ranks := _on_this_node(environ.get(name, ""), environ.get("SLURM_NODEID", "")):
            return ranks
    return 0


def _positive(text: str) -> int:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _on_this_node(text: str, node: str) -> int:
    """Returns the entry of ``node`` in a list such as ``4(x2),3``; the largest where this node is not known.

    Returns:
        0 for a text of another form.
    """
    runs = [_RUN.fullmatch(part.strip()) for part in text.split(",")]
    found = [(int(run[1]), int(run[2] or 1)) for run in runs if run is not None]
    if len(found) < len(runs):
        return 0
    if node.isascii() and node.isdecimal():
        left = int(node)
        for ranks, times in found:
            if left < times:
                return ranks
            left -= times
    return max(ranks for ranks, _ in found)


# -- what the process group says ---------------------------------------------------------------------------------------


class RollCall:
    """Counts the ranks of the process group that may be on this node. Thread-safe; see [Note: roll call].

    Args:
        node: what names the node: the same for its processes, and another one on each other node.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        #: The store in which this process has said where it is; to hold it would keep the port of a destroyed group.
        self._store: weakref.ref[Any] | None = None
        #: What has come of it, once nothing more will.
        self._known: Ranks | None = None
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Keeps the child from asking the store, whose connection it shares with its parent."""
        if (store := default_store()) is not None:
            self._store, self._known = weakref.ref(store), Ranks(dist.get_world_size(), is_guess=True)

    def ranks(self) -> Ranks | None:
        """Returns the ranks of the process group on this node; ``None`` where there is no group. Waits for no rank."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        size, store = dist.get_world_size(), default_store()
        if size == 1:
            return Ranks(1)
        if store is None:
            return Ranks(size, is_guess=True)
        if self._store is None or store is not self._store():
            self._store, self._known = None, None
        if self._known is not None:
            return self._known
        try:
            return self._call(store, size)
        except (RuntimeError, OSError):  # its server has gone, or it has no counters
            self._store, self._known = weakref.ref(store), Ranks(size, is_guess=True)
            return self._known

    def _call(self, store: Any, size: int) -> Ranks:
        everywhere, here = f"{_KEY}/all", f"{_KEY}/node/{self._node}"
        if self._store is None:
            if store.add(f"{_KEY}/rank/{dist.get_rank()}", 1) == 1:  # else another Python of this rank has said it
                store.add(here, 1)
                store.add(everywhere, 1)
            self._store = weakref.ref(store)
        spoken = store.add(everywhere, 0)
        found = Ranks(size - max(spoken - store.add(here, 0), 0))
        if spoken >= size:
            self._known = found
        return found


def this_node() -> str:
    """Returns a name of this machine: of its boot, which containers on it share as they share its memory."""
    return (read(Path("/proc/sys/kernel/random/boot_id")) or "").strip() or socket.gethostname()


@functools.lru_cache
def is_this_node(address: str) -> bool:
    """Returns whether ``address``, a name or a number, is this machine's: whether a socket can be bound to it."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return address.lower() == socket.gethostname().lower()
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as one:
                one.bind(where)
                return True
        except OSError:
            continue
    return False


_roll_call = RollCall(this_node())
