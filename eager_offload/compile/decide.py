"""Which of the storages that may leave a graph do: a graph as a ``Program``, for which the planner chooses.

[Note: what a budget bounds in a graph]
The bytes of one forward and its backward, as the two graphs say: inputs and parameters all of the time, gradients and
outputs from where they are made, and every value from where it is made to its last use, as if operators ran one by one.
A compiler that melts operators together takes less. What lives elsewhere no graph knows: an optimizer's states, other
models, what a process has besides. And neither does a part of a step know what the other parts keep; nor may it take
what is left over, since those behind it are not there yet. So the budget is for graphs that are a whole step: they are
given no activations, and return a loss. Of all others everything moves that may, which is the least that they can take.
What the link hides every graph knows for itself: it waits for its own transfers before it ends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, cast

import torch
from torch.fx import Graph, Node

from eager_offload.compile.cost import bandwidth_of, flops_of, free_bytes, is_single, traffic_of
from eager_offload.compile.graphs import nbytes_of, outputs_of, returned_by, storage_of, tensor_of
from eager_offload.config import OffloadConfig
from eager_offload.core.schedule import Windows
from eager_offload.planning.machine import Machine, machine_of
from eager_offload.planning.program import Op, Problem, Program, Storage, living
from eager_offload.planning.replay import Chooser, Outcome
from eager_offload.runtime.base import Direction
from eager_offload.torch_private.memory import hint


@dataclass(frozen=True)
class Step:
    """Forward and backward of a graph, operator by operator."""

    nodes: Sequence[Node]
    forward_ops: int
    """How many of them are forward's."""
    inputs: Collection[Node]
    """What is there from the beginning to the end."""
    tangents: Collection[Node]
    """What is there from the beginning of backward on."""
    returned: Collection[Node]
    """What stays when it was made."""
    storage_of: Callable[[Node], object | None]
    """Names the storage of a node: equal for those that share one, in forward and in backward."""


@dataclass(frozen=True)
class Movable:
    """A storage that may leave."""

    bases: tuple[Node, ...]
    """What its transfers take."""
    moved_bytes: int
    """That travel."""
    forced: bool = False
    """Whether it leaves, whatever is decided."""


class Aim(NamedTuple):
    """What a decision is made for; all that may move does where it says nothing."""

    budget: int | None
    """Bytes of the device that the step may take."""
    is_free: bool
    """Whether only what the link hides moves."""
    fraction: float | None
    """The part of the bytes that moves, where that is known."""

    @classmethod
    def of(cls, config: OffloadConfig, fraction: float | None) -> Aim | None:
        """Returns what ``config`` and a plan's fraction say; ``None`` where that is how many of the newest stay."""
        budget = config.device_budget
        if budget is None and not config.is_free and fraction is None:
            return None
        return cls(
            free_bytes(config.to_text()) if budget == "auto" else cast("int | None", budget), config.is_free, fraction
        )


class Decided(NamedTuple):
    """What comes of a decision."""

    stay: frozenset[object]
    """The storages that stay."""
    outcome: Outcome


def step_of_pair(forward: Graph, backward: Graph, num_outputs: int) -> Step:
    """The step of two graphs that were split."""
    saved = {node.name: node for node in outputs_of(forward)[num_outputs:] if isinstance(node, Node)}
    saved.update((node.name, node) for node in forward.find_nodes(op="placeholder"))
    arrived = {node: saved.get(node.name) for node in backward.find_nodes(op="placeholder")}
    same = {storage_of(node): storage_of(one) for node, one in arrived.items() if one is not None}

    def named(node: Node) -> object | None:
        key = storage_of(node)
        if key is None or node.graph is forward:
            return key
        # What backward computes again is traced as what forward computes, and is another one.
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
    """The step of one graph whose backward begins with ``boundary``."""
    nodes = [node for node in graph.nodes if node.op == "call_function" or node is boundary]
    return Step(nodes, nodes.index(boundary), _given(graph), (), returned_by(graph), cache(storage_of))


def _given(graph: Graph) -> list[Node]:
    return [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]


