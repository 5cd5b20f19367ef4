"""Which of torch's calls tell that a graph is captured, and that none is made where no device is in use yet."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eager_offload import Offload
from eager_offload.runtime import accelerator
from eager_offload.torch_private import captures
from tests.programs import leaf

CUDA = torch.device("cuda")


def says_there_is(monkeypatch: pytest.MonkeyPatch, found: torch.device | None) -> None:
    """Has torch find this accelerator, at run time too."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(accelerator, "_runtime", None)


def test_an_older_torch_is_asked_about_the_selected_device_and_a_newer_one_about_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = SimpleNamespace(is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    monkeypatch.setattr(torch, "Stream", object)
    assert captures.is_capturing(0)
    del module.is_current_stream_capturing
    assert not captures.is_capturing(0)
    streams = [SimpleNamespace(is_capturing=lambda index=index: index == 1) for index in range(2)]
    monkeypatch.setattr(torch, "Stream", SimpleNamespace(is_capturing=None))
    monkeypatch.setattr(torch.accelerator, "current_stream", streams.__getitem__)
    assert [captures.is_capturing(index) for index in (0, 1)] == [False, True]


def test_a_device_not_in_use_yet_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(index: int | None) -> object:
        raise AssertionError("the question starts the device")

    monkeypatch.setattr(torch.accelerator, "current_stream", started)
    for found in (None, CUDA):  # which a build without CUDA never initializes
        says_there_is(monkeypatch, found)
        with Offload(tier="host", min_bytes=1 << 40) as offload:
            loss = leaf(32, 32).tanh().exp().sum()
        assert loss.requires_grad
        assert offload.stats().saved_tensors > 0
