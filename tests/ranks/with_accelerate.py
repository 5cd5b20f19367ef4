"""Accelerate on many ranks: DDP and FSDP2; mixed, accumulated, compiled and checkpointed.

Accelerate itself takes an ``fsdp_plugin`` on the CPU and then uses DDP, without a word. ``sharded`` says afterwards
what it says on an accelerator by itself; from there on all is its own code: ``prepare``, ``fully_shard``, ``no_sync``.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.parallel import DistributedDataParallel

from eager_offload.integrations.accelerate import OffloadPlugin
from tests.hazards.programs import assert_identical
from tests.integrations.accelerate_training import new_accelerator, train
from tests.integrations.training import WIDTH, Model, Trained, counted, exact, fields
from tests.ranks.launch import Ranks

MIXED = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}


def replicated(**options: Any) -> Accelerator:
    """DDP, which is what Accelerate chooses."""
    accelerator = new_accelerator(**options)
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    return accelerator


def sharded(fsdp: dict[str, Any] | None = None, **options: Any) -> Accelerator:
    """FSDP2, a shard for each block."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **(fsdp or {}))
    accelerator = new_accelerator(**options)
    accelerator.state.fsdp_plugin = plugin
    for state in AcceleratorState, PartialState:  # each is made anew from the other
        state._shared_state["distributed_type"] = DistributedType.FSDP
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    assert accelerator.is_fsdp2
    return accelerator


def compiled(**options: Any) -> dict[str, Any]:
    return {"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager", **options)}


def states(trained: Trained, folder: Path) -> list[dict[str, Tensor]]:
    """What may be saved of a model, and what it is after it has been saved, spoilt and loaded again."""
    accelerator, model = trained.owner, trained.model
    whole = accelerator.get_state_dict(model)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    return [whole, accelerator.get_state_dict(model)]


def shared_folder(ranks: Ranks) -> Path:
    return Path(str(ranks.gathered(tempfile.mkdtemp(dir=ranks.directory))[0]))


def trains(
    ranks: Ranks,
    start: Callable[..., Accelerator],
    options: Callable[[], dict[str, Any]] = dict,
    form: str = "prepare",
    warned: bool = False,
) -> None:
    """Three steps without and with offload, then the states that are saved.

    Args:
        warned: whether the main rank is warned of what hides saved tensors.
    """
    folder = shared_folder(ranks)
    torch._dynamo.reset()
    without = train(start(**options()), None)
    expected = states(without, folder / "without")
    torch._dynamo.reset()
    plugin = OffloadPlugin(**fields(folder))
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        found = train(start(**options()), plugin, form=form)
    kind = DistributedDataParallel if start is replicated else FSDPModule
    assert any(isinstance(module, kind) for module in found.model.modules())
    moved = [figures["offload/moved_mib"] for figures in found.logged]
    stats = exact(without, found, plugin.offload, foreign=warned)
    assert sum(moved) * 2**20 == pytest.approx(stats.bytes_out), "those of this rank"
    assert stats.bytes_out > 0
    assert (stats.compiled_regions > 0) == ("dynamo_plugin" in options())
    assert sum("offload_wrapper stands around" in str(one.message) for one in reported) == (warned and not ranks.rank)
    if form == "both":
        # No parameter moves, however it was gathered. Three steps of two forwards: 64 rows into each layer, 2 bytes a
        # number; and what is saved of them besides.
        weights, inputs = 2 * 2 * 4 * WIDTH * WIDTH, WIDTH + 2 * (2 * WIDTH + 2 * 4 * WIDTH) + WIDTH
        assert stats.kept_bytes["parameter"] == 3 * 2 * 2 * weights
        assert stats.offloaded_bytes + stats.kept_bytes.get("alive", 0) >= 3 * 2 * 64 * 2 * inputs
    assert_identical(expected, states(found, folder / "with"))
    plugin.close()


def recomputes(ranks: Ranks, start: Callable[..., Accelerator]) -> None:
    """Three steps without, and by the plan of the first batch, which is that of rank 0."""
    plainly, calls = counted(whole := Model()), counted(again := Model())
    without = train(start(), None, make=lambda: whole)
    plugin = OffloadPlugin(min_bytes=1024, device_budget=1, recompute=True)
    with warnings.catch_warnings(record=True):
        found = train(start(), plugin, make=lambda: again)
    assert_identical(list(without.parameters.values()), list(found.parameters.values()))
    assert without.losses == found.losses
    assert calls[True] > plainly[True], "in backward"
    stats = plugin.offload.stats(synchronize=True)
    assert stats.plan is not None
    assert len({stats.plan.predicted_peak_bytes, *ranks.gathered(stats.plan.predicted_peak_bytes)}) == 1
    plugin.close()


def regions() -> dict[str, Any]:
    return compiled(use_regional_compilation=True)


def fsdp(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"fsdp": options}


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    **{
        f"{name}{variant}": partial(trains, start=start, **how)
        for name, start in {"ddp": replicated, "fsdp2": sharded}.items()
        for variant, how in {
            "": {},
            "-mixed": {"options": lambda: MIXED, "form": "both"},
            "-compiled": {"options": lambda: compiled() | MIXED},
            "-regions": {"options": regions},
        }.items()
    },
    "ddp-recompute": partial(recomputes, start=replicated),
    "fsdp2-recompute": partial(recomputes, start=sharded),
    "fsdp2-checkpointing": partial(trains, start=sharded, options=fsdp(activation_checkpointing=True)),
    "fsdp2-their-offload": partial(
        trains,
        start=sharded,
        options=fsdp(activation_checkpointing=True, activation_checkpointing_offload=True),
        warned=True,
    ),
    "fsdp2-parameters-on-cpu": partial(
        trains, start=sharded, options=fsdp(cpu_offload=CPUOffloadPolicy(pin_memory=False))
    ),
}
