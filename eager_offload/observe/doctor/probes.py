"""What an examination looks at, and how fast it is. Each probe takes about a second or less, and may fail."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from eager_offload import _torch
from eager_offload.config import OffloadConfig
from eager_offload.errors import ConfigError
from eager_offload.observe.doctor.diagnosis import Device, Disk, Feature, Memory, SelfTest, Software, Speed
from eager_offload.offload import Offload
from eager_offload.runtime.accelerator import accelerator_runtime
from eager_offload.runtime.accelerator_api import AcceleratorApi
from eager_offload.runtime.base import Direction, Runtime
from eager_offload.runtime.host import host_runtime
from eager_offload.tiers.directories import IN_MEMORY, filesystem_of
from eager_offload.tiers.disk import DiskTier
from eager_offload.tiers.limits import host_budget, host_headroom, pinning_limit
from eager_offload.tiers.memory import PAGE, anonymous_slab, node_of_device, prefer_node
from eager_offload.tiers.ranks import local_ranks
from eager_offload.tiers.rawfile import RawFile
from eager_offload.version import VERSION

#: Accelerators of one machine that are looked at.
_MOST_DEVICES = 4
#: Rows and columns of the matrices that are multiplied, on a CPU and on an accelerator.
_SIZE_ON_CPU, _SIZE = 1024, 4096
#: Seconds that one measurement should take.
_MEASURING = 0.4
#: Bytes that are pinned to see how long it takes.
_PINNED_BYTES = 256 << 20
#: Bytes that have to fit on a disk to measure it, those that are enough, and the part of what is free that it may take.
_LEAST_ON_DISK, _MOST_ON_DISK, _PART_OF_FREE = 16 << 20, 64 << 20, 16
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: Of the driver that moves bytes between NVIDIA's devices and a disk.
_STORAGE_DRIVER = Path("/proc/driver/nvidia-fs")


# -- what the machine says of itself --------------------------------------------------------------------------------


def software() -> Software:
    """Versions."""
    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    return Software(
        eager_offload=VERSION,
        torch=str(torch.__version__),
        python=platform.python_version(),
        system=platform.platform(),
        accelerator=", ".join(f"{kind} {version}" for kind, version in kinds.items() if version),
    )


def processor() -> Device:
    """The CPU, and how many threads torch uses of it."""
    name = platform.processor() or platform.machine()
    table = Path("/proc/cpuinfo")
    if table.exists():
        named = [line for line in table.read_text(errors="replace").splitlines() if line.startswith("model name")]
        name = named[0].partition(":")[2].strip() if named else name
    threads = torch.get_num_threads()
    model = f"{name}, {threads} thread{'' if threads == 1 else 's'}"
    return Device("cpu", model, psutil.virtual_memory().total)


def accelerators() -> list[Device]:
    """The first few that can be used now."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    found, module = [], torch.get_device_module(accelerator)
    for index in range(min(torch.accelerator.device_count(), _MOST_DEVICES)):
        device = torch.device(accelerator.type, index)
        # Not every kind of device can be asked for its name.
        model = module.get_device_name(device) if hasattr(module, "get_device_name") else accelerator.type
        api = AcceleratorApi()
        node = node_of_device(api.pci_address(index))
        found.append(Device(str(device), model, api.total_memory(device), numa_node=node))
    return found


def memory() -> Memory:
    """What is free, and what limits it."""
    headroom = host_headroom()
    return Memory(
        total_bytes=psutil.virtual_memory().total,
        headroom_bytes=headroom.nbytes,
        budget_bytes=host_budget(),
        ranks=local_ranks(),
        bound_by=headroom.binding.reason,
        remedy=headroom.binding.remedy,
        limits=list(headroom.limits),
        pinning_limit_bytes=pinning_limit(),
    )


