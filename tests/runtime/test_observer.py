"""The observer: what it writes into the log of the operators that a user runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.simulation.log import Allocated, ByteRegion, Freed, Operation, WrittenLog
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


def test_backward_is_seen_on_the_thread_that_calls_it(watch: Watch) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    x = torch.randn(4, 4)
    loss = (x @ weight).relu().sum()
    loss.backward()
    (operation,) = watch.operations("threshold_backward")
    assert len(operation.reads) == 2
    forward, for_weight = watch.operations("mm")
    assert watch.region(x) in forward.reads
    assert watch.region(x) in for_weight.reads
    assert for_weight.writes == (watch.region(weight.grad),)


def test_a_storage_that_dies_is_freed_on_the_stream_that_allocated_it(watch: Watch) -> None:
    side = SimulatedStream("side")
    with watch.runtime.stream(side):
        a = torch.ones(4)
    region = watch.region(a)
    begin = len(watch.log.entries)
    view = a[1:]
    del a
    watch.observer.sweep()
    assert watch.log.entries[begin:] == [], "a view keeps it"
    del view
    torch.ones(4)
    assert watch.log.entries[begin:][0] == Freed(side, region, "the last reference went")


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


def test_a_parameter_is_there_from_the_start_and_its_range_is_never_reused() -> None:
    weight = torch.nn.Parameter(torch.randn(4))
    watch = Watch()
    with watch.observer:
        result = weight.detach() * 2
        (operation,) = watch.operations("mul")
        assert operation.reads == (watch.region(weight),)
        allocated = [entry.region for entry in watch.log.entries if isinstance(entry, Allocated)]
        assert allocated == [watch.region(result)]
        region = watch.region(weight)
        del weight, operation
        torch.ones(4)
    assert Freed(watch.runtime.default_stream, region, "the last reference went") in watch.log.entries
    assert all(e.region.space != region.space for e in watch.log.entries if isinstance(e, Allocated))


class Wrapped(torch.Tensor):
    """Two tensors in one, as quantized subclasses are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [arg.inner if isinstance(arg, Wrapped) else arg for arg in args]
        return Wrapped(func(*inner, **(kwargs or {})))


def test_h13_the_inner_tensors_of_a_wrapper_are_seen(watch: Watch) -> None:
    inner = torch.ones(4)
    result = Wrapped(inner) * 2
    (operation,) = watch.operations("mul")
    assert operation.reads == (watch.region(inner),)
    assert operation.writes == (watch.region(result.inner),)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*quantize_per_tensor:UserWarning")
def test_h12_h13_odd_tensors_pass_through(watch: Watch) -> None:
    begin = len(watch.log.entries)
    torch.empty(4, device="meta").add_(1)
    with FakeTensorMode():  # whose tensors say that they are on the CPU, and have no bytes there
        assert (torch.empty(4, 4) * 2).detach().shape == (4, 4)
    assert watch.log.entries[begin:] == []
    sparse = torch.eye(3).to_sparse()
    assert torch.equal((sparse + sparse).to_dense(), 2 * torch.eye(3))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert watch.region(nested * 2).stop > 0
    sized = {torch.empty(0): 0, torch.ones((), dtype=torch.complex64): 8}
    sized |= {torch.ones(3, dtype=torch.complex64).conj(): 24}
    sized |= {torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8): 4}
    assert [watch.region(tensor).stop - watch.region(tensor).start for tensor in sized] == [*sized.values()]
    with torch.inference_mode():
        torch.ones(3) + 1


def test_h25_storages_that_died_leave_nothing_behind(watch: Watch) -> None:
    for _ in range(200):
        x = torch.randn(16, requires_grad=True)
        (x * x).exp().sum().backward()
    del x
    watch.observer.sweep()
    assert watch.observer.resident_bytes == 0
    starts = [e.region.stop for e in watch.log.entries if isinstance(e, Allocated)]
    assert max(starts) <= 16 * 512, "ranges are reused"
