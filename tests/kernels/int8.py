"""A kernel for torch and for Pallas: blocks of eight-bit integers, with scales that are powers of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eager_offload.kernels import Kernel, LaunchSpec, Signature, TensorSpec


def with_torch(x: Tensor, codes: Tensor, exponents: Tensor) -> None:
    _, above = torch.frexp(x.abs().amax(1, keepdim=True))
    exponents.copy_((above - 7).to(torch.int8))
    codes.copy_(torch.round(torch.ldexp(x, 7 - above)).clamp(-127, 127).to(torch.int8))


def with_pallas(x: Any, codes: Any, exponents: Any) -> None:
    import jax.numpy as jnp

    _, above = jnp.frexp(jnp.max(jnp.abs(x[...]), axis=1, keepdims=True))
    exponents[...] = (above - 7).astype(jnp.int8)
    codes[...] = jnp.clip(jnp.round(jnp.ldexp(x[...], 7 - above)), -127, 127).astype(jnp.int8)


def int8_blocks(count: int, size: int = 64) -> Kernel:
    """Blocks of ``size`` numbers each, with an exponent for each of them."""
    return Kernel(
        "int8_blocks",
        Signature(
            inputs=(TensorSpec((count, size), torch.float32),),
            outputs=(TensorSpec((count, size), torch.int8), TensorSpec((count, 1), torch.int8)),
        ),
        LaunchSpec(grid=(1, 1, 1), block=(128, 1, 1)),
        {"torch": with_torch, "pallas": with_pallas},
    )