def directory(path: Path) -> Disk:
    """``path``, not measured yet."""
    try:
        found = Disk(str(path), filesystem_of(path), path.stat().st_dev, shutil.disk_usage(path).free)
    except OSError as error:
        return Disk(str(path), "", 0, 0, refused=error.strerror or str(error))
    if not path.is_dir():
        return replace(found, refused="it is no directory")
    if found.filesystem in IN_MEMORY:  # before its size, which is beside the point
        return replace(found, refused=f"it is on {found.filesystem}, which is memory itself")
    return found if os.access(path, os.W_OK | os.X_OK) else replace(found, refused="it is not writable")


# -- speeds ---------------------------------------------------------------------------------------------------------


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a product of two square matrices of random numbers."""
    size = _SIZE_ON_CPU if device.type == "cpu" else _SIZE
    generator = torch.Generator(device)  # not torch's own, whose numbers belong to the user's training
    with torch.inference_mode(False), torch.no_grad():
        left, right = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
        for _ in range(2):  # the first loads kernels and starts threads
            seconds = _seconds_of_products(left, right, 1)
        repeats = min(max(round(_MEASURING / max(seconds, 1e-6)), 1), 1000)
        return 2.0 * size**3 * repeats / _seconds_of_products(left, right, repeats)


def _seconds_of_products(left: Tensor, right: Tensor, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        torch.mm(left, right)
    if left.device.type != "cpu":
        torch.accelerator.synchronize(left.device)
    return max(time.perf_counter() - started, 1e-9)


def link(device: torch.device) -> Speed:
    """To host memory and back, one way at a time."""
    runtime = _runtime_of(device)
    return Speed(runtime.bandwidth(device, Direction.OUT), runtime.bandwidth(device, Direction.IN))


def duplex_link(device: torch.device) -> Speed:
    """The same, both ways at once."""
    runtime = _runtime_of(device)
    return Speed(runtime.duplex_bandwidth(device, Direction.OUT), runtime.duplex_bandwidth(device, Direction.IN))


def _runtime_of(device: torch.device) -> Runtime:
    return host_runtime() if device.type == "cpu" else accelerator_runtime()


def pin_seconds() -> float:
    """Seconds to pin one GiB as offloading does it, in a slab of a quarter of that."""
    runtime = accelerator_runtime()
    runtime.slab_sizes()  # finds out how to pin
    started = time.perf_counter()
    slab = runtime.host_buffer(_PINNED_BYTES)
    seconds = time.perf_counter() - started
    if not slab.is_pinned():
        raise RuntimeError("the memory that came is pageable")
    return seconds * (1 << 30) / _PINNED_BYTES


def disk_speed(path: Path, free_bytes: int, *, direct: bool) -> Speed | str | None:
    """What one transfer at a time reaches there, through the disk tier itself.

    Args:
        free_bytes: on that disk; a small part of it is used.
        direct: around the page cache.

    Returns:
        A text that says why a spill file cannot be there; ``None`` where the filesystem refuses ``direct``.
    """
    budget = min(_MOST_ON_DISK, free_bytes // _PART_OF_FREE)
    if budget < _LEAST_ON_DISK:
        return f"only {free_bytes} bytes are free there"
    try:
        tier = DiskTier([path], budget, file_type=RawFile if direct else _Buffered)
    except ConfigError as error:
        return str(error.__cause__ or error)  # without what else may be given
    try:
        return None if direct and not tier.direct_io else Speed(*tier.measure())
    finally:
        tier.close()


class _Buffered(RawFile):
    """Never goes around the page cache."""

    def set_direct(self, direct: bool) -> None:
        if direct:
            raise OSError(errno.EOPNOTSUPP, "measured without it")


# -- what torch and the system may lack -----------------------------------------------------------------------------


def features() -> list[Feature]:
    """Everything that is probed, with what happens without it; direct I/O is asked for each directory."""
    modes = _HUGE_PAGES.read_text() if _HUGE_PAGES.exists() else ""
    backend = importlib.metadata.entry_points(group="torch_dynamo_backends", name="eager_offload")
    around = "a disk is reached through pinned memory, as it is with this too: nothing uses it yet"
    # torch has the names where it cannot do it, and without the driver the copies go through host memory unnoticed.
    storage = _resolves("torch.cuda.gds.GdsFile") and torch.cuda.is_available() and _STORAGE_DRIVER.exists()
    return [
        Feature("os.pwritev", hasattr(os, "pwritev"), "there is no disk tier"),
        Feature("os.posix_fallocate", hasattr(os, "posix_fallocate"), "a full disk shows when it is written"),
        Feature("os.O_DIRECT", hasattr(os, "O_DIRECT"), "what is spilled passes through the page cache"),
        Feature("os.O_TMPFILE", hasattr(os, "O_TMPFILE"), "the spill file has a name for a moment"),
        Feature("transparent huge pages", bool(modes) and "[never]" not in modes, "memory comes in more page faults"),
        Feature("mallopt", _in_the_c_library("mallopt"), "release_freed_memory() does nothing"),
        Feature("mbind", _binds_memory(), "host memory may come from a node that is far from the device"),
        Feature(
            "cudaHostRegister",
            _torch.host_registration() is not None,
            "host memory is pinned by torch, which rounds sizes up to powers of two (nothing to pin on a CPU)",
        ),
        Feature("torch.cuda.gds", storage, around),
        Feature("kvikio", importlib.util.find_spec("kvikio") is not None, around),
        Feature(
            "hooks in compiled graphs", _torch.compiler_inlines_hooks(), "compiled code is offloaded around its graphs"
        ),
        Feature(
            'backend="eager_offload"',
            bool(backend),
            "torch.compile finds no such backend: install the package, or use offload.compile(model)",
        ),
        *private_names(),
    ]


def private_names() -> list[Feature]:
    """Every name of torch's that is private, or that a version may not have; one to be called is among the features."""
    return [
        Feature(name, _resolves(name), without)
        for without, names in (*_torch.PRIVATE_NAMES.items(), *_torch.PUBLIC_NAMES.items())
        for name in names
        if "()" not in name and name not in _torch.IMPORTED_BY_USERS
        if name not in _torch.OF_CUDA or torch.version.cuda
    ]


