"""``eo.plan(steps=2)``: real steps in place of a trace, for models whose steps depend on numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from eager_offload.__main__ import main
from tests.planning.programs import CONFIG, slow, trained, wide

pytestmark = pytest.mark.usefixtures("one_thread")


class Gate(nn.Linear):
    """Asks for a number, and does more or less by it."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.abs().max().item() > 0)):
            x = x + super().forward(x).sigmoid()
        return x


class Counting(nn.Module):
    """Normalizes by running statistics, drops at random, and has a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.BatchNorm1d(64), Gate(64, 64)
        self.register_buffer("last", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.gate(self.norm(x)), 0.1)
        self.last = x.detach().mean(0)
        return nn.functional.rrelu(x, training=True).square().sum()


def counting() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Counting(), torch.randn(256, 64)


def test_a_model_that_asks_for_numbers_is_planned_and_followed(tmp_path: Path) -> None:
    model, x = counting()
    with pytest.raises(eo.PlanError, match=r"module 'gate' asks for the value of a tensor .*steps=2\)"):
        eo.plan(model, x, config=CONFIG)
    plan = eo.plan(model, x, policy="max", config=CONFIG, steps=2)
    assert "operators take what they took in 2 real steps" in str(plan)
    stats = trained(plan, model, x, tmp_path)
    assert stats.bytes_out >= 3 * sum(plan.step_plans[0].slots) > 0, "and what is asked for its largest number"


class Scaled(nn.Module):
    """A loss with a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, total: Tensor) -> Tensor:
        self.steps += 1
        return total * self.scale


def test_an_input_of_a_graph_and_a_loss_that_is_a_module_are_put_back_too() -> None:
    (model, x), loss = wide(), Scaled()
    root = x.clone().requires_grad_()
    hidden = root.exp()
    assert eo.plan(model, hidden, loss=loss, config=CONFIG, steps=2).fits
    assert loss.scale.grad is None
    assert loss.steps == 0
    hidden.sum().backward()
    assert root.grad is not None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": -1}, "steps=-1 is not accepted: steps takes a whole number"),
        ({"steps": True}, "steps=True is not accepted: steps takes a whole number"),
        ({"steps": 1.5}, "steps=1.5 is not accepted: steps takes a whole number"),
        ({"device": "h200"}, "steps=2 is not accepted: real steps take the time of this machine"),
        ({"device": slow()}, "steps=2 is not accepted: real steps take the time of this machine"),
        ({"recompute": True}, "steps=2 is not accepted: what is computed again is decided by a trace"),
    ],
)
def test_what_cannot_be_timed_is_an_error(fields: dict[str, Any], said: str) -> None:
    model, x = wide()
    with pytest.raises(eo.ConfigError) as caught:
        eo.plan(model, x, **{"steps": 2, **fields})
    assert said in str(caught.value)


def test_tensors_without_numbers_and_accelerators_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = wide()
    with pytest.raises(eo.ConfigError, match="steps=2 is not accepted for a model on meta"):
        eo.plan(model.to("meta"), x, steps=2)
    model, x = wide()
    with pytest.raises(eo.PlanError, match="the loss requires no gradient"):
        eo.plan(nn.Identity(), [(x,)], steps=2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    with pytest.raises(eo.ConfigError, match="operators of an accelerator run after their calls"):
        eo.plan(model, x, steps=2)


def test_the_command_runs_steps_too(capsys: pytest.CaptureFixture[str]) -> None:
    questions = "tests.planning.models_of_a_user:questions"
    assert main(["plan", questions]) == 2
    assert "steps=2" in capsys.readouterr().err
    assert main(["plan", questions, "--steps", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
