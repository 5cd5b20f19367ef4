"""Adapters on quantized weights, packed sequences, averages of weights, and an optimizer that steps in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import eager_offload as eo
from tests.hazards.programs import Settled, exact
from tests.ranks.launch import torchrun
from tests.stacks.test_engines import TORCHRUN, compares

pytestmark = pytest.mark.usefixtures("one_thread")


def _of(package: str) -> Any:
    return pytest.importorskip(package, reason=f"{package} is not installed")


class _Adapted(nn.Module):
    """Layers that are frozen, and a low-rank adapter that is trained."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.frozen(x + self.up(self.down(x))),)


def _bitsandbytes() -> tuple[nn.Module, dict[str, Tensor]]:
    """QLoRA: PEFT's own layer around those that are quantized."""
    kind, options = _of("bitsandbytes").nn.Linear4bit, {"compute_dtype": torch.float32, "quant_type": "nf4"}
    peft = _of("peft")
    layers = nn.Sequential(kind(64, 64, **options), nn.Tanh(), kind(64, 64, **options)).to("cpu")  # which quantizes
    layers.is_loaded_in_4bit = True  # as transformers marks a model
    model = peft.get_peft_model(layers, peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False))
    assert isinstance(model.base_model.model[2], peft.tuners.lora.Linear4bit)
    return model, {"input": torch.randn(1, 128, 64)}


def _torchao() -> tuple[nn.Module, dict[str, Tensor]]:
    _of("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    quantize_(layers, Int8WeightOnlyConfig())
    return _Adapted(layers), {"x": torch.randn(128, 64)}


#: Of the sequences that are packed into one.
LENGTHS = (20, 30, 14)


def _packed() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model that takes the ``position_ids`` as what tells its sequences apart."""
    transformers = _of("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, use_cache=False, **sizes))
    ids, positions = torch.randint(64, (1, sum(LENGTHS))), torch.cat([torch.arange(length) for length in LENGTHS])
    given = {"input_ids": ids, "position_ids": positions[None]}
    apart = torch.cat([model(one)[0] for one in ids.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(model(**given)[0], apart)
    return model, given


class _Fused(nn.Module):
    """Attention with Liger's rotary embedding in front, and its loss behind, which has gradients in forward already."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = _of("liger_kernel.ops")
        self.inner, self.head = nn.Linear(64, 192), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
        query, key, value = self.inner(x).view(1, len(x), 6, 32).transpose(1, 2).chunk(3, dim=1)
        query, key = self.ops.LigerRopeFunction.apply(query, key, cos, sin)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = x + mixed.transpose(1, 2).reshape(x.shape)
        return (self.ops.LigerFusedLinearCrossEntropyFunction.apply(mixed, self.head.weight, targets)[0],)


def _liger() -> tuple[nn.Module, dict[str, Tensor]]:
    """Those of its kernels that Triton's interpreter runs."""
    angles = torch.randn(1, 64, 32)
    given = {"x": torch.randn(64, 64), "targets": torch.randint(32, (64,)), "cos": angles.cos(), "sin": angles.sin()}
    return _Fused(), given


@pytest.mark.parametrize("make", [_packed, _liger, _bitsandbytes, _torchao])
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
        assert found
        return found

    assert exact(gradients, Settled(offload)).bytes_in > 0
    offload.close()


#: Makes what follows backward, and returns it and the modules that it trains or averages.
Way = Callable[[nn.Module], tuple[Callable[[], None], list[nn.Module]]]


def _averaged(**options: Any) -> Way:
    def way(model: nn.Module) -> tuple[Callable[[], None], list[nn.Module]]:
        optimizer, averaged = torch.optim.AdamW(model.parameters()), AveragedModel(model, **options)

        def finish() -> None:
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)

        return finish, [model, averaged]

    return way


def _in_backward(model: nn.Module) -> tuple[Callable[[], None], list[nn.Module]]:
    optimizers = {one: torch.optim.AdamW([one]) for one in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for one in optimizers:
        one.register_post_accumulate_grad_hook(step)
    return lambda: None, [model]


WAYS = {
    "EMA": _averaged(multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "SWA": _averaged(),
    "optimizer.step in backward": _in_backward,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_parameters_and_their_averages_are_equal_and_bytes_move(way: Way) -> None:
    offload = eo.Offload(tier="host", min_bytes=0, keep_last_bytes=0)

    def trained(context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU()) for _ in range(3)]
        model, x = nn.Sequential(*layers), torch.randn(64, 32)
        finish, modules = way(model)
        for _ in range(6):
            with context:
                with torch.no_grad():
                    target = modules[-1](x)  # of the average: a teacher
                loss = (model(x) - target.roll(1)).square().mean()
            loss.backward()
            del loss
            finish()
        if way is WAYS["SWA"]:
            with context:
                update_bn([x], modules[-1])
        return [*(one.detach() for each in modules for one in each.state_dict().values())]

    assert exact(trained, Settled(offload)).bytes_in > 0
    offload.close()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["flux", "wan"])
def test_the_example_with_diffusers_learns_the_same(model: str, tmp_path: Path) -> None:
    _of("diffusers")
    compares("train_diffusers.py", torchrun(2), TORCHRUN, tmp_path, f"--model={model}")
