"""Architectures of ``transformers`` and ``diffusers``: few, narrow layers, random weights; one small builder each.

Four layers: what every layer saves of the same tensor, a mask say, is treated otherwise from the third time on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple, TypeAlias

import torch
import transformers
from torch import nn

#: What a model is called with.
Batch: TypeAlias = dict[str, Any]

WIDTH, HEADS, LAYERS = 128, 4, 4
WORDS = 256
SEQUENCES, TOKENS = 4, 128
IMAGES, PIXELS, PATCH = 4, 44, 4
MEL_BINS = 40
ATTENTION = ("q_proj", "v_proj")

# What most configurations call it by the same names.
_STACK: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_TEXT: dict[str, Any] = {**_STACK, "vocab_size": WORDS, "max_position_embeddings": TOKENS}
_DECODER: dict[str, Any] = {**_TEXT, "num_key_value_heads": HEADS // 2}


class Architecture(NamedTuple):
    """One architecture, and how it is fed."""

    name: str
    build: Callable[..., nn.Module]
    batch: Callable[[], Batch]
    #: Whether it has a decoder: nearly all that those save has to move.
    decodes: bool
    #: What peft adapts.
    adapted: tuple[str, ...]
    #: What has it.
    package: str = "transformers"


def of(model: str, config: str, **fields: Any) -> Callable[..., nn.Module]:
    """What builds a ``transformers`` model of so named a configuration with these fields, and with others besides."""
    return lambda **others: getattr(transformers, model)(getattr(transformers, config)(**deepcopy(fields), **others))


llama = of("LlamaForCausalLM", "LlamaConfig", **_DECODER)
qwen3 = of("Qwen3ForCausalLM", "Qwen3Config", **_DECODER, head_dim=WIDTH // HEADS)
qwen3_experts = of(
    "Qwen3MoeForCausalLM",
    "Qwen3MoeConfig",
    **_DECODER,
    head_dim=WIDTH // HEADS,
    moe_intermediate_size=WIDTH,
    num_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
)
mixtral = of(
    "MixtralForCausalLM",
    "MixtralConfig",
    **_DECODER | {"intermediate_size": WIDTH},
    num_local_experts=4,
    num_experts_per_tok=2,
)
_gemma: dict[str, Any] = {**_DECODER, "head_dim": WIDTH // HEADS, "sliding_window": TOKENS // 2}
gemma2 = of("Gemma2ForCausalLM", "Gemma2Config", **_gemma)
gemma3 = of(
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    **_gemma,
    layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
)
gpt2 = of(
    "GPT2LMHeadModel",
    "GPT2Config",
    vocab_size=WORDS,
    n_positions=TOKENS,
    n_embd=WIDTH,
    n_layer=LAYERS,
    n_head=HEADS,
    bos_token_id=0,
    eos_token_id=0,
)
bert = of("BertForMaskedLM", "BertConfig", **_TEXT)
t5 = of(
    "T5ForConditionalGeneration",
    "T5Config",
    vocab_size=WORDS,
    d_model=WIDTH,
    d_kv=WIDTH // HEADS,
    d_ff=2 * WIDTH,
    num_layers=LAYERS,
    num_heads=HEADS,
    decoder_start_token_id=0,
)
vit = of("ViTForImageClassification", "ViTConfig", **_STACK, image_size=PIXELS, patch_size=PATCH, num_labels=10)
whisper = of(
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    vocab_size=WORDS,
    num_mel_bins=MEL_BINS,
    d_model=WIDTH,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    encoder_ffn_dim=2 * WIDTH,
    decoder_ffn_dim=2 * WIDTH,
    max_source_positions=TOKENS,
    max_target_positions=TOKENS,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
mamba = of(
    "MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8
)
clip = of(
    "CLIPModel",
    "CLIPConfig",
    text_config={**_TEXT, "bos_token_id": 0, "eos_token_id": 2},
    vision_config={**_STACK, "image_size": PIXELS, "patch_size": PATCH},
    projection_dim=WIDTH,
)


def of_diffusers(model: str, **fields: Any) -> Callable[..., nn.Module]:
    """What builds a ``diffusers`` model with these fields."""
    return lambda: getattr(importlib.import_module("diffusers"), model)(**fields, num_layers=LAYERS)


_HEAD: dict[str, Any] = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH // HEADS}
flux = of_diffusers(
    "FluxTransformer2DModel",
    **_HEAD,
    in_channels=PATCH**2,
    num_single_layers=LAYERS,
    joint_attention_dim=WIDTH,
    pooled_projection_dim=WIDTH,
    axes_dims_rope=(12, 10, 10),
)
wan = of_diffusers(
    "WanTransformer3DModel", **_HEAD, in_channels=PATCH, out_channels=PATCH, text_dim=WIDTH, ffn_dim=4 * WIDTH
)


def words() -> Batch:
    ids = torch.randint(3, WORDS, (SEQUENCES, TOKENS))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def padded_words() -> Batch:
    """With a mask that attention really gets: one of ones is left out."""
    batch = words()
    batch["attention_mask"][1:, -TOKENS // 8 :] = 0
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def few_words() -> Batch:
    return {name: tensor[:, : TOKENS // 8] for name, tensor in words().items()}


def images() -> Batch:
    return {"pixel_values": torch.randn(IMAGES, 3, PIXELS, PIXELS), "labels": torch.randint(10, (IMAGES,))}


def speech() -> Batch:
    return {
        "input_features": torch.randn(SEQUENCES, MEL_BINS, 2 * TOKENS),
        "labels": torch.randint(3, WORDS, (SEQUENCES, TOKENS)),
    }


def captions() -> Batch:
    ids = torch.randint(3, WORDS, (IMAGES, TOKENS))
    ids[:, -1] = 2  # its end is where the text's features are taken
    return {"input_ids": ids, "pixel_values": torch.randn(IMAGES, 3, PIXELS, PIXELS), "return_loss": True}


def latents() -> Batch:
    return {
        "hidden_states": torch.randn(IMAGES, TOKENS, PATCH**2),
        "img_ids": torch.arange(3 * TOKENS).view(-1, 3) % TOKENS,
        "encoder_hidden_states": torch.randn(IMAGES, TOKENS // 4, WIDTH),
        "txt_ids": torch.zeros(TOKENS // 4, 3),
        "pooled_projections": torch.randn(IMAGES, WIDTH),
        "timestep": torch.rand(IMAGES),
    }


def frames() -> Batch:
    """Two frames of 64 patches each."""
    return {
        "hidden_states": torch.randn(IMAGES, PATCH, 2, 16, 16),
        "encoder_hidden_states": torch.randn(IMAGES, TOKENS // 4, WIDTH),
        "timestep": torch.randint(1000, (IMAGES,)),
    }


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("Llama", llama, words, True, ATTENTION),
        Architecture("Qwen3", qwen3, words, True, ATTENTION),
        Architecture("Qwen3-MoE", qwen3_experts, words, True, ATTENTION),
        Architecture("Mixtral", mixtral, words, True, ATTENTION),
        Architecture("Gemma 2", gemma2, words, True, ATTENTION),
        Architecture("Gemma 3", gemma3, words, True, ATTENTION),
        Architecture("GPT-2", gpt2, words, True, ("c_attn",)),
        Architecture("BERT", bert, padded_words, False, ("query", "value")),
        Architecture("T5", t5, padded_words, True, ("q", "v")),
        Architecture("ViT", vit, images, False, ATTENTION),
        Architecture("Whisper", whisper, speech, True, ATTENTION),
        Architecture("Mamba", mamba, few_words, True, ("in_proj", "x_proj")),
        Architecture("CLIP", clip, captions, False, ATTENTION),
        Architecture("Flux", flux, latents, False, ("to_q", "to_v"), "diffusers"),
        Architecture("Wan", wan, frames, False, ("to_q", "to_v"), "diffusers"),
    )
}
