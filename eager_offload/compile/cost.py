"""How long operators of a graph take, and how fast its transfers are: estimates that steer, and decide nothing else.

An operator takes as long as its operations or its bytes take, whichever is longer (the roofline model of Williams,
Waterman and Patterson). Every operator counts. What depends on the inputs is taken as it was when the graph was traced.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import flop_registry

from eager_offload import active
from eager_offload._torch import OpOverload, tree_iter, without_dispatch_modes
from eager_offload.compile import ops
from eager_offload.compile.graphs import hint
from eager_offload.config import OffloadConfig
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.errors import OffloadError
from eager_offload.runtime.base import Direction
from eager_offload.tiers.disk import Bandwidth, DiskTier

__all__ = ["Estimate", "Rates", "bandwidth_of", "counts_flops", "flops_of", "rates_of", "roofline", "traffic_of"]

#: Seconds that an operator takes.
Estimate: TypeAlias = Callable[[Node], float]

#: They hand out memory and leave it as it is.
_UNFILLED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
#: Of what a device is said to reach, how much operators do reach: of operations, and of bytes.
_REACHED_FLOPS, _REACHED_MEMORY = 0.6, 0.8
#: Operations in each clock of a multiprocessor, dense, in 16 bits: the newest generation that is not newer than it.
_FLOPS_PER_CLOCK = {7: 1024, 8: 2048, 9: 4096, 10: 8192, 12: 1024}
_SINGLE_FLOPS_PER_CLOCK = 256
#: Bytes a second of a link that cannot be measured: a slow one, so that what comes over it is asked for early.
_UNKNOWN_BANDWIDTH = 1e9


@dataclass(frozen=True)
class Rates:
    """What a device does in a second when it does nothing else."""

    flops: float
    """Operations of products of 16-bit numbers."""
    single_flops: float
    """Operations of products of 32-bit numbers."""
    memory: float
    """Bytes read and written."""


def roofline(rates: Rates) -> Estimate:
    """Estimates for a device of those rates; the same node is asked for once."""

    @cache
    def seconds(node: Node) -> float:
        nbytes = traffic_of(node)
        if nbytes == 0:
            return 0.0
        peak = rates.single_flops if _itemsize(node) >= 4 else rates.flops
        return max(flops_of(node) / peak, nbytes / rates.memory)

    return seconds


def traffic_of(node: Node) -> int:
    """Bytes that ``node`` reads and writes: its inputs and its outputs. Views, and transfers, touch none."""
    target = node.target
    if node.op != "call_function" or target in ops.OPERATIONS or target is operator.getitem:
        return 0
    if isinstance(target, OpOverload) and (_is_view(target) or _name(target) in _UNFILLED):
        return 0
    made = _tensors(node.meta.get("val"))
    if not made and not (isinstance(target, OpOverload) and target._schema.is_mutable):
        return 0  # a size, or another number
    read = [one.meta.get("val") for one in node.all_input_nodes]
    return sum(hint(tensor.numel()) * tensor.itemsize for tensor in [*_tensors(read), *made])


def flops_of(node: Node) -> int:
    """Operations of a product, an attention or a convolution by torch's own count; 0 of all else.

    Of a causal attention it is half of that: kernels leave out what is masked.
    """
    if not counts_flops(node):
        return 0
    # torch's formulas take shapes where the operator takes tensors. Those that depend on the inputs are made numbers
    # first: the formulas compare them, and a comparison of symbols would fix them for good.
    arguments, named = cast("tuple[Any, Any]", map_aggregate((node.args, node.kwargs), _shape))
    result = map_aggregate(node.meta.get("val"), _shape)
    try:
        count = int(_formula(node.target)(*arguments, **named, out_val=result))
    except AssertionError:  # numbers that are not known before it runs do not fit together
        return 0
    return count // 2 if _is_causal(node) else count


def counts_flops(node: Node) -> bool:
    """Whether ``node`` is a product, an attention or a convolution, which compilers leave in one piece."""
    return node.op == "call_function" and isinstance(node.target, OpOverload) and _formula(node.target) is not None


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, Tensor) and value.layout is torch.strided]


def _itemsize(node: Node) -> int:
    """Bytes of a number among those that ``node`` multiplies."""
    value = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    return value.itemsize if isinstance(value, Tensor) else 4


def _shape(value: Any) -> Any:
    """What torch's formulas see in place of an argument."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, Tensor):
        return tuple(hint(size) for size in value.size())
    return hint(value) if isinstance(value, torch.SymInt) else value


