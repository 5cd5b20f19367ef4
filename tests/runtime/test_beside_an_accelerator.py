"""What a graph that the program captures on an accelerator does to a step, on the recording double."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, OffloadError, _torch
from eager_offload.runtime import accelerator
from tests.doubles.training_accelerator import TrainingAccelerator
from tests.hazards.backends import assert_settled, hooks_are_gone
from tests.hazards.programs import assert_identical, leaf

#: Moves, all at once.
EVERYTHING: dict[str, Any] = {
    "tier": "host",
    "min_bytes": 0,
    "keep_last_bytes": 0,
    "max_inflight_bytes": "1MiB",
    "prefetch_bytes": "1MiB",
}
CUDA = torch.device("cuda")


def says_there_is(monkeypatch: pytest.MonkeyPatch, found: torch.device | None) -> None:
    """Has torch find this accelerator, at run time too."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(accelerator, "_runtime", None)


def forward(x: Tensor, w: Tensor) -> Tensor:
    h = (x * 2).tanh().exp()
    return (h @ w).sin().sum()


def leaves() -> list[Tensor]:
    return [leaf(32, 32, seed=seed) for seed in (1, 2)]


@pytest.fixture
def expected() -> tuple[Tensor, ...]:
    of = leaves()
    return torch.autograd.grad(forward(*of), of)


# -- the program captures a graph -------------------------------------------------------------------------------------


@pytest.fixture
def double() -> Iterator[TrainingAccelerator]:
    """Whose program computes on a stream that can be captured."""
    double = TrainingAccelerator()
    with double.checked() as checker, double.computing_on(double.side_stream()):
        yield double
    checker.assert_clean()
    assert double.captures.refused == []


def test_h52_to_enter_where_a_graph_is_captured_is_an_error(
    double: TrainingAccelerator, expected: tuple[Tensor, ...]
) -> None:
    offload, of, graph = Offload(runtime=double.runtime, **EVERYTHING), leaves(), double.graph(keep=False)
    double.begin_graph(graph, None, "global")
    calls = list(double.calls)
    with pytest.raises(OffloadError, match=r"an Offload was entered while.*captured into a graph.*Leave the capture"):
        offload.__enter__()
    assert hooks_are_gone()
    assert double.calls == calls, "nothing was asked of the device"
    graph.capture_end()
    with offload:
        loss = forward(*of)
    assert_identical(expected, torch.autograd.grad(loss, of))
    del loss
    assert assert_settled(offload).bytes_out > 0
    offload.close()


def test_h52_what_is_saved_while_a_graph_is_captured_stays(
    double: TrainingAccelerator, expected: tuple[Tensor, ...]
) -> None:
    offload, of, graph = Offload(runtime=double.runtime, **EVERYTHING), leaves(), double.graph(keep=False)
    with offload:
        before = forward(*of)
        double.begin_graph(graph, None, "global")
        calls, moved = list(double.calls), offload.stats().bytes_out
        captured = forward(*of)
        stats = offload.stats(synchronize=True)
        assert double.calls == calls
        with pytest.raises(OffloadError, match="backward asked for a tensor that was offloaded"):
            torch.autograd.grad(before, of, retain_graph=True)
        assert_identical(expected, torch.autograd.grad(captured, of))
        assert double.calls == calls
        graph.capture_end()
    assert stats.kept_bytes["region"] == 4 * of[0].nbytes
    assert stats.bytes_out == moved > 0
    assert_identical(expected, torch.autograd.grad(before, of))
    del before, captured
    assert_settled(offload)
    offload.close()


def test_an_older_torch_is_asked_about_the_selected_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    monkeypatch.setattr(torch, "Stream", object)
    assert _torch.is_capturing(0)
    del module.is_current_stream_capturing
    assert not _torch.is_capturing(0)


def test_a_newer_torch_is_asked_about_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_stream(index: int | None) -> object:
        return SimpleNamespace(is_capturing=lambda: index == 1)

    monkeypatch.setattr(torch, "Stream", SimpleNamespace(is_capturing=None))
    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    assert [_torch.is_capturing(index) for index in (0, 1)] == [False, True]


def test_a_device_not_in_use_yet_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(index: int | None) -> object:
        raise AssertionError("the question starts the device")

    monkeypatch.setattr(torch.accelerator, "current_stream", started)
    for found in (None, CUDA):  # which a build without CUDA never initializes
        says_there_is(monkeypatch, found)
        with Offload(tier="host", min_bytes=1 << 40) as offload:
            loss = forward(*leaves())
        assert loss.requires_grad
        assert offload.stats().saved_tensors > 0
