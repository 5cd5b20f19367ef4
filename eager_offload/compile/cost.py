"""How long operators take, and how fast transfers are: estimates that steer, and decide nothing else.

An operator takes as long as its operations or its bytes take, whichever is longer (the roofline model of Williams,
Waterman and Patterson). Every operator counts. What is asked about is a call: one that a tracer sees as it is made, or
one that a node of a graph stands for, of which what depends on the inputs is taken as it was when the graph was traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from eager_offload import contexts
from eager_offload.compile import ops
from eager_offload.config import OffloadConfig
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.errors import OffloadError
from eager_offload.planning.machine import UNKNOWN_BANDWIDTH, Machine, disk_link, link_of
from eager_offload.runtime.base import Direction
from eager_offload.torch_private.calls import HigherOrderOperator, OpOverload, schema_of, without_dispatch_modes
from eager_offload.torch_private.memory import hint, tree_iter, tree_map

#: Seconds that the operator of a node takes.
Estimate: TypeAlias = Callable[[Node], float]

#: So many leading bits of it count: another process, which finds a little more or less, takes the same graphs.
_LEADING_BITS = 5
#: They hand out memory and leave it as it is.
_UNFILLED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class OperatorCall(NamedTuple):
    """An operator with what it was given and what it returned. Only shapes, strides and types of tensors are asked."""

    target: Any
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    result: Any


def roofline(machine: Machine) -> Estimate:
    """Estimates for a device of those rates; the same node is asked for once."""

    @cache
    def seconds(node: Node) -> float:
        nbytes = traffic_of(node)
        return machine.seconds(flops_of(node), nbytes, single=is_single(node)) if nbytes else 0.0

    return seconds


def traffic_of(call: OperatorCall | Node) -> int:
    """Bytes that ``call`` reads and writes: its inputs and its outputs. Views, and transfers, touch none."""
    target, arguments, named, result = _as_call(call)
    if not callable(target) or target in ops.OPERATIONS or target is operator.getitem:
        return 0
    if isinstance(target, OpOverload) and (returns_views(target) or _name(target) in _UNFILLED):
        return 0
    made = _tensors(result)
    if not made and not (isinstance(target, OpOverload) and schema_of(target).is_mutable):
        return 0  # a size, or another number
    read = {id(tensor): tensor for tensor in _tensors((arguments, named))}
    return sum(hint(tensor.numel()) * tensor.itemsize for tensor in [*read.values(), *made])


def flops_of(call: OperatorCall | Node) -> int:
    """Operations of a product, an attention or a convolution by torch's own count; 0 of all else.

    Of a causal attention it is half of that: kernels leave out what is masked.
    """
    formula = _formula(call.target) if isinstance(call.target, OpOverload | HigherOrderOperator) else None
    if formula is None:
        return 0
    # torch's formulas take shapes where the operator takes tensors. Those that depend on the inputs are made numbers
    # first: the formulas compare them, and a comparison of symbols would fix them for good.
    call = _as_call(call)
    arguments, named, result = cast(
        "tuple[Any, Any, Any]", tree_map(_shape, (call.arguments, dict(call.named), call.result))
    )
    try:
        count = int(formula(*arguments, **named, out_val=result))
    except AssertionError:  # numbers that are not known before it runs do not fit together
        return 0
    return count // 2 if _is_causal(call) else count


def counts_flops(call: OperatorCall | Node) -> bool:
    """Whether ``call`` is a product, an attention or a convolution, which compilers leave in one piece."""
    return isinstance(call.target, OpOverload) and _formula(call.target) is not None


def is_single(call: OperatorCall | Node) -> bool:
    """Whether the numbers that ``call`` multiplies have 32 bits or more; so it is taken where it is given no tensor."""
    call = _as_call(call)
    given = next((one for one in tree_iter((call.arguments, call.named)) if isinstance(one, Tensor)), None)
    return given is None or given.itemsize >= 4


def _as_call(call: OperatorCall | Node) -> OperatorCall:
    """What a node stands for, with the values that its tracer has left; of one that calls nothing, the target is no
    function."""
    if isinstance(call, OperatorCall):
        return call
    target = call.target if call.op == "call_function" else None
    arguments, named = map_arg((call.args, call.kwargs), lambda node: node.meta.get("val"))
    return OperatorCall(target, arguments, named, call.meta.get("val"))


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, Tensor) and value.layout is torch.strided]


def _shape(value: Any) -> Any:
    """What torch's formulas see in place of an argument."""
    if isinstance(value, Tensor):
        return tuple(hint(size) for size in value.size())
    return hint(value) if isinstance(value, torch.SymInt) else value


