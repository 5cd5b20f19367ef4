"""Layers that save in their own ways, and operators that fill what they have saved already."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.hazards.functions import custom
from tests.hazards.programs import trained
from tests.programs import Flag, Run, leaf, program, step


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(16, 16, num_layers=2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class _Embedded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16, **options), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.table(x.detach().abs().mul(3).long() % 20) * 2).tanh())


class _Decoder(nn.TransformerDecoderLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x)


#: Makes a layer; the size of its input.
_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch-norm-1d": (lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()), (16, 16)),
    "depthwise-convolution": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.GELU()), (2, 4, 8, 8)),
    "multihead-attention": (lambda: _Decoder(16, 2, 32, batch_first=True), (2, 6, 16)),
}
#: Those that no compiler needs to be asked about, or that none compiles as one function.
_FURTHER_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch-norm-3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4)), (2, 2, 6, 6, 6)),
    "instance-norm": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 8, 8)),
    "rnn": (lambda: _Recurrent(nn.RNN), (4, 6, 16)),
    "lstm-with-dropout-both-ways": (lambda: _Recurrent(nn.LSTM, bidirectional=True, dropout=0.2), (4, 6, 16)),
    "gru": (lambda: _Recurrent(nn.GRU), (4, 6, 16)),
    "convolutions": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.ConvTranspose1d(8, 4, 3, stride=2)), (2, 4, 12)),
    "embedding-with-a-norm": (lambda: _Embedded(max_norm=1.0, padding_idx=3), (4, 6)),
    "sparse-embedding": (lambda: _Embedded(sparse=True), (4, 6)),
    "alpha-dropout": (lambda: nn.Sequential(nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)), (8, 4, 4, 4)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(3), nn.Tanh()), (2, 4, 12, 12)),
    "upsampling": (lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.PReLU(4)), (2, 4, 6, 6)),
}


def _add_layer(name: str, make: Callable[[], nn.Module], size: tuple[int, ...], *flags: Flag) -> None:
    # A GRU writes to one third of a storage, of which another third is saved and the whole travels.
    writes = [Flag.SOURCES_CHANGE] if "norm" in name or name == "gru" else []

    @step(f"H31-{name}", *flags, *writes)
    def _() -> tuple[Callable[..., Tensor], list[Any]]:
        def forward(layer: nn.Module, x: Tensor) -> Tensor:
            y = layer((x * 1.5).sin())
            return y * y.sigmoid()

        return forward, [make(), leaf(*size)]


for _name, _layer in _LAYERS.items():
    _add_layer(_name, *_layer)
for _name, _layer in _FURTHER_LAYERS.items():
    _add_layer(_name, *_layer, Flag.EAGER)


@program("H31-three-steps-of-layers-that-write-to-what-the-step-before-has-saved", Flag.EAGER, Flag.SOURCES_CHANGE)
def _(run: Run) -> object:
    names = ("batch-norm-1d", "batch-norm-3d", "instance-norm", "embedding-with-a-norm")
    results = []
    for make, size in ({**_LAYERS, **_FURTHER_LAYERS}[name] for name in names):
        model, x = make(), leaf(*size)
        parameters = [x, *model.parameters()]
        results += trained(parameters, run.around, lambda _: model((x * 1.5).sin()).square().mean())  # noqa: B023
        results += model.buffers()
    return results


# -- filled late ------------------------------------------------------------------------------------------------------


# A checkpoint of torch stops to compute again as soon as it has seen the last save: before this noise is drawn.
@step("H33-rrelu-saves-its-noise-before-it-draws-it", Flag.EAGER, Flag.NO_CHECKPOINT)
def _() -> tuple[Callable[..., Tensor], list[Tensor]]:
    def forward(x: Tensor) -> Tensor:
        h = x * 2
        for inplace in (False, True, False, True):
            h = F.rrelu(h * 1.5, training=True, inplace=inplace)
        return F.rrelu(h, training=True)

    return forward, [leaf(32, 32)]


@step("H33-rrelu-as-the-last-operator-of-the-context", Flag.EAGER, Flag.NO_CHECKPOINT)
def _() -> tuple[Callable[..., Tensor], list[Tensor]]:
    """No later pack tells that it has run: the end of the context does."""
    return lambda x: F.rrelu(x * 2, training=True), [leaf(32, 32)]


@step("H33-many-packs-of-one-operator", Flag.EAGER, Flag.SOURCES_CHANGE)
def _() -> tuple[Callable[..., Tensor], list[Any]]:
    """One operator packs many tensors before it has computed anything: a lag of a few packs would not do."""

    def forward(x: Tensor, norm: nn.Module, lstm: nn.Module) -> Tensor:
        h = norm(x * 2)
        late = [h, *(leaf(32, 32, seed=5, grad=False) * n for n in range(1, 8))]
        h = custom(h, lambda ctx, gradient: math.prod(ctx.saved_tensors, start=gradient), *late)
        return lstm(F.rrelu(norm(h), training=True))[0].square()

    return forward, [leaf(32, 32), nn.BatchNorm1d(32), nn.LSTM(32, 32)]


for _name, _kind in {
    "batch": nn.BatchNorm1d,
    "instance": partial(nn.InstanceNorm1d, affine=True, track_running_stats=True),
}.items():

    @step(f"H33-statistics-of-{_name}-normalization", Flag.EAGER, Flag.SOURCES_CHANGE)
    def _(kind: Any = _kind) -> tuple[Callable[..., list[Tensor]], list[Any]]:
        """They are saved, and then written without a version: by the operator itself, and by the next one."""

        def forward(x: Tensor, *norms: nn.Module) -> list[Tensor]:
            results = []
            for norm, modes in zip(norms, ("t", "e", "te", "et"), strict=True):
                h = norm.train()(x * 2)
                for mode in modes:
                    h = norm.train(mode == "t")((h * 1.5).sin())
                results.append(h * h.sigmoid())
            return results

        return forward, [leaf(8, 4, 16), *(kind(4) for _ in range(4))]
