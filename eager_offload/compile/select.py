"""Which values of a graph move between forward and backward, and the reason for each that stays.

Pure functions of the metadata that the tracer left on the nodes. What counts is whose storage a value shares, never
what kind of node made it. And what a user has asked of single values:

| how it is asked | where it is found |
| --- | --- |
| a pass of the user's: ``node.meta["should_offload"] = True`` or ``False`` | there |
| selective checkpointing: ``CheckpointPolicy.MUST_CPU_OFFLOAD``, ``PREFER_CPU_OFFLOAD`` | ``node.meta["recompute"]`` |
| ``eager_offload.keep(tensor)``, ``eager_offload.prefer_offload(tensor)`` | on the storage that stands for the tensor |
| ``with eager_offload.no_offload():`` | ``node.meta["custom"]`` of every node that was traced inside |

What is asked of one value counts for all that share its storage. What asks for it to stay wins over what asks for it to
move, and neither moves what is owned outside of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import cast

from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from eager_offload.compile.decide import (
    Movable,
    Step,
    decided,
    returns_views,
    step_of_pair,
)
from eager_offload.compile.graphs import (
    calls_regions,
    counted_from_the_beginning,
    covers_its_storage,
    nbytes_of,
    outputs_of,
    positions,
    same_geometry,
    storage_of,
    tensor_of,
    undeclared_aliases,
    written_by,
)
from eager_offload.compile.keys import free_bytes
from eager_offload.config import OffloadConfig
from eager_offload.core.schedule import Windows
from eager_offload.core.selection import covers_little, keeps_cpu_tensors, part_of_storage
from eager_offload.errors import OffloadError
from eager_offload.marks import ONLY_NOTE, REGION_NOTE, Mark, mark_of
from eager_offload.planning.machine import memory_of
from eager_offload.planning.simulate import Outcome
from eager_offload.stats import KeepReason
from eager_offload.torch_private.calls import schema_of
from eager_offload.torch_private.memory import hint, is_plain_fake, span_of


class OffloadPolicy(IntEnum):
    """What was asked of a value; of those that share a storage the largest counts."""

    NONE = 0
    MOVE_IF_LARGE = 1
    """Even if it is the newest, but not if it is small."""
    MOVE = 2
    """Even if it is small or the newest."""
    STAY = 3


_POLICIES: dict[object, OffloadPolicy] = {
    CheckpointPolicy.MUST_CPU_OFFLOAD: OffloadPolicy.MOVE,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: OffloadPolicy.MOVE_IF_LARGE,
}
_MARKS = {Mark.KEEP: OffloadPolicy.STAY, Mark.PREFER: OffloadPolicy.MOVE}


def policy_of(node: Node) -> OffloadPolicy:
    policy = _POLICIES.get(node.meta.get("recompute"), OffloadPolicy.NONE)
    should = node.meta.get("should_offload")
    if should is not None:
        policy = max(policy, OffloadPolicy.MOVE if should else OffloadPolicy.STAY)
    value = tensor_of(node)
    mark = None if value is None else mark_of(value.untyped_storage())
    return policy if mark is None else max(policy, _MARKS[mark])


def is_in_region(node: Node, config: OffloadConfig) -> bool:
    """Whether ``node`` was traced inside of :func:`~eager_offload.no_offload`, or is the backward of what was; or
    outside of the modules of ``only``."""
    notes = node.meta.get("custom")
    notes = notes if isinstance(notes, dict) else {}
    return bool(notes.get(REGION_NOTE) or (config.only and not notes.get(ONLY_NOTE)))


#: What a compiler may take for granted about the address of a result, in bytes.
_ALIGNMENT = 16
#: Declared to return views, which they do if they can.
_MAY_COPY = frozenset(f"aten::{name}" for name in ("contiguous", "flatten", "reshape", "reshape_as", "to"))


@dataclass(frozen=True)
class Group:
    """Saved values that move in one transfer."""

    base: Node
    """The forward's node whose bytes travel: they span all of the members'."""
    members: tuple[Node, ...]
    """The saved values, in the order in which they were saved; ``base`` may be one of them."""
    nbytes: int
    """That travel."""
    gathered: bool = False
    """Whether what lies between the elements of ``base``, a view with holes and the only member, stays behind."""
    counted: bool = False
    """Whether backward counts elements from the beginning of the storage, which ``base`` is then all of."""


@dataclass(frozen=True)
class Choice:
    """What moves, and what stays."""

    groups: tuple[Group, ...]
    windows: Windows = field(compare=False)
    """That the transfers keep to."""
    kept: dict[Node, KeepReason] = field(default_factory=dict)
    outcome: Outcome | None = None
    """What comes of it where the planner has decided."""


def choose(
    forward: Graph,
    backward: Graph,
    num_outputs: int,
    config: OffloadConfig,
    *,
    fraction: float | None = None,
    whole: bool = True,
) -> Choice:
    """Chooses among what a partitioned forward saves for its backward.

        forward                                   chosen
        a = mm(x, w)                              a, b: one group, whose base is a
        b = view(a)                               out:  kept, alive (an output)
        c = slice(d)                              c:    a gathered group, if it is a small part of d
        return out, w, a, b, c, out               w:    kept, parameter (an input)

    No graph is changed.

    Args:
        forward: its outputs are ``num_outputs`` of the user's (mutated inputs among them), then what is saved.
        backward: takes what is saved under the names of the forward's nodes.
        num_outputs: how many of the forward's outputs are the user's.
        config: ``min_bytes``, ``keep_last_bytes`` and the windows; ``device_budget`` and ``policy``.
        fraction: the part of the bytes that moves, where a plan says it.
        whole: whether the two graphs are a whole step. Of a part everything moves that may where there is a budget.

    Raises:
        OffloadError: the graph does not tell which values share a storage.
    """
    outputs = outputs_of(forward)
    uses = {node.name: node for node in backward.find_nodes(op="placeholder")}
    order = positions(backward)
    users = {
        node: list(uses[node.name].users) if node.name in uses else []
        for node in outputs[num_outputs:]
        if isinstance(node, Node)
    }
    counted = {node.name for node in counted_from_the_beginning(backward.nodes)}
    return choose_among(
        forward,
        users,
        order,
        [*outputs[:num_outputs], *outputs_of(backward)],
        config,
        counted=[node for node in users if node.name in counted],
        step=lambda: step_of_pair(forward, backward, num_outputs),
        has_regions=calls_regions([*forward.nodes, *backward.nodes]),
        fraction=fraction,
        whole=whole,
    )


def choose_nothing(forward: Graph, num_outputs: int) -> Choice:
    """All that ``forward`` saves behind its ``num_outputs`` of the user's stays, because a pass failed."""
    saved = (node for node in outputs_of(forward)[num_outputs:] if isinstance(node, Node))
    return Choice((), Windows(1, 1), {node: KeepReason.FAILED for node in saved if tensor_of(node) is not None})


