"""Makes the C library return freed memory to the system."""

from __future__ import annotations

import ctypes
import os

from eager_offload.config import parse_size

# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_INT_MAX = (1 << 31) - 1

#: Environment variables that replace glibc's allocator or set its thresholds.
_OTHERWISE = ("LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
#: Whether the C library has accepted the thresholds of ``release_freed_memory``.
_is_released = False


def release_freed_memory(threshold: int | str = 1 << 20) -> bool:
    """Makes the C library return blocks of ``threshold`` bytes and more to the system as soon as they are freed.

    On a CPU device freed saved tensors make the process smaller only with this call: by default glibc keeps freed
    blocks of up to 32 MiB for later, and the process never shrinks. It is a setting of the whole process (``mallopt``),
    so the library never makes it by itself. Each such block costs page faults on its first use, a few percent of a
    step; with ``THP_MEM_ALLOC_ENABLE=1`` in the environment before Python starts, torch asks Linux for huge pages,
    which are far fewer. Call it once, before the model is built.

    Args:
        threshold: bytes, or a text such as ``"1MiB"``.

    Returns:
        Whether the C library accepts it: glibc does, others have no such setting.
    """
    # The C library counts in an int, in which a larger size would wrap around: 4 GiB to 0.
    nbytes = min(parse_size(threshold, "threshold"), _INT_MAX)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl and macOS have no mallopt, Windows no CDLL(None)
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    global _is_released
    _is_released = bool(mallopt(_M_MMAP_THRESHOLD, nbytes)) and bool(mallopt(_M_TRIM_THRESHOLD, nbytes))
    return _is_released


def keeps_freed_memory() -> bool:
    """Returns whether freed blocks stay with this process, as far as is known: it uses glibc with default
    thresholds."""
    if _is_released or any(os.environ.get(name) for name in _OTHERWISE):
        return False
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # of another C library, or another system
        return False
