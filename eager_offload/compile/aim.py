"""What a graph's decision is made for: a budget, what the link hides, or everything that may move.

[Note: the text of a configuration]
Compilers key on a text what they keep, and Dynamo guards on hooks of which there is one pair for each text. It begins
with the configuration's own, one line, which names the ``Offload`` that serves a graph. Where a plan was given, what it
was made for is the next line; and where a budget is ``"auto"``, what that has come to is a part of the keys.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import cast

import torch

from eager_offload import contexts
from eager_offload._torch import without_dispatch_modes
from eager_offload.config import OffloadConfig
from eager_offload.errors import OffloadError
from eager_offload.machine import Machine
from eager_offload.plan_settings import PlanSettings

#: Of what is free when it is first used, the part that ``"auto"`` takes: allocators round and fragment.
_AUTO_PART = 0.9
#: So many leading bits of it count: another process, which finds a little more or less, takes the same graphs.
_LEADING_BITS = 5


@dataclass(frozen=True)
class Aim:
    """What a decision is made for; all that may move does where it says nothing."""

    budget: int | None = None
    """Bytes of the device that the step may take."""
    slowdown: float | None = None
    """How much longer a step may take than without transfers, as a part of it: so much moves as then may."""
    machine: Machine | None = None
    """The device; ``None``: the one that is here."""


def text_of(config_key: str, plan: PlanSettings) -> str:
    """The text of a configuration with what a plan was made for."""
    made_for = {"budget": plan.device_budget, "policy": plan.policy, "machine": asdict(plan.machine)}
    return f"{config_key}\n{json.dumps(made_for, sort_keys=True)}"


def aim_of(text: str) -> Aim | None:
    """What the decisions for a configuration's text are made for; ``None``: what is the newest stays, as far as
    ``keep_last_bytes`` says, and all else moves that may."""
    config_key, _, planned = text.partition("\n")
    if planned:
        made_for = json.loads(planned)
        policy, machine = made_for["policy"], Machine(**made_for["machine"])
        if policy == "least":
            return Aim(made_for["budget"], None, machine)
        return Aim(None, 0.0 if policy == "free" else None, machine)
    config = OffloadConfig.from_text(config_key)
    if config.device_budget is None and config.slowdown is None:
        return None
    budget = config.device_budget
    return Aim(_free(config_key) if budget == "auto" else cast("int | None", budget), config.slowdown)


def key_of(text: str) -> str:
    """What compilers key on what they have made for that text."""
    config_key, _, _ = text.partition("\n")
    if OffloadConfig.from_text(config_key).device_budget != "auto":
        return text
    return f"{text}\n{_free(config_key)}"


@cache
def _free(config_key: str) -> int | None:
    """What ``device_budget="auto"`` comes to in this process; ``None`` where the device does not tell.

    It is found once, so that all graphs have the same.
    """
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    try:
        with without_dispatch_modes():
            runtime = contexts.serving(config_key, is_hooked=True).offloader_of(device).runtime
            memory = runtime.memory(device)
            if memory is None:
                return None
            nbytes: int = memory.used + int(runtime.free_memory(device) * _AUTO_PART)
    except OffloadError:  # nothing moves off such a device here
        return None
    step = 1 << max(nbytes.bit_length() - _LEADING_BITS, 0)
    return nbytes // step * step
