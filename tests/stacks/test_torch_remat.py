"""torch_remat's checkpoints under five policies, of saves in a ``with`` and of inputs by ``saved_tensors_hooks``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.hazards.backends import Backend

remat = pytest.importorskip("torch_remat", reason="torch_remat is not installed")
pytestmark = pytest.mark.usefixtures("one_thread")
#: By the name of a policy, which of a block's three calls are saved and not computed again.
POLICIES: dict[str, tuple[int, ...]] = {"nothing": (), "the last": (2,), "all": (0, 1, 2)}
POLICIES |= {"the first": (0,), "the one between": (1,)}
#: Whether an output that nothing is computed from again has a stand-in without bytes, which takes a function that only
#: builds of torch for CUDA have. Elsewhere torch_remat's own call has such outputs saved too.
HAS_STAND_INS = hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")
SIDE = 64


class Block(nn.Module):
    def __init__(self, saved: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.last, self._saved = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE), saved

    def forward(self, x: Tensor) -> Tensor:
        calls: list[Callable[[Tensor], Tensor]] = [self.first, torch.tanh, self.last]
        for number, call in enumerate(calls):
            x = remat.region(call, f"call {number}", recompute=number not in self._saved)(x)
            if number in self._saved and not HAS_STAND_INS:
                remat.recompute_needs_tensor(x)
        return x


@pytest.mark.parametrize("saved", POLICIES.values(), ids=list(POLICIES))
@pytest.mark.parametrize("inputs", [False, True], ids=["saves", "inputs too"])
def test_gradients_are_equal_under_each_policy(saved: tuple[int, ...], inputs: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(Block(saved) for _ in range(3))
    offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)
    x = torch.randn(SIDE, SIDE, requires_grad=True)

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


@pytest.mark.parametrize("inside", [False, True], ids=["of the checkpoint", "a with that has ended"])
def test_saved_outputs_that_come_late_are_asked_for_in_the_order_of_forward(backend: Backend, inside: bool) -> None:
    """torch_remat packs an output once something is to be computed from it again, and asks for all before that."""
    offload, layers, calls = backend.offload(), nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(4)), list[Any]()
    pack, unpack = offload.saved_tensors_hooks()
    scopes = [0]

    def packed(tensor: Tensor) -> Any:
        if remat.current_saved_tensor_info().kind is not remat.SavedTensorKind.SAVE_OUTPUT:
            return None, pack(tensor)
        calls.append(f"pack {len(calls)}")
        assert scopes == [0], "it comes when its `with` has ended"
        return len(calls) - 1, pack(tensor)

    def unpacked(found: Any) -> Tensor:
        if found[0] is not None:
            calls.append(f"unpack {found[0]}")
        return unpack(found[1])

    def block(pair: Any, x: Tensor) -> Tensor:
        for number, layer in enumerate(layers):
            with nullcontext() if pair is None else remat.saved_tensors_hooks(*pair):
                scopes[0] += pair is not None
                y = remat.region(layer, f"saved {number}", recompute=False)(x)
                scopes[0] -= pair is not None
            x = remat.region(torch.tanh, f"computed {number}", recompute=True)(y)
            del y
        return x

    def gradients(pair: Any) -> list[Tensor | None]:
        x = torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).requires_grad_()
        run = remat.checkpoint(saved_tensors_hooks=None if inside else pair)
        y = run(lambda x: block(pair if inside else None, x))(x.sin())
        offload.stats(synchronize=True)
        y.square().sum().backward()
        found = [x.grad, *(one.grad for one in layers.parameters())]
        layers.zero_grad()
        return found

    expected = gradients(None)
    for _ in range(3):
        calls.clear()
        found = gradients((packed, unpacked))
        assert all(one is not None and torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert calls == [f"{what} {number}" for what in ("pack", "unpack") for number in range(len(layers))]
    stats = offload.stats(synchronize=True)
    assert stats.bytes_out >= 3 * (len(layers) - 1) * 4 * SIDE * SIDE, "all but the last, which waits for another save"
    assert stats.offloaded_bytes == stats.reloaded_bytes + stats.forwarded_bytes + stats.released_bytes
