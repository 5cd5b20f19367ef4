"""H30: two devices in one model, on the recording double: streams, targets, windows and pools by device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from eager_offload import Offload
from eager_offload.eager.saving import SavedTensors
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.runtime.base import Direction
from eager_offload.stats import KeepReason
from tests.doubles.training_accelerator import TrainingAccelerator
from tests.hazards.backends import assert_settled
from tests.hazards.blocks import ROWS, WIDTH, Block
from tests.hazards.programs import REGIMES, Regime, Settled, assert_identical, assert_moved
from tests.runtime.test_accelerator_step import Around, Cross, Streams
from tests.simulation.checker import Checker

FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)


class Machine(NamedTuple):
    """Two devices, an ``Offload`` that takes the selected one for the one that a tensor is on, and the checker."""

    double: TrainingAccelerator
    offload: Offload
    streams: Streams
    checker: Checker

    def offloader(self, device: torch.device) -> DeviceOffloader:
        offloader = self.offload._offloaders.of(device)
        assert isinstance(offloader, DeviceOffloader)
        return offloader


@contextmanager
def two_devices(haste: float = 0.0, **fields: Any) -> Iterator[Machine]:
    """On torch's side there is one device, the CPU: which of the two a tensor is on is what was selected."""
    double = TrainingAccelerator(devices=2, haste=haste)
    defaults = [double.runtime.current_stream(device) for device in (FIRST, SECOND)]
    with double.checked() as checker:
        offload = Offload(
            runtime=double.runtime,
            **{"tier": "host", "min_bytes": 0, "keep_last_bytes": 0, "prefetch_bytes": 0, **fields},
        )
        saved_tensors = offload._hooks.saved_tensors

        def of_the_selected(device: torch.device) -> SavedTensors | KeepReason:
            return saved_tensors(torch.device("cpu", double.current_device_index()))

        offload._hooks.saved_tensors = of_the_selected  # type: ignore[method-assign]
        yield Machine(double, offload, Streams(double, [*defaults, double.side_stream(1)]), checker)
        offload.close()


def pipeline(around: Around, streams: Streams, steps: int = 2) -> object:
    """Half of the blocks on each device, and one of the second device's on a side stream there."""
    torch.manual_seed(0)
    places, model, losses = [0, 1, 2, 0], [], []
    for place in places:
        streams.meet()
        streams.select(place)
        model.append(Block())
    parameters = [parameter for block in model for parameter in block.parameters()]
    for _ in range(steps):
        streams.meet()
        streams.select(0)
        with around:
            x, here = torch.randn(ROWS, WIDTH), 0
            for block, there in zip(model, places, strict=True):
                if here != there:
                    x, here = Cross.apply(x, streams, here, there), there  # type: ignore[no-untyped-call]
                x = nn.functional.dropout(block(x), 0.1)
            loss = x.square().mean()
        loss.backward()
        streams.meet()
        with torch.no_grad():
            for place, block in zip(places, model, strict=True):
                streams.select(place)
                for parameter in block.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.01 * parameter.grad
        streams.meet()
        streams.select(0)
        losses.append(loss.item())
        for parameter in parameters:
            parameter.grad = None
        del x, loss
    result = [parameter.detach().clone() for parameter in parameters]
    streams.meet()
    return losses, result


@functools.cache
def expected() -> object:
    return pipeline(nullcontext(), Streams(None))


@pytest.mark.parametrize("haste", [0.0, 0.5])
@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_h30_a_model_on_two_devices_is_exact_and_ordered(regime: Regime, haste: float) -> None:
    with two_devices(haste, **{"prefetch_bytes": 1 << 28, **regime.fields}) as machine:
        assert_identical(expected(), pipeline(regime.around(machine.offload), machine.streams))
        devices = {one.device for one in machine.offload._offloaders.all()}
        stats = assert_settled(machine.offload)
    machine.checker.assert_clean()
    assert devices == {FIRST, SECOND}
    assert_moved(stats)
    assert stats.bytes_in > 0 or not regime.settled


def test_h30_each_device_has_transfer_streams_of_its_own_and_reload_targets_in_its_own_memory() -> None:
    with two_devices() as machine:
        pipeline(Settled(machine.offload), machine.streams)
    runtime, calls = machine.double.runtime, machine.double.calls
    streams = {(device, way): runtime.transfer_stream(device, way) for device in (FIRST, SECOND) for way in Direction}
    assert len(set(streams.values())) == 4
    for (device, _), stream in streams.items():
        assert stream.device == device
        assert any(
            call.startswith("copy") and call.endswith(f" on {device.index}/{stream.stream_id}") for call in calls
        )
    for device in (FIRST, SECOND):
        assert any(call.startswith("empty ") and f" on {device.index}/" in call for call in calls)


@pytest.mark.parametrize("selected", [0, 1], ids=["the first selected", "the second selected"])
@pytest.mark.parametrize("owner", [0, 1], ids=["of the first", "of the second"])
def test_h30_a_reload_lands_on_the_tensors_own_device_whichever_is_selected(owner: int, selected: int) -> None:
    with two_devices() as machine:
        double, streams = machine.double, machine.streams
        streams.select(owner)
        tensor = torch.randn(64, 64).mul_(2).requires_grad_()
        values = tensor.detach().clone()
        with machine.offload:
            handle = machine.offload._hooks.pack(tensor * 1)
        machine.offload.stats(synchronize=True)
        streams.meet()
        streams.select(selected)
        before: list[object] = [double.current_device_index(), *(current(double, index) for index in (0, 1))]
        back = handle.unpack()
        assert [double.current_device_index(), *(current(double, index) for index in (0, 1))] == before
        assert double.device_of(back) == torch.device("cpu", owner)
        streams.meet()
        assert torch.equal(back, values)
        streams.meet()
        assert machine.offload.stats().bytes_in == values.nbytes
        del handle, back
        streams.select(0)
    machine.checker.assert_clean()


def current(double: TrainingAccelerator, index: int) -> torch.Stream:
    return double.runtime.current_stream(torch.device("cpu", index))


def test_h30_a_full_window_of_one_device_does_not_hold_up_the_other() -> None:
    with two_devices(max_inflight_bytes=1 << 14) as machine:
        kept: list[object] = []
        for device in (0, 1):
            machine.streams.select(device)
            for _ in range(3):
                kept.append(leave(machine.offload, torch.randn(1 << 10).mul_(2)))
        offloaders = [machine.offloader(device) for device in (FIRST, SECOND)]
        assert [offloader.inflight_bytes for offloader in offloaders] == [3 << 12, 3 << 12]
        assert "synchronize" not in machine.double.calls, "each has room for its own"
        machine.streams.select(0)
        for _ in range(2):
            kept.append(leave(machine.offload, torch.randn(1 << 10).mul_(2)))
        assert "synchronize" in machine.double.calls
        assert offloaders[0].inflight_bytes == 1 << 14
        assert offloaders[1].inflight_bytes == 3 << 12
        kept.clear()
        machine.streams.select(0)
    machine.checker.assert_clean()


def leave(offload: Offload, tensor: Tensor) -> object:
    with offload:
        return offload._hooks.pack(tensor)
