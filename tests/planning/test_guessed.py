"""What a plan says of functions whose saves depend on the device, and of those that cannot be traced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.planning.programs import CONFIG

pytestmark = pytest.mark.usefixtures("one_thread")


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def batch() -> Tensor:
    return torch.randn(256, 64, generator=torch.Generator().manual_seed(1))


class Device(nn.Module):
    """Functions that save other tensors on an accelerator, and the same ones where they save nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.lstm = nn.MultiheadAttention(64, 4, dropout=0.1), nn.LSTM(64, 64)
        self.dropout, self.norm = nn.Dropout(0.1), nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm(x)
        attended = self.attention(x, x, x, need_weights=False)[0]
        return self.lstm(self.dropout(attended))[0].square().mean()


def test_h70_a_plan_names_the_functions_whose_saves_it_guessed(tmp_path: Path) -> None:
    plan = eo.plan(Device(), batch(), device="h200", config=CONFIG)
    assert [one.partition(" ")[0] for one in plan.guessed] == ["attention", "dropout", "recurrent"]
    assert ["of CUDA" in one or "CUDA's" in one for one in plan.guessed] == [True, True, False], "written down as those"
    assert "guessed, since the device is not here" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert eo.Plan.load(tmp_path / "plan.json").guessed == plan.guessed
    assert not eo.plan(
        Device(), batch(), device="here", device_budget="1GiB", config={**CONFIG, "tier": "host"}
    ).guessed
    assert not eo.plan(body(), batch(), loss=lambda made: made.mean(), device="h200", config=CONFIG).guessed


class Flexible(nn.Linear):
    """Calls what torch differentiates on accelerators alone."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        y = super().forward(x).view(1, 4, -1, 16)
        return flex_attention(y, y, y, score_mod=lambda score, b, h, q, k: score + q - k).square().mean()


def test_a_model_with_flex_attention_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(eo.PlanError, match=r"module '0' calls an operator .*scaled_dot_product_attention.* Offload\("):
        eo.plan(nn.Sequential(Flexible(64, 64)), batch(), device="h200")
