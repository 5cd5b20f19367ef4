"""Sizes and dtypes, as a declaration has them."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch

from eager_offload.errors import KernelError


def checked_sizes(of: str, name: str, given: Any, least: int) -> tuple[int, ...]:
    """``given`` as a tuple of whole numbers, ``least`` or more; raises ``KernelError`` for anything else."""
    sizes = tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(is_whole(size) and size >= least for size in sizes):
        raise KernelError(
            f"{of}({name}={given!r}) is not accepted: these are whole numbers from {least} on, in a tuple"
        )
    return tuple(map(int, sizes))


def check_dtype(of: str, given: object) -> None:
    """Raises ``KernelError`` for what is no dtype of torch: its name is none."""
    if not isinstance(given, torch.dtype):
        raise KernelError(f"{of}(dtype={given!r}) is not accepted: it is a torch.dtype, such as torch.float32")


def is_whole(number: object) -> bool:
    """Whether this is a whole number, which ``True`` is not."""
    return isinstance(number, Integral) and not isinstance(number, bool)
