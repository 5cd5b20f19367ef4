"""What may happen between two steps of the library, put there on purpose: other threads, the collector, late news."""

from __future__ import annotations

import torch

from eager_offload.eager.ground import Ground
from eager_offload.eager.offloading import Offloading
from eager_offload.runtime.simulated import SimulatedRuntime
from eager_offload.schedule import DelayLine
from eager_offload.stats import Accounts
from eager_offload.tiers.arena import Arena, HostTier

CPU = torch.device("cpu")


def test_h09_a_storage_that_dies_as_its_turn_to_leave_comes_is_not_counted_on() -> None:
    runtime = SimulatedRuntime()
    ground = Ground(CPU, runtime, Accounts())
    offloading = Offloading(ground, [HostTier(Arena(runtime.host_buffer), 1 << 20)], 1 << 20)
    line = DelayLine(0)
    line.push(1, 4096, None)  # another thread drops the last handle before the copy starts
    ground.hold(4096)
    offloading.start_due(line, None)
    assert (ground.resident_bytes, line.nbytes, len(offloading)) == (0, 0, 0)
