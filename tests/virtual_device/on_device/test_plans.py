"""A plan that is made where there is an accelerator has the saves of that device, wherever the model is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eager_offload as eo
from tests.virtual_device import NAME, VirtualDevice


class Layers(nn.Module):
    """Dropout, an attention, an autocast, a mask that it asks for, a random number, and a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(32, 64), nn.Linear(64, 64)
        self.register_buffer("places", torch.arange(16))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        x = self.words(words) + self.words(self.places)
        x = x.exp() if bool(mask.all()) else x.sin().cos()
        x = x if torch.rand((), device=x.device) < 2 else x.tan()
        with torch.autocast(NAME, torch.bfloat16):
            x = F.dropout(self.layer(x), 0.1)
            x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask)
            x = checkpoint(self.again, x[:, 0], use_reentrant=False)
        return x.float().square().mean()

    def again(self, x: Tensor) -> Tensor:
        return F.dropout(F.gelu(self.layer(x)), 0.1)


def given(place: str) -> tuple[Tensor, Tensor]:
    return torch.zeros(8, 16, dtype=torch.long, device=place), torch.ones(16, 16, dtype=torch.bool, device=place)


def saved_by_a_step() -> int:
    """Bytes of the storages that a real step saves beside parameters, casts of them, inputs and buffers."""
    model, inputs = Layers().to(NAME), given(NAME)
    held = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), *inputs)}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_cast = tensor.shape == model.layer.weight.shape
        if storage.data_ptr() not in held and not is_cast and storage.nbytes() > 64:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs).backward()
    return sum(storage.nbytes() for storage in found.values())


def planned(place: str) -> eo.Plan:
    with torch.device(place):
        model = Layers()
    inputs = given("cpu" if place == "meta" else place)
    return eo.plan(model, inputs, device="h100", policy="max", config={"min_bytes": 65})


@pytest.mark.parametrize("place", [NAME, "cpu", "meta"])
def test_a_plan_has_the_saves_of_the_device(virtual: VirtualDevice, place: str) -> None:
    torch.manual_seed(0)
    expected = saved_by_a_step()
    before = torch.get_device_module(NAME).get_rng_state().clone()
    plan = planned(place)
    assert plan.movable_bytes == expected
    assert not plan.guessed
    assert "guessed" not in str(plan)
    assert torch.equal(torch.get_device_module(NAME).get_rng_state(), before), "it draws from a generator of its own"


def test_an_autocast_around_a_plan_counts(virtual: VirtualDevice) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.GELU(), nn.GELU()).to(NAME)
    x = torch.zeros(8, 64, device=NAME)

    def plan() -> eo.Plan:
        return eo.plan(model, x, loss=Tensor.sum, device="h100", policy="max", config={"min_bytes": 65})

    single = plan().movable_bytes
    with torch.autocast(NAME, torch.bfloat16):
        assert plan().movable_bytes < single
    assert plan().movable_bytes == single
