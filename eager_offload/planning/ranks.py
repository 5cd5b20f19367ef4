"""Several ranks, one plan: rank 0 decides, within the limits of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn

from eager_offload.config import OffloadConfig, size_text
from eager_offload.errors import ConfigError, OffloadError, PlanError
from eager_offload.planning.machine import Machine
from eager_offload.planning.sharding import Sharding
from eager_offload.planning.states import States
from eager_offload.version import digest


class Asked(NamedTuple):
    """What a user asks for on one rank; bytes."""

    settings: OffloadConfig
    machine: Machine
    budget: int
    """That a step may take of the device."""
    states: States | None
    """Of an optimizer; ``None``: they are not counted."""
    model: str
    """What is planned, where there are several ranks: see ``model_text``."""
    sharding: Sharding | None = None
    """How the model is sharded."""
    accumulates: bool = False
    """Whether gradients are there when the step begins."""

    def within(self, each: Sequence[Asked]) -> Asked:
        """The same, but what keeps to the limits of all."""
        hosts = [one.settings.host_budget for one in each if isinstance(one.settings.host_budget, int)]
        settings = replace(self.settings, host_budget=min(hosts)) if hosts else self.settings
        states = [one.states for one in each if one.states is not None]
        most = self.states and max(states, key=attrgetter("nbytes"))
        return self._replace(settings=settings, budget=min(one.budget for one in each), states=most)


_P = TypeVar("_P")


def are_several() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agreed(ask: Callable[[], Asked], make: Callable[[Asked], _P]) -> _P:
    """What ``make`` returns for what ``ask`` returns; on several ranks what it returns on rank 0, in the limits of all.

    Modules that only one rank computes again would gather their parameters alone under FSDP2, and wait forever. All
    ranks get an error that one of them meets, so that none waits for it.
    """
    if not are_several():
        return make(ask())
    asked, own = _try(ask)
    answers: list[tuple[Asked | None, OffloadError | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(answers, (asked, _report(own)))
    _raise_any(own, [error for _, error in answers])
    assert asked is not None
    each = [one for one, _ in answers if one is not None]
    _compare([one.model for one in each])
    made, own = None, None
    if dist.get_rank() == 0:
        made, own = _try(lambda: make(asked.within(each)))
    answer = [(made, _report(own))]
    dist.broadcast_object_list(answer, src=0)
    found, error = answer[0]
    _raise_any(own, [error])
    assert found is not None
    return found if made is None else made


def model_text(model: nn.Module) -> str:
    """The class of a model, the bytes of its parameters, and a digest of its modules, parameters and buffers."""
    parts = [f"{name} {type(module).__qualname__} {module.training}" for name, module in model.named_modules()]
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        parts.append(f"{name} {tuple(one.shape)} {one.dtype} {one.requires_grad}")
    nbytes = sum(one.numel() * one.itemsize for one in model.parameters())
    return f"{type(model).__name__} of {size_text(nbytes)} in {len(parts)} parts, {digest(*parts)[:12]}"


def _compare(models: Sequence[str]) -> None:
    """Raises ``PlanError``, on each rank the same, where not all plan the same."""
    others = {model: rank for rank, model in reversed([*enumerate(models)]) if model != models[0]}
    if others:
        named = ", ".join(f"on rank {rank} {model}" for model, rank in others.items())
        raise PlanError(
            f"ranks plan different models: on rank 0 {models[0]}, {named}. All get the plan that rank 0 makes, so give "
            "the same model on each; stages of a pipeline cannot be planned"
        )


_R = TypeVar("_R")


def _try(work: Callable[[], _R]) -> tuple[_R | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # the others wait for an answer
        return None, error


def _report(error: Exception | None) -> OffloadError | None:
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
