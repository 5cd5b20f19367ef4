"""The stages in the order of their worth: what is at the end may be left out when time is up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from benchmarks.common import ROOT
from benchmarks.gpu.bits import bits
from benchmarks.gpu.captured import capture
from benchmarks.gpu.facts import facts
from benchmarks.gpu.frameworks import accelerate, framework, lightning, transformers
from benchmarks.gpu.results import Job
from benchmarks.gpu.sanitizer import sanitizer
from benchmarks.gpu.train import LARGE, HuggingFace, Way, train
from benchmarks.models import Shape
from benchmarks.peers import (
    checkpointed,
    checkpointed_on_cpu,
    plain,
    saved_on_cpu,
    selectively_checkpointed,
    trl_offloading,
)


@dataclass(frozen=True)
class Stage:
    """A process of its own."""

    name: str
    #: It is killed after so many seconds; and what it takes on an H100. It begins only if that is left.
    limit: int
    expected: int
    #: A function that it runs, or a command.
    run: Callable[[Job], None] | tuple[str, ...]
    #: Modules without which it is left out.
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def _way(name: str, limit: int, expected: int, way: Way, *needs: str) -> Stage:
    return Stage(name, limit, expected, partial(train, way=way), needs)


def _windows(size: str) -> dict[str, str]:
    return {"max_inflight_bytes": size, "prefetch_bytes": size}


def _budget(size: str) -> Way:
    return replace(OURS, offload={"device_budget": size}, warm_up=6)  # it holds from the fifth step on


#: Two sequences, 65,536 tokens in all, in 16 of the 32 layers of a model of 8 billion parameters.
LONG = Way(
    run=checkpointed,
    shape=Shape(layers=16, width=4096, hidden=14_336, heads=32, shared_heads=8),
    tokens=65_536,
    frozen=True,
    warm_up=1,
    steps=2,
)
COMPILED = Way(shape=replace(LARGE, layers=4), compiled={})
#: From the fourth step on it follows what it has learnt.
OURS = Way(offload={}, warm_up=3)
#: Those alone are imported where nothing else is installed; strict options would not go without pytest-timeout.
GPU_TESTS = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    if path.parent.name != "gpu" and "mark.gpu" in path.read_text()
]
PYTEST = (sys.executable, "-m", "pytest", "-o", "addopts=-ra", "-q", "-m", "gpu", *GPU_TESTS)

STAGES = (
    Stage("facts", 60, 13, facts),
    Stage("tests of order", 150, 85, (sys.executable, "-m", "tests.gpu")),
    Stage("bits", 75, 35, bits),
    _way("none", 45, 19, Way()),
    _way("checkpointing", 45, 18, Way(run=checkpointed)),
    _way("ours", 75, 42, OURS),
    Stage("capture", 75, 24, capture),
    *(_way(f"plan {size} GiB", 75, 30, Way(plan=f"{size}GiB", warm_up=6)) for size in (14, 16, 20, 30)),
    _way("selective checkpointing", 45, 18, Way(run=selectively_checkpointed)),
    _way("selective checkpointing + ours", 60, 30, replace(OURS, run=selectively_checkpointed)),
    _way("ours + checkpointing", 50, 21, replace(OURS, run=checkpointed)),
    _way("ours, budget 30 GiB", 75, 37, _budget("30GiB")),
    _way("ours, budget 20 GiB", 75, 37, _budget("20GiB")),
    _way("ours, budget 45 GiB", 75, 35, _budget("45GiB")),
    _way("ours, free", 90, 60, replace(OURS, offload={"policy": "free"}, warm_up=4)),  # it is decided by two
    _way("65k, checkpointing", 60, 25, LONG),
    _way("65k, plan 29 GiB", 90, 50, replace(LONG, run=plain, plan="29.1GiB", warm_up=3)),
    _way("65k, ours + checkpointing", 75, 25, replace(LONG, offload={})),
    _way("ours, windows 256 MiB", 75, 39, replace(OURS, offload=_windows("256MiB"))),
    _way("ours, windows 1 GiB", 75, 39, replace(OURS, offload=_windows("1GiB"))),
    _way("ours, windows 5 GiB", 75, 35, replace(OURS, offload=_windows("5GiB"))),
    _way("save_on_cpu", 75, 50, Way(around=saved_on_cpu, warm_up=1, steps=2)),
    _way("checkpoints by save_on_cpu", 45, 20, Way(run=checkpointed_on_cpu)),
    _way("HF, checkpointing", 45, 13, Way(build=lambda shape, run: HuggingFace(shape, offload=False)), "transformers"),
    _way("HF, offload=True", 45, 13, Way(build=lambda shape, run: HuggingFace(shape, offload=True)), "transformers"),
    _way("TRL", 60, 30, Way(around=trl_offloading), "trl"),
    Stage("sanitizer", 45, 13, sanitizer, environment={"TORCH_CUDA_SANITIZER": "1"}),
    _way("compiled", 75, 32, COMPILED),
    _way("compiled, ours", 90, 36, replace(COMPILED, offload={})),
    _way("reduce-overhead, ours", 90, 33, replace(COMPILED, offload={}, compiled={"mode": "reduce-overhead"})),
    Stage("pytest", 75, 20, PYTEST, needs=("pytest",)),
    Stage("Accelerate", 60, 20, partial(framework, train=accelerate), needs=("accelerate",)),
    Stage("Transformers", 60, 20, partial(framework, train=transformers), needs=("transformers", "accelerate")),
    Stage("Lightning", 60, 20, partial(framework, train=lightning), needs=("lightning",)),
)
