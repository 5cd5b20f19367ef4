"""The simulated runtime and its checker: the way of a saved tensor is clean, and a race without any of its edges.

``tests/scripts`` has when each copy runs.
"""

from __future__ import annotations

import pytest
import torch

from tests.runtime.simulated_rig import Rig, flat
from tests.simulation.checker import Checker, OrderingError
from tests.simulation.log import WrittenLog
from tests.simulation.simulated import SimulatedRuntime


def way_of_a_saved_tensor(rig: Rig) -> None:
    """Offloads one tensor and reloads it, where others use the same block and the same slot before and after."""
    runtime, main, out, inward = rig.runtime, rig.main, rig.out, rig.inward
    saved = torch.randn(1024) * 2
    want = saved.clone()
    runtime.wait(out, runtime.record(main))  # the offload waits for the producer
    slot = rig.slot(4096)
    runtime.copy(slot, flat(saved), out)
    runtime.wait(main, runtime.record(out))  # the source goes after its copy
    del saved
    scratch = torch.full((1024,), 7.0)  # takes the block
    del scratch
    target = rig.target(4096)  # takes it again
    runtime.wait(inward, runtime.record(main))  # the reload waits for the block's last owner
    runtime.copy(target, slot, inward)
    reloaded = runtime.record(inward)
    other = torch.ones(1024)
    produced = runtime.record(main)
    runtime.wait(out, reloaded)  # the slot's next writer waits for its last reader
    runtime.wait(out, produced)  # the next offload waits for its producer
    runtime.copy(slot, flat(other), out)
    offloaded = runtime.record(out)
    runtime.wait(main, reloaded)  # compute waits for the reload
    got = target.view(torch.float32) + 0.0
    runtime.synchronize(offloaded)  # lets the second source go
    assert torch.equal(slot.tensor, flat(other))
    assert torch.equal(got, want)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_full_way_is_exact_and_lacks_each_of_its_edges_in_turn(at_once: bool) -> None:
    rig, recording = Rig(SimulatedRuntime(at_once=at_once)), WrittenLog()
    with rig.runtime.checked(recording) as checker:
        way_of_a_saved_tensor(rig)
    checker.assert_clean()
    assert [span.nbytes for span in rig.runtime.timeline.spans if span.is_transfer] == [4096, 4096, 4096]
    assert rig.runtime.faults == []
    assert len(recording.entries) == checker.entries
    recording.replay(again := WrittenLog())
    assert recording.entries == again.entries
    assert len(recording.edges) == 7
    for index in recording.edges:
        recording.replay(lacking := Checker(), without=index)
        with pytest.raises(OrderingError, match="nothing orders"):
            lacking.assert_clean()
        assert all(race.earlier.number < index <= race.later.number for race in lacking.violations)
