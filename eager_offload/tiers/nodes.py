"""Which ranks of the process group are on this node, as far as they have said it; whether an address is this node's.

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
import socket
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from eager_offload._torch import default_store
from eager_offload.tiers.cgroups import read
from eager_offload.tiers.forking import tell_after_fork

#: What the keys of the library in a store begin with.
_KEY = "eager_offload/ranks"


class Ranks(NamedTuple):
    """Ranks of a run that share this node."""

    number: int
    """At most this many."""
    is_guess: bool = False
    """Whether it is all of the run, since nothing tells where they are."""


class RollCall:
    """Counts the ranks of the process group that may be on this node. Thread-safe; see [Note: roll call].

    Args:
        node: what names the node: the same for its processes, and another one on each other node.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        #: The store in which this process has said where it is; to hold it would keep the port of a destroyed group.
        self._store: weakref.ref[Any] | None = None
        #: What has come of it, once all have spoken.
        self._known: Ranks | None = None
        #: A store that is not asked: it has failed, or is the parent's, whose connection a forked child shares.
        self._avoided: weakref.ref[Any] | None = None
        tell_after_fork(self)

    def after_fork(self) -> None:
        store = default_store()
        self._store, self._known = None, None
        self._avoided = None if store is None else weakref.ref(store)

    def ranks(self) -> Ranks | None:
        """Returns the ranks of the process group on this node; ``None`` where there is no group. Waits for no rank."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        size, store = dist.get_world_size(), default_store()
        if size == 1:
            return Ranks(1)
        if store is None or (self._avoided is not None and store is self._avoided()):
            return Ranks(size, is_guess=True)
        if self._store is None or store is not self._store():
            self._store, self._known = None, None
        if self._known is not None:
            return self._known
        try:
            return self._call(store, size)
        except (RuntimeError, OSError):  # its server has gone, or it has no counters
            self._avoided = weakref.ref(store)
            return Ranks(size, is_guess=True)

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
