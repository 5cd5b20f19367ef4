"""Sizes, as a declaration has them."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from eager_offload.errors import KernelError

__all__ = ["checked_sizes", "is_whole"]


def checked_sizes(of: str, name: str, given: Any, least: int) -> tuple[int, ...]:
    """``given`` as a tuple of whole numbers.

    Raises:
        KernelError: it is something else, or one is below ``least``.
    """
    sizes = tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(is_whole(size) and size >= least for size in sizes):
        raise KernelError(
            f"{of}({name}={given!r}) is not accepted: these are whole numbers from {least} on, in a tuple"
        )
    return tuple(map(int, sizes))


def is_whole(number: object) -> bool:
    """Whether this is a whole number, which ``True`` is not."""
    return isinstance(number, Integral) and not isinstance(number, bool)