def _is_causal(call: OperatorCall) -> bool:
    if isinstance(call.target, HigherOrderOperator):
        return False
    arguments = schema_of(call.target).arguments
    place = next((number for number, one in enumerate(arguments) if one.name == "is_causal"), None)
    if place is None:
        return False
    default = arguments[place].default_value
    given = call.arguments[place] if place < len(call.arguments) else call.named.get("is_causal", default)
    return given is True


def _grouped_mm(left: Sequence[int], right: Sequence[int], *_: object, out_val: object = None, **__: object) -> int:
    """A product for each group: rows, columns or both lie one group behind the other, and groups are disjoint."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _flex_attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
    """As of an attention that masks nothing: how much a block mask leaves out only its numbers tell."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # torch declares no types for it


def _flex_attention_backward(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], out: Sequence[int], *_: object, **__: object
) -> int:
    return int(sdpa_backward_flop_count(out, query, key, value))  # type: ignore[no-untyped-call]  # as above


#: Those that torch does not count, or counts by tensors and not by shapes; by name, as its own formulas are.
_FORMULAS: dict[str, Callable[..., int]] = {
    "_grouped_mm": _grouped_mm,
    "flex_attention": _flex_attention,
    "flex_attention_backward": _flex_attention_backward,
}


@cache
def _formula(target: Any) -> Any:
    if isinstance(target, HigherOrderOperator):
        return _FORMULAS.get(target.__name__)
    # Not every version counts what stands for an attention on a CPU; it is the same one.
    same = getattr(torch.ops.aten, _name(target).replace("_for_cpu", ""), None)
    return flop_registry.get(target.overloadpacket) or flop_registry.get(same) or _FORMULAS.get(_name(target))


@cache
def returns_views(target: object) -> bool:
    """Whether ``target`` is an operator that returns views of what it is given, and nothing else."""
    aliases = [one.alias_info for one in schema.returns] if (schema := schema_of(target)) is not None else []
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _name(target: Any) -> str:
    name: str = schema_of(target).name.partition("::")[2]
    return name


# -- links -----------------------------------------------------------------------------------------------------------


def bandwidth_of(device: torch.device, direction: Direction, text: str) -> float:
    """Bytes a second between ``device`` and the tier that a graph compiled for the configuration ``text`` fills first.

    A hint: measured once, and a slow link where that is not possible. Thread-safe.
    """
    try:
        with without_dispatch_modes():
            offloader: DeviceOffloader = contexts.serving(text, is_hooked=True).offloader_of(device)
            if offloader.tiers[0].name == "disk":
                link = disk_link(OffloadConfig.from_text(text).disk_path)
            else:
                link = link_of(offloader.runtime, device)
            return (link.out if direction is Direction.OUT else link.back).median
    except (OffloadError, MemoryError, RuntimeError):  # no room to try it: that is no reason not to compile
        return UNKNOWN_BANDWIDTH


@cache
def free_bytes(config_key: str) -> int | None:
    """Returns what ``device_budget="auto"`` comes to in this process; ``None`` where the device does not tell.

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
            nbytes: int = runtime.available_memory(device, memory.used)
    except OffloadError:  # nothing moves off such a device here
        return None
    step = 1 << max(nbytes.bit_length() - _LEADING_BITS, 0)
    return nbytes // step * step
