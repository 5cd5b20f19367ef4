"""Builds a ``Program`` from a graph, for which the planner chooses the storages that move.

[Note: budgets of graphs]
A budget bounds the bytes of one forward and its backward, derived from the two graphs as if operators ran one by one:
inputs and parameters for the whole step, gradients and outputs from their creation on, other values from creation to
last use. A compiler that fuses operators uses less memory. A graph does not show other memory: optimizer states, other
models, other allocations of the process. A graph of a part of a step does not show either how many bytes the other
parts keep. So a budget applies only to graphs of a whole step, which return a loss and take no activations. In other
graphs all movable values move, which needs the least memory. ``policy="free"`` is decided for each graph alone, because
each graph waits for its own transfers.

[Note: roofline estimates]
An operator takes the longer of the time for its FLOP and the time for its bytes (the roofline model of Williams,
Waterman and Patterson). All operators count. A call is either an operator call seen by a tracer, or a node of a graph;
a symbolic size counts as the size seen while tracing. The estimates place transfers and choose the values that move;
results do not depend on them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from eager_offload import contexts
from eager_offload.compile import ops
from eager_offload.compile.graphs import nbytes_of, outputs_of, storage_of, tensor_of
from eager_offload.config import OffloadConfig
from eager_offload.core.schedule import Windows
from eager_offload.engine.offloader import DeviceOffloader
from eager_offload.errors import OffloadError
from eager_offload.planning.machine import UNKNOWN_BANDWIDTH, Machine
from eager_offload.planning.measuring import disk_link, link_of, machine_of
from eager_offload.planning.program import Op, Problem, Program, Storage, live_bytes
from eager_offload.planning.simulate import Outcome, PolicySearch
from eager_offload.runtime.base import Direction
from eager_offload.torch_private.calls import HigherOrderOperator, OpOverload, schema_of, without_dispatch_modes
from eager_offload.torch_private.memory import hint, tree_iter, tree_map

#: Returns the seconds that the operator of a node takes.
Estimate: TypeAlias = Callable[[Node], float]

#: Operators that allocate without writing.
_UNFILLED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class OperatorCall(NamedTuple):
    """An operator call; only shapes, strides and dtypes of tensors are read."""

    target: Any
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    result: Any


def roofline(machine: Machine) -> Estimate:
    """Returns estimates for a device with the rates of ``machine``, cached by node."""

    @cache
    def seconds(node: Node) -> float:
        nbytes = traffic_of(node)
        return machine.seconds(flops_of(node), nbytes, single=is_single(node)) if nbytes else 0.0

    return seconds


def traffic_of(call: OperatorCall | Node) -> int:
    """Returns the bytes that ``call`` reads and writes: its inputs and outputs. Views and transfers count as 0."""
    target, arguments, named, result = _as_call(call)
    if not callable(target) or target in ops.OPERATIONS or target is operator.getitem:
        return 0
    if isinstance(target, OpOverload) and (returns_views(target) or _name(target) in _UNFILLED):
        return 0
    made = _tensors(result)
    if not made and not (isinstance(target, OpOverload) and schema_of(target).is_mutable):
        return 0  # returns a size or another number
    read = {id(tensor): tensor for tensor in _tensors((arguments, named))}
    return sum(hint(tensor.numel()) * tensor.itemsize for tensor in [*read.values(), *made])


def flops_of(call: OperatorCall | Node) -> int:
    """Returns the FLOP of a product, an attention or a convolution by torch's formulas; 0 for other operators.

    Causal attention counts half, because kernels skip the masked part.
    """
    formula = _formula(call.target) if isinstance(call.target, OpOverload | HigherOrderOperator) else None
    if formula is None:
        return 0

    # Formulas take shapes in place of tensors. Symbolic sizes become their hints: a formula compares sizes, and a
    # comparison of symbols would add a guard to the graph.
    def shape(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(hint(size) for size in value.size())
        return hint(value) if isinstance(value, torch.SymInt) else value

    call = _as_call(call)
    given = call.arguments, dict(call.named), call.result
    arguments, named, result = cast("tuple[Any, Any, Any]", tree_map(shape, given))
    try:
        count = int(formula(*arguments, **named, out_val=result))
    except AssertionError:  # hints of data-dependent sizes may not fit together
        return 0
    return count // 2 if _is_causal(call) else count


def counts_flops(call: OperatorCall | Node) -> bool:
    """Returns whether ``call`` is a product, an attention or a convolution, which compilers do not split or fuse."""
    return isinstance(call.target, OpOverload) and _formula(call.target) is not None


def is_single(call: OperatorCall | Node) -> bool:
    """Returns whether the first tensor of ``call`` has elements of 32 bits or more; true without a tensor."""
    call = _as_call(call)
    given = next((one for one in tree_iter((call.arguments, call.named)) if isinstance(one, Tensor)), None)
    return given is None or given.itemsize >= 4


def _as_call(call: OperatorCall | Node) -> OperatorCall:
    """Returns the call of a node with the traced values; the target is ``None`` unless the node calls a function."""
    if isinstance(call, OperatorCall):
        return call
    target = call.target if call.op == "call_function" else None
    arguments, named = map_arg((call.args, call.kwargs), lambda node: node.meta.get("val"))
    return OperatorCall(target, arguments, named, call.meta.get("val"))


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, Tensor) and value.layout is torch.strided]


def _is_causal(call: OperatorCall) -> bool:
    if isinstance(call.target, HigherOrderOperator):
        return False
    for place, one in enumerate(schema_of(call.target).arguments):
        if one.name == "is_causal":
            given = call.arguments[place:] or (call.named.get(one.name, one.default_value),)
            return given[0] is True
    return False


def _grouped_mm(left: Sequence[int], right: Sequence[int], *_: object, out_val: object = None, **__: object) -> int:
    """Returns the FLOP of one product for each group; groups are disjoint."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _flex_attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
    """Returns the FLOP of attention without a mask, because only the values of a block mask tell how much it skips."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # torch declares no types for it


def _flex_attention_backward(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], out: Sequence[int], *_: object, **__: object
) -> int:
    return int(sdpa_backward_flop_count(out, query, key, value))  # type: ignore[no-untyped-call]  # as above


#: Formulas that torch lacks or defines for tensors instead of shapes, by operator name.
_FORMULAS: dict[str, Callable[..., int]] = {
    "_grouped_mm": _grouped_mm,
    "flex_attention": _flex_attention,
    "flex_attention_backward": _flex_attention_backward,
}


@cache
def _formula(target: Any) -> Any:
    if isinstance(target, HigherOrderOperator):
        return _FORMULAS.get(target.__name__)
    # Not every torch version counts the CPU operator of an attention; the formula is that of the other devices.
    same = getattr(torch.ops.aten, _name(target).replace("_for_cpu", ""), None)
    return flop_registry.get(target.overloadpacket) or flop_registry.get(same) or _FORMULAS.get(_name(target))


@cache
def returns_views(target: object) -> bool:
    """Returns whether ``target`` is an operator that returns only views of its inputs."""
    aliases = [one.alias_info for one in schema.returns] if (schema := schema_of(target)) is not None else []
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _name(target: Any) -> str:
    name: str = schema_of(target).name.partition("::")[2]
    return name


def bandwidth_of(device: torch.device, direction: Direction, text: str) -> float:
    """Returns the bytes/s between ``device`` and the first tier of the configuration ``text``.

    Measured once; a slow link is assumed if the measurement fails.
    """
    try:
        with without_dispatch_modes():
            offloader: DeviceOffloader = contexts.serving(text, is_hooked=True).offloader_of(device)
            if offloader.tiers[0].name == "disk":
                link = disk_link(OffloadConfig.from_text(text).disk_path)
            else:
                link = link_of(offloader.runtime, device)
            return (link.out if direction is Direction.OUT else link.back).median
    except (OffloadError, MemoryError, RuntimeError):  # no memory to measure: compile anyway
        return UNKNOWN_BANDWIDTH


@dataclass(frozen=True)
class Step:
    """Forward and backward of a graph as one list of operators."""

    nodes: Sequence[Node]
    forward_ops: int
    inputs: Collection[Node]
    """Values that exist for the whole step."""
    tangents: Collection[Node]
    """Values that exist from the beginning of backward on."""
    returned: Collection[Node]
    """Values that are kept once made."""
    storage_of: Callable[[Node], object | None]
    """Returns a key for the storage of a node, equal for nodes that share one, across forward and backward."""


@dataclass(frozen=True)
class Movable:
    """A storage that may move."""

    bases: tuple[Node, ...]
    """The sources of its transfers."""
    moved_bytes: int
    forced: bool = False
    """Whether the storage moves regardless of the planner."""


def step_of_pair(forward: Graph, backward: Graph, num_outputs: int) -> Step:
    saved = {node.name: node for node in outputs_of(forward)[num_outputs:] if isinstance(node, Node)}
    saved.update((node.name, node) for node in forward.find_nodes(op="placeholder"))
    arrived = {node: saved.get(node.name) for node in backward.find_nodes(op="placeholder")}
    same = {storage_of(node): storage_of(one) for node, one in arrived.items() if one is not None}

    def named(node: Node) -> object | None:
        key = storage_of(node)
        if key is None or node.graph is forward:
            return key
        # A recomputed value has the fake storage of the forward value, but is another storage.
        return same.get(key, ("backward", key))

    ours = [node for node in forward.nodes if node.op == "call_function"]
    theirs = [node for node in backward.nodes if node.op == "call_function"]
    return Step(
        [*ours, *theirs],
        len(ours),
        [*_given(forward), *backward.find_nodes(op="get_attr")],
        [node for node, one in arrived.items() if one is None],
        [one for one in [*outputs_of(forward)[:num_outputs], *outputs_of(backward)] if isinstance(one, Node)],
        cache(named),
    )


def step_of_joint(graph: Graph, boundary: Node) -> Step:
    nodes = [node for node in graph.nodes if node.op == "call_function" or node is boundary]
    return Step(nodes, nodes.index(boundary), _given(graph), (), graph.output_node().all_input_nodes, cache(storage_of))


def _given(graph: Graph) -> list[Node]:
    return [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]


def is_whole(forward: Graph, backward: Graph, num_outputs: int, parameters: Iterable[int]) -> bool:
    """Returns whether two graphs are a whole step: the forward returns a loss, and no input is an activation.

    Args:
        parameters: positions of the forward inputs that are parameters and buffers.
    """
    saved = {node.name for node in outputs_of(forward)[num_outputs:] if isinstance(node, Node)}
    inputs = forward.find_nodes(op="placeholder")
    known = saved | {node.name for node in inputs}
    tangents = [tensor_of(node) for node in backward.find_nodes(op="placeholder") if node.name not in known]
    if not any(one is not None and hint(one.numel()) == 1 for one in tangents):
        return False
    owned = set(parameters)
    gradients = outputs_of(backward)
    return not any(one is not None and number not in owned for number, one in enumerate(gradients[: len(inputs)]))


@dataclass
class _Life:
    """The operators that make a storage, use it last in forward, and first and last in backward; -1 for none."""

    nbytes: int
    made: int
    in_forward: int = -1
    first_in_backward: int = -1
    in_backward: int = -1


def problem_of(
    step: Step, movable: Mapping[object, Movable], windows: Windows, machine: Machine
) -> tuple[Problem, list[object]]:
    """Returns the planner's problem for a step, and the keys of its storages."""
    count, place = len(step.nodes), {node: op for op, node in enumerate(step.nodes)}
    lives = _lives(step, place)
    returned = {step.storage_of(node) for node in step.returned}
    inputs = {step.storage_of(node): value for node in step.inputs if (value := tensor_of(node)) is not None}
    spans = [(nbytes_of(value), 0, count) for name, value in inputs.items() if name is not None]
    storages: list[tuple[Storage, object]] = []
    for name, life in lives.items():
        one = movable.get(name)
        if one is None:
            until = count if name in returned else max(life.made, life.in_forward, life.in_backward) + 1
            spans.append((life.nbytes, life.made, until))
            continue
        saved = max(place[base] for base in one.bases) + 1
        unpacked = life.first_in_backward if life.first_in_backward >= 0 else count
        dropped = life.in_backward + 1 if life.in_backward >= 0 else count
        freed = max(life.in_forward + 1, saved)
        places = life.made, freed, saved, unpacked, dropped
        storages.append((Storage(life.nbytes, one.moved_bytes, 0, *places, one.forced), name))
    storages.sort(key=lambda pair: pair[0].saved)
    names = [name for _, name in storages]
    ops = tuple(Op(node.name, 0, flops_of(node), traffic_of(node), is_single(node)) for node in step.nodes)
    sizes = tuple(one for one, _ in storages)
    program = Program(("",), ops, step.forward_ops, (), (), sizes, tuple(live_bytes(count, spans)))
    # Fused kernels have no launch for each operator.
    seconds = program.seconds(replace(machine, launch_seconds=0.0))
    links, room = (machine.out, machine.back), (windows.inflight, windows.prefetch)
    return Problem(program, seconds, *links, *room, ordered=True), names


