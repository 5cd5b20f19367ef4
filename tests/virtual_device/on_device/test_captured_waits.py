"""Each kind of wait that a captured step makes, left out: the checker reports it, and replays are wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eager_offload import Offload
from eager_offload.engine.captured import CapturedTransfers
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.engine.transfer import Transfer
from eager_offload.errors import UnjoinedStreamError
from eager_offload.graphs import CapturedStep, capture_step
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.accelerator_events import CapturedEvent
from eager_offload.runtime.captures import CAPTURES
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.graphs import nodes_of, violations
from tests.virtual_device.on_device.steps import FEW, same

#: By the stream that waits, and the one of which it waits for an event.
WAITS = {
    "a copy out for its source": ("out", "compute"),
    "a source for its copy out": ("compute", "out"),
    "a copy out for the last copy back from its place": ("out", "in"),
    "a copy back for its target": ("in", "compute"),
    "compute for a copy back": ("compute", "in"),
}


class Pipeline:
    """Three forwards, then their backwards: what leaves late takes the places of what has come back."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weights = [(torch.randn(32, 32, generator=generator) / 8).to(NAME).requires_grad_() for _ in range(6)]
        self.batches = [torch.randn(16, 32, generator=generator).to(NAME) for _ in range(FEW)]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        losses = []
        for number in range(3):
            h = x + number
            for weight in self._weights:
                h = (h @ weight).tanh().exp()
            losses.append(h.square().mean())
        return tuple(value for loss in losses for value in torch.autograd.grad(loss, self._weights))

    def capture(self, offload: Offload) -> CapturedStep:
        return capture_step(self, (torch.zeros(16, 32, device=NAME),), offload=offload, debug=True)

    def results(self, one: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
        return [value.cpu() for x in self.batches for value in one(x)]


@pytest.fixture
def pipeline(offloads: Callable[..., Offload]) -> Callable[[], CapturedStep]:
    offload = offloads(max_inflight_bytes="8KiB", prefetch_bytes="16KiB", keep_last_bytes=0)
    return lambda: Pipeline().capture(offload)


def test_replays_of_forwards_that_overlap_are_exact(
    virtual: VirtualDevice, pipeline: Callable[[], CapturedStep]
) -> None:
    step, eager = pipeline(), Pipeline()
    assert not violations(nodes_of(step.graph._graph))
    with virtual.replays(1):
        assert same(eager.results(eager), eager.results(step))


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_that_is_left_out_is_reported_and_shows(
    name: str, virtual: VirtualDevice, pipeline: Callable[[], CapturedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, back = accelerator_runtime().capture_streams(torch.device(NAME, 0))
    kinds, left_out = {out: "out", back: "in"}, list[CapturedEvent]()
    wait_on, joins = CapturedEvent.wait_on, CapturedTransfers.join

    def wait(event: CapturedEvent, stream: torch.Stream) -> None:
        is_meant = WAITS[name] == (kinds.get(stream, "compute"), kinds.get(event.recorded_on, "compute"))
        if is_meant and CAPTURES.of(stream) is not None:  # else the stream is not captured at all, which is an error
            left_out.append(event)
        else:
            wait_on(event, stream)

    def join(transfers: CapturedTransfers) -> None:  # else the capture has no end
        monkeypatch.setattr(CapturedEvent, "wait_on", wait_on)
        joins(transfers)

    monkeypatch.setattr(CapturedEvent, "wait_on", wait)
    monkeypatch.setattr(CapturedTransfers, "join", join)
    step, eager = pipeline(), Pipeline()
    assert left_out
    assert violations(nodes_of(step.graph._graph))
    with virtual.replays(1):
        assert not same(eager.results(eager), eager.results(step))


@pytest.mark.parametrize("waits", [True, False])
def test_compute_waits_for_what_comes_back_in_vain_before_its_memory_has_a_new_owner(
    waits: bool, virtual: VirtualDevice, offloads: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [torch.full((64, 64), 0.02, device=NAME, requires_grad=True) for _ in range(8)]
    x = torch.ones(32, 64, device=NAME)

    def step(x: Tensor) -> Tensor:
        for last in (4, 0):  # the first time half of the graph is asked for
            h = x
            for weight in weights:
                h = (h @ weight).tanh().exp()
            gradients = torch.autograd.grad(h.sum(), weights[last:])
        return torch.stack([value.sum() for value in gradients])

    if not waits:
        release = DeviceOffloader.release

        def released(transfers: CapturedTransfers, transfer: Transfer) -> None:
            release(transfers, transfer)
            transfers._in.pop(transfer, None)

        monkeypatch.setattr(CapturedTransfers, "release", released)
    offload = offloads(max_inflight_bytes=1, prefetch_bytes="32KiB", keep_last_bytes=0)
    captured = capture_step(step, (x,), offload=offload, warmup=1, debug=True)
    assert bool(violations(nodes_of(captured.graph._graph))) != waits
    if waits:
        with virtual.replays(1):
            assert torch.equal(captured(x), step(x))


def test_streams_of_copies_that_do_not_join_are_an_error(
    pipeline: Callable[[], CapturedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CapturedTransfers, "join", lambda transfers: None)
    out, _ = accelerator_runtime().capture_streams(torch.device(NAME, 0))
    wait_on = CapturedEvent.wait_on

    def wait(event: CapturedEvent, stream: torch.Stream) -> None:
        if event.recorded_on != out:
            wait_on(event, stream)

    monkeypatch.setattr(CapturedEvent, "wait_on", wait)
    with pytest.raises(UnjoinedStreamError):
        pipeline()
