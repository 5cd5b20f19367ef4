"""What is pinned for a step is little more than the step saves, whichever way it is pinned."""

from __future__ import annotations

import pytest
from torch import Tensor

from eager_offload.tiers.arena import Arena
from eager_offload.tiers.host import HostTier
from eager_offload.tiers.memory import anonymous_slab
from eager_offload.tiers.slabs import ExactSizes, PowersOfTwo, SlabSizes

MIB, GIB = 1 << 20, 1 << 30


class Counted:
    """Where slabs come from; adds up what torch's allocator would have taken."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> Tensor:
        self.sizes.append(nbytes)
        return anonymous_slab(nbytes)

    @property
    def rounded(self) -> int:
        return sum(1 << (nbytes - 1).bit_length() for nbytes in self.sizes)


def saved_by_a_llama(tokens: int, layers: int, width: int = 2048, inner: int = 8192, shared: int = 512) -> list[int]:
    """Bytes of what a decoder of about 1B parameters saves in bf16, in the order of saving."""
    per_token = [2 * width, 4, 2 * width, 2 * width, 2 * shared, 2 * shared, 128, 2 * width, 2 * width, 4]
    per_token += [2 * width, 2 * inner, 2 * inner, 2 * inner]
    return [tokens * nbytes for _ in range(layers) for nbytes in per_token]


STEPS = {
    "a power of two of tokens": saved_by_a_llama(8192, 24),
    "an odd number of tokens": saved_by_a_llama(6151, 24),
    "few tokens": saved_by_a_llama(777, 64),
    "an odd width": saved_by_a_llama(5000, 24, width=2304, inner=5760, shared=768),
}


@pytest.mark.parametrize("sizes", [ExactSizes(64 * MIB), PowersOfTwo()], ids=["registered", "pinned by torch"])
@pytest.mark.parametrize("step", STEPS)
def test_what_is_pinned_for_a_step_is_at_most_5_percent_more_than_it_saves(step: str, sizes: SlabSizes) -> None:
    system = Counted()
    tier = HostTier(Arena(system, sizes=sizes, idle_bytes=64 * GIB), 64 * GIB)
    for _ in range(2):
        slots = [tier.reserve(nbytes) for nbytes in STEPS[step]]
        assert all(slots)
        asked, taken = sum(STEPS[step]), sum(system.sizes)
        assert tier.held_bytes == taken
        if isinstance(sizes, PowersOfTwo):
            assert system.rounded == taken, "torch rounds nothing up"
            # The end of the newest slab is room for what comes next, and no waste.
            taken -= max(system.sizes)
        assert taken <= 1.05 * asked
        slots.clear()


def test_a_budget_bounds_what_is_held_where_slabs_are_powers_of_two() -> None:
    tier = HostTier(Arena(Counted(), sizes=PowersOfTwo(), idle_bytes=GIB), budget=100 * MIB)
    slots = []
    while (slot := tier.reserve(3 * MIB)) is not None:
        slots.append(slot)
    assert tier.held_bytes <= 100 * MIB
    assert len(slots) * 3 * MIB > 80 * MIB
    del slots[::2]
    assert tier.reserve(3 * MIB) is not None, "the holes are used again"