def is_whole(forward: Graph, backward: Graph, num_outputs: int, parameters: Iterable[int]) -> bool:
    """Whether two graphs are a whole step: a loss is returned, and no activation is given.

    Args:
        parameters: which of forward's inputs are parameters and buffers.
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
    """When a storage is made and used, by operator; -1 for never."""

    nbytes: int
    made: int
    in_forward: int = -1
    first_in_backward: int = -1
    in_backward: int = -1

    def touch(self, op: int, *, is_backward: bool) -> None:
        if not is_backward:
            self.in_forward = op
            return
        self.in_backward = op
        if self.first_in_backward < 0:
            self.first_in_backward = op


def problem_of(
    step: Step, movable: Mapping[object, Movable], windows: Windows, machine: Machine
) -> tuple[Problem, list[object]]:
    """The step as numbers.

    Args:
        movable: by their names, the storages that may leave.
        windows: those in force.
        machine: how long operators and transfers take.

    Returns:
        It, and what names each of its storages.
    """
    count, place = len(step.nodes), {node: op for op, node in enumerate(step.nodes)}
    lives = _lives(step, place)
    returned = {step.storage_of(node) for node in step.returned}
    spans: list[tuple[int, int, int]] = []
    inputs = {step.storage_of(node): value for node in step.inputs if (value := tensor_of(node)) is not None}
    spans += [(nbytes_of(value), 0, count) for name, value in inputs.items() if name is not None]
    storages: list[tuple[Storage, object]] = []
    for name, life in lives.items():
        one = movable.get(name)
        if one is None:
            until = count if name in returned else max(life.made, life.in_forward, life.in_backward) + 1
            spans.append((life.nbytes, life.made, until))
            continue
        saved = max(place[base] for base in one.bases) + 1
        asked = life.first_in_backward if life.first_in_backward >= 0 else count
        dropped = life.in_backward + 1 if life.in_backward >= 0 else count
        freed = max(life.in_forward + 1, saved)
        places = life.made, freed, saved, asked, dropped
        storages.append((Storage(life.nbytes, one.moved_bytes, 0, *places, one.forced), name))
    storages.sort(key=lambda pair: pair[0].saved)
    names = [name for _, name in storages]
    ops = tuple(Op(node.name, 0, flops_of(node), traffic_of(node), is_single(node)) for node in step.nodes)
    program = Program(
        ("",), ops, step.forward_ops, (), (), tuple(one for one, _ in storages), tuple(living(count, spans))
    )
    problem = Problem(
        program,
        # A compiler's kernels are not launched one for each of these operators.
        program.seconds(replace(machine, launch_seconds=0.0)),
        machine.out,
        machine.back,
        windows.inflight,
        windows.prefetch,
        ordered=True,
    )
    return problem, names


def _lives(step: Step, place: Mapping[Node, int]) -> dict[object, _Life]:
    """By their names, when storages that are not given are made and used."""
    lives: dict[object, _Life] = {}
    for node in step.tangents:
        name, value = step.storage_of(node), tensor_of(node)
        if name is not None and value is not None:
            lives.setdefault(name, _Life(nbytes_of(value), step.forward_ops))
    given = {step.storage_of(node) for node in step.inputs}
    for op, node in enumerate(step.nodes):
        is_backward = op >= step.forward_ops
        for name in {step.storage_of(one) for one in (node, *node.all_input_nodes)} - given:
            if name in lives:
                lives[name].touch(op, is_backward=is_backward)
            elif name is not None and (value := tensor_of(node)) is not None and name == step.storage_of(node):
                # Of an operator with several results each is a node behind it.
                maker = node.args[0] if node.target is operator.getitem else node
                lives[name] = _Life(nbytes_of(value), place.get(maker, op) if isinstance(maker, Node) else op)
                lives[name].touch(op, is_backward=is_backward)
    return lives


def decided(problem: Problem, names: Sequence[object], aim: Aim) -> Decided:
    """Returns the planner's decision for ``aim``, which says something."""
    chooser = Chooser(problem)
    if aim.fraction is not None:
        found = chooser.share(aim.fraction)
    else:
        found = chooser.hidden() if aim.is_free else chooser.nothing
        if aim.budget is not None and found.peak_bytes > aim.budget:
            found = chooser.within(aim.budget)
    stay = frozenset(name for name, one in zip(names, found.outcome.moves, strict=True) if not one)
    return Decided(stay, found.outcome)


def machine_here(device: torch.device, text: str) -> Machine:
    """``device``, and the link to the tier that a graph of the configuration ``text`` fills first."""
    out, back = (bandwidth_of(device, direction, text) for direction in (Direction.OUT, Direction.IN))
    return replace(machine_of(device), out=out, back=back)
