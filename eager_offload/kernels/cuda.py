"""Kernels in CUDA C++, which NVRTC compiles for the device that their tensors are on.

A kernel receives the address of each tensor, in the order of the call. A number is a tensor of no dimensions there too,
so that no argument loses bits: what torch passes of a Python number is a C `int` or a `double`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eager_offload._torch import compile_cuda
from eager_offload.errors import CapabilityError, KernelError
from eager_offload.kernels.compiled import Launch, kept
from eager_offload.kernels.launch import LaunchSpec

#: Bytes of shared memory of a block from which on CUDA wants a kernel to be prepared for as many.
_PREPARED_FROM = 48 << 10


def check_available(name: str, spec: LaunchSpec) -> None:
    """Raises ``CapabilityError`` where no CUDA kernel can be launched, or not with this ``spec``."""
    missing = ""
    if torch.version.hip is not None:  # torch.cuda is ROCm's there, whose compiler takes HIP C++ and whose warps differ
        missing = "this torch is built for ROCm"
    elif not torch.cuda.is_available():
        missing = "torch finds no CUDA device"
    if missing:
        raise CapabilityError(f"{name}: impl='cuda' needs a CUDA device, and {missing}: take impl='inductor'")
    if spec.cluster != (1, 1, 1):
        raise CapabilityError(f"{name}: cluster={spec.cluster}, and impl='cuda' launches no clusters: leave it out")


def compiled(name: str, source: str, spec: LaunchSpec, tensors: list[Tensor]) -> Launch:
    """Returns what launches the function ``name`` of ``source`` on such tensors, on the current stream.

    A launch that CUDA refuses is a ``KernelError``.

    Raises:
        CapabilityError: the tensors are not on a CUDA device, it gives a block less shared memory, or NVRTC or CUDA's
            headers are not installed.
        KernelError: the source does not compile, or has no such function.
    """
    device = tensors[0].device
    if device.type != "cuda":
        raise CapabilityError(f"{name}: impl='cuda' takes CUDA tensors, and these are on {device}")
    properties = torch.cuda.get_device_properties(device)
    limit = int(getattr(properties, "shared_memory_per_block_optin", _PREPARED_FROM))
    too_much = (
        f"{name}: a block has {spec.shared_bytes:,} bytes of shared memory beside what its source declares, and "
        f"{device} gives it {limit:,} at most: stage less at a time"
    )
    if spec.shared_bytes > limit:
        raise CapabilityError(too_much)

    def make() -> Launch:
        try:
            with torch.cuda.device(device):
                run = compile_cuda(source, name)
        except OSError as error:
            raise CapabilityError(
                f"{name}: impl='cuda' needs NVRTC and CUDA's headers ({error}). Set CUDA_HOME before Python "
                "starts, such as to nvidia/cu13 in the site-packages of a torch that pip has installed"
            ) from error
        except RuntimeError as error:
            raise KernelError(f"{name}: impls['cuda'] does not compile for {device}: {error}") from error
        if spec.shared_bytes >= _PREPARED_FROM:
            try:
                with torch.cuda.device(device):
                    run.set_shared_memory_config(spec.shared_bytes)
            except RuntimeError as error:
                raise CapabilityError(f"{too_much} ({error})") from error

        def launch(*given: Tensor) -> None:
            try:
                with torch.cuda.device(device):
                    run(spec.grid, spec.block, list(given), spec.shared_bytes, torch.cuda.current_stream(device))
            except RuntimeError as error:
                raise KernelError(f"{name}: {device} does not launch it with {spec}: {error}") from error

        return launch

    capability = torch.cuda.get_device_capability(device)
    return kept("\n".join(map(str, ("cuda", torch.__version__, device, capability, spec, name, source))), make)
