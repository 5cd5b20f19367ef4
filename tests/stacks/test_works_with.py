"""Models of ``diffusers`` at random weights, and adapters on weights that bitsandbytes and torchao have quantized."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eager_offload as eo

pytestmark = pytest.mark.usefixtures("one_thread")


def _of(package: str) -> Any:
    return pytest.importorskip(package, reason=f"{package} is not installed")


def _flux() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    widths = {"patch_size": 1, "in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    given = {"hidden_states": torch.randn(1, 64, 4), "encoder_hidden_states": torch.randn(1, 16, 32)}
    given |= {"pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5])}
    given |= {"img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(16, 3)}
    return _of("diffusers").FluxTransformer2DModel(**sizes, **widths, axes_dims_rope=(4, 4, 8)), given


def _wan() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2}
    widths = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32}
    given = {"hidden_states": torch.randn(1, 4, 2, 16, 16), "timestep": torch.tensor([5])}
    given["encoder_hidden_states"] = torch.randn(1, 12, 16)
    return _of("diffusers").WanTransformer3DModel(**sizes, **widths), given


class _Adapted(nn.Module):
    """Layers that are frozen, and a low-rank adapter that is trained."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.frozen(x + self.up(self.down(x))),)


def _bitsandbytes() -> tuple[nn.Module, dict[str, Tensor]]:
    kind, options = _of("bitsandbytes").nn.Linear4bit, {"compute_dtype": torch.float32, "quant_type": "nf4"}
    layers = nn.Sequential(kind(64, 64, **options), nn.Tanh(), kind(64, 64, **options)).to("cpu")  # which quantizes
    return _Adapted(layers), {"x": torch.randn(128, 64)}


def _torchao() -> tuple[nn.Module, dict[str, Tensor]]:
    _of("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    quantize_(layers, Int8WeightOnlyConfig())
    return _Adapted(layers), {"x": torch.randn(128, 64)}


@pytest.mark.parametrize("make", [_flux, _wan, _bitsandbytes, _torchao])
def test_gradients_are_equal_and_bytes_move(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    torch.manual_seed(0)
    model, given = make()
    model.train()
    offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)

    def gradients(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            loss = model(**given)[0].square().mean()
        loss.backward()
        found = [one.grad for one in model.parameters() if one.grad is not None]
        model.zero_grad()
        return found

    expected, found = gradients(nullcontext()), gradients(offload)
    assert len(expected) == len(found) > 0
    assert all(map(torch.equal, expected, found))
    assert offload.stats(synchronize=True).bytes_out > 0
    offload.close()
