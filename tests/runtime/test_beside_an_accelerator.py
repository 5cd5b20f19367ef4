"""Which of torch's calls tell that a graph is captured, and that none is made where no device is in use yet."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eager_offload import Offload, _torch
from eager_offload.runtime import accelerator
from tests.hazards.programs import leaf

CUDA = torch.device("cuda")


def says_there_is(monkeypatch: pytest.MonkeyPatch, found: torch.device | None) -> None:
    """Has torch find this accelerator, at run time too."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(accelerator, "_runtime", None)


def forward(x: Tensor, w: Tensor) -> Tensor:
    h = (x * 2).tanh().exp()
    return (h @ w).sin().sum()


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
            loss = forward(leaf(32, 32, seed=1), leaf(32, 32, seed=2))
        assert loss.requires_grad
        assert offload.stats().saved_tensors > 0
