"""Decides which values move between forward and backward of a graph, and gives each kept value its reason.

Pure functions of the metadata on the nodes. Values are grouped by storage, whatever nodes made them. Users mark single
values in these ways:

| request | source |
| --- | --- |
| a user's pass: ``node.meta["should_offload"] = True`` or ``False`` | the node |
| selective checkpointing: ``CheckpointPolicy.MUST_CPU_OFFLOAD``, ``PREFER_CPU_OFFLOAD`` | ``node.meta["recompute"]`` |
| ``eager_offload.keep(tensor)``, ``eager_offload.prefer_offload(tensor)`` | the (fake) storage of the tensor |
| ``with eager_offload.no_offload():`` | ``node.meta["custom"]`` of each node traced inside |

A request for one value applies to all values of its storage. A request to keep overrides requests to move. Values that
are owned outside of the graph never move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import cast

from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from eager_offload.compile.decide import Movable, Step, decided, returns_views, step_of_pair
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
from eager_offload.planning.measuring import memory_of
from eager_offload.planning.simulate import Outcome
from eager_offload.stats import KeepReason
from eager_offload.torch_private.calls import schema_of
from eager_offload.torch_private.memory import hint, is_plain_fake, span_of


class OffloadPolicy(IntEnum):
    """A request for a value; the largest one of a storage counts."""

    NONE = 0
    MOVE_IF_LARGE = 1
    """Moves even if newest, but not if small."""
    MOVE = 2
    """Moves even if small or newest."""
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
    """Returns whether ``node`` was traced inside :func:`~eager_offload.no_offload` or outside the modules of ``only``,
    or is the backward of such a node."""
    notes = node.meta.get("custom")
    notes = notes if isinstance(notes, dict) else {}
    return bool(notes.get(REGION_NOTE) or (config.only and not notes.get(ONLY_NOTE)))


#: Address alignment in bytes that compilers may assume of a result.
_ALIGNMENT = 16
#: Declared to return views, but may copy.
_MAY_COPY = frozenset(f"aten::{name}" for name in ("contiguous", "flatten", "reshape", "reshape_as", "to"))


@dataclass(frozen=True)
class Group:
    """Saved values that move in one transfer."""

    base: Node
    """The forward node whose bytes are copied; they contain the bytes of all members."""
    members: tuple[Node, ...]
    """The saved values in save order; may contain ``base``."""
    nbytes: int
    gathered: bool = False
    """Whether only the elements of ``base``, a view with gaps and the only member, are copied, without the gaps."""
    counted: bool = False
    """Whether backward reads elements by an absolute offset into the storage, which ``base`` then covers."""


@dataclass(frozen=True)
class Choice:
    groups: tuple[Group, ...]
    windows: Windows = field(compare=False)
    kept: dict[Node, KeepReason] = field(default_factory=dict)
    outcome: Outcome | None = None
    """The planner's prediction, if the planner decided."""


def choose(
    forward: Graph,
    backward: Graph,
    num_outputs: int,
    config: OffloadConfig,
    *,
    fraction: float | None = None,
    whole: bool = True,
) -> Choice:
    """Chooses among the values that a partitioned forward saves for its backward.

        forward                                   choice
        a = mm(x, w)                              a, b: move as one group with base a
        b = view(a)                               out:  kept, alive (an output)
        c = slice(d)                              c:    moves gathered if it is a small part of d
        return out, w, a, b, c, out               w:    kept, parameter (an input)

    The graphs are not changed.

    Args:
        forward: returns ``num_outputs`` outputs of the user, mutated inputs included, then the saved values.
        backward: takes the saved values as inputs, under the names of their forward nodes.
        num_outputs: the number of user outputs of ``forward``.
        config: decides by ``min_bytes``, ``keep_last_bytes``, the windows, ``device_budget`` and ``policy``.
        fraction: the fraction of the movable bytes that a plan moves; ``None`` without a plan.
        whole: whether the two graphs are a whole step. With a budget, all movable values of a part of a step move.

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
    """Keeps all values that ``forward`` saves, because a pass failed."""
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
    """Chooses among saved values of ``graph``.

    Args:
        users: the backward users of each saved value. Users in a ``no_offload`` region keep their inputs.
        order: positions of the users.
        returned: the values that the user gets.
        counted: saved values that the backward reads by absolute offsets.
        step: builds the step for the planner.
        has_regions: whether regions hide aliases; then all values are kept.
        fraction, whole: as in :func:`choose`.
    """
    _require_aliases(graph)
    inputs = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    owned = {key for node in inputs if (key := storage_of(node)) is not None}
    alive = {key for node in returned if (key := storage_of(node)) is not None}
    alive |= {key for node in graph.nodes for key in written_by(node)}
    alive |= undeclared_aliases(graph)
    devices = {value.device.type for node in users if (value := tensor_of(node)) is not None}
    # CPU values in a graph for an accelerator, or in a process with one, are the host's own.
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
            kept[node] = KeepReason.DEVICE  # host state; for Inductor the fake one is real and fits no other operator
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
        if moving.issuperset(members):  # otherwise a kept member would hold the storage
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
        for group in free:  # in the order in which backward needs them
            if group.nbytes > room:
                break
            room -= group.nbytes
            staying.append(group)
    elif movable and (whole or budget is None):  # [Note: budgets of graphs]
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
    """Returns the transfers for the saved ``members`` of a storage, given all values ``sharing`` the storage.

    One transfer if a value spans all members; one for each member if the members are a small part of the storage, or
    their offsets are known only at run time. Members that fit neither are left out. With ``counted`` the whole storage
    moves, because reloaded values must be views of a whole storage.
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
    """Returns the node whose bytes are copied for ``members``; ``None`` if there is none.

    Views are rebuilt by their offset in the storage, so their base covers the storage. A saved value that is its own
    base needs no view, which is cheaper with dynamic shapes.
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
    """Returns the first of ``candidates`` that covers the storage, if each of ``members`` can be rebuilt as a view of
    it."""
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
    """Returns whether the elements of ``value`` can be copied without the rest of the storage, and reloaded aligned."""
    if not _is_aligned(value):
        return False
    if span_of(value) <= hint(value.numel()) * value.itemsize:
        return True  # no gaps
    strides = value.stride()
    return all(isinstance(stride, int) for stride in strides) and all(
        stride != 0 or hint(size) == 1 for size, stride in zip(value.size(), strides, strict=True)
    )


def _is_lazy(value: Tensor) -> bool:
    return value.is_conj() or value.is_neg()


def _is_generator_state(node: Node) -> bool:
    """Returns whether ``node`` is a random-generator state, saved for a recomputation."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node) or getattr(source.target, "__name__", "") != "run_and_save_rng_state":
        return False
    return bool(node.args[1] == 0)  # later items are the operator's results


def _is_aligned(value: Tensor) -> bool:
    offset = value.storage_offset()
    return isinstance(offset, int) and offset * value.itemsize % _ALIGNMENT == 0


def _require_aliases(graph: Graph) -> None:
    """Raises if the graph was traced with real tensors, which do not tell which values are views."""
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