def choose_among(
    graph: Graph,
    users: Mapping[Node, Collection[Node]],
    order: Mapping[Node, int],
    returned: Iterable[object],
    config: OffloadConfig,
    *,
    counted: Iterable[Node],
    step: Callable[[], Step],
    has_regions: bool,
    fraction: float | None = None,
    whole: bool = True,
) -> Choice:
    """The choice among saved values of ``graph``, of which the user gets what is ``returned``.

    Args:
        users: what uses each saved value in backward; those of a region keep what they use.
        order: where those stand.
        counted: of ``graphs.counted_from_the_beginning``.
        step: makes the graph's step, where the planner decides.
        has_regions: of ``graphs.calls_regions``; then all of them stay.
        fraction, whole: as of :func:`choose`.
    """
    _require_aliases(graph)
    inputs = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    owned = {key for node in inputs if (key := storage_of(node)) is not None}
    alive = {key for node in returned if (key := storage_of(node)) is not None}
    alive |= {key for node in graph.nodes for key in written_by(node)}
    alive |= undeclared_aliases(graph)
    devices = {value.device.type for node in users if (value := tensor_of(node)) is not None}
    # The host's own values, in a graph for an accelerator or beside one.
    cpu_stays = bool(devices - {"cpu", "meta"}) or keeps_cpu_tensors(config)
    kept: dict[Node, KeepReason] = {}
    by_storage: dict[object, list[Node]] = {}
    for node in users:
        value, key = tensor_of(node), storage_of(node)
        if value is None:
            continue
        if node.op in ("placeholder", "get_attr") or key in owned:
            kept[node] = KeepReason.PARAMETER
        elif key is None or not is_plain_fake(value):
            kept[node] = KeepReason.LAYOUT
        elif key in alive:
            kept[node] = KeepReason.ALIVE
        elif _is_generator_state(node):
            kept[node] = KeepReason.DEVICE  # the host's own; for Inductor, fake ones are real and fit no other operator
        elif value.device.type == "meta" or (value.device.type == "cpu" and cpu_stays):
            kept[node] = KeepReason.DEVICE
        else:
            by_storage.setdefault(key, []).append(node)
    sharing: dict[object, list[Node]] = {key: [] for key in by_storage}
    for node in graph.nodes:
        if node.op == "call_function" and (key := storage_of(node)) in sharing:
            sharing[key].append(node)
    from_the_beginning = {storage_of(node) for node in counted}
    firm: list[Group] = []
    free: list[Group] = []
    movable: dict[object, Movable] = {}
    for key, members in by_storage.items():
        policy = max(map(policy_of, sharing[key]), default=OffloadPolicy.NONE)
        in_region = has_regions or any(is_in_region(user, config) for node in members for user in users[node])
        reason = _reason_to_stay(members, policy, in_region, config)
        groups = _groups(members, sharing[key], counted=key in from_the_beginning) if reason is None else []
        is_firm = policy in (OffloadPolicy.MOVE, OffloadPolicy.MOVE_IF_LARGE)
        (firm if is_firm else free).extend(groups)
        moving = {node for group in groups for node in group.members}
        if moving.issuperset(members):  # else moving it frees nothing
            bases = tuple(group.base for group in groups)
            movable[key] = Movable(bases, sum(group.nbytes for group in groups), is_firm)
        kept.update({node: reason or KeepReason.LAYOUT for node in members if node not in moving})
    first = {
        group: min((order[user] for node in group.members for user in users[node]), default=len(order))
        for group in (*firm, *free)
    }
    free.sort(key=first.__getitem__)
    may_move, outcome = (*firm, *free), None
    windows = config.windows(
        lambda: memory_of(may_move[0].base.meta["val"].device) if may_move else None, [one.nbytes for one in may_move]
    )
    staying = list[Group]()
    given = config.device_budget
    budget = free_bytes(config.to_text()) if given == "auto" else cast("int | None", given)
    if given is None and not config.is_free and fraction is None:
        room = config.newest_bytes(windows.prefetch)
        for group in free:  # backward asks for the first ones first
            if group.nbytes > room:
                break
            room -= group.nbytes
            staying.append(group)
    elif movable and (whole or budget is None):  # [Note: what a budget bounds in a graph]
        stay, outcome = decided(step(), movable, windows, config, budget, fraction)
        staying = [one for one in free if storage_of(one.base) in stay]
    kept.update((node, KeepReason.NEWEST) for group in staying for node in group.members)
    moving_groups = (*firm, *(group for group in free if group not in staying))
    ordered = tuple(sorted(moving_groups, key=first.__getitem__))
    return Choice(ordered, windows, kept, outcome)


