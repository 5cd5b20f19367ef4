"""Kernels that are called like functions: what they take is checked before anything is launched."""

from __future__ import annotations

from eager_offload.errors import CapabilityError, KernelError
from eager_offload.kernels.kernel import Kernel, TorchKernel, as_torch_kernel
from eager_offload.kernels.signature import Scalar, Signature, TensorSpec
from eager_offload.kernels.staging import LaunchSpec, Slot, StagingTree, Union

__all__ = [
    "CapabilityError",
    "Kernel",
    "KernelError",
    "LaunchSpec",
    "Scalar",
    "Signature",
    "Slot",
    "StagingTree",
    "TensorSpec",
    "TorchKernel",
    "Union",
    "as_torch_kernel",
]
