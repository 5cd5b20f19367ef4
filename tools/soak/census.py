"""What a process holds, resource by resource."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from dataclasses import dataclass

import psutil
import torch

from eager_offload.runtime.host import host_runtime
from eager_offload.tiers.forking import Living

MIB = 1 << 20
#: By how much memory may grow, in bytes: the C library's heap is as large as the largest steps so far made it, in each
#: of its pools. And objects of one type, in number: caches that have a bound and are not full yet. What is left behind
#: by every step, or by every step of one kind, is hundreds after a minute.
_MEMORY_SLACK, _OBJECTS_SLACK = 96 * MIB, 16
#: Each ``Offload`` keeps the table of the step that was looked up last, which ``step_table()`` returns after a close as
#: well.
_TABLE_SLACK = {"objects: eager_offload.core.step_table.Row": 256}


@dataclass(frozen=True)
class Row:
    """One resource, at the beginning and at the end."""

    what: str
    before: int
    after: int
    slack: int

    @property
    def flat(self) -> bool:
        return self.after <= self.before + self.slack


def census() -> dict[str, int]:
    """Counts now; the caller has closed every ``Offload``, so nothing of theirs should be left."""
    gc.collect()
    _take_up()
    process, unnamed = psutil.Process(), _unnamed_files()
    found = {
        "resident memory": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "unnamed files": len(unnamed),
        "bytes in unnamed files": sum(unnamed),
        "threads": threading.active_count(),
        "children": len(process.children()),
        "hooks on autograd": int(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None),
    }
    # Those of torch and of the library; a loop's own integers and frames come and go.
    kinds = Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in map(type, gc.get_objects())
        if str(kind.__module__).startswith(("eager_offload", "torch"))  # some types have something else there
    )
    return {**found, **{f"objects: {kind}": number for kind, number in sorted(kinds.items())}}


def compare(before: dict[str, int], after: dict[str, int]) -> list[Row]:
    """Every resource of both, but for types of torch of which there are as many as before."""
    rows = []
    for what in dict.fromkeys([*before, *after]):
        slack = _OBJECTS_SLACK if what.startswith("objects: ") else _MEMORY_SLACK if what == "resident memory" else 0
        slack = _TABLE_SLACK.get(what, slack)
        row = Row(what, before.get(what, 0), after.get(what, 0), slack)
        if not what.startswith("objects: ") or "eager_offload" in what or row.before != row.after:
            rows.append(row)
    return rows


def _take_up() -> None:
    """Has the library note what has died, as its next call would: until then the records of that are there."""
    host_runtime().poll()
    for one in gc.get_objects():
        if type(one) is Living:
            bool(one)


def _unnamed_files() -> list[int]:
    """Bytes on the disk of each open file without a name."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").endswith(" (deleted)"):
                found.append(os.stat(f"/proc/self/fd/{name}").st_blocks * 512)
        except OSError:  # the one that listed them
            continue
    return found
