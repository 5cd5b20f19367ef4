"""Automatic windows by the times of a device: the inputs of checkpointed blocks leave one by one."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import pytest
import torch

import eager_offload as eo
from benchmarks.models import Llama, Shape
from benchmarks.peers import checkpointed

SHAPE, LENGTH = Shape(16, 512, 2048, 4, 4, 40_000), 8192
#: What each block is given, the norm and the head behind them included.
INPUT = LENGTH * SHAPE.width * 2
INPUTS = 18 * INPUT
#: From which on two steps like it were looked up and timed, and the device has come to their end.
STEPS = 10


def last_peak(around: AbstractContextManager[Any]) -> int:
    with torch.device("cuda"):
        model = Llama(SHAPE, checkpointed).to(torch.bfloat16)
        tokens = torch.zeros((1, LENGTH + 1), dtype=torch.int64)
    for _ in range(STEPS):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with around:
            loss = model(tokens)
        loss.backward()
        del loss
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del model, tokens
    gc.collect()
    return peak


@pytest.mark.timeout(120)
def test_inputs_of_blocks_leave_one_by_one() -> None:
    none = last_peak(nullcontext())
    with closing(eo.Offload(host_budget="4GiB", step_tables=False)) as offload:
        by_bytes, large = last_peak(offload), offload.stats()
    with closing(eo.Offload(host_budget="4GiB")) as offload:
        by_times, least = last_peak(offload), offload.stats()
    assert large.max_inflight_bytes >= 4 * INPUT <= large.prefetch_bytes
    assert least.max_inflight_bytes < large.max_inflight_bytes
    assert least.prefetch_bytes < large.prefetch_bytes
    assert by_times <= none - INPUTS + least.prefetch_bytes + least.max_inflight_bytes
    assert by_times < by_bytes < none
    assert 0 < least.offloaded_bytes < large.offloaded_bytes  # the logits rest
