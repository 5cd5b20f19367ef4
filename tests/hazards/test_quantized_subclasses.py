"""H13: the float8 and NF4 tensors of torchao, where torchao is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hazards.backends import Backend
from tests.hazards.functions import watching
from tests.hazards.programs import Around, leaf, one_step, same_gradients, trained

pytest.importorskip("torchao", reason="torchao is not installed")
float8 = pytest.importorskip("torchao.float8", reason="this torchao does not train in float8")
scaling = pytest.importorskip("torchao.float8.float8_scaling_utils", reason="this torchao does not train in float8")
quantization = pytest.importorskip("torchao.quantization", reason="this torchao does not quantize")
if not hasattr(quantization, "to_nf4"):
    pytest.skip("this torchao has no NF4", allow_module_level=True)


def test_h13_a_model_with_float8_matrices(backend: Backend) -> None:
    def program(offload: Around) -> object:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(torch.bfloat16)
        float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))

        def loss(seed: int) -> Tensor:
            return model(leaf(16, 32, seed=seed, grad=False).to(torch.bfloat16)).float().square().mean()

        return trained(model.parameters(), offload, loss, torch.optim.AdamW)

    same_gradients(program, backend)


def saved_by_an_operator(make: Callable[[], Tensor], values: Callable[[Any], Tensor]) -> Callable[[Around], object]:
    """A program in which an operator saves what ``make`` makes, and backward looks at its ``values``."""

    @one_step
    def program() -> Sequence[object]:
        x, seen = leaf(32, 32), []
        y = watching((x * 2).tanh(), lambda tensor: seen.extend([type(tensor).__name__, values(tensor)]), make())
        return y, x, seen

    return program


def test_h13_a_float8_tensor(backend: Backend) -> None:
    def make() -> Tensor:
        return scaling.hp_tensor_to_float8_dynamic(leaf(32, 32, seed=3), torch.float8_e4m3fn, None)

    for stats in same_gradients(saved_by_an_operator(make, lambda tensor: tensor.to_original_precision()), backend):
        assert stats.offloaded_tensors >= 2, "the float8 values did not move"


def test_h13_an_nf4_tensor(backend: Backend) -> None:
    def make() -> Tensor:
        return quantization.to_nf4(leaf(64, 64, seed=3, grad=False), block_size=32, scaler_block_size=2)

    for stats in same_gradients(saved_by_an_operator(make, lambda tensor: tensor.to(torch.float32)), backend):
        assert stats.offloaded_bytes >= 32 * 32 * 4 + 64 * 64 // 2, "the quantized values did not move"


@pytest.mark.parametrize("loaded", [False, True], ids=["new", "loaded"])
def test_h13_a_frozen_nf4_weight_stays(loaded: bool, backend: Backend) -> None:
    @one_step
    def program() -> tuple[Tensor, ...]:
        weight = nn.Parameter(quantization.to_nf4(leaf(64, 64, seed=3, grad=False), 32, 2), requires_grad=False)
        if loaded:  # counts as a change in place
            weight.copy_(quantization.to_nf4(leaf(64, 64, seed=4, grad=False), 32, 2))
        x = leaf(16, 64)
        return F.linear((x * 2).tanh(), weight).sin(), x

    for stats in same_gradients(program, backend):
        assert stats.kept_bytes["parameter"] > 0
