"""Several ranks, one plan: rank 0 decides, for the least of their budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self, TypeVar

import torch.distributed as dist

from eager_offload.errors import ConfigError, OffloadError, PlanError

__all__ = ["agreed"]


class _Asked(Protocol):
    @property
    def budget(self) -> int: ...

    def with_budget(self, budget: int) -> Self: ...


_A = TypeVar("_A", bound=_Asked)
_P = TypeVar("_P")


def agreed(ask: Callable[[], _A], make: Callable[[_A], _P]) -> _P:
    """What ``make`` returns for what ``ask`` returns; on several ranks what it returns on rank 0, for the least budget.

    Modules that only one rank computes again would gather their parameters alone under FSDP2, and wait forever. All
    ranks get an error that one of them meets, so that none waits for it.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return make(ask())
    asked, own = _tried(ask)
    answers: list[tuple[int | None, OffloadError | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(answers, (None if asked is None else asked.budget, _told(own)))
    _raise_any(own, [error for _, error in answers])
    assert asked is not None
    made, own = None, None
    if dist.get_rank() == 0:
        least = min(budget for budget, _ in answers if budget is not None)
        made, own = _tried(lambda: make(asked.with_budget(least)))
    answer = [(made, _told(own))]
    dist.broadcast_object_list(answer, src=0)
    found, error = answer[0]
    _raise_any(own, [error])
    assert found is not None
    return found if made is None else made


_R = TypeVar("_R")


def _tried(work: Callable[[], _R]) -> tuple[_R | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # the others wait for an answer
        return None, error


def _told(error: Exception | None) -> OffloadError | None:
    """What the other ranks raise."""
    if error is None:
        return None
    text = f"on rank {dist.get_rank()}: {error}"
    if isinstance(error, ConfigError):
        return ConfigError(text)
    return PlanError(text if isinstance(error, OffloadError) else f"on rank {dist.get_rank()}: {error!r}")


def _raise_any(own: Exception | None, others: list[OffloadError | None]) -> None:
    if own is not None:
        raise own
    for error in others:
        if error is not None:
            raise error
