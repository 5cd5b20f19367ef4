"""Functions whose kernels save other tensors on CUDA, and the bytes that each saves in a plan of this process.

    python -m tests.fake_cuda.saves > tests/fake_cuda/saves.json

Over the stand-in torch chooses the kernels, on fake tensors of the device; elsewhere the plan does, by torch's rules.
The file has what both have found.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eager_offload as eo

_HALF = torch.bfloat16
_SIZE = (2, 4, 64, 32)
#: Bytes of seeds, and of a batch norm's statistics of each channel, whose type in half precision is another on a CPU.
_NUMBERS = 16


def _attention(x: Tensor, mask: Tensor | None = None, **fields: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, mask, **fields)


def _mask(x: Tensor, length: int = 64) -> Tensor:
    return x.detach()[:1, :1, :, :1].expand(1, 1, length, length).contiguous()


def _norm(x: Tensor, weight: Tensor, bias: Tensor, **fields: Any) -> Tensor:
    means = torch.zeros_like(weight), torch.ones_like(weight)
    return F.batch_norm(x, *means, weight, bias, **{"training": True, **fields})


def _self_attention(x: Tensor, into: Tensor, out: Tensor, *, need_weights: bool) -> Tensor:
    made: Tensor = F.multi_head_attention_forward(
        *(x, x, x, 64, 4, into, None, None, None, False, 0.1, out, None), need_weights=need_weights
    )[0]
    return made


#: A function, the size of its input and those of its parameters.
Case = tuple[Callable[..., Tensor], tuple[int, ...], tuple[tuple[int, ...], ...]]
#: They run in one type each, or in an autocast.
PLAIN: dict[str, Case] = {
    "dropout": (lambda x: F.dropout(x, 0.1), _SIZE, ()),
    "dropout in place": (lambda x: F.dropout(x.exp(), 0.1, inplace=True), _SIZE, ()),
    "channels": (lambda x: F.dropout2d(x, 0.1), _SIZE, ()),
    "causal": (lambda x: _attention(x, is_causal=True), _SIZE, ()),
    "attention with dropout": (lambda x: _attention(x, dropout_p=0.1), _SIZE, ()),
    "a mask": (lambda x: _attention(x, _mask(x)), _SIZE, ()),
    "a mask of bits": (lambda x: _attention(x, _mask(x) > 0), _SIZE, ()),
    "a mask with rows of odd length": (lambda x: _attention(x, _mask(x, 50)), (2, 4, 50, 32), ()),
    "an expanded mask": (lambda x: _attention(x, x.detach()[:, :1, :, :1].expand(2, 1, 64, 64)), _SIZE, ()),
    "narrow heads": (lambda x: _attention(x, is_causal=True), (2, 4, 64, 28), ()),
    "narrow heads and a mask": (lambda x: _attention(x, _mask(x)), (2, 4, 64, 28), ()),
    "odd heads": (lambda x: _attention(x, is_causal=True), (2, 4, 64, 29), ()),
    "wide heads": (lambda x: _attention(x, is_causal=True), (2, 4, 64, 320), ()),
    "no heads": (lambda x: _attention(x, is_causal=True), (8, 64, 32), ()),
    "groups": (
        lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], is_causal=True, enable_gqa=True),
        _SIZE,
        (),
    ),
    "fewer queries": (lambda x: F.scaled_dot_product_attention(x[:, :, :32], x, x, is_causal=True), _SIZE, ()),
    "other values": (lambda x: F.scaled_dot_product_attention(x, x, x[..., :16]), _SIZE, ()),
    "heads in rows": (
        lambda x: _attention(x.view(2, 64, 4, 32).transpose(1, 2), is_causal=True),
        (2, 64, 128),
        (),
    ),
    "batch norm": (_norm, (8, 4, 16, 16), ((4,), (4,))),
    "batch norm of rows": (_norm, (64, 4), ((4,), (4,))),
    "batch norm for testing": (lambda *given: _norm(*given, training=False), (8, 4, 16, 16), ((4,), (4,))),
    "batch norm, channels last": (
        lambda x, *given: _norm(x.exp().to(memory_format=torch.channels_last), *given),
        (8, 4, 16, 16),
        ((4,), (4,)),
    ),
    "self-attention": (lambda *given: _self_attention(*given, need_weights=False), (16, 2, 64), ((192, 64), (64, 64))),
    "and its weights": (lambda *given: _self_attention(*given, need_weights=True), (16, 2, 64), ((192, 64), (64, 64))),
}
#: A function of a linear layer's result, which an autocast has made.
CAST: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.long, device=x.device)),
    "smoothed": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.long, device=x.device), label_smoothing=0.1),
    "mixed": lambda x: F.cross_entropy(x, x.detach() + 1),
    "layer_norm": lambda x: F.layer_norm(x, (64,)),
    "group_norm": lambda x: F.group_norm(x[..., None], 4),
    "powers": lambda x: x**2 + x.pow(3) + x.exp() + x.square() + x.rsqrt(),
    "norms": lambda x: F.normalize(x) + x.norm(),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 1),
    "sums": lambda x: x.cumsum(-1).sin() * x.sum().sin(),
    "pad": lambda x: F.pad(x, (1, 1), mode="reflect").sin(),
    "cat": lambda x: torch.cat([x, x]).sin(),
    "stack": lambda x: torch.stack([x, x]).sin(),
    "attention": lambda x: _attention(x.view(1, 1, 8, 64), is_causal=True),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2, mode="linear").sin(),
    "off": lambda x: _off(x),
}


def _off(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x @ x.T


class _Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor], parameters: list[Tensor], cast: torch.dtype | None) -> None:
        super().__init__()
        self.function, self.given, self.cast = function, nn.ParameterList(parameters), cast

    def forward(self, x: Tensor) -> Tensor:
        with nullcontext() if self.cast is None else torch.autocast("cuda", self.cast):
            return self.function(x, *self.given).float().sum()


def _saved(case: Case, dtype: torch.dtype, cast: torch.dtype | None = None) -> int:
    function, size, others = case
    parameters = [torch.empty(one, dtype=dtype, device="meta", requires_grad=True) for one in others]
    x = torch.empty(size, dtype=dtype, device="meta", requires_grad=True)
    model = _Model(function, parameters, cast)
    return eo.plan(model, x, device="h100", policy="max", config={"min_bytes": _NUMBERS + 1}).movable_bytes


def recorded() -> dict[str, int]:
    found: dict[str, int] = json.loads(Path(__file__).with_name("saves.json").read_text())
    return found


def saved_bytes(stride: int = 1) -> dict[str, int]:
    """The bytes that may move, by the name of what saves them; of one in ``stride``."""
    calls = {
        f"{name}, {dtype}": partial(_saved, case, dtype)
        for name, case in PLAIN.items()
        for dtype in (_HALF, torch.float16, torch.float32)
    }
    for name, function in CAST.items():
        for cast in (_HALF, torch.float16, torch.float32):
            for dtype in (torch.float32, _HALF):
                case: Case = (lambda x, weight, function=function: function(F.linear(x, weight)), (8, 32), ((64, 32),))
                calls[f"{name} of {dtype} in {cast}"] = partial(_saved, case, dtype, cast)
    return {name: call() for name, call in [*calls.items()][::stride]}


if __name__ == "__main__":
    print(json.dumps(saved_bytes(), indent=2))
