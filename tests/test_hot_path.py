"""How many calls one saved tensor takes that is offloaded and comes back; benchmarks/hooks.py measures its time."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import closing
from threading import Event
from types import FrameType

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload import marks
from eager_offload.contexts import unpack
from eager_offload.runtime.base import Direction
from eager_offload.runtime.host import host_runtime
from eager_offload.tiers.forking import ForkSafeLock

SAVES, NBYTES = 256, 4096

pytestmark = pytest.mark.filterwarnings("ignore:eager_offload. tier=.host.")


def calls(offload: eo.Offload) -> Counter[str]:
    """The library's functions that one forward and its backward call, on the thread that computes.

    No copy ends while saves are packed, and nothing has to be waited for, so that it is the same each time. How many
    locks the process has, which a forward asks once, is of other tests.
    """
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code not in (part.__code__, ForkSafeLock.is_held.__code__):
            found[frame.f_code.co_qualname] += 1

    def forward() -> None:
        with offload:
            handles.extend(map(offload._hooks.pack, tensors))

    def first() -> None:
        unpack(handles.pop())  # which notices that all copies are over, and has the others brought back

    def others() -> None:
        while handles:
            unpack(handles.pop())

    leaf = torch.zeros(NBYTES // 4, requires_grad=True)
    tensors: list[Tensor] = [leaf * 1 for _ in range(SAVES)]
    handles: list[object] = []
    streams, gate = [host_runtime().transfer_stream(leaf.device, direction) for direction in Direction], Event()
    streams[0].submit(gate.wait)
    for part in (forward, first, others):
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            part()
        finally:
            sys.setprofile(before)
        tensors.clear()
        gate.set()
        for stream in streams:
            stream.record().wait()
    return found


@pytest.mark.parametrize("step_tables", [False, True])
def test_an_offloaded_tensor_takes_so_many_calls_of_functions(
    step_tables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "standing", {})  # what other tests have marked and still hold is asked for at each save
    # Of no other size: what waits behind the gate has to fit.
    windows = {"max_inflight_bytes": 2 * SAVES * NBYTES, "prefetch_bytes": 2 * SAVES * NBYTES}
    with closing(
        eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0, step_tables=step_tables, **windows)
    ) as offload:
        for _ in range(3):
            calls(offload)
        found = calls(offload)
        stats = offload.stats(synchronize=True)
    assert stats.offloaded_tensors == 4 * SAVES
    assert stats.table_forwards == (3 if step_tables else 0)
    assert stats.bytes_in > 0
    assert found.total() <= 60 * SAVES, found.most_common(80)
