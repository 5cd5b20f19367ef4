"""Kernels that are given tensors of a device."""

from __future__ import annotations

import pytest
import torch

from eager_offload.kernels import (
    Kernel,
    KernelError,
    LaunchSpec,
    Signature,
    TensorSpec,
    as_torch_kernel,
)
from tests.virtual_device import NAME

SPEC = TensorSpec((1024,), torch.float32)
DOUBLE = Kernel(
    "double",
    Signature((SPEC,), (SPEC,)),
    LaunchSpec((1, 1, 1), (32, 1, 1)),
    {"torch": lambda x, y: torch.mul(x, 2, out=y)},
)


def test_what_is_not_on_the_device_is_an_error() -> None:
    with pytest.raises(KernelError, match=f"on {NAME}:0, and got one .* on cpu"):
        as_torch_kernel(DOUBLE, "torch")(torch.ones(1024, device=NAME), out=torch.empty(1024))
