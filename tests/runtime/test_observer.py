"""The observer: what it writes into the log of the operators that a user runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.simulation.log import Allocated, ByteRegion, Operation, WrittenLog
from tests.simulation.observer import OperatorObserver
from tests.simulation.simulated import SimulatedRuntime, SimulatedStream

CPU = torch.device("cpu")


class Watch:
    """An observer that is active, with its log."""

    def __init__(self) -> None:
        self.runtime = SimulatedRuntime()
        self.log = WrittenLog()
        self.observer = OperatorObserver(self.runtime, self.log, CPU)

        self.region = self.observer.region

    def operations(self, name: str) -> list[Operation]:
        return [e for e in self.log.entries if isinstance(e, Operation) and e.what.startswith(f"aten.{name}.")]

    def last(self) -> Operation:
        return next(entry for entry in reversed(self.log.entries) if isinstance(entry, Operation))


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    with watch.observer:
        yield watch


def test_a_fresh_result_is_allocated_then_written_and_arguments_are_read(watch: Watch) -> None:
    a, b = torch.ones(4), torch.ones(4)
    begin = len(watch.log.entries)
    c = a + b
    allocated, operation = watch.log.entries[begin:]
    main = watch.runtime.default_stream
    assert allocated == Allocated(main, watch.region(c), "aten.add.Tensor")
    assert operation == Operation(main, (watch.region(a), watch.region(b)), (watch.region(c),), "aten.add.Tensor")


def test_a_view_touches_nothing_and_covers_the_bytes_from_its_first_element_to_its_last(watch: Watch) -> None:
    a = torch.ones(4, 6)
    whole, begin = watch.region(a), len(watch.log.entries)
    for view in (a.t(), a[1:], a.view(24), a.detach(), a.expand(2, 4, 6), a.reshape(3, 8), a.contiguous(), *a.split(2)):
        assert watch.region(view).space == watch.region(a).space
    with torch.inference_mode():
        a.reshape(24)
    assert watch.region(a[:, 1]) == ByteRegion(whole.space, whole.start + 4, whole.start + 4 + 4 * (3 * 6 + 1))
    assert watch.region(a[2:2]).start == watch.region(a[2:2]).stop
    assert watch.log.entries[begin:] == []


def test_h33_what_an_operator_changes_in_place_or_is_given_as_out_or_fills_later_is_written(watch: Watch) -> None:
    a, b, noise = torch.ones(4), torch.ones(4), torch.empty(4)
    a.mul_(b)
    assert (watch.last().reads, watch.last().writes) == ((watch.region(b),), (watch.region(a),))
    a[1:3].zero_()
    assert watch.last().writes == (watch.region(a[1:3]),)
    torch.add(a, a, out=b)
    assert (watch.last().reads, watch.last().writes) == ((watch.region(a), watch.region(a)), (watch.region(b),))
    torch.ops.aten.rrelu_with_noise(torch.randn(4), noise, training=True)  # whose backward reads the noise
    assert watch.region(noise) in watch.last().writes


def test_h11_a_freed_range_is_handed_out_again_at_once_and_to_its_own_stream_only(watch: Watch) -> None:
    a = torch.ones(300)
    keeper = torch.ones(300)
    region = watch.region(a)
    del a
    side = SimulatedStream("side")
    with watch.runtime.stream(side):
        b = torch.ones(300)
    c = torch.ones(200)
    assert watch.region(b).space != region.space
    assert watch.region(c) == ByteRegion(region.space, region.start, region.start + 800)
    assert watch.region(keeper).start >= region.stop
