"""LoRA on a frozen DiT of ``diffusers`` with offload: Flux's or Wan's own class, narrow and with random weights.

    torchrun --standalone --nproc-per-node 2 examples/train_diffusers.py
    torchrun --standalone --nproc-per-node 2 examples/train_diffusers.py --compare
    torchrun --standalone --nproc-per-node 2 examples/train_diffusers.py --model wan

Needs ``pip install diffusers peft``. Runs on CPU ranks as it stands and on one accelerator a rank unchanged; with
``--nproc-per-node 1`` it is a plain loop. Activations move although the weights under them are frozen: the adapters'
gradients need them.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lm.ranks import Rank, parse, run

CHANNELS, TEXT = 16, 64


def flux(options: argparse.Namespace) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    """Returns the model, latents of images, and what else a call takes."""
    head = options.width // options.heads
    side = head // 6 * 2
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=CHANNELS,
        num_layers=options.layers // 2,
        num_single_layers=options.layers - options.layers // 2,
        attention_head_dim=head,
        num_attention_heads=options.heads,
        joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT,
        axes_dims_rope=(head - 2 * side, side, side),
    )
    places = torch.zeros(options.sequence, 3)
    places[:, 1] = torch.arange(options.sequence)
    others = {"img_ids": places, "txt_ids": torch.zeros(32, 3)}
    others |= {"pooled_projections": torch.randn(options.batch, TEXT)}
    return model, torch.randn(options.batch, options.sequence, CHANNELS), others


def wan(options: argparse.Namespace) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    """Returns the model, latents of videos, and what else a call takes."""
    model = WanTransformer3DModel(
        num_attention_heads=options.heads,
        attention_head_dim=options.width // options.heads,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT,
        ffn_dim=4 * options.width,
        num_layers=options.layers,
    )
    return model, torch.randn(options.batch, CHANNELS, options.sequence // 64, 16, 16), {}  # 64 tokens a frame


MODELS = {"flux": flux, "wan": wan}


def train(rank: Rank) -> None:
    options, device = rank.options, rank.device
    model: Any
    model, latents, others = MODELS[options.model](options)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v"]))
    parallel = DistributedDataParallel(model.to(device), device_ids=None if device.type == "cpu" else [device])
    adapters = [one for one in parallel.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    torch.manual_seed(rank.number)
    others["encoder_hidden_states"] = torch.randn(options.batch, 32, TEXT)
    others = {name: one.to(device) for name, one in others.items()}
    for _ in range(options.steps):
        noise, time = torch.randn_like(latents), torch.rand(options.batch)
        mixed = torch.lerp(latents, noise, time.view(-1, *[1] * (latents.dim() - 1))).to(device)
        when = time if options.model == "flux" else 1000 * time
        optimizer.zero_grad()
        with rank.forward():
            (velocity,) = parallel(hidden_states=mixed, timestep=when.to(device), return_dict=False, **others)
            loss = nn.functional.mse_loss(velocity, (noise - latents).to(device))
        loss.backward()
        rank.note(loss, (one.grad for one in adapters))
        optimizer.step()


if __name__ == "__main__":
    more = argparse.ArgumentParser(add_help=False)
    more.add_argument("--model", choices=[*MODELS], default="flux")
    run(train, parse(__doc__, more))