def _reason_to_stay(
    members: Sequence[Node], policy: OffloadPolicy, in_region: bool, config: OffloadConfig
) -> KeepReason | None:
    nbytes = nbytes_of(members[0].meta["val"])
    if nbytes == 0:
        return KeepReason.SMALL
    if policy is OffloadPolicy.STAY:
        return KeepReason.MARKED
    if in_region:
        return KeepReason.REGION
    if nbytes < config.size("min_bytes") and policy is not OffloadPolicy.MOVE:
        return KeepReason.SMALL
    return None


def _groups(members: Sequence[Node], sharing: Sequence[Node], *, counted: bool) -> list[Group]:
    """How the saved ``members`` of those ``sharing`` a storage travel.

    As one transfer where something spans them all; each on its own where they are a small part of it, or where their
    place in it is not known before the graph runs. What cannot be told at all is left out. What is ``counted`` has to
    be all of its storage, or views of that, when it is back.
    """
    storage_bytes = nbytes_of(members[0].meta["val"])
    values = {node: value for node in members if not _is_lazy(value := node.meta["val"])}
    own = {node: hint(value.numel()) * value.itemsize for node, value in values.items()}
    is_little = covers_little(sum(own.values()), storage_bytes)
    if not counted and is_little and all(map(_travels_alone, values.values())):
        return [_alone(node, own[node]) for node in values]
    groups, by_dtype = [], dict[object, list[Node]]()
    for node, value in values.items():
        by_dtype.setdefault(value.dtype, []).append(node)
    for some in by_dtype.values():
        base = (_whole_of if counted else _base_of)(some, [*values, *sharing])
        if base is not None:
            groups.append(Group(base, tuple(some), span_of(base.meta["val"]), counted=counted))
        elif not counted:
            groups += [_alone(node, own[node]) for node in some if _travels_alone(values[node])]
    return groups


