"""Trains torchtitan's debug Llama for 4 steps on the CPU, without offload and with it, and prints digests of it.

Each gloo rank is a process, which is forked: to import torchtitan takes several times as long as to train.

python tests/stacks/titan_steps.py RANKS [tensor|pipeline_parallel_degree=2]
python tests/stacks/titan_steps.py graphs                                     ends with an error
python tests/stacks/titan_steps.py arguments --offload.device_budget 60GiB   prints that field
"""

# ruff: noqa: E402  # torchtitan is imported after what it asks of torch was answered

from __future__ import annotations

import hashlib
import inspect
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.multiprocessing import start_processes

# torchtitan asks for the accelerator when it is imported, and takes "cuda" where there is none.
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: torch.cpu
torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30)
torch.cpu.get_device_name = lambda *_: "CPU"
for name in ("reset_peak_memory_stats", "empty_cache"):
    setattr(torch.cpu, name, lambda *_: None)
torch.cpu.memory_stats = lambda *_: {}


def _taking_microbatches(step: Any) -> Any:
    """Has a schedule's ``step`` take lists of microbatches, as torchtitan 0.3 gives them and torch 2.13 does not."""

    def taking(schedule: Any, *given: Any, kwarg_mbs: Any = None, **named: Any) -> Any:
        if kwarg_mbs is None:
            return step(schedule, *given, **named)
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            stage.has_backward = True
            stage.clear_runtime_states()
        arguments = named.pop("arg_mbs", None) or [()] * len(kwarg_mbs)
        return schedule._step_microbatches(arguments, kwarg_mbs, **named)

    return taking


for _kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
    if "arg_mbs" not in inspect.signature(_kind.step).parameters:
        _kind.step = _taking_microbatches(_kind.step)

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ConfigManager
from torchtitan.distributed import utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import config_registry

from eager_offload.integrations.torchtitan import OffloadTrainer


class Words(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


class Tokens(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self._size, self._made = (local_batch_size, seq_len + 1), torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(2048, self._size, generator=self._made)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def offload_debugmodel() -> OffloadTrainer.Config:
    return OffloadTrainer.Config.of(config_registry.llama3_debugmodel())


def train(rank: int, way: str, port: int, ranks: int, degrees: tuple[str, ...]) -> None:
    """Trains as one of so many ranks; prints of it the way, its digest, and the bytes that left and came back."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    utils.set_pg_timeouts = lambda **_: None  # gives gloo's barrier the name of a device
    config = offload_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others want an accelerator
    config.tokenizer, config.dataloader = Words.Config(), Tokens.Config()
    config.training.disable_cuda_graphs = way != "graphs"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 128, 4
    config.debug.seed, config.debug.deterministic = 1, True
    config.parallelism.spmd_backend = "partial_dtensor"  # "spmd_types" shards with FSDP of a later torch
    for name, _, degree in (one.partition("=") for one in degrees):
        setattr(config.parallelism, name, int(degree))
    config.offload = type(config.offload)(enabled=way != "plain", tier="host", min_bytes=4096, keep_last_bytes=0)
    config.validator = Validator.Config(enable=ranks == 1, steps=1, dataloader=Tokens.Config())
    trainer = config.build()
    for one in [each for part in trainer.model_parts for each in part.modules() if isinstance(each, FSDPModule)]:
        one.set_force_sum_reduction_for_comms(True)  # gloo takes no factor
    trainer.train()
    digest = hashlib.sha256()
    for part in trainer.model_parts:
        for one in part.parameters():
            local = one.to_local() if hasattr(one, "to_local") else one
            digest.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    stats = trainer.offload.stats(synchronize=True)
    sys.stdout.write(f"DIGEST {way} {rank} {digest.hexdigest()} {stats.bytes_out} {stats.bytes_in}\n")
    if ranks == 1:
        (model,), saved = trainer.model_parts, [stats.saved_tensors]
        for context in (trainer.validator.validation_context, trainer.train_context):
            with context():  # with gradients: without them, as titan validates, nothing is saved in any case
                model(torch.zeros(2, 128, dtype=torch.long))
            saved.append(trainer.offload.stats().saved_tensors)
        sys.stdout.write(f"SAVED {way} {saved[1] - saved[0]} {saved[2] - saved[1]}\n")
    sys.stdout.flush()
    trainer.close()
    torch.distributed.destroy_process_group()


def main(ranks: str, *degrees: str) -> None:
    for way in ("plain", "offload"):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        start_processes(train, (way, port, int(ranks), degrees), int(ranks), start_method="fork")


if __name__ == "__main__":
    if sys.argv[1] == "arguments":
        named = ["--module", "titan_steps", "--config", "offload_debugmodel"]
        print("OFFLOAD", ConfigManager().parse_args([*named, *sys.argv[2:]]).offload.device_budget)
    elif sys.argv[1] == "graphs":
        train(0, "graphs", 0, 1, ())
    else:
        main(*sys.argv[1:])
