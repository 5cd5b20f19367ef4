"""A generator and a discriminator of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LATENT, SIZE, CHANNELS = 12, 16, 8


class Generator(nn.Module):
    """(rows, LATENT) to (rows, 3, SIZE, SIZE)."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(LATENT, 2 * CHANNELS * 16)
        self.grow = nn.Sequential(
            nn.BatchNorm2d(2 * CHANNELS),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * CHANNELS, CHANNELS, 4, 2, 1),
            nn.BatchNorm2d(CHANNELS),
            nn.ReLU(),
            nn.ConvTranspose2d(CHANNELS, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, latent: Tensor) -> Tensor:
        return self.grow(self.start(latent).unflatten(1, (2 * CHANNELS, 4, 4)))


class Discriminator(nn.Module):
    """(rows, 3, SIZE, SIZE) to (rows,): large for what looks real."""

    def __init__(self) -> None:
        super().__init__()
        self.shrink = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, CHANNELS, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(CHANNELS, 2 * CHANNELS, 4, 2, 1),
            nn.LeakyReLU(0.2),
        )
        self.judge = nn.Linear(2 * CHANNELS * 16, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.judge(self.shrink(images).flatten(1)).squeeze(1)

    def slope_penalty(self, images: Tensor) -> Tensor:
        """How steep the verdict is at ``images``: its gradient, squared, with a graph of its own."""
        images = images.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self(images).sum(), images, create_graph=True)
        return slope.square().sum((1, 2, 3)).mean()
