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
from tests.codecs.test_saved_tensors import program
from tests.hazards.backends import Backend, assert_settled, offloader_of
from tests.hazards.programs import Settled, assert_identical
from tests.threads import collect

CODEC = BitMask()


class Allocated:
    """Hands out memory that is full of ones, and knows of what it has."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nbytes: int, stream: Hashable) -> Tensor:
        self.sizes.append(nbytes)
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)


def meta(count: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta((count,), (1,), dtype)


def held_by(work: Workspaces) -> int:
    return sum(buffer.nbytes for buffer in work._buffers.values())


def test_pack_and_unpack_share_one_place_which_grows_to_the_largest() -> None:
    allocated = Allocated()
    work = Workspaces(allocated)
    parts = work.of(CODEC, meta(1000), "one")
    assert {name: part.nbytes for name, part in parts.items()} == {"words": 1008, "mask": 1008, "differs": 1008}
    assert len({part.data_ptr() for part in parts.values()}) == 3
    assert held_by(work) == 3 * 1008
    mask = work.of(CODEC, meta(500, torch.bool), "one")
    assert mask["words"].data_ptr() == parts["words"].data_ptr()
    assert allocated.sizes == [3 * 1008], "what is smaller fits"
    work.of(CODEC, meta(2000), "one")
    work.of(CODEC, meta(16), "another")
    assert allocated.sizes == [3 * 1008, 3 * 2000, 3 * 16]
    assert held_by(work) == 3 * 2016
    assert work.of(BF16(), meta(1000), "one") is None
    work.clear()
    assert held_by(work) == 0
    lent = Workspaces(allocated, holds=False)
    assert lent.of(CODEC, meta(1000), "one") is not None
    assert held_by(lent) == 0


@given(st.data())
def test_what_lay_in_it_before_changes_no_bit(data: st.DataObject) -> None:
    x = data.draw(strided(data.draw(st.sampled_from((*FLOATS, torch.float64, torch.bool)))))
    if x.dtype is not torch.bool and data.draw(st.booleans()):
        x = torch.where(x > 0, 1.5, 0.0).to(x.dtype)
    own, layout, work = TensorMeta.of(x), CODEC.layout(TensorMeta.of(x)), Workspaces(Allocated())
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
    offload = users_backend.offload(codec="lossless", step_plans=plans)
    found = []
    for _ in range(4):
        torch.manual_seed(0)
        found.append(program(Settled(offload)))
        collect()
        stats = assert_settled(offload)
        (saves,) = offload._hooks._saves.values()
        assert held_by(saves.scratch) == 0
    assert stats.packed_bytes["bitmask"] > 0
    for other in found[1:]:
        assert_identical(found[0], other)
    x = torch.rand(64, 64, device=offloader_of(offload).device)
    weight = torch.rand(64, 64, device=x.device).requires_grad_()
    with Settled(offload):
        loss = torch.where(x > 0.5, weight, weight.sin()).sin().sum()
    is_held = offloader_of(offload).device.type == "cpu"  # of the mask
    assert held_by(saves.scratch) == (64 * 64 if is_held else 0)
    loss.backward()
    del loss
    collect()
    assert_settled(offload)
    assert held_by(saves.scratch) == 0
    offload.close()