def _lives(step: Step, place: Mapping[Node, int]) -> dict[object, _Life]:
    lives: dict[object, _Life] = {}
    for node in step.tangents:
        name, value = step.storage_of(node), tensor_of(node)
        if name is not None and value is not None:
            lives.setdefault(name, _Life(nbytes_of(value), step.forward_ops))
    given = {step.storage_of(node) for node in step.inputs}
    for op, node in enumerate(step.nodes):
        for name in {step.storage_of(one) for one in (node, *node.all_input_nodes)} - given:
            life = lives.get(name)
            if life is None and name is not None and name == step.storage_of(node):
                # Each result of an operator with several results is a later node.
                maker, value = node.args[0] if node.target is operator.getitem else node, node.meta["val"]
                made = place.get(maker, op) if isinstance(maker, Node) else op
                life = lives[name] = _Life(nbytes_of(value), made)
            if life is None:
                continue
            if op < step.forward_ops:
                life.in_forward = op
            else:
                life.in_backward = op
                life.first_in_backward = op if life.first_in_backward < 0 else life.first_in_backward
    return lives


def decided(
    step: Step,
    movable: Mapping[object, Movable],
    windows: Windows,
    config: OffloadConfig,
    budget: int | None,
    fraction: float | None,
) -> tuple[frozenset[object], Outcome]:
    """Returns the storages that the planner keeps, and its prediction.

    Args:
        budget: bytes of device memory that the step may take.
        fraction: the fraction of the movable bytes that moves, if a plan sets it.
    """
    device, text = next(iter(movable.values())).bases[0].meta["val"].device, config.to_text()
    out, back = (bandwidth_of(device, direction, text) for direction in (Direction.OUT, Direction.IN))
    problem, names = problem_of(step, movable, windows, replace(machine_of(device), out=out, back=back))
    chooser = PolicySearch(problem)
    if fraction is not None:
        found = chooser.share(fraction)
    else:
        found = chooser.hidden() if config.is_free else chooser.nothing
        if budget is not None and found.peak_bytes > budget:
            found = chooser.within(budget)
    return frozenset(name for name, one in zip(names, found.outcome.moves, strict=True) if not one), found.outcome
