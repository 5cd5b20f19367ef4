"""What a machine says of itself: versions, devices, memory, directories."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from eager_offload import __version__
from eager_offload.observe.doctor.findings import Device, Disk, Memory, Software
from eager_offload.runtime.accelerator_api import TorchAcceleratorApi
from eager_offload.tiers.directories import IN_MEMORY, filesystem_of
from eager_offload.tiers.limits import host_budget, host_headroom, local_ranks, pinning_limit
from eager_offload.tiers.numa import node_of_device

__all__ = ["accelerators", "disk", "memory", "processor", "software"]

#: Accelerators of one machine that are looked at.
_MOST_DEVICES = 4


def software() -> Software:
    """Versions."""
    version = torch.version
    built = [f"CUDA {version.cuda}"] if version.cuda else []
    built += [f"ROCm {hip}"] if (hip := getattr(version, "hip", None)) else []
    built += [f"XPU {xpu}"] if (xpu := getattr(version, "xpu", None)) else []
    return Software(
        eager_offload=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        system=platform.platform(),
        accelerator=", ".join(built),
    )


def accelerators() -> list[Device]:
    """The first few that can be used now."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    found, module = [], torch.get_device_module(accelerator)
    for index in range(min(torch.accelerator.device_count(), _MOST_DEVICES)):
        device = torch.device(accelerator.type, index)
        # Not every kind of device can be asked for its name and its memory.
        model = module.get_device_name(device) if hasattr(module, "get_device_name") else accelerator.type
        total = module.mem_get_info(device)[1] if hasattr(module, "mem_get_info") else None
        node = node_of_device(TorchAcceleratorApi().pci_address(index))
        found.append(Device(str(device), model, total, numa_node=node))
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


def disk(path: Path) -> Disk:
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
