"""What a user has asked of single values of a graph, and where tracing leaves it.

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

from enum import IntEnum

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from eager_offload.compile.graphs import tensor_of
from eager_offload.marks import REGION_NOTE, Mark, mark_of


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
    """What was asked of the value that ``node`` makes."""
    policy = _POLICIES.get(node.meta.get("recompute"), OffloadPolicy.NONE)
    should = node.meta.get("should_offload")
    if should is not None:
        policy = max(policy, OffloadPolicy.MOVE if should else OffloadPolicy.STAY)
    value = tensor_of(node)
    mark = None if value is None else mark_of(value.untyped_storage())
    return policy if mark is None else max(policy, _MARKS[mark])


def is_in_region(node: Node) -> bool:
    """Whether ``node`` was traced inside of :func:`~eager_offload.no_offload`, or is the backward of what was."""
    notes = node.meta.get("custom")
    return isinstance(notes, dict) and bool(notes.get(REGION_NOTE))
