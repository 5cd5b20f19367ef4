"""torch_remat's checkpoints under five policies, of saves in a ``with`` and of inputs by ``saved_tensors_hooks``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo

remat = pytest.importorskip("torch_remat", reason="torch_remat is not installed")
pytestmark = pytest.mark.usefixtures("one_thread")
#: By the name of a policy, which of a block's three calls are saved and not computed again.
POLICIES: dict[str, tuple[int, ...]] = {"nothing": (), "the last": (2,), "all": (0, 1, 2)}
POLICIES |= {"the first": (0,), "the one between": (1,)}
if not hasattr(torch._C, "_set_storage_data_ptr_access_error_msg"):  # which torch_remat asks for where others follow
    POLICIES = {"nothing": ()}


class Block(nn.Module):
    def __init__(self, saved: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.last, self._saved = nn.Linear(64, 64), nn.Linear(64, 64), saved

    def forward(self, x: Tensor) -> Tensor:
        calls: list[Callable[[Tensor], Tensor]] = [self.first, torch.tanh, self.last]
        for number, call in enumerate(calls):
            x = remat.region(call, f"call {number}", recompute=number not in self._saved)(x)
        return x


@pytest.mark.parametrize("saved", POLICIES.values(), ids=list(POLICIES))
@pytest.mark.parametrize("inputs", [False, True], ids=["saves", "inputs too"])
def test_gradients_are_equal_under_each_policy(saved: tuple[int, ...], inputs: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(Block(saved) for _ in range(3))
    offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)
    x = torch.randn(64, 64, requires_grad=True)

    def gradients(context: AbstractContextManager[Any], pair: Any) -> list[Tensor]:
        with context:
            y = x.sin()
            for block in model:
                y = remat.checkpoint(saved_tensors_hooks=pair)(block)(y)
        offload.stats(synchronize=True)  # or backward asks for the last one before its copy has begun
        y.sum().backward()
        leaves = [x, *model.parameters()]
        found = [one.grad for one in leaves if one.grad is not None]
        assert len(found) == len(leaves)
        for one in leaves:
            one.grad = None
        return found

    expected = gradients(nullcontext(), None)
    for _ in range(3):
        found = gradients(offload, offload.saved_tensors_hooks() if inputs else None)
        assert all(map(torch.equal, found, expected))
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out > 0
    assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
    offload.close()
