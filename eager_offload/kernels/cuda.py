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
from eager_offload.kernels.signature import Signature

#: Bytes of shared memory of a block from which on CUDA wants a kernel to be prepared for as many.
_PREPARED_FROM = 48 << 10


def check_available(name: str, spec: LaunchSpec) -> None:
    """Raises ``CapabilityError`` where no CUDA kernel can be launched, or not with this ``spec``."""
    if compile_cuda is None or not torch.cuda.is_available():
        missing = "this torch compiles none" if compile_cuda is None else "torch finds no CUDA device"
        raise CapabilityError(f"{name}: impl='cuda' needs a CUDA device, and {missing}: take impl='inductor'")
    if spec.cluster != (1, 1, 1):
        raise CapabilityError(f"{name}: cluster={spec.cluster}, and impl='cuda' launches no clusters: leave it out")


def compiled(name: str, source: str, signature: Signature, spec: LaunchSpec, tensors: list[Tensor]) -> Launch:
    """Returns what launches the function ``name`` of ``source`` on such tensors, on the current stream.

    Raises:
        CapabilityError: the tensors are not on a CUDA device, it gives a block less shared memory, or NVRTC or CUDA's
            headers are not installed.
        KernelError: the source does not compile, or has no such function.
    """
    assert compile_cuda is not None  # `check_available` came first
    device = tensors[0].device
    if device.type != "cuda":
        raise CapabilityError(f"{name}: impl='cuda' takes CUDA tensors, and these are on {device}")
    properties = torch.cuda.get_device_properties(device)
    limit = int(getattr(properties, "shared_memory_per_block_optin", _PREPARED_FROM))
    if spec.shared_bytes > limit:
        raise CapabilityError(
            f"{name}: a block has {spec.shared_bytes:,} bytes of shared memory, and {device} gives it {limit:,} at "
            "most: stage less at a time, or put what is not needed at once into a Union"
        )
    compile_it = compile_cuda

    def make() -> Launch:
        try:
            with torch.cuda.device(device):
                run = compile_it(source, name)
                if spec.shared_bytes >= _PREPARED_FROM:
                    run.set_shared_memory_config(spec.shared_bytes)
        except OSError as error:
            raise CapabilityError(
                f"{name}: impl='cuda' needs NVRTC and CUDA's headers ({error}). Set CUDA_HOME before Python "
                "starts, such as to nvidia/cu13 in the site-packages of a torch that pip has installed"
            ) from error
        except RuntimeError as error:
            raise KernelError(f"{name}: impls['cuda'] does not compile for {device}: {error}") from error

        def launch(*given: Tensor) -> None:
            with torch.cuda.device(device):
                run(spec.grid, spec.block, list(given), spec.shared_bytes, torch.cuda.current_stream(device))

        return launch

    capability = torch.cuda.get_device_capability(device)
    return kept("\n".join(map(str, ("cuda", torch.__version__, device, capability, spec, name, source))), make)
