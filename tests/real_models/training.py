"""Three steps of a model in one of the ways in which people train, and what an ``Offload`` did with what they saved."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor

from eager_offload import Offload, OffloadStats
from tests.hazards.programs import Settled, exact
from tests.programs.parts.blocks import trained
from tests.real_models.models import ARCHITECTURES, Architecture, padded_words

#: A 16th of a hidden state, as the default, 1 MiB, is of one of 2,048 tokens at a width of 4,096 in bfloat16.
MIN_BYTES = "16KiB"


class Variant(NamedTuple):
    """One way to train."""

    name: str
    #: Fields of the model's configuration.
    config: dict[str, Any] | None = None
    #: Whether its checkpoints are reentrant; ``None`` for no checkpoints.
    reentrant: bool | None = None
    adapts: bool = False
    autocast: bool = False
    padded: bool = False
    #: Whether the loop has a name for all that the model returned while backward runs.
    holds: bool = False


REENTRANT = Variant("checkpointing, reentrant", reentrant=True)
WRITTEN_OUT = Variant('attn_implementation="eager"', {"attn_implementation": "eager"})
BFLOAT16 = Variant("bfloat16 autocast", autocast=True)
PADDED = Variant("padded batch", padded=True)
HELD = (
    Variant("outputs held", holds=True),
    Variant("outputs held, use_cache=False", {"use_cache": False}, holds=True),
)


class Case(NamedTuple):
    """One line of the table."""

    architecture: Architecture
    variant: Variant

    def __str__(self) -> str:
        return f"{self.architecture.name}: {self.variant.name}".replace(" ", "_")


LORA = Variant("LoRA", adapts=True)
_EVERY = {
    "transformers": (Variant("plain"), Variant("checkpointing", reentrant=False), LORA),
    "diffusers": (LORA,),  # on frozen weights, as people train so large a model
}
_MORE = {
    "Llama": (
        *(REENTRANT, Variant("LoRA, checkpointing", adapts=True, reentrant=False), WRITTEN_OUT, BFLOAT16, PADDED),
        *HELD,
    ),
    "Qwen3-MoE": (BFLOAT16,),
    "Gemma 3": (PADDED,),
    "GPT-2": HELD,
    "T5": (REENTRANT,),
    "Whisper": (WRITTEN_OUT, *HELD),
}
CASES = [
    Case(architecture, variant)
    for name, architecture in ARCHITECTURES.items()
    for variant in (*_EVERY[architecture.package], *_MORE.get(name, ()))
]


def measured(case: Case, directory: Path) -> OffloadStats:
    """What an ``Offload`` did in three steps.

    Asserts that it agrees with a run without it in every bit of losses and parameters, that bytes moved and came back,
    and that nothing is held at the end.
    """
    fields = {"tier": "disk", "disk_path": str(directory), "min_bytes": MIN_BYTES, "keep_last_bytes": 0}
    with closing(Offload(fields)) as offload:
        # Settled: whatever backward needs has to be brought back, in every run alike.
        stats = exact(partial(collected, case), Settled(offload))
    assert stats.bytes_out > 0, "nothing left"
    assert stats.bytes_in > 0, "nothing came back"
    assert stats.fallbacks == {}
    assert stats.foreign_hooks == stats.empty_forwards == 0
    return stats


def collected(case: Case, around: AbstractContextManager[Any]) -> list[Tensor]:
    """What three steps give; the adapters that are in cycles, and hold what was saved, are gone."""
    results = three_steps(case, around)
    gc.collect()
    return results


def three_steps(case: Case, around: AbstractContextManager[Any]) -> list[Tensor]:
    """Three steps of AdamW; returns the losses and the parameters."""
    torch.manual_seed(0)
    model, held = _model(case), list[Any]()

    def forward(_: int) -> Tensor:
        held.clear()
        batch = padded_words() if case.variant.padded else case.architecture.batch()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.variant.autocast):
            outputs = model(**batch)
        held.extend([outputs, batch] if case.variant.holds else [])
        return outputs.loss if "loss" in outputs else outputs.sample.square().mean()

    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [*trained(wanted, around, forward, torch.optim.AdamW), *(one.detach() for one in model.buffers())]


def _model(case: Case) -> Any:
    variant = case.variant
    model: Any = case.architecture.build(**(variant.config or {}))
    if variant.adapts:
        adapters = peft.LoraConfig(r=8, target_modules=list(case.architecture.adapted))
        if variant.reentrant is not None:
            model.enable_input_require_grads()
        model = peft.get_peft_model(model, adapters)
    if variant.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": variant.reentrant})
    return model.train()
