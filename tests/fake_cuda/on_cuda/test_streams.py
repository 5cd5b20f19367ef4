"""The streams that copies run on are none of those that a program can have."""

from __future__ import annotations

import pytest
import torch

from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.base import Direction


@pytest.mark.parametrize("priority", [0, -1])
def test_a_program_that_makes_many_streams_has_none_that_copies_run_on(priority: int) -> None:
    runtime, device = accelerator_runtime(), torch.device("cuda", torch.cuda.current_device())
    ours = {runtime.transfer_stream(device, direction).stream_id for direction in Direction}
    ours |= {stream.stream_id for stream in runtime.capture_streams(device)}
    assert len(ours) == 4
    theirs = {torch.cuda.Stream(priority=priority).stream_id for _ in range(64)}
    assert len(theirs) == 32, "all that there are"
    assert not ours & theirs
    assert runtime.separate_stream(device).stream_id not in ours
