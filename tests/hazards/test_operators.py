"""H31, H33: operators that save in their own ways, and those that fill what they have saved already."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hazards.backends import Backend
from tests.hazards.functions import custom
from tests.hazards.programs import (
    REGIMES,
    Around,
    leaf,
    named,
    noise,
    one_step,
    same_gradients,
    trained,
)


class Model(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    size: tuple[int, ...]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(16, 16, num_layers=2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Embedded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16, **options), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.table(x.detach().abs().mul(3).long() % 20) * 2).tanh())


MODELS = [
    Model("batch norm 1d", lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()), (16, 16)),
    Model("batch norm 3d", lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4)), (2, 2, 6, 6, 6)),
    Model("instance norm", lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 8, 8)),
    Model("rnn", lambda: Recurrent(nn.RNN), (4, 6, 16)),
    Model("lstm with dropout both ways", lambda: Recurrent(nn.LSTM, bidirectional=True, dropout=0.2), (4, 6, 16)),
    Model("gru", lambda: Recurrent(nn.GRU), (4, 6, 16)),
    Model("convolutions", lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.ConvTranspose1d(8, 4, 3, stride=2)), (2, 4, 12)),
    Model("depthwise convolution", lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.GELU()), (2, 4, 8, 8)),
    Model("embedding with a norm", lambda: Embedded(max_norm=1.0, padding_idx=3), (4, 6)),
    Model("sparse embedding", lambda: Embedded(sparse=True), (4, 6)),
    Model("alpha dropout", lambda: nn.Sequential(nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)), (8, 4, 4, 4)),
    Model("pooling", lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(3), nn.Tanh()), (2, 4, 12, 12)),
    Model("multihead attention", lambda: nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), (2, 6, 16)),
    Model("upsampling", lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.PReLU(4)), (2, 4, 6, 6)),
]


@pytest.mark.sampled(5, quick=True)
@pytest.mark.parametrize("case", MODELS, ids=named)
def test_h31_modules_that_save_in_their_own_ways(case: Model, backend: Backend) -> None:
    # Normalization saves its statistics and writes to them in the next step; a GRU writes to one third of a storage,
    # of which another third is saved and the whole travels.
    backend.sources_change = "norm" in case.name or case.name == "gru"

    def program(offload: Around) -> object:
        model, x = case.make(), leaf(*case.size)

        def loss(step: int) -> Tensor:
            h = (x * 1.5).sin()
            y = model(h, h) if isinstance(model, nn.TransformerDecoderLayer) else model(h)
            return (y * y.sigmoid()).mean()

        return trained([x, *model.parameters()], offload, loss), list(model.buffers())

    same_gradients(program, backend)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_h33_rrelu_saves_its_noise_before_it_draws_it(regime: Any, inplace: bool, backend: Backend) -> None:
    @one_step
    def program() -> tuple[Tensor, ...]:
        x = leaf(32, 32)
        h = x * 2
        for _ in range(3):
            h = F.rrelu(h * 1.5, training=True, inplace=inplace)
        return F.rrelu(h, training=True), x

    same_gradients(program, backend, regimes=[regime])


def test_h33_rrelu_as_the_last_operator_of_the_context(backend: Backend) -> None:
    """No later pack tells that it has run: the end of the context does."""

    @one_step
    def program() -> tuple[Tensor, ...]:
        x = leaf(32, 32)
        return F.rrelu(x * 2, training=True), x

    same_gradients(program, backend)


def filling_late(x: Tensor, *late: Tensor) -> Tensor:
    """Saves its input and buffers, many in one operator, before it has computed anything."""
    return custom(x, lambda ctx, gradient: math.prod(ctx.saved_tensors, start=gradient), x, *late)


def test_h33_many_packs_of_one_operator(backend: Backend) -> None:
    """One operator packs many tensors, so a lag of a few packs would not do."""

    @one_step
    def program() -> tuple[Tensor, ...]:
        x = leaf(32, 32)
        norm = nn.BatchNorm1d(32)
        h = norm(x * 2)
        h = filling_late(h, *[noise(32, 32) * n for n in range(1, 8)])
        h = F.rrelu(norm(h), training=True)
        h, _ = nn.LSTM(32, 32)(h)
        return h.square(), x, norm.running_mean, norm.running_var

    backend.sources_change = True
    same_gradients(program, backend)


@pytest.mark.parametrize("later", ["train", "eval", "train then eval", "eval then train"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, partial(nn.InstanceNorm1d, affine=True, track_running_stats=True)])
def test_h33_statistics_of_normalization(kind: Callable[[int], nn.Module], later: str, backend: Backend) -> None:
    """They are saved, and then written without a version bump: by the operator itself, and by the next one."""
    backend.sources_change = True

    @one_step
    def program() -> tuple[Tensor, ...]:
        x, norm = leaf(8, 4, 16), kind(4)
        h = norm.train()(x * 2)
        for mode in later.split(" then "):
            h = norm.train(mode == "train")((h * 1.5).sin())
        return h * h.sigmoid(), x, norm.weight, norm.bias, norm.running_mean, norm.running_var

    same_gradients(program, backend)
