"""A stand-in for CUDA's runtime library, under torch's own CUDA build: torch finds an H100 where there is no GPU.

    make fake-gpu                                                        the environment (5 GB, once) and all tests
    .venv-cuda/bin/python -m tests.fake_cuda -m pytest tests/fake_cuda/on_cuda/test_peaks.py
    .venv-cuda/bin/python -m tests.fake_cuda [--big] program.py | -m module | -c code

One preloaded library (``runtime/``) answers for CUDA's runtime and driver, cuBLAS, cuSOLVER and NCCL. Everything above
it is the unmodified wheel: the caching allocator, the allocator of pinned memory, CUDA graphs, autograd's threads of
the device, the sanitizer, Inductor with Triton and ptxas.

    streams     a time line: one engine computes and one copies each way, events are points in it, and the host waits in
                real time
    kernels     take the time that the environment gives them and compute nothing. So what tensors hold is garbage, and
                nothing here can compare it. ``torch.cuda._sleep`` takes the time that it says, and ``fill_`` fills
                up to 64 KiB: the host acts on a learning rate or a counter
    copies      move bytes when they end; memory that is not pinned makes the host wait
    captures    the rules of modes, isolation, joining, captured events and waiting; a graph's nodes run one behind the
                other when it is launched
    memory      a device's capacity, to the byte; registered and allocated pinned memory

What it does not model: cuDNN, cuSPARSE and cuFFT (their real libraries fail on it), memory that is mapped by pages
(``expandable_segments``), ``cudaMallocAsync``, streams that synchronize with the default one, access from one device to
the other's memory, and faults of kernels.

Variables, each read once: ``FAKE_CUDA_KERNEL_US`` (20), ``FAKE_CUDA_GEMM_US`` (100), ``FAKE_CUDA_GBPS`` each way (50),
``FAKE_CUDA_PIN_S_PER_GIB`` (0.3), ``FAKE_CUDA_DEVICE_GIB`` (80), ``FAKE_CUDA_DEVICES`` (1), ``FAKE_CUDA_VERBOSE``,
``FAKE_CUDA_NO_BYTES`` (copies above 64 KiB move nothing, and no copy takes time). ``FAKE_CUDA_PINNED_GIB``, above which
nothing is pinned, is read whenever something is.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from tests.processes import python

#: Names the library in the environment of processes that it is preloaded into.
LIBRARY = "FAKE_CUDA_LIBRARY"
#: For steps of any size: no bytes move and nothing takes time, so peaks of memory are exact and come in seconds.
BIG = {
    "FAKE_CUDA_NO_BYTES": "1",
    "FAKE_CUDA_KERNEL_US": "0",
    "FAKE_CUDA_GEMM_US": "0",
    "FAKE_CUDA_PIN_S_PER_GIB": "0",
    "FAKE_CUDA_DEVICE_GIB": "78",
}


class StandIn:
    """What a test may ask of the stand-in, beyond torch's own calls; of all devices together."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[LIBRARY])
        self._library.fake_cuda_count.restype = ctypes.c_long
        self._library.fake_cuda_busy_seconds.restype = ctypes.c_double
        self._library.fake_cuda_pinned_bytes.restype = ctypes.c_long

    @property
    def launched(self) -> tuple[int, int]:
        """Threads of the kernels that were launched by the driver's API, and bytes of shared memory of their blocks."""
        return self._count("threads"), self._count("shared bytes")

    @property
    def copied_bytes(self) -> tuple[int, int]:
        """Bytes of copies that were called for: out, back."""
        return self._count("bytes out"), self._count("bytes back")

    @property
    def pageable_copies(self) -> int:
        """Copies of memory that is not pinned, for each of which the host has waited."""
        return self._count("pageable copies")

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the host that are pinned now."""
        return int(self._library.fake_cuda_pinned_bytes())

    @property
    def busy_seconds(self) -> tuple[float, float, float]:
        """Seconds that were given to the engines so far: compute, out, back."""
        compute, out, back = (self._library.fake_cuda_busy_seconds(engine) for engine in range(3))
        return compute, out, back

    def forget(self) -> None:
        """Sets all of the above to 0, but for what is pinned."""
        self._library.fake_cuda_forget()

    def _count(self, name: str) -> int:
        return int(self._library.fake_cuda_count(name.encode()))


def run(
    arguments: list[str | Path], *, big: bool = False, seconds: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``python *arguments`` over the stand-in, with variables of its own; it has to end well."""
    ended = python(*arguments, seconds=seconds, **(BIG if big else {}), **environment)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-6000:]
    return ended