def _resolves(dotted: str) -> bool:
    """Whether ``package.module.name.attribute`` is there, on the class or on an instance of it."""
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name(dotted)
        return True
    owner, _, name = dotted.rpartition(".")
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        return hasattr(pkgutil.resolve_name(owner)(), name)
    return False


def _binds_memory() -> bool:
    page = anonymous_slab(PAGE)
    return prefer_node(page.data_ptr(), PAGE, 0)


def _in_the_c_library(name: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(None), name)
    except (OSError, TypeError):  # Windows has no CDLL(None)
        return False


# -- a step with everything offloaded -------------------------------------------------------------------------------

_LAYERS, _WIDTH, _ROWS = 4, 256, 4096
#: Sizes that have everything move.
_SMALL = {"max_inflight_bytes": 8 << 20, "prefetch_bytes": 8 << 20, "keep_last_bytes": 0, "min_bytes": 1 << 20}


def self_test(device_name: str, settings: Mapping[str, Any]) -> SelfTest:
    """Trains four layers for a step with everything offloaded, in small windows, and compares the gradients.

    Raises:
        OffloadError: offloading failed.
    """
    device = torch.device(device_name)
    generator = torch.Generator(device)  # not torch's own, whose numbers belong to the user's training
    weights = [
        (torch.randn(_WIDTH, _WIDTH, device=device, generator=generator) / 16).requires_grad_() for _ in range(_LAYERS)
    ]
    rows = torch.randn(_ROWS, _WIDTH, device=device, generator=generator)
    offload = Offload(OffloadConfig.from_fields({**settings, **_SMALL}))
    try:
        with torch.inference_mode(False), torch.enable_grad():
            expected = torch.autograd.grad(_loss(rows, weights), weights)
            with offload:
                loss = _loss(rows, weights)
            given = torch.autograd.grad(loss, weights)
        equal = all(map(torch.equal, given, expected))
        return SelfTest(device_name, equal, offload.stats().bytes_out)
    finally:
        offload.close()


def _loss(rows: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        rows = F.gelu(rows @ weight)
    return rows.square().sum()
