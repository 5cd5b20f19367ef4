"""Of graphs, what needs no accelerator: names, states, pools, handles, and inputs that stay where they are."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import pytest
import torch

import eager_offload as eo
from eager_offload import graphs
from eager_offload.graphs import (
    CaptureInputError,
    CapturePool,
    CaptureStatus,
    DeviceScalar,
    GraphPoolHandle,
    PoolSealedError,
    StaticInputs,
)
from tests.processes import printed_by
from tests.threads import collect


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


def test_names_are_sorted_documented_and_errors_are_of_one_kind_that_travels() -> None:
    assert list(graphs.__all__) == sorted(graphs.__all__)
    for one in map(graphs.__dict__.get, graphs.__all__):
        assert one.__doc__
        if one.__name__.endswith("Error"):
            assert issubclass(one, graphs.GraphError)
            assert issubclass(one, eo.OffloadError)
            assert issubclass(one, ValueError) == (one is CaptureInputError)
            assert str(pickle.loads(pickle.dumps(one("why")))) == "why"


def test_the_package_is_imported_by_who_asks_for_it() -> None:
    program = "import sys, eager_offload; print(sorted(name for name in sys.modules if 'offload.graphs' in name))"
    assert printed_by("-c", program).strip() == "[]"


@pytest.mark.usefixtures("no_accelerator")
def test_nothing_is_captured_where_nothing_can_be_and_what_needs_a_device_says_so() -> None:
    assert graphs.capture_status() is graphs.capture_status(torch.Stream(device="cpu")) is CaptureStatus.NONE
    assert not graphs.is_capturing()
    found = [(status.is_capturing, status.is_invalidated) for status in CaptureStatus]
    assert found == [(False, False), (True, False), (False, True)]
    assert [mode.value for mode in graphs.CaptureMode] == ["global", "thread_local", "relaxed"]
    for call in (
        graphs.GraphCaptureGuard,
        lambda: graphs.capture_step(lambda: None),
        lambda: graphs.make_graphed_callable(lambda: None),
        lambda: CapturePool("1MiB").host_buffer(8),
    ):
        with pytest.raises(graphs.NoAcceleratorError, match="a CPU has nothing to capture"):
            call()


# -- pools ------------------------------------------------------------------------------------------------------------


class Anything:
    pass


def test_a_pool_keeps_anything_in_order_until_it_is_cleared() -> None:
    pool, one, gone = CapturePool(), Anything(), list[int]()
    for number in range(3):
        weakref.finalize(buffer := Anything(), gone.append, number)
        assert pool.record_buffer(buffer) == number
    assert [pool.record_buffer(one), pool.record_buffer("text"), pool.buffer_count] == [3, 4, 5]
    del buffer
    collect()
    assert gone == []
    pool.clear_buffers()
    assert (gone, pool.buffer_count, pool.record_buffer(one)) == ([0, 1, 2], 0, 0)


def test_a_pool_takes_nothing_while_it_is_sealed_and_what_is_in_use_is_cleared_by_force_only() -> None:
    pool, graph = CapturePool(), Anything()
    pool.begin(object())
    pool.end(None)  # a capture that fails leaves its pool open
    assert not pool.sealed
    pool.record_buffer(1)
    pool.begin(object())
    with pytest.raises(graphs.PoolInUseError, match="end that first"):
        pool.begin(object())
    with pytest.raises(graphs.PoolInUseError, match="by a capture that is under way"):
        pool.clear_buffers()
    pool.end(graph)
    assert pool.sealed
    for call in (lambda: pool.record_buffer(1), lambda: pool.begin(object())):
        with pytest.raises(PoolSealedError, match=r"sealed.*unseal"):
            call()
    with pytest.raises(graphs.PoolInUseError, match=r"the 1 buffers.*by 1 graphs"):
        pool.clear_buffers()
    pool.clear_buffers(force=True)
    del graph
    collect()
    pool.clear_buffers()
    pool.unseal()
    assert pool.record_buffer(1) == 0
    pool.seal()
    assert pool.sealed


def test_handles_name_pools_until_they_are_released() -> None:
    one, other = graphs.graph_pool_handle(), graphs.graph_pool_handle()
    assert one != other
    pool = graphs.capture_pool_for_handle(one)
    assert isinstance(pool, CapturePool)
    assert graphs.capture_pool_for_handle(GraphPoolHandle(one.id)) is pool
    assert graphs.capture_pool_for_handle(other) not in (pool, None)
    assert graphs.capture_pool_for_handle(GraphPoolHandle(-1)) is None
    pool.record_buffer(1)
    graphs.release_graph_pool_handle(one)
    graphs.release_graph_pool_handle(one)
    assert graphs.capture_pool_for_handle(one) is None
    assert pool.buffer_count == 1, "the test holds it"
    there = weakref.ref(pool)
    del pool
    collect()
    assert there() is None
    graphs.release_graph_pool_handle(other)
    with pytest.raises(eo.ConfigError, match="host_bytes"):
        CapturePool(host_bytes="much")


# -- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize(
    ("value", "then", "dtype"), [(0.5, 0.25, torch.float32), (3, 2**40 + 1, torch.int64), (True, False, torch.bool)]
)
def test_a_scalar_is_a_tensor_that_stays(value: Any, then: Any, dtype: torch.dtype) -> None:
    scalar = DeviceScalar(value)
    tensor, address = scalar.tensor, scalar.tensor.data_ptr()
    assert (tensor.item(), tensor.dtype, tensor.device.type, tensor.shape) == (value, dtype, "cpu", ())
    scalar.update(then)
    assert scalar.tensor is tensor
    assert (tensor.item(), tensor.data_ptr()) == (then, address)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(0.5, torch.int64), (float("nan"), torch.int32), (300, torch.uint8), (2, torch.bool), ("1", None), (None, None)],
)
def test_a_scalar_refuses_what_it_cannot_hold(value: Any, dtype: torch.dtype | None) -> None:
    with pytest.raises(CaptureInputError, match="DeviceScalar"):
        DeviceScalar(value, dtype, "cpu")
    scalar = DeviceScalar(0, torch.float64 if dtype is None else dtype, "cpu")
    with pytest.raises(CaptureInputError, match="DeviceScalar"):
        scalar.update(value)
    assert scalar.tensor.item() == 0
    scalar.update(1.0)
    assert scalar.tensor.item() == 1


def given(scale: float = 1.0, **changed: Any) -> Any:
    batch: dict[str, Any] = {"ids": torch.full((2, 3), scale), "flags": [True, None, float("nan"), "train"]}
    return (batch | changed, torch.full((4,), 2 * scale, dtype=torch.float64))


def test_inputs_come_into_buffers_that_stay() -> None:
    source = given(requires=torch.ones(2, requires_grad=True))
    static = StaticInputs(source)
    batch, y = static.values
    addresses = [batch["ids"].data_ptr(), y.data_ptr()]
    assert batch["ids"].data_ptr() != source[0]["ids"].data_ptr()
    assert batch["flags"][3] == "train"
    assert not batch["requires"].requires_grad
    static.update(given(5.0, requires=torch.zeros(2, requires_grad=True)))
    assert static.values[0]["ids"] is batch["ids"]
    assert (batch["ids"].unique().item(), y.unique().item(), batch["requires"].sum().item()) == (5.0, 10.0, 0.0)
    assert [batch["ids"].data_ptr(), y.data_ptr()] == addresses
    static.update(static.values)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (given()[0], "captured inputs have 6 values, at .*, and the given ones 5, at"),
        (given(more=1), "captured inputs have 6 values, at .*, and the given ones 7, at"),
        (given(ids=torch.ones(3, 2)), r"input \[0\]\['ids'\] was captured as a tensor of \(2, 3\).* as .* of \(3, 2\)"),
        (given(ids=torch.ones(2, 3).long()), r"\['ids'\].*torch.float32, cpu, and is given as .*torch.int64"),
        (given(ids=torch.ones(2, 3, device="meta")), "cpu, and is given as .*meta"),
        (given(ids=1), "captured as a tensor of .* and is given as int 1"),
        (given(flags=[True, None, 0.0, "train"]), r"\[0\]\['flags'\]\[2\] was captured as float nan.* as float 0.0"),
        (given(flags=[1, None, float("nan"), "train"]), "captured as bool True, and is given as int 1"),
        (given(flags=[True, None, float("nan"), "eval"]), "captured as str 'train', and is given as str 'eval'"),
    ],
)
def test_inputs_that_differ_are_an_error_with_both_sides_and_nothing_is_copied(inputs: Any, message: str) -> None:
    static = StaticInputs(given())
    with pytest.raises(CaptureInputError, match=message):
        static.update(inputs)
    batch, y = static.values
    assert (batch["ids"].unique().item(), y.unique().item()) == (1.0, 2.0)
