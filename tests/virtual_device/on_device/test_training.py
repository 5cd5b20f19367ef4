"""Where bytes rest on the virtual device: training is exact in each, and takes less of the device.

The matrix has the programs, in memory that is registered.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eager_offload.runtime import accelerator
from eager_offload.runtime.accelerator import AcceleratorRuntime
from eager_offload.tiers.pool import PowersOfTwo
from tests.hazards.backends import assert_settled
from tests.hazards.programs import assert_identical
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.api import Api

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS, WIDTH, STEPS = 64, 32, 3
#: Bytes that bound what the device holds.
WINDOWS = {"max_inflight_bytes": 1 << 16, "prefetch_bytes": 1 << 16}
#: Where the bytes rest, and how much is on its way at once.
MEMORIES: dict[str, dict[str, Any]] = {
    "registered": {"max_inflight_bytes": 1, "prefetch_bytes": 0},
    "pinned by torch": WINDOWS,
    "pageable": {"pin_memory": False, **WINDOWS},
    "disk": {"tier": "disk", **WINDOWS},
    "automatic windows": {"max_inflight_bytes": "auto", "prefetch_bytes": "auto"},
}


def trained(around: AbstractContextManager[object]) -> tuple[list[Tensor], int]:
    """Losses, gradients and parameters of a transformer, and the most bytes of the device above those before."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)).to(NAME)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), list[Tensor]()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    held = torch.accelerator.memory_allocated()
    for size in [(4, 48), (2, 31), (4, 48)][:STEPS]:
        batch = torch.randint(WORDS, size).to(NAME)
        with around:
            loss = nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        found += [loss.detach(), *(one.grad.cpu() for one in model.parameters() if one.grad is not None)]
        del loss
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    return [one.cpu() for one in (*found, *model.parameters())], torch.accelerator.max_memory_allocated() - held


@pytest.mark.parametrize("memory", MEMORIES)
def test_training_is_exact_and_takes_less_of_the_device(
    memory: str, virtual: VirtualDevice, offloads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory == "pinned by torch":
        Api(monkeypatch, can_register=False)
        runtime = AcceleratorRuntime()
        assert isinstance(runtime.slab_sizes(), PowersOfTwo)
        monkeypatch.setattr(accelerator, "_runtime", runtime)
    expected, plain = trained(nullcontext())
    offload = offloads(**MEMORIES[memory])
    with virtual.slow_links(latency=3e-4, bandwidth=100e6):
        actual, peak = trained(offload)
    assert_identical(expected, actual)
    assert all(one.isfinite().all() for one in expected), "new memory is painted: it was read before it was written"
    stats = assert_settled(offload)
    assert stats.bytes_out > 0
    tell = f"{peak} bytes of the device with offload, {plain} without"
    if memory == "automatic windows":  # two copies, one target and the part that a stream is given ahead above
        assert peak <= plain * (1 + 1 / 32) + 3 * 4 * 48 * 4 * WIDTH * 4, tell
    else:
        assert stats.bytes_in > 0
        assert peak < 0.9 * plain, tell
    offload.close()
