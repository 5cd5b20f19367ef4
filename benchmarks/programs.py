"""Models of many kinds on ``meta``, at the sizes at which people train them, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Step(NamedTuple):
    """What is planned."""

    model: nn.Module
    inputs: Mapping[str, Any] | tuple[Any, ...]
    loss: Callable[[Any], Tensor] | None = None


def _language(name: str, tokens: int, rows: int = 1, **fields: Any) -> Step:
    """A causal language model of the library ``transformers``, in bfloat16."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**fields, use_cache=False)
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, kind)(config).to(torch.bfloat16).train()
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    return Step(model, {"input_ids": ids, "labels": ids})


def _llama(tokens: int, width: int, layers: int, hidden: int, heads: int) -> Step:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": hidden}
    kept = {"num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128_256}
    return _language("Llama", tokens, **sizes, **kept, max_position_embeddings=tokens)


def _images(kind: str, rows: int, **fields: Any) -> Step:
    """A classifier of images of the library ``transformers``."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**fields, num_labels=1000)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForImageClassification")(config).train()
        pixels = torch.empty(rows, 3, 224, 224)
    return Step(model, {"pixel_values": pixels, "labels": torch.zeros(rows, dtype=torch.int64)})


def _t5() -> Step:
    from transformers import T5Config, T5ForConditionalGeneration

    with torch.device("meta"):
        config = T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, use_cache=False)
        model = T5ForConditionalGeneration(config).to(torch.bfloat16).train()
    ids = torch.zeros(8, 1024, dtype=torch.int64)
    return Step(model, {"input_ids": ids, "labels": ids})


class _UNet(nn.Module):
    """Convolutions down and up again, with what went down beside what comes up."""

    def __init__(self, width: int = 64, levels: int = 5) -> None:
        super().__init__()
        sizes = [width << level for level in range(levels)]

        def twice(before: int, after: int) -> nn.Module:
            parts = [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
            return nn.Sequential(*parts, nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU())

        self.down = nn.ModuleList(twice(before, after) for before, after in zip([3, *sizes], sizes, strict=False))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(size, size // 2, 2, 2) for size in sizes[:0:-1])
        self.up = nn.ModuleList(twice(size, size // 2) for size in sizes[:0:-1])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        beside = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else F.max_pool2d(x, 2))
            beside.append(x)
        beside.pop()
        for wider, block in zip(self.wider, self.up, strict=True):
            x = block(torch.cat([beside.pop(), wider(x)], 1))
        return F.mse_loss(self.head(x), target)


def _unet() -> Step:
    with torch.device("meta"):
        return Step(_UNet(), (torch.empty(16, 3, 256, 256), torch.empty(16, 3, 256, 256)))


def _lstm() -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTMCell(1024, 1024) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            states = [(x.new_zeros(x.shape[1:]), x.new_zeros(x.shape[1:])) for _ in self.layers]
            total = x.new_zeros(())
            for step in x:
                for number, layer in enumerate(self.layers):
                    states[number] = layer(step, states[number])
                    step = states[number][0]
                total = total + step.square().mean()
            return total

    with torch.device("meta"):
        return Step(Model(), (torch.empty(128, 256, 1024),))


#: By name.
STEPS: dict[str, Callable[[], Step]] = {
    "Llama 1B, 8k": lambda: _llama(8 << 10, 2048, 16, 8192, 32),
    "Llama 1B, 32k": lambda: _llama(32 << 10, 2048, 16, 8192, 32),
    "Llama 8B, 8k": lambda: _llama(8 << 10, 4096, 32, 14_336, 32),
    "Llama 8B, 32k": lambda: _llama(32 << 10, 4096, 32, 14_336, 32),
    "GPT, 8 of 1k": lambda: _language("GPT2", 1024, 8, n_embd=1024, n_layer=24, n_head=16),
    "ViT, 64": lambda: _images(
        "ViT", 64, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "ResNet, 64": lambda: _images("ResNet", 64),
    "T5, 8 of 1k": _t5,
    "U-Net, 16": _unet,
    "LSTM, 128 steps": _lstm,
}