def _base_of(members: Sequence[Node], candidates: Iterable[Node]) -> Node | None:
    """The node whose bytes travel for ``members``.

    Views are made anew by their place in the storage, so the base of one is all of the storage. One that is saved needs
    no view; which is cheaper, and matters most where shapes change.
    """
    whole = _whole_of(members, candidates)
    if whole is not None:
        return whole
    first, *others = members
    value = first.meta["val"]
    if _is_aligned(value) and all(same_geometry(value, other.meta["val"]) for other in others):
        return first
    return None


def _whole_of(members: Sequence[Node], candidates: Iterable[Node]) -> Node | None:
    """The first of ``candidates`` that is all of the storage, if every one of ``members`` can be a view of it."""
    dtype = members[0].meta["val"].dtype
    values = ((node, node.meta["val"]) for node in candidates)
    whole = next(
        (node for node, value in values if value.dtype == dtype and not _is_lazy(value) and covers_its_storage(value)),
        None,
    )
    return (
        whole if all(node is whole or isinstance(node.meta["val"].storage_offset(), int) for node in members) else None
    )


def _alone(node: Node, own_bytes: int) -> Group:
    area = part_of_storage(0, own_bytes, span_of(node.meta["val"]))
    return Group(node, (node,), area.moved, area.gathered)


def _travels_alone(value: Tensor) -> bool:
    """Whether the elements of ``value`` alone can travel, and come back to where kernels expect them."""
    if not _is_aligned(value):
        return False
    if span_of(value) <= hint(value.numel()) * value.itemsize:
        return True  # nothing lies between them
    strides = value.stride()
    return all(isinstance(stride, int) for stride in strides) and all(
        stride != 0 or hint(size) == 1 for size, stride in zip(value.size(), strides, strict=True)
    )


def _is_lazy(value: Tensor) -> bool:
    """Whether ``value`` is a conjugate or a negative that was not computed yet: its bytes are not its elements."""
    return value.is_conj() or value.is_neg()


def _is_generator_state(node: Node) -> bool:
    """Whether ``node`` is the state in which an operator found the random numbers, for when it is computed again."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node) or getattr(source.target, "__name__", "") != "run_and_save_rng_state":
        return False
    return bool(node.args[1] == 0)  # what comes behind it is what the operator returned


def _is_aligned(value: Tensor) -> bool:
    offset = value.storage_offset()
    return isinstance(offset, int) and offset * value.itemsize % _ALIGNMENT == 0


def _require_aliases(graph: Graph) -> None:
    """A graph that was traced with real tensors has forgotten which of them were views."""
    lost: Node | None = None
    for node in graph.nodes:
        if node.op != "call_function" or not node.args or not returns_views(node.target):
            continue
        if schema_of(node.target).name in _MAY_COPY:
            continue
        theirs, ours = storage_of(node.args[0]), storage_of(node)
        if theirs is not None and theirs is ours:
            return
        lost = node if lost is None and theirs is not None and ours is not None else lost
    if lost is not None:
        raise OffloadError(
            f"the graph does not tell which values share memory: {lost} is a view of {lost.args[0]}, but the values in "
            'their meta["val"] share no storage. Trace it with fake tensors: make_fx(f, tracing_mode="fake")'
        )
