"""What a planner tells an ``Offload`` of a step, and what an ``Offload`` has measured of one."""

from __future__ import annotations

from typing import NamedTuple

from eager_offload.config import OffloadConfig
from eager_offload.machine import Machine
from eager_offload.stats import Relief
from eager_offload.step_plan import StepPlan


class Stretch(NamedTuple):
    """A part of a step that was measured: from the end of the one before, or the beginning of forward, on."""

    save: int
    """The number of the save at which it ends, or that is asked for then."""
    is_ask: bool
    seconds: float
    """That compute took, without what it has waited for transfers."""


class Timing(NamedTuple):
    """What a step has taken, in parts that follow each other."""

    stretches: tuple[Stretch, ...]
    waited_seconds: float
    """That compute has waited for transfers in all of them."""
    out: float | None
    back: float | None
    """Bytes a second of the link; ``None`` where nothing has travelled."""


class Adapted(NamedTuple):
    """A plan that was made anew."""

    plan: ComputedPlan
    is_other: bool
    """Whether other storages move; else only what is expected of the step is another."""


class ComputedPlan:
    """What a planner has worked out, as far as an ``Offload`` follows it; sizes in bytes, times in seconds."""

    config: OffloadConfig
    """The settings that it was made for."""
    device_budget: int
    """Bytes of the device that a step may take."""
    policy: str
    """``"least"``, ``"free"`` or ``"max"``."""
    machine: Machine
    """The device."""

    @property
    def step_plans(self) -> tuple[StepPlan, ...]:
        """What forwards follow from the first one on."""
        raise NotImplementedError

    @property
    def is_small(self) -> bool:
        """Whether beside parameters the step saves nothing that is as large as ``min_bytes``."""
        raise NotImplementedError

    @property
    def peak_bytes(self) -> int:
        """That the step takes of the device at most."""
        raise NotImplementedError

    @property
    def step_seconds(self) -> float:
        """Of forward and backward."""
        raise NotImplementedError

    @property
    def seen_bytes(self) -> int | None:
        """That are in use at a save or an ask, at most; ``None`` where that is not known."""
        raise NotImplementedError

    @property
    def grown_bytes(self) -> int | None:
        """By which ``seen_bytes`` are more than what is in use when the step begins; ``None`` where it is not known."""
        raise NotImplementedError

    @property
    def without_offload_seconds(self) -> float | None:
        """Of forward and backward without offload, where real steps were timed."""
        raise NotImplementedError

    @property
    def relief(self) -> Relief | None:
        """The least larger budget with which compute waits little; ``None`` where there is none. May take seconds."""
        raise NotImplementedError

    def is_off(self, timing: Timing) -> bool:
        """Whether a step has taken another time than is expected of it. Takes no time itself."""
        raise NotImplementedError

    def adapted(self, surplus: int, timing: Timing | None) -> Adapted | None:
        """The plan for a device on which so many bytes more are in use than this one knows of, or fewer.

        Args:
            timing: what operators take, and the link; ``None``: as this one has it.

        Returns:
            Over the budget, one that takes less; else one whose step is shorter, or with ``timing`` what is to be
            expected of this one. ``None`` where there is none.
        """
        raise NotImplementedError
