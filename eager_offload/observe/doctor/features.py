"""What torch and the system may lack, and what happens then."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

import torch

from eager_offload import _torch
from eager_offload.observe.doctor.findings import Feature
from eager_offload.tiers.memory import PAGE, anonymous_slab
from eager_offload.tiers.numa import prefer_node

__all__ = ["features", "private_names"]

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: Of the driver that moves bytes between NVIDIA's devices and a disk.
_STORAGE_DRIVER = Path("/proc/driver/nvidia-fs")


def features() -> list[Feature]:
    """Everything that is probed; direct I/O depends on the directory and is asked for each."""
    return [*_of_the_system(), *_of_direct_storage(), *_of_compiled_code(), *private_names()]


def _of_the_system() -> list[Feature]:
    modes = _HUGE_PAGES.read_text() if _HUGE_PAGES.exists() else ""
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
    ]


def _of_direct_storage() -> list[Feature]:
    """Ways between a disk and a device that leave host memory out. No tier takes them so far."""
    without = "a disk is reached through pinned memory, as it is with this too: nothing uses it yet"
    # torch has the names where it cannot do it, and without the driver the copies go through host memory unseen.
    usable = _resolves("torch.cuda.gds.GdsFile") and torch.cuda.is_available() and _STORAGE_DRIVER.exists()
    return [
        Feature("torch.cuda.gds", usable, without),
        Feature("kvikio", importlib.util.find_spec("kvikio") is not None, without),
    ]


def _of_compiled_code() -> list[Feature]:
    named = importlib.metadata.entry_points(group="torch_dynamo_backends", name="eager_offload")
    return [
        Feature(
            "hooks in compiled graphs", _torch.compiler_asks_hooks(), "compiled code is offloaded around its graphs"
        ),
        Feature(
            'backend="eager_offload"',
            bool(named),
            "torch.compile finds no such backend: install the package, or use offload.compile(model)",
        ),
    ]


def private_names() -> list[Feature]:
    """Every private name of torch that the library uses, by the table that lists them."""
    found = []
    for row in (_torch.__doc__ or "").splitlines():
        if row.startswith("| ``"):
            names, _, without = (cell.strip() for cell in row.strip("|").split("|"))
            found += [Feature(name, _resolves(name), without) for name in re.findall(r"``([^`]+)``", names)]
    return [one for one in found if "()" not in one.name]  # what has to be called is asked for above


def _resolves(dotted: str) -> bool:
    """Whether ``package.module.name.attribute`` is there, on the class or on an instance of it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part) and isinstance(found, type):
                with contextlib.suppress(TypeError):
                    found = found()
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def _binds_memory() -> bool:
    page = anonymous_slab(PAGE)
    return prefer_node(page.data_ptr(), PAGE, 0)


def _in_the_c_library(name: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(None), name)
    except (OSError, TypeError):  # Windows has no CDLL(None)
        return False
