"""Ways in which passes that offload activations have gone wrong, each of which this one does not.

torch's own pass had nine. Here are 2, 3, 6 and 7 of them; 1 is in ``test_order_pinned.py``, 4 in
``test_handover_values.py``, 5 in ``test_handover_aliases.py``, 8 in ``test_policies.py``, 9 in ``test_recompiles.py``
and ``test_decide.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.compile.compiled import BOTH, compare, exact, step_of
from tests.hazards.programs import leaf


@exact(leaf(8, 8, seed=1), leaf(8, 8, seed=2))
def test_2_a_view_of_a_part_keeps_the_whole(x: Tensor, weight: Tensor) -> Tensor:
    one, two = (x @ weight).chunk(2, -1)
    return (one.sin() * two.cos()) @ weight[:4]


def aliased(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = (x @ weight).exp()
    return hidden.detach(), (hidden * hidden).sin() @ weight


@BOTH
def test_3_what_aliases_an_output_stays(backend: str) -> None:
    stats = compare(step_of(aliased, leaf(8, 8, seed=1), leaf(8, 8, seed=2)), backend)
    assert stats.kept_bytes["alive"] >= 2 * 8 * 8 * 4


def test_6_prefetch_is_bounded_in_bytes() -> None:
    size = 16 * 16 * 4

    def function(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(6):
            x = (x @ weight).sin().exp()
        return x

    stats = compare(
        step_of(function, leaf(16, 16, seed=1), leaf(16, 16, seed=2)),
        "aot_eager",
        prefetch_bytes=size,
        max_inflight_bytes=size,
    )
    assert stats.bytes_in > 10 * size
    assert stats.inflight_bytes_peak <= 2 * size


@exact(leaf(8, 8, seed=1), leaf(8, 8, seed=2))
def test_7_empty_values_share_nothing(x: Tensor, weight: Tensor) -> Tensor:
    empty = (x[:0] @ weight).exp() * (x[:0] @ weight).sin()
    return torch.cat([(x @ weight).exp(), empty]).sin()
