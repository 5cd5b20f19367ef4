"""Codecs that round, on CUDA: training goes on whatever a compiler does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import eager_offload.kernels.codecs as module
from eager_offload import Offload


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.filterwarnings("default:eager_offload. .* computes other numbers:RuntimeWarning")  # as all kernels do here
def test_what_rounds_is_compiled_and_training_goes_on_whatever_comes_of_it(
    codec: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh, compile_it, outcomes = module.CodecKernels(), module._compile, []

    def compiled(size: Any) -> Any:
        try:
            kernels = compile_it(size)
        except Exception as error:
            outcomes.append(str(error))
            raise
        outcomes.append("compiled")
        return kernels

    monkeypatch.setattr(module, "_compile", compiled)
    for name in ("offload", "eager.packing", "eager.saved_tensors"):
        monkeypatch.setattr(f"eager_offload.{name}.CODECS", fresh)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)]).cuda()
    offload = Offload(codec=codec, min_bytes=0, keep_last_bytes=0)
    caplog.set_level("WARNING", "eager_offload.kernels")
    for _ in range(5):
        with offload:
            assert len(outcomes) == 1, "it is compiled before anything is saved, and not in the midst of a step"
            loss = model(torch.randn(512, 256, device="cuda")).sum()
        loss.backward()
        del loss
    stats = offload.stats(synchronize=True)
    assert stats.steps == 5
    assert sum(stats.coded_bytes.values()) > 0
    assert re.findall(r"compiling \w+ of 64 float32: .* several seconds", caplog.text)
    assert len(outcomes) == 1
    assert all(outcome == "compiled" or "computes other numbers" in outcome for outcome in outcomes)
    assert stats.demotions.get("uncompiled_codec", 0) == sum(outcome != "compiled" for outcome in outcomes)
    offload.close()
