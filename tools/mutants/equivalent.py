"""Sites without which nothing observable differs, each with the reason: they are not tried.

Such code stays where one rule serves several tiers or runtimes, and to except one of them would take more lines.
"""

from __future__ import annotations

from tools.mutants.sites import Site

__all__ = ["why_equivalent"]

_HELD = "the thread that reads or writes a disk slot holds it, so that its range is free only when every use is over"

_NO_STORAGE = "of every other layout that reaches it, to ask for the storage or its address has raised before"

_OWN_QUEUE = "a storage of a run is packed and its copy started by that run alone, which has one queue"

#: By path, kind and what is taken out.
_EQUIVALENT = {
    (
        "eager_offload/tiers/disk.py",
        "fence",
        "super().__init__(nbytes, extent.fences, DiskSlotRecord(self, space.returned.append))",
    ): _HELD,
    (
        "eager_offload/tiers/space.py",
        "fence",
        "self.extents.release(record.extent.start, record.extent.nbytes, record.fences)",
    ): _HELD,
    (
        "eager_offload/eager/following.py",
        "guard",
        "not address or address % tensor.itemsize or tensor.layout is not torch.strided or tensor.is_nested"
        "  without  tensor.layout is not torch.strided",
    ): _NO_STORAGE,
    (
        "eager_offload/eager/following.py",
        "guard",
        "followed.started == (self.queue, sequence, version_of(tensor))  without  self.queue",
    ): _OWN_QUEUE,
}


def why_equivalent(site: Site) -> str | None:
    """The reason, for such a site."""
    return _EQUIVALENT.get((site.path, site.kind, site.source))
