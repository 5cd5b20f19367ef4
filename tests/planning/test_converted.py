"""Plans of models that convert modules in forward, or have modules of TorchScript."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo
from tests.planning.programs import CONFIG, planned

pytestmark = pytest.mark.usefixtures("one_thread")


def like(plan: eo.Plan) -> tuple[int, ...]:
    return plan.peak_bytes, plan.moved_bytes, plan.movable_bytes


# -- modules that forward converts ------------------------------------------------------------------------------------


class Converted(nn.Module):
    """Converts some of its modules in forward, before or after their use."""

    def __init__(self, convert: Callable[[Converted, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.router, self.convert = (
            nn.Linear(64, 256),
            nn.Linear(256, 64),
            nn.Linear(64, 4),
            convert,
        )

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        self.convert(self, x)
        shares = self.router(x.to(self.router.weight.dtype)).float().softmax(-1)
        return self.last(nn.functional.gelu(made) * shares[:, :1]).square().mean()


@pytest.mark.parametrize(
    ("convert", "same"),
    [
        (lambda model, x: model.to(x.device), True),
        (lambda model, x: model.router.to(x.dtype), True),
        (lambda model, x: model.router.to(torch.bfloat16), False),
        (lambda model, x: (model.first.double(), model.first.float()), False),
        (lambda model, x: model.last.type(torch.float32).requires_grad_(), True),
        (lambda model, x: setattr(model.router.weight, "data", model.router.weight.data.clone()), False),
    ],
)
def test_h76_a_module_that_forward_converts_is_planned(convert: Callable[..., Any], same: bool, tmp_path: Path) -> None:
    x, model = torch.randn(512, 64), Converted(convert)
    before = [(one, one.dtype, one.data_ptr()) for one in model.parameters()]
    plan = planned(lambda: (model, x), policy="max")
    assert (like(plan) == like(planned(lambda: (Converted(lambda model, x: None), x), policy="max"))) is same
    assert before == [(one, one.dtype, one.data_ptr()) for one in model.parameters()]
    assert plan.moved_bytes > 0


# -- TorchScript ------------------------------------------------------------------------------------------------------


@torch.jit.script
def halved(x: Tensor) -> Tensor:
    return x * 0.5


class Scripted(nn.Module):
    def __init__(self, make: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.function = halved
        self.body = make(nn.Sequential(nn.Linear(64, 128), nn.ReLU()))
        self.head = nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.head(self.body(x))).square().mean()


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(4, 64))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_h76_a_module_of_torchscript_is_refused_by_name(make: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    model, x = Scripted(make), torch.randn(256, 64)
    with pytest.raises(eo.PlanError, match="module 'body' is a module of TorchScript"):
        planned(lambda: (model, x), policy="max")
    with pytest.raises(eo.PlanError, match="the model itself is a module of TorchScript"):
        planned(lambda: (model.body, x), loss=lambda made: made.mean())
    with pytest.raises(eo.PlanError, match="the loss is a module of TorchScript"):
        planned(lambda: (nn.Linear(64, 64), x), loss=model.body)
    assert planned(lambda: (Scripted(lambda module: module), x), policy="max").moved_bytes > 0, "functions are traced"
    hidden, body = Scripted(lambda module: module), model.body
    hidden.handlers = [{"a": body}]  # type: ignore[assignment]
    with pytest.raises(eo.PlanError, match="'handlers' of the model itself has a module of TorchScript"):
        planned(lambda: (hidden, x))
    hidden.handlers = SimpleNamespace(body=body)  # type: ignore[assignment]
    with pytest.raises(eo.PlanError, match="an object that is an attribute of the model has a module of TorchScript"):
        planned(lambda: (hidden, x))
    with pytest.raises(eo.PlanError, match="the model itself calls code of TorchScript"):
        planned(lambda: (nn.Linear(64, 64), x), loss=lambda made: body(made).mean())
    for pattern in ("body", "*", "body.0"):
        with pytest.raises(eo.ConfigError, match="a module of TorchScript"):
            eo.Offload(skip=[pattern]).skip_in(model)
    offload = eo.Offload(CONFIG, skip=["head"], tier="disk", disk_path=tmp_path)
    offload.skip_in(model)
    with offload:
        loss = model(x)
    loss.backward()
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()
