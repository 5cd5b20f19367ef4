"""Training on the virtual device: exact, and with less of the device, whichever of copies and compute come late."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eager_offload.runtime import accelerator
from eager_offload.runtime.accelerator import AcceleratorRuntime, accelerator_runtime
from eager_offload.tiers.slabs import ExactSizes
from tests.hazards.backends import assert_settled
from tests.hazards.programs import assert_identical
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.api import Api

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS, WIDTH, STEPS = 64, 32, 3
PACES: dict[str, Callable[[VirtualDevice], AbstractContextManager[None]]] = {
    "copies late": lambda virtual: virtual.slow_links(latency=3e-4, bandwidth=100e6),
    "compute late": lambda virtual: virtual.slow_compute(2e-4),
}
#: Where the bytes rest.
MEMORIES: dict[str, dict[str, Any]] = {
    "registered": {},
    "pinned by torch": {},
    "pageable": {"pin_memory": False},
    "disk": {"tier": "disk"},
}
_WINDOW = 1 << 16
#: How much is on its way at once. Small windows bound what the device holds, wide ones have all of it late.
SCHEDULES: dict[str, dict[str, Any]] = {
    "small windows": {"max_inflight_bytes": _WINDOW, "prefetch_bytes": _WINDOW},
    "all at once": {},
    "one by one": {"max_inflight_bytes": 1, "prefetch_bytes": 0},
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


def cases() -> list[Any]:
    """Every two of memory, pace and schedule meet."""
    found = []
    for column, memory in enumerate(MEMORIES):
        for row, schedule in enumerate(SCHEDULES):
            is_quick = (column + row) % 4 == 0
            case = memory, [*PACES][(row + column) % 2], schedule
            found.append(pytest.param(*case, marks=() if is_quick else pytest.mark.long))
    return found


@pytest.mark.parametrize(("memory", "pace", "schedule"), cases())
def test_training_is_exact_and_takes_less_of_the_device(
    memory: str, pace: str, schedule: str, virtual: VirtualDevice, offloads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory == "pinned by torch":
        monkeypatch.setattr(accelerator, "_runtime", AcceleratorRuntime(Api(can_register=False)))
    assert isinstance(accelerator_runtime().slab_sizes(), ExactSizes) == (memory != "pinned by torch")
    expected, plain = trained(nullcontext())
    windows = {"max_inflight_bytes": "auto", "prefetch_bytes": "auto"}
    offload = offloads(**windows | MEMORIES[memory] | SCHEDULES[schedule])
    with PACES[pace](virtual):
        actual, peak = trained(offload)
    assert_identical(expected, actual)
    assert all(one.isfinite().all() for one in expected), "new memory is painted: it was read before it was written"
    stats = assert_settled(offload)
    assert stats.bytes_out > 0
    tell = f"{peak} bytes of the device with offload, {plain} without"
    if schedule == "all at once":  # two copies, one target and the part that a stream is given ahead above
        assert peak <= plain * (1 + 1 / 32) + 3 * 4 * 48 * 4 * WIDTH * 4, tell
    else:
        assert stats.bytes_in > 0
        assert peak < 0.9 * plain, tell
    offload.close()
