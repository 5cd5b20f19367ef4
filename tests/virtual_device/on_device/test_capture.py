"""A graph is captured by the program, on the stream that a program computes on: the library does not spoil it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadError
from tests.hazards.backends import assert_settled, hooks_are_gone
from tests.hazards.programs import assert_identical
from tests.runtime.test_beside_an_accelerator import forward
from tests.virtual_device import NAME, VirtualDevice
from tests.virtual_device.graphs import capturing

MESSAGE = "being captured into a graph.*Leave the capture out of `with offload:`"


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(64, 64, generator=generator).to("virtual").requires_grad_() for _ in range(2))
    return x, w


def expected() -> tuple[Tensor, ...]:
    x, w = leaves()
    return torch.autograd.grad(forward(x, w), [x, w])


@pytest.mark.parametrize("used", [False, True])
def test_h52_to_enter_is_an_error(virtual: VirtualDevice, used: bool, offloads: Any) -> None:
    offload, (x, w) = offloads(), leaves()
    if used:
        with offload:
            loss = forward(x, w)
    with capturing():
        for enter in (offload.__enter__, lambda: offload.compile(forward, backend="aot_eager")(x, w)):
            with pytest.raises(OffloadError, match=f"an Offload was entered while.*{MESSAGE}"):
                enter()
        assert hooks_are_gone()
        assert offload.stats().saved_tensors == (5 if used else 0)
    if used:
        assert_identical(expected(), torch.autograd.grad(loss, [x, w]))
        del loss
        assert assert_settled(offload).bytes_out > 0
    graph, other = torch.accelerator.Graph(), torch.Stream(device=NAME)
    with other:
        graph.capture_begin()
    with offloads():
        pass  # another stream is of no concern
    with other:
        graph.capture_end()
    with offload:
        loss = forward(x, w)
    assert_identical(expected(), torch.autograd.grad(loss, [x, w]))
    del loss
    assert assert_settled(offload).bytes_out > 0


@pytest.mark.parametrize("used", [False, True])
def test_h52_what_is_saved_in_a_capture_stays(virtual: VirtualDevice, used: bool, offloads: Any) -> None:
    """Its replays look for it where it is."""
    offload, (x, w), stream = offloads(), leaves(), torch.Stream(device=NAME)
    torch.accelerator.synchronize()
    with stream, virtual.slow_links(latency=0.01), offload:
        before = forward(x, w) if used else None
        moved = offload.stats().bytes_out
        with capturing(stream=stream) as graph:
            captured = forward(x, w)
            gradients = torch.autograd.grad(captured, [x, w])
            stats = offload.stats()
            captured = forward(x, w)
        graph.replay()
        assert_identical(expected(), gradients)
        assert stats.kept_bytes["region"] > 0
        assert stats.bytes_out == moved
        after = forward(x, w)
    assert offload.stats(synchronize=True).bytes_out > moved
    for loss in (captured, after, before):
        if loss is not None:
            assert_identical(expected(), torch.autograd.grad(loss, [x, w]))
    del captured, after, before, loss
    assert_settled(offload)


def test_h52_a_view_of_what_has_left_does_not_go_with_it(virtual: VirtualDevice, offloads: Any) -> None:
    offload, (x, _) = offloads(min_bytes=1024), leaves()
    with offload:
        h = (x * 2).exp()
        first = h.sin().sum()
        with capturing() as graph:
            second = h[:1].cos().sum()
        graph.replay()
    (gradient,) = torch.autograd.grad(first + second, x)
    plain = (x * 2).exp()
    assert torch.equal(gradient, torch.autograd.grad(plain.sin().sum() + plain[:1].cos().sum(), x)[0])
    del first, second, h
    stats = assert_settled(offload)
    assert stats.bytes_out > 0
    assert stats.kept_bytes["small"] >= 64 * 4


def test_h52_backward_in_a_capture_of_what_was_offloaded_is_an_error(virtual: VirtualDevice, offloads: Any) -> None:
    offload, (x, w), stream = offloads(), leaves(), torch.Stream(device=NAME)
    torch.accelerator.synchronize()
    with stream, offload:
        loss = forward(x, w)
    with capturing(stream=stream), pytest.raises(OffloadError, match=f"backward asked for.*{MESSAGE}"):
        torch.autograd.grad(loss, [x, w], retain_graph=True)
    assert_identical(expected(), torch.autograd.grad(loss, [x, w]))
    del loss
    assert assert_settled(offload).bytes_in > 0


def test_h52_a_context_that_is_left_in_a_capture_starts_nothing(virtual: VirtualDevice, offloads: Any) -> None:
    offload, (x, w) = offloads(), leaves()
    offload.__enter__()
    loss = forward(x, w)
    moved = offload.stats().bytes_out
    with capturing():
        offload.__exit__(None, None, None)
        assert offload.stats().bytes_out == moved
    assert hooks_are_gone()
    assert_identical(expected(), torch.autograd.grad(loss, [x, w]))
    del loss
    assert_settled(offload)


def test_h52_operations_of_a_compiled_graph_are_an_error(virtual: VirtualDevice) -> None:
    standing = Offload.serving(tier="host", min_bytes=0, keep_last_bytes=0)
    config = standing.config.to_text()
    x = leaves()[0].detach()
    operations = torch.ops.eager_offload
    with capturing(), pytest.raises(OffloadError, match=f"compiled code that offloads.*{MESSAGE}"):
        operations.offload(x, config=config)  # before anything is open on this device
    host = operations.offload(x, config=config)
    with capturing():
        with pytest.raises(OffloadError, match=MESSAGE):
            operations.offload(x, config=config)
        with pytest.raises(OffloadError, match=MESSAGE):
            operations.reload(host, x.device, config=config)
    assert torch.equal(operations.reload(host, x.device, config=config), x)
    assert standing.stats(synchronize=True).bytes_out == x.nbytes
    standing.close()
