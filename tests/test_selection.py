"""Which saved tensors move, how many bytes of them, and why the others stay: pure functions of metadata."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from eager_offload.core.selection import Footprint, footprint, is_parameter, own_bytes


def leaf(*size: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.ones(size, dtype=dtype, requires_grad=grad)


def activation(*size: int) -> Tensor:
    """What an operator made of a leaf: the ordinary saved tensor."""
    return leaf(*size) * 2


# -- parameters -----------------------------------------------------------------------------------------------------

WEIGHT = nn.Parameter(torch.ones(8, 8))
FROZEN = nn.Parameter(torch.ones(8, 8), requires_grad=False)


def without_grad(view: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        with torch.no_grad():
            return view()

    return make


def cast_by_autocast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast makes of a weight and saves: a view of its cached cast."""
    packed: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor
    )
    with torch.autocast("cpu", dtype), hooks:
        nn.functional.linear(leaf(4, 8), weight)
    (cast,) = [tensor for tensor in packed if tensor.size() == (8, 8)]
    assert cast.dtype is dtype
    return cast


PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "itself": lambda: WEIGHT,
    "frozen": lambda: FROZEN,
    "transposed": lambda: WEIGHT.t(),
    "a slice of a transpose": lambda: WEIGHT.t()[2:5].unsqueeze(0),
    "a view of a frozen one": lambda: FROZEN.view(4, 16),
    "a view made without grad": without_grad(lambda: WEIGHT.view(-1)),
    "a leaf": lambda: leaf(8),
    "a view of a leaf": lambda: leaf(8, 8)[1:].t(),
    "a leaf in a wrapper's clothes": lambda: WEIGHT.as_subclass(nn.Parameter),
    "autocast's cast": lambda: cast_by_autocast(WEIGHT, torch.bfloat16),
    "autocast's cast to half": lambda: cast_by_autocast(WEIGHT, torch.float16),
    "a cast of a view": lambda: WEIGHT.t().to(torch.bfloat16),
    "a view of a cast of a view": lambda: WEIGHT.t().to(torch.bfloat16).unsqueeze(0)[0],
}
NO_PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "an activation": lambda: activation(8),
    "a view of one": lambda: activation(8, 8).t(),
    "a batch": lambda: leaf(8, grad=False),
    "a view of a batch": lambda: leaf(8, 8, grad=False)[1:],
    "what is computed from a weight": lambda: WEIGHT * 1,
    "a view of what is computed from a weight": lambda: (WEIGHT * 1).t(),
    "a cast that autocast does not make": lambda: WEIGHT.to(torch.float64),
    "a copy": lambda: WEIGHT.clone(),
    "a cast of an activation": lambda: activation(8).to(torch.bfloat16),
    "a cast of a cast of an activation": lambda: activation(8).to(torch.float64).to(torch.bfloat16),
    "a frozen weight's cast": lambda: cast_by_autocast(FROZEN, torch.bfloat16),
    "its data, of which it cannot be told whose they are": lambda: WEIGHT.data,
    "its data again": lambda: WEIGHT.detach(),
}


@pytest.mark.parametrize("name", [*PARAMETERS, *NO_PARAMETERS])
def test_h06_a_parameter_is_told_by_what_it_is_a_view_or_a_cast_of_and_nothing_else_is_one(name: str) -> None:
    assert is_parameter((PARAMETERS | NO_PARAMETERS)[name]()) == (name in PARAMETERS)


# -- footprints -----------------------------------------------------------------------------------------------------


class Strided(NamedTuple):
    """Any view that a storage can have, overlapping ones included."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    #: Elements of the storage behind the view's last.
    rest: int
    dtype: torch.dtype

    @property
    def indices(self) -> list[int]:
        """Where in the storage each element is."""
        places = itertools.product(*(range(n) for n in self.size))
        return [self.offset + sum(i * s for i, s in zip(at, self.stride, strict=True)) for at in places]

    def tensor(self) -> Tensor:
        count = max(self.indices) + 1 + self.rest
        flat = torch.arange(count * self.dtype.itemsize, dtype=torch.int64).to(torch.uint8).view(self.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


@st.composite
def strided(draw: st.DrawFn) -> Strided:
    size = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    stride = tuple(draw(st.sampled_from([0, 1, 1, 2, 3, 4, 8, 12, 16, 64])) for _ in size)
    return Strided(
        size,
        stride,
        draw(st.integers(0, 40)),
        draw(st.sampled_from([0, 1, 7, 60, 400])),
        draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64])),
    )


def compact(x: Tensor) -> Tensor:
    """``x`` with every broadcast dimension narrowed to one element."""
    for dim, stride in enumerate(x.stride()):
        x = x.narrow(dim, 0, 1) if stride == 0 else x
    return x


def bits(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def bytes_at(indices: list[int], itemsize: int) -> set[int]:
    return {i * itemsize + byte for i in indices for byte in range(itemsize)}


@settings(max_examples=600)
@given(strided())
@example(Strided((), (), 0, 0, torch.float32))
@example(Strided((3, 3), (1, 1), 5, 400, torch.float32))
@example(Strided((4, 4), (12, 1), 0, 400, torch.float32))
@example(Strided((2, 2, 2), (0, 16, 1), 3, 400, torch.int16))
def test_a_view_of_a_quarter_of_its_storage_takes_it_whole_and_another_exactly_its_elements(view: Strided) -> None:
    tensor, itemsize, indices = view.tensor(), view.dtype.itemsize, view.indices
    storage_nbytes, distinct = tensor.untyped_storage().nbytes(), {*indices}
    area, own = footprint(tensor, storage_nbytes), bytes_at(indices, itemsize)
    assert area.whole == (own_bytes(tensor) * 4 >= storage_nbytes)
    repeats = math.prod(n for n, stride in zip(view.size, view.stride, strict=True) if stride == 0)
    overlaps_by_broadcasting_alone = len(distinct) * repeats == len(indices)
    if overlaps_by_broadcasting_alone:
        assert own_bytes(tensor) == len(own), "a broadcast counts once"
        holes = len(distinct) < max(distinct) - min(distinct) + 1
        assert area.gathered == (holes and not area.whole)
    if area.whole:
        assert area == Footprint(True, 0, storage_nbytes, storage_nbytes, False)
        return
    assert (area.start, area.start + area.nbytes) == (min(own), max(own) + 1)
    assert len(own) <= area.moved <= area.nbytes <= storage_nbytes
    assert area.moved == len(own) or not overlaps_by_broadcasting_alone
    if area.gathered:
        assert area.moved == compact(tensor).numel() * itemsize < area.nbytes
    else:
        assert area.moved == area.nbytes


@settings(max_examples=300)
@given(strided())
def test_h05_what_travels_is_enough_to_build_the_view_again(view: Strided) -> None:
    tensor = view.tensor()
    storage = tensor.untyped_storage()
    area = footprint(tensor, storage.nbytes())
    first = (view.offset * view.dtype.itemsize - area.start) // view.dtype.itemsize
    # Filled with what nothing else has: a byte that did not travel shows.
    again = torch.full((area.nbytes,), 0xA5, dtype=torch.uint8)
    if area.gathered:
        places = again.view(view.dtype).as_strided(view.size, view.stride, first)
        compact(places).copy_(compact(tensor).contiguous())
    else:
        again.copy_(torch.empty(0, dtype=torch.uint8).set_(storage, area.start, (area.nbytes,), (1,)))
    rebuilt = torch.empty(0, dtype=view.dtype).set_(again.untyped_storage(), first, view.size, view.stride)
    assert torch.equal(bits(rebuilt), bits(tensor))
