"""Convolutions: a ResNet with BatchNorm, and a U-Net whose tensors are stored channels-last."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.proof.models.base import Batch, Trainee, images

CLASSES, CHANNELS = 10, 8


class ResidualBlock(nn.Module):
    """Two convolutions beside a residual, which is projected where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.beside = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.beside = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first_norm(self.first(x)), inplace=True)
        h = self.second_norm(self.second(h))
        h += self.beside(x)
        return F.relu(h, inplace=True)


class ResNet(Trainee):
    changes_what_it_saves = True

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, CHANNELS, 3, 1, 1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.ModuleList([ResidualBlock(CHANNELS, CHANNELS, 1), ResidualBlock(CHANNELS, 2 * CHANNELS, 2)])
        self.head = nn.Linear(2 * CHANNELS, CLASSES)

    def batch(self, seed: int) -> Batch:
        return images(seed, 4, 3, 16, CLASSES)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.pool(self.stem(inputs))
        for block in self.blocks:
            x = self.checkpointing.run(block, x)
        return F.cross_entropy(self.head(x.mean((2, 3))), targets, label_smoothing=0.1)


class DoubleConvolution(nn.Sequential):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.GroupNorm(2, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(2, channels),
            nn.SiLU(),
        )


class UNet(Trainee):
    """Takes noise out of images: what goes down is put beside what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([DoubleConvolution(3, CHANNELS), DoubleConvolution(CHANNELS, 2 * CHANNELS)])
        self.middle = DoubleConvolution(2 * CHANNELS, 2 * CHANNELS)
        self.up = nn.ModuleList([DoubleConvolution(4 * CHANNELS, CHANNELS), DoubleConvolution(2 * CHANNELS, CHANNELS)])
        self.wider = nn.ModuleList(
            [nn.ConvTranspose2d(2 * CHANNELS, 2 * CHANNELS, 2, 2), nn.Upsample(scale_factor=2, mode="bilinear")]
        )
        self.head = nn.Conv2d(CHANNELS, 3, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(self, seed: int) -> Batch:
        clean, noise = (images(seed + shift, 2, 3, 16, CLASSES).inputs for shift in (0, 500))
        return Batch((clean + noise).to(memory_format=torch.channels_last), clean)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x, beside = inputs, []
        for number, block in enumerate(self.down):
            # The images need no gradient, and a reentrant checkpoint would pass none to the weights either.
            x = self.checkpointing.run(block, x) if number else block(x)
            beside.append(x)
            x = F.max_pool2d(x, 2)
        x = self.checkpointing.run(self.middle, x)
        for wider, block in zip(self.wider, self.up, strict=True):
            x = self.checkpointing.run(block, torch.cat([beside.pop(), wider(x)], 1))
        return F.mse_loss(self.head(x).float(), targets)
