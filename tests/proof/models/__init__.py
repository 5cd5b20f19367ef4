"""Small models of the families that people train, with random weights and random batches."""

from __future__ import annotations

from collections.abc import Callable

from tests.proof.models.adapters import Adapted
from tests.proof.models.base import Batch, Checkpointing, Trainee
from tests.proof.models.convolutional import ResNet, UNet
from tests.proof.models.experts import MixtureOfExperts
from tests.proof.models.gan import Discriminator, Generator
from tests.proof.models.gpt import Gpt
from tests.proof.models.llama import Llama
from tests.proof.models.recurrent import Recurrent
from tests.proof.models.vision import VisionTransformer

__all__ = ["FAMILIES", "Batch", "Checkpointing", "Discriminator", "Generator", "Trainee"]

#: Every family that one optimizer trains with one loss.
FAMILIES: dict[str, Callable[[], Trainee]] = {
    "gpt": Gpt,
    "llama": Llama,
    "unet": UNet,
    "resnet": ResNet,
    "lstm": Recurrent,
    "experts": MixtureOfExperts,
    "vit": VisionTransformer,
    "lora": Adapted,
}
