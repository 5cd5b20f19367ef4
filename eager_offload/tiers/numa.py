"""Which node of memory a device is nearest to, and memory that comes from there.

A machine with several sockets has several nodes of memory. A copy between a device and a node of another socket goes
over the link between the two, which is slower and shared by all processes. What a process allocates comes from the node
that its thread happens to run on, so pages for a device are bound to that device's node before they are first touched.
It is a preference: where the node is full, or the system refuses (containers often do), pages come from where they
would have come from anyway.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path

#: The number of the system call by processor, as ``platform.machine`` names it. The C library has no name for it.
_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
_MPOL_PREFERRED = 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of_device(pci_address: str | None, root: Path = Path("/")) -> int | None:
    """The node that a device is nearest to; ``None`` where it is not known or there is only one.

    Args:
        pci_address: such as ``0000:3b:00.0``.
        root: what stands in place of ``/``.
    """
    if pci_address is None:
        return None
    try:
        online = (root / "sys/devices/system/node/online").read_text().strip()
        node = int((root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    # "0" is one node; several are written "0-1" or "0,2". A virtual machine may say -1 for a device: unknown.
    return node if node >= 0 and not online.isdecimal() else None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Has pages that were not touched yet come from ``node`` as long as it has any; whether the system took it.

    Args:
        address: a multiple of the page size.
    """
    number = _MBIND.get(platform.machine())
    syscall = _syscall()
    if number is None or syscall is None:
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    # The kernel reads one bit less than this says.
    arguments = (number, address, nbytes, _MPOL_PREFERRED, ctypes.addressof(mask), words * _WORD_BITS + 1, 0)
    return bool(syscall(*(ctypes.c_long(argument) for argument in arguments)) == 0)


@cache
def _syscall() -> ctypes._NamedFuncPointer | None:
    if platform.system() != "Linux":
        return None
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (AttributeError, OSError):
        return None
    syscall.restype = ctypes.c_long
    return syscall
