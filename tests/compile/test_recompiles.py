"""An ``Offload`` compiles anew when it comes or goes, and at no other time; and inside, nothing is done twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import eager_offload as eo
from tests.compile.compiled import BOTH, fresh_compiler
from tests.hazards.backends import DiskBackend, assert_settled
from tests.hazards.programs import leaf


def deep(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(3):
        x = (x @ weight).sin().exp()
    return x


class Counted:
    """A compiled function that counts how often it was compiled."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self._counter = CompileCounterWithBackend(backend)
        self._run = torch.compile(deep, backend=self._counter, fullgraph=True)

    def step(self, around: AbstractContextManager[object]) -> int:
        """Runs forward and backward; returns how often it has been compiled by now."""
        x, weight = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
        with around:
            loss = self._run(x, weight).sum()
        loss.backward()
        assert x.grad is not None
        return int(self._counter.frame_count)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


def test_entering_again_compiles_nothing(offload: eo.Offload) -> None:
    run = Counted()
    assert [run.step(offload) for _ in range(4)] == [1, 1, 1, 1]
    stats = offload.stats()
    assert (stats.compiled_graphs, stats.compiled_regions, stats.steps) == (1, 4, 4)
    assert "compiled   1 graph, 4 runs" in str(stats)
    assert stats.without_offload_bytes_peak == (stats.bytes_out + stats.kept_bytes["alive"]) / 4, "of one step"


def test_an_equal_offload_compiles_nothing(disk: DiskBackend) -> None:
    run = Counted()
    for _ in range(12):  # more than torch lets one function be compiled
        offload = disk.offload()
        assert run.step(offload) == 1
        assert offload.stats(synchronize=True).bytes_in > 0


def test_one_comes_and_goes_for_one_compilation_each(offload: eo.Offload) -> None:
    run = Counted()
    around = [nullcontext(), offload, nullcontext(), offload, offload, nullcontext()]
    assert [run.step(one) for one in around] == [1, 2, 2, 2, 2, 2]


def test_another_configuration_is_another_compilation(disk: DiskBackend) -> None:
    run, one, other = Counted(), disk.offload(), disk.offload(min_bytes=1 << 20)
    assert [run.step(each) for each in (one, other, one, other)] == [1, 2, 2, 2]
    assert one.stats(synchronize=True).bytes_in > 0 == other.stats(synchronize=True).bytes_out


def test_a_nested_equal_offload_compiles_nothing_and_the_inner_one_counts(disk: DiskBackend) -> None:
    run, outer, inner = Counted(), disk.offload(), disk.offload()
    run.step(outer)
    before = outer.stats(synchronize=True).bytes_out
    with outer:
        assert run.step(inner) == 1
    assert outer.stats(synchronize=True).bytes_out == before
    assert inner.stats(synchronize=True).bytes_out == before


@BOTH
def test_what_the_graph_moves_no_hook_packs(backend: str, offload: eo.Offload) -> None:
    run = Counted(backend)
    packed = list[Tensor]()
    pack = offload._hooks.pack

    def packing(tensor: Tensor) -> object:
        packed.append(tensor)
        return pack(tensor)

    offload._hooks.pack = packing  # type: ignore[method-assign]
    offload.pack = packing
    for _ in range(2):
        packed.clear()
        run.step(offload)
        # The sum saves nothing, and the graph packs for itself.
        assert packed == []
    stats = assert_settled(offload)
    assert stats.offloaded_bytes > 0
    assert stats.shared_bytes == 0
    with offload:
        leaf(8, 8).exp()
    assert len(packed) == 1  # which goes to show that they would be seen
    packed.clear()
