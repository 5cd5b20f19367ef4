"""What codecs compute in: one place for each stream, in which pack and unpack take turns."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eager_offload.codecs import BF16, BitMask, TensorMeta
from eager_offload.kernels.codecs import Workspaces
from tests.codecs.tensors import FLOATS, same_bits, strided
from tests.hazards.backends import Backend, assert_settled, offloader_of
from tests.hazards.programs import Settled
from tests.threads import collect

CODEC = BitMask()


def ones(nbytes: int, stream: Hashable) -> Tensor:
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8)


def held_by(work: Workspaces) -> list[int]:
    return [buffer.nbytes for buffer in work._buffers.values()]


def test_pack_and_unpack_share_one_place_which_grows_to_the_largest() -> None:
    work, lent, meta = Workspaces(ones), Workspaces(ones, holds=False), TensorMeta((1000,), (1,), torch.float32)
    parts = work.of(CODEC, meta, "one")
    assert {name: part.nbytes for name, part in parts.items()} == {"words": 1008, "mask": 1008, "differs": 1008}
    assert len({part.data_ptr() for part in parts.values()}) == 3
    mask = work.of(CODEC, meta._replace(size=(500,), dtype=torch.bool), "one")
    assert mask["words"].data_ptr() == parts["words"].data_ptr(), "what is smaller fits"
    assert held_by(work) == [3 * 1008]
    work.of(CODEC, meta._replace(size=(2000,)), "one")
    work.of(CODEC, meta._replace(size=(16,)), "another")
    assert held_by(work) == [3 * 2000, 3 * 16]
    assert work.of(BF16(), meta, "one") is None
    assert lent.of(CODEC, meta, "one") is not None
    work.clear()
    assert held_by(work) == held_by(lent) == []


@given(st.data())
def test_what_lay_in_it_before_changes_no_bit(data: st.DataObject) -> None:
    x = data.draw(strided(data.draw(st.sampled_from((*FLOATS, torch.float64, torch.bool)))))
    if x.dtype is not torch.bool and data.draw(st.booleans()):
        x = torch.where(x > 0, 1.5, 0.0).to(x.dtype)
    own, layout, work = TensorMeta.of(x), CODEC.layout(TensorMeta.of(x)), Workspaces(ones)
    packed, expected = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    holds = CODEC.pack(x, packed, work.of(CODEC, own, 0))
    assert bool(holds) == bool(CODEC.pack(x, expected))
    if holds:
        assert torch.equal(packed, expected)
        back = torch.empty_strided(own.size, own.stride, dtype=x.dtype)
        CODEC.unpack(packed, back, work.of(CODEC, own, 0))
        assert same_bits(back, x)


@pytest.mark.parametrize("plans", [False, True], ids=["decided", "followed"])
def test_a_step_has_one_for_its_stream_which_goes_with_its_graph(users_backend: Backend, plans: bool) -> None:
    offload, device = users_backend.offload(codec="lossless", step_plans=plans), torch.get_default_device()
    for _ in range(3):
        x, weight = torch.rand(64, 64, device=device), torch.rand(64, 64, device=device).requires_grad_()
        with Settled(offload):
            loss = torch.where(x > 0.5, weight, weight.sin()).sin().sum()
        (saves,) = offload._hooks._saves.values()
        is_held = offloader_of(offload).device.type == "cpu"
        assert held_by(saves.scratch) == [64 * 64] * is_held, "of the mask"
        loss.backward()
        del loss
        collect()
        assert assert_settled(offload).packed_bytes["bitmask"] > 0
        assert held_by(saves.scratch) == []
