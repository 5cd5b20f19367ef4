"""Layers that save in their own ways, and operators that fill what they have saved already."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs import Flag, Run, leaf, program, step
from tests.programs.parts.blocks import trained
from tests.programs.parts.functions import custom

#: Makes a layer; the size of its input.
_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch-norm-1d": (lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()), (16, 16)),
    "batch-norm-3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4)), (2, 2, 6, 6, 6)),
    "instance-norm": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 8, 8)),
    "rnn": (lambda: nn.RNN(16, 16, 2), (4, 6, 16)),
    "lstm-with-dropout-both-ways": (lambda: nn.LSTM(16, 16, 2, bidirectional=True, dropout=0.2), (4, 6, 16)),
    "gru": (lambda: nn.GRU(16, 16, 2), (4, 6, 16)),
    "convolutions": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.ConvTranspose1d(8, 4, 3, stride=2)), (2, 4, 12)),
    "depthwise-convolution": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.GELU()), (2, 4, 8, 8)),
    "embedding-with-a-norm": (lambda: nn.Embedding(20, 16, max_norm=1.0, padding_idx=3), (4, 6)),
    "sparse-embedding": (lambda: nn.Embedding(20, 16, sparse=True), (4, 6)),
    "alpha-dropout": (lambda: nn.Sequential(nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)), (8, 4, 4, 4)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(3), nn.Tanh()), (2, 4, 12, 12)),
    "attention": (lambda: nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True), (2, 6, 16)),
    "upsampling": (lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.PReLU(4)), (2, 4, 6, 6)),
}
#: Dynamo leaves these to eager code.
_NOT_COMPILED = ("rnn", "lstm-with-dropout-both-ways", "gru", "sparse-embedding")
#: A GRU writes to one third of a storage, of which another third is saved and the whole travels.
_WRITING = ("batch-norm-1d", "batch-norm-3d", "instance-norm", "embedding-with-a-norm", "gru")


def _forward(layer: nn.Module, x: Tensor) -> Tensor:
    h = (x * 1.5).sin()
    if isinstance(layer, nn.Embedding):
        h = h.detach().abs().mul(30).long() % 20
    y = layer(h, h) if isinstance(layer, nn.TransformerDecoderLayer) else layer(h)
    y = y[0] if isinstance(y, tuple) else y
    return (y * 2).tanh() * y.sigmoid()


for _name, (_make, _size) in _LAYERS.items():
    _flags = [Flag.SOURCES_CHANGE] if _name in _WRITING else []
    _flags += [Flag.HOST] if _name == "sparse-embedding" else []
    _flags += [Flag.EAGER] if _name in _NOT_COMPILED else []
    _flags += [Flag.NO_CAPTURE] if "dropout" in _name else []
    # A kernel that ends where a value leaves takes Inductor's other form of tanh: see "What no library can see".
    _flags += [Flag.NO_INDUCTOR] if _name == "pooling" else []
    step(f"H31-{_name}", *_flags)(lambda make=_make, size=_size: (_forward, [make(), leaf(*size)]))


@program("H31-three-steps-of-layers-that-write-to-what-the-step-before-has-saved", Flag.EAGER, Flag.SOURCES_CHANGE)
def _(run: Run) -> object:
    results = []
    for make, size in (_LAYERS[name] for name in _WRITING):
        layer, x = make(), leaf(*size)
        forward = partial(_forward, layer, x)
        results += trained([x, *layer.parameters()], run.around, lambda _, run=forward: run().square().mean())
        results += layer.buffers()
    return results


# -- filled late ------------------------------------------------------------------------------------------------------


# A checkpoint of torch stops to compute again as soon as it has seen the last save: before this noise is drawn.
@step("H33-rrelu-saves-its-noise-before-it-draws-it", Flag.NO_CAPTURE, Flag.NO_CHECKPOINT)
def _() -> tuple[Callable[..., Tensor], list[Tensor]]:
    def forward(x: Tensor) -> Tensor:
        h = x * 2
        for inplace in (False, True, False, True):
            h = F.rrelu(h * 1.5, training=True, inplace=inplace)
        return F.rrelu(h, training=True)

    return forward, [leaf(32, 32)]


# No later pack tells that it has run: the end of the context does.
step("H33-rrelu-as-the-last-operator-of-the-context", Flag.NO_CAPTURE, Flag.NO_CHECKPOINT)(
    lambda: (lambda x: F.rrelu(x * 2, training=True), [leaf(32, 32)])
)


@step("H33-many-packs-of-one-operator", Flag.EAGER, Flag.NO_CAPTURE, Flag.SOURCES_CHANGE)
def _() -> tuple[Callable[..., Tensor], list[Any]]:
    """One operator packs many tensors before it has computed anything: a lag of a few packs would not do."""

    def forward(x: Tensor, norm: nn.Module, lstm: nn.Module) -> Tensor:
        h = norm(x * 2)
        late = [h, *(leaf(32, 32, seed=5, grad=False) * n for n in range(1, 8))]
        h = custom(h, lambda ctx, gradient: math.prod(ctx.saved_tensors, start=gradient), *late)
        return lstm(F.rrelu(norm(h), training=True))[0].square()

    return forward, [leaf(32, 32), nn.BatchNorm1d(32), nn.LSTM(32, 32)]


# A compiler takes batch normalization on a device that torch does not know to save what it saves on a CPU.
for _name, _kind, _flags in (
    ("batch", nn.BatchNorm1d, [Flag.HOST]),
    ("instance", partial(nn.InstanceNorm1d, affine=True, track_running_stats=True), []),
):

    @step(f"H33-statistics-of-{_name}-normalization", Flag.NO_CAPTURE, Flag.SOURCES_CHANGE, *_flags)
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
