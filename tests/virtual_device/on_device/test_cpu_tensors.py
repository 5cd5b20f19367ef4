"""What is saved on the CPU in a process that has an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from eager_offload import ConfigError
from eager_offload.engine import offloaders
from eager_offload.tiers.base import Fence
from eager_offload.tiers.disk import DiskSlot
from tests.hazards.backends import assert_settled
from tests.hazards.programs import assert_identical

ROWS, WIDTH = 512, 512
NBYTES = ROWS * WIDTH * 4


def loss_of(x: Tensor, w: Tensor) -> Tensor:
    return ((x * 2).tanh().exp() @ w).sin().sum()


def on_both(
    around: AbstractContextManager[object], forward: Callable[..., Tensor] = loss_of
) -> list[tuple[Tensor, ...]]:
    """The loss and gradients of a step on the CPU, and of one on the device."""
    results = []
    for device in ("cpu", "virtual"):
        generator = torch.Generator().manual_seed(1)
        x, w = (torch.randn(ROWS, WIDTH, generator=generator).to(device).requires_grad_() for _ in range(2))
        with around:
            loss = forward(x, w)
        results.append((loss.detach(), *torch.autograd.grad(loss, [x, w])))
    return results


@pytest.mark.filterwarnings("ignore:eager_offload. compiled code waits:RuntimeWarning")  # of aot_eager, without a pass
@pytest.mark.parametrize("how", ["eager", "without a disk", "compiled"])
def test_h51_they_stay_unless_a_disk_is_named(monkeypatch: pytest.MonkeyPatch, how: str, offloads: Any) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise ConfigError("disk_path=None is not accepted: no directory can serve")

    if how == "without a disk":
        monkeypatch.setattr(offloaders, "DiskTier", refuse)
    forward = torch.compile(loss_of, backend="aot_eager") if how == "compiled" else loss_of
    expected, offload = on_both(nullcontext(), forward), offloads(tier="auto")
    assert_identical(expected, on_both(offload, forward))
    stats = assert_settled(offload)
    if how != "compiled":
        assert stats.kept_bytes["device"] == 4 * NBYTES, "what tanh, exp, the product and sin save"
    assert stats.kept_bytes["device"] > 0
    assert stats.bytes_out > 0, "what is on the device moves"
    assert stats.disk_bytes_written == 0
    assert stats.compiled_regions == (how == "compiled"), "the one on the device"


@pytest.mark.parametrize("fields", [{"tier": "auto"}, {"tier": "disk"}, {"tier": "disk", "disk_path": None}, {}])
def test_h51_they_move_where_that_is_asked_for(tmp_path: Path, fields: dict[str, Any], offloads: Any) -> None:
    """To a disk, or within host memory."""
    expected, offload = on_both(nullcontext()), offloads(**({"disk_path": tmp_path} if fields else {}) | fields)
    assert_identical(expected, on_both(offload))
    stats = assert_settled(offload)
    assert "device" not in stats.kept_bytes
    assert stats.disk_bytes_written >= (2 * NBYTES if fields else 0)
    assert stats.bytes_out >= 4 * NBYTES


def test_h51_one_disk_budget_bounds_both(tmp_path: Path, offloads: Any) -> None:
    offload = offloads(tier="disk", disk_path=tmp_path, disk_budget=3 * NBYTES)
    with pytest.warns(RuntimeWarning, match="no room"), offload:
        roots = [
            torch.ones(ROWS, WIDTH, device=device, requires_grad=True).exp()
            for device in ("cpu", "cpu", "virtual", "virtual")
        ]
    stats = offload.stats(synchronize=True)
    assert stats.offloaded_bytes == 3 * NBYTES
    assert stats.kept_bytes["budget"] == NBYTES
    assert stats.disk_bytes_peak == 3 * NBYTES
    del roots
    assert_settled(offload)


def test_h51_neither_waits_for_what_the_other_did_with_a_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offloads: Any
) -> None:
    made, elsewhere, used = DiskSlot.__init__, Mock(query=lambda event: False), list[int]()

    def used_elsewhere(slot: DiskSlot, *arguments: Any, **named: Any) -> None:
        """By a runtime whose events are not over yet, as far as anybody can see."""
        made(slot, *arguments, **named)
        slot.record.fences = (*slot.record.fences, Fence(elsewhere, object()))
        used.append(slot.nbytes)

    monkeypatch.setattr(DiskSlot, "__init__", used_elsewhere)
    expected, offload = on_both(nullcontext()), offloads(tier="auto", disk_path=tmp_path, host_budget=1)
    with pytest.warns(RuntimeWarning, match="go to the disk tier as well"):
        assert_identical(expected, on_both(offload))
    stats = assert_settled(offload)
    assert stats.disk_bytes_written >= 4 * NBYTES
    assert sum(used) >= 4 * NBYTES