def _is_causal(node: Node) -> bool:
    arguments = cast(OpOverload[..., Any], node.target)._schema.arguments
    place = next((number for number, one in enumerate(arguments) if one.name == "is_causal"), None)
    if place is None:
        return False
    given = node.args[place] if place < len(node.args) else node.kwargs.get("is_causal", arguments[place].default_value)
    return given is True


@cache
def _formula(target: Any) -> Any:
    # Not every version counts what stands for an attention on a CPU; it is the same one.
    same = getattr(torch.ops.aten, _name(target).replace("_for_cpu", ""), None)
    return flop_registry.get(target.overloadpacket) or flop_registry.get(same)


@cache
def _is_view(target: Any) -> bool:
    returns = target._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _name(target: Any) -> str:
    name: str = target._schema.name.partition("::")[2]
    return name


# -- devices and links ------------------------------------------------------------------------------------------------


@cache
def rates_of(device: torch.device) -> Rates:
    """What ``device`` does in a second: tried out once on a CPU, elsewhere worked out from what it says of itself."""
    if device.type == "cpu":
        return _measured()
    if device.type == "cuda":
        return _from_properties(torch.cuda.get_device_properties(device))
    # Nothing is known of it: what an accelerator of some years ago did, so that transfers start rather too early.
    return Rates(flops=1e14, single_flops=2e13, memory=1e12)


def _from_properties(told: Any) -> Rates:
    """Rates of a CUDA device by its properties; those that this torch does not tell are taken as usual ones."""
    generation = max((one for one in _FLOPS_PER_CLOCK if one <= told.major), default=min(_FLOPS_PER_CLOCK))
    clocks = told.multi_processor_count * getattr(told, "clock_rate", 1_700_000) * 1e3
    bus = getattr(told, "memory_bus_width", 5120) / 8
    memory = 2 * bus * getattr(told, "memory_clock_rate", 1_600_000) * 1e3
    flops = clocks * _FLOPS_PER_CLOCK[generation]
    single = flops / 2 if torch.backends.cuda.matmul.allow_tf32 else clocks * _SINGLE_FLOPS_PER_CLOCK
    return Rates(_REACHED_FLOPS * flops, _REACHED_FLOPS * single, _REACHED_MEMORY * memory)


def _measured() -> Rates:
    """What this CPU does, with the threads that torch has now: a small product and a small copy, a few milliseconds."""
    size, nbytes = 256, 4 << 20
    with without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():  # compilers trace without bytes
        matrix, source = torch.ones(size, size), torch.ones(nbytes, dtype=torch.uint8)
        result, target = torch.empty_like(matrix), torch.empty_like(source)
        flops = 2 * size**3 / _least_seconds(lambda: torch.mm(matrix, matrix, out=result))
        memory = 2 * nbytes / _least_seconds(lambda: target.copy_(source))
    return Rates(flops, flops, memory)


def _least_seconds(work: Callable[[], object]) -> float:
    """The best of a few times; the first, in which memory and threads are made, counts too but is never the best."""
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return max(min(seconds), 1e-9)


def bandwidth_of(device: torch.device, direction: Direction, text: str) -> float:
    """Bytes a second between ``device`` and the tier that a graph compiled for the configuration ``text`` fills first.

    A hint: measured once, and a slow link where that is not possible. Thread-safe.
    """
    try:
        with without_dispatch_modes():
            offloader: DeviceOffloader = active.packing(text).offloader_of(device)
            if offloader.tiers[0].name == "disk":
                disk = _measured_disk(text)
                return disk.write if direction is Direction.OUT else disk.read
            return offloader.runtime.bandwidth(device, direction)
    except (OffloadError, MemoryError, RuntimeError):  # no room to try it: that is no reason not to compile
        return _UNKNOWN_BANDWIDTH


@cache
def _measured_disk(text: str) -> Bandwidth:
    """Measured in a file of its own: what is tried out is not to be counted as used."""
    tier = DiskTier(OffloadConfig.from_text(text).disk_paths, None)
    try:
        return tier.measure()
    finally:
        tier.close()
