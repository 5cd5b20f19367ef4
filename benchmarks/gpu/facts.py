"""What the machine is: its card, the link, what pinning and forking take."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.common import GIB, commit, environment
from benchmarks.gpu.results import Job
from eager_offload.runtime.accelerator import accelerator_runtime

T = TypeVar("T")


def machine(job: Job, named: str | None) -> None:
    """Adds the line that all others are read by. ``named``: the commit, for a checkout without its history."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        driver = None
    free, total = torch.cuda.mem_get_info()
    job.add(
        what="machine",
        card=torch.cuda.get_device_name(),
        driver=driver,
        torch=torch.__version__,
        commit={"revision": named} if named else commit(),
        date=time.strftime("%Y-%m-%d"),
        small=job.small,
        device_gib=total / GIB,
        device_free_gib=free / GIB,
        capability=torch.cuda.get_device_capability(),
        environment=environment(),
    )


def facts(job: Job) -> None:
    """The link each way; what it takes to pin memory, and to fork with pinned memory."""
    runtime, device = accelerator_runtime(), torch.device("cuda", 0)
    job.add(
        what="host",
        memory_gib=memory(),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        cgroup=_text("/sys/fs/cgroup/memory.max"),
        overcommit=_text("/proc/sys/vm/overcommit_memory"),
        allocator=os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    )
    link = runtime.measure_link(device)
    job.add(
        what="link",
        alone={"out": link.out.median / 1e9, "in": link.back.median / 1e9},
        slabs=str(runtime.slab_sizes()),
    )
    sizes = (1 / 16, 1 / 8) if job.small else (1 / 4, 4)
    for gib in sizes:
        nbytes = int(gib * GIB)
        _pin(job, nbytes, "library")
        block, seconds = _timed(lambda nbytes=nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        job.add(what="pin", name=f"torch, {gib:g} GiB", seconds=seconds, pinned=block.is_pinned())
        del block
    job.add(what="fork", name="nothing pinned", seconds=_fork_seconds())
    slab = runtime.host_buffer(int(sizes[-1] * GIB))
    before = memory()
    job.add(what="fork", name=f"{sizes[-1]:g} GiB pinned", seconds=_fork_seconds(), memory_gib=[before, memory()])
    del slab
    runtime.poll()


def memory() -> dict[str, float]:
    """Returns the kernel's own account of the host's memory, in GiB."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines()[:3])
    return {name.rstrip(":"): int(kib) / (1 << 20) for name, kib, _ in lines}


def _text(path: str) -> str | None:
    return Path(path).read_text().strip() if Path(path).exists() else None


def _pin(job: Job, nbytes: int, name: str) -> None:
    """How long the library takes to pin, and to give back."""
    runtime = accelerator_runtime()
    slab, seconds = _timed(lambda: runtime.host_buffer(nbytes))
    pinned = slab.is_pinned()
    del slab
    unpin = _timed(runtime.poll)[1]
    job.add(what="pin", name=f"{name}, {nbytes / GIB:g} GiB", seconds=seconds, unpin_seconds=unpin, pinned=pinned)


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    found = call()
    return found, time.perf_counter() - began


def _fork_seconds() -> float:
    """How long fork keeps the parent, as a DataLoader's workers are made."""
    began = time.perf_counter()
    if (child := os.fork()) == 0:
        os._exit(0)
    seconds = time.perf_counter() - began
    os.waitpid(child, 0)
    return seconds
