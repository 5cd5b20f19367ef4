"""Ways in which passes that offload activations have gone wrong, each of which this one does not.

``test_defects_of_torch.py`` shows them in torch's own pass, where the installed torch has one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import eager_offload as eo
from tests.compile.compiled import BOTH, Compile, compare, fresh_compiler, step_of
from tests.hazards.backends import assert_settled
from tests.hazards.programs import leaf

FIELDS = {"tier": "disk", "min_bytes": 0, "keep_last_bytes": 0}


@pytest.mark.long
def test_1_the_order_survives_inductor_with_its_defaults() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ weight).sin().exp()
        return x

    offload = eo.Offload(**FIELDS)

    def run() -> None:
        with offload:
            loss = torch.compile(function)(leaf(16, 16, seed=1), leaf(16, 16, seed=2)).sum()
        loss.backward()

    with fresh_compiler():
        _, codes = run_and_get_code(run)
    assert len(codes) == 2
    assert not any("resize_" in code for code in codes)
    for code in codes:
        calls = code[code.index("def call(") :]
        lines = [line for line in calls.splitlines() if "eager_offload." in line or "extern_kernels." in line]
        waits = [number for number, line in enumerate(lines) if "wait_tensor.default(" in line]
        starts = [number for number, line in enumerate(lines) if "load.default(" in line]
        assert len(waits) == len(starts) > 0
        # Something is computed between some start and its wait.
        products = [number for number, line in enumerate(lines) if "extern_kernels." in line]
        assert any(starts[0] < number < waits[-1] for number in products)
    assert assert_settled(offload).bytes_in > 0
    offload.close()


@BOTH
def test_2_a_view_of_a_part_keeps_the_whole(backend: str) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        one, two = (x @ weight).chunk(2, -1)
        return (one.sin() * two.cos()) @ weight[:4]

    compare(step_of(function, leaf(8, 8, seed=1), leaf(8, 8, seed=2)), backend)


def aliased(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = (x @ weight).exp()
    return hidden.detach(), (hidden * hidden).sin() @ weight


@BOTH
def test_3_what_aliases_an_output_stays(backend: str) -> None:
    stats = compare(step_of(aliased, leaf(8, 8, seed=1), leaf(8, 8, seed=2)), backend)
    assert stats.kept_bytes["alive"] >= 2 * 8 * 8 * 4


@BOTH
def test_4_sizes_that_change_are_exact(backend: str) -> None:
    def step(compile: Compile, around: AbstractContextManager[object]) -> list[Tensor | None]:
        run = compile(lambda x, weight: ((x @ weight).exp() @ weight).sin(), dynamic=True)
        weight, results = leaf(8, 8, seed=9), list[Tensor | None]()
        for rows in (3, 9, 5):
            x = leaf(rows, 8, seed=rows)
            with around:
                loss = run(x, weight).sum()
            loss.backward()
            results += [loss, x.grad]
        return [*results, weight.grad]

    compare(step, backend)


def test_5_views_and_parts_of_a_product_move() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (x @ weight).split(8, -1)
        return ((q @ k.t()).softmax(-1) @ v).tanh()

    stats = compare(step_of(function, leaf(8, 8, seed=1), leaf(8, 24, seed=2)), "aot_eager")
    assert stats.kept_bytes.get("layout", 0) == 0


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


def test_7_empty_values_share_nothing() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        empty = (x[:0] @ weight).exp()
        other = (x[:0] @ weight).sin()
        return torch.cat([(x @ weight).exp(), empty * other]).sin()

    compare(step_of(function, leaf(8, 8, seed=1), leaf(8, 8, seed=2)), "aot_eager")


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.sin(self.up(x)).exp())
        return result


@BOTH
def test_9_two_configurations_never_share_what_was_compiled(backend: str) -> None:
    """No pass whose parameters a cache does not see: what moves is what the configuration of that moment says."""
    few, many = eo.Offload(**{**FIELDS, "min_bytes": 1 << 20}), eo.Offload(**FIELDS)
    with fresh_compiler():
        run = torch.compile(Wide(), backend=backend)
        for offload in (few, many, few, many):
            with offload:
                loss = run(leaf(4, 8)).sum()
            loss.backward()
        assert few.stats(synchronize=True).bytes_out == 0
        assert many.stats(synchronize=True).bytes_in > 0
    for offload in (few, many):
        assert_settled(offload)
        offload.close()
