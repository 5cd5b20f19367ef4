"""Kernels in CUDA C++: compiled by NVRTC itself, and launched as they are declared."""

from __future__ import annotations

import pytest
import torch

from eager_offload.kernels import (
    CapabilityError,
    Kernel,
    KernelError,
    LaunchSpec,
    Signature,
    TensorSpec,
    as_torch_kernel,
)
from tests.fake_cuda import StandIn
from tests.gpu.scenarios import TURNED

ROWS = TensorSpec((8, 256), torch.float32)
NUMBER = TensorSpec((), torch.int64)


def turned(source: str = TURNED, name: str = "turned<2>", shared: int = 48 << 10) -> Kernel:
    spec = LaunchSpec((4, 2, 1), (128, 2, 1), shared=shared)
    return Kernel(name, Signature((ROWS, NUMBER), (ROWS,)), spec, {"torch": print, "cuda": source})


def test_a_launch_is_one_kernel_of_its_grid_its_block_and_its_shared_memory(cuda: StandIn) -> None:
    x, number = torch.ones(8, 256, device="cuda"), torch.ones((), dtype=torch.int64, device="cuda")
    kernel, side = as_torch_kernel(turned(), "cuda"), torch.cuda.Stream()
    kernel(x, number)
    cuda.forget()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
        kernel(x, number)
        assert not side.query(), "it is behind what its stream does"
    assert torch.cuda.current_stream().query()
    assert cuda.launched == (8 * 256, 48 << 10)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        kernel(x, number)
    graph.replay()
    assert cuda.launched == (2 * 8 * 256, 2 * (48 << 10))


def test_what_does_not_compile_or_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    x, number = torch.ones(8, 256, device="cuda"), torch.ones((), dtype=torch.int64, device="cuda")
    for source, name in ((TURNED.replace("staged[blockDim.x", "stagd[blockDim.x"), "turned<2>"), (TURNED, "returned")):
        with pytest.raises(KernelError, match=r"does not compile for cuda:0: .*\n.*(stagd|returned)"):
            as_torch_kernel(turned(source, name), "cuda")(x, number)
    with pytest.raises(CapabilityError, match=r"232,449 bytes of shared memory.*, and cuda:0 gives it 232,448 at most"):
        as_torch_kernel(turned(shared=(227 << 10) + 1), "cuda")(x, number)
    with pytest.raises(CapabilityError, match="takes CUDA tensors, and these are on cpu"):
        as_torch_kernel(turned(), "cuda")(x.cpu(), number.cpu())
    intact = as_torch_kernel(turned(), "cuda")
    intact(x, number)

    def refused(*_: object) -> None:
        raise RuntimeError("CUDA error: refused by the driver")

    of_torch = torch.cuda._utils._CudaKernel
    monkeypatch.setattr(of_torch, "set_shared_memory_config", refused)  # what the source declares itself is beside it
    with pytest.raises(CapabilityError, match=r"turned<2>: .* gives it 232,448 at most.*refused by the driver"):
        as_torch_kernel(turned(shared=227 << 10), "cuda")(x, number)
    monkeypatch.setattr(of_torch, "__call__", refused)
    with pytest.raises(KernelError, match=r"turned<2>: cuda:0 does not launch it with LaunchSpec.*refused by the dri"):
        intact(x, number)
