"""``capture_step`` where torch's own CUDA build captures: what is in the graph does not depend on who is fast."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import eager_offload as eo
from eager_offload.graphs import capture_step

LAYERS, RUNS = 12, 20
#: Of a layer's activation.
NBYTES = 1 << 20


class Training:
    """Layers between which the host waits for the device now and then; elsewhere it runs ahead of a link that is busy.

    Args:
        seed: says where it waits.
    """

    def __init__(self, seed: int) -> None:
        self._waits = random.Random(seed)
        self._share = seed / (RUNS - 1)
        self._w = torch.zeros(256, 256, device="cuda", requires_grad=True)

    def _hurry_up(self, *_: object) -> None:
        if not torch.cuda.is_current_stream_capturing() and self._waits.random() < self._share:
            torch.cuda.synchronize()

    def __call__(self, x: Tensor) -> None:
        h = x
        for _ in range(LAYERS):
            h = (h @ self._w).tanh()
            h.register_hook(self._hurry_up)
            self._hurry_up()
        h.sum().backward()


WINDOWS = {"max_inflight_bytes": 2 * NBYTES, "prefetch_bytes": 2 * NBYTES}


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        pytest.param(
            {**WINDOWS, "keep_last_bytes": 0}, LAYERS - 2, id="all but what is on its way when backward begins"
        ),
        pytest.param(WINDOWS, None, id="what stays is learnt"),
        pytest.param({}, None, id="automatic windows"),
        pytest.param({**WINDOWS, "policy": "free"}, None, id="free"),
    ],
)
def test_h71_what_a_captured_step_moves_does_not_depend_on_the_host(fields: dict[str, Any], slots: int | None) -> None:
    x, found = torch.zeros(NBYTES // 1024, 256, device="cuda"), set()
    for seed in range(0, RUNS, 1 if slots else 4):
        train = Training(seed)
        offload = eo.Offload(tier="host", min_bytes=NBYTES, **fields)
        with capture_step(train, (x,), offload=offload) as step:
            found.add((step.plans, tuple(sorted(step.kept.items()))))
            plan = step.plan
        offload.close()
    assert len(found) == 1
    assert plan is not None
    assert plan.totals.slots > 0
    assert slots is None or plan.totals.slots == slots * NBYTES
