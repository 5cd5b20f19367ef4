"""Accelerate on two ranks of the CPU: each scenario trains without offload and with it; facts go to a file a rank.

    python -m tests.integrations.accelerate_ranks FOLDER SCENARIO...

Accelerate itself takes an ``fsdp_plugin`` on the CPU and then uses DDP, without a word. ``sharded`` says afterwards
what it says on an accelerator by itself; from there on all is its own code: ``prepare``, ``fully_shard``, ``no_sync``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.parallel import DistributedDataParallel

from eager_offload._torch import top_pack_hook
from tests.integrations.accelerate_training import Block, Trained, new_accelerator, new_plugin, train

RANKS = 2
MIXED = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}


def main(folder: Path, scenarios: list[str]) -> int:
    """Runs two ranks, which share what has been imported; returns the first exit status that is not 0."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(number, folder, scenarios), daemon=True) for number in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return next((rank.exitcode or 0 for rank in ranks if rank.exitcode), 0)


def run(rank: int, folder: Path, scenarios: list[str]) -> None:
    """One rank. A failure ends it, and is printed."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), RANKS)
    waits = timedelta(seconds=100)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=waits)
    facts: dict[str, Any] = {}
    for scenario in scenarios:
        torch._dynamo.reset()
        (folder / scenario).mkdir(exist_ok=True)
        facts[scenario] = SCENARIOS[scenario](folder / scenario)
        assert top_pack_hook() is None
    torch.distributed.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(facts))


# -- what differs among scenarios ---------------------------------------------------------------------------------


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


def trains(accelerator: Callable[[], Accelerator], form: str = "prepare") -> Callable[[Path], dict[str, Any]]:
    """A scenario: three steps without and with offload, then the states that are saved."""

    def scenario(folder: Path) -> dict[str, Any]:
        without = train(accelerator(), None)
        expected = states(without, folder / "without")
        torch._dynamo.reset()
        plugin = new_plugin(folder)
        with warnings.catch_warnings(record=True) as reported:
            warnings.simplefilter("always")
            trained = train(accelerator(), plugin, form=form)
        facts = {
            "strategy": strategy(trained),  # before states: unwrap_model takes DDP out of what is compiled
            "equal": trained.equals(without),
            "states equal": same(states(trained, folder / "with"), expected),
            "bytes out": trained.stats.bytes_out,
            "offloaded": trained.stats.offloaded_bytes,
            "kept": trained.stats.kept_bytes,
            "compiled regions": trained.stats.compiled_regions,
            "reported": sum("offload_wrapper stands around" in str(one.message) for one in reported),
            "metrics": plugin.metrics(),
        }
        plugin.close()
        return facts

    return scenario


def strategy(trained: Trained) -> str:
    kinds = {DistributedDataParallel: "ddp", FSDPModule: "fsdp2"}
    return next((name for kind, name in kinds.items() if any(isinstance(m, kind) for m in trained.model.modules())), "")


def states(trained: Trained, folder: Path) -> list[dict[str, Tensor]]:
    """What may be saved of a model, and what it is after it has been saved, spoilt and loaded again."""
    accelerator, model = trained.accelerator, trained.model
    whole = accelerator.get_state_dict(model)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    return [whole, accelerator.get_state_dict(model)]


def same(states: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> bool:
    return all(
        list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(states, others, strict=True)
    )


def fails(accelerator: Callable[[], Accelerator]) -> Callable[[Path], dict[str, Any]]:
    """A scenario: a forward that fails in every rank leaves no hook, and training goes on with another model."""

    def scenario(folder: Path) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        without, plugin = train(accelerator(), None), new_plugin(folder)
        for error in RuntimeError("in forward"), KeyboardInterrupt():
            Block.fails = error
            try:
                train(accelerator(), plugin)
            except (RuntimeError, KeyboardInterrupt) as caught:
                facts[type(error).__name__] = caught is error and top_pack_hook() is None
            Block.fails = None
        plugin.offload.reset_stats()
        trained = train(accelerator(), plugin)
        plugin.close()
        return facts | {"equal": trained.equals(without), "bytes out": trained.stats.bytes_out}

    return scenario


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ddp": trains(replicated),
    "ddp-mixed": trains(lambda: replicated(**MIXED), form="both"),
    "ddp-compiled": trains(lambda: replicated(**compiled(), **MIXED)),
    "ddp-regions": trains(lambda: replicated(**compiled(use_regional_compilation=True))),
    "ddp-fails": fails(replicated),
    "fsdp2": trains(sharded),
    "fsdp2-mixed": trains(lambda: sharded(**MIXED), form="both"),
    "fsdp2-compiled": trains(lambda: sharded(**compiled(), **MIXED)),
    "fsdp2-regions": trains(lambda: sharded(**compiled(use_regional_compilation=True))),
    "fsdp2-checkpointing": trains(lambda: sharded({"activation_checkpointing": True})),
    "fsdp2-their-offload": trains(
        lambda: sharded({"activation_checkpointing": True, "activation_checkpointing_offload": True})
    ),
    "fsdp2-parameters-on-cpu": trains(lambda: sharded({"cpu_offload": CPUOffloadPolicy(pin_memory=False)})),
    "fsdp2-fails": fails(sharded),
}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
