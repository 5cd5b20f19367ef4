"""What the saved-tensor hooks decide while AOTAutograd puts them into its graphs."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.fx import Graph, Node

from eager_offload.compile.graphs import outputs_of
from eager_offload.compile.insert import HOST, PLANNED, region_of
from eager_offload.compile.log import log_choice
from eager_offload.compile.select import choose
from eager_offload.config import OffloadConfig

__all__ = ["NOTHING", "Plan", "plan_for", "same_names"]


class Plan(NamedTuple):
    """What the hooks move of one graph."""

    names: frozenset[str]
    """Of the values that move."""
    first: str | None
    """The one that is asked about first, and so tells what stays."""
    region: str


def plan_for(node: Node, forward: Graph, backward: Graph, text: str) -> Plan | None:
    """What moves of what ``forward`` saves for ``backward``; ``None`` if the value ``node`` does not.

    AOTAutograd asks for one value after another, and puts in what it was told before it asks for the next. So all of
    them are looked at when it asks for the first.
    """
    if node.meta.get(HOST):
        return None  # it was moved when this graph was partitioned
    notes: dict[str, Any] = cast(Any, forward.owning_module).meta
    plan: Plan | None = notes.get(PLANNED)
    if plan is None:
        same_names(forward, backward)
        outputs = outputs_of(forward)
        names = {placeholder.name for placeholder in backward.find_nodes(op="placeholder")}
        # What is saved comes behind the user's outputs, each once, under the names of the backward's inputs. An output
        # of the user may be saved too, and comes twice.
        count = len(outputs) - len(names & {one.name for one in outputs if isinstance(one, Node)})
        choice = choose(forward, backward, count, OffloadConfig.from_text(text), each_alone=True)
        log_choice(choice)
        moving = {member.name for group in choice.groups for member in group.members}
        asked = (one.name for one in outputs[count:] if isinstance(one, Node))
        plan = notes[PLANNED] = Plan(
            frozenset(moving), next((name for name in asked if name in moving), None), region_of(choice)
        )
    return plan if node.name in plan.names else None


def same_names(forward: Graph, backward: Graph) -> None:
    """Gives saved states of random number generators the names under which ``backward`` takes them.

    AOTAutograd looks for a saved value by its name, and its partitioner calls these differently on both sides.
    """
    states = [one for one in backward.find_nodes(op="placeholder") if one.name.startswith("rng_state_output_")]
    saved = [one for one in outputs_of(forward) if isinstance(one, Node) and isinstance(one.meta.get("val"), Tensor)]
    for state, arrived in zip(saved[-len(states) :] if states else (), states, strict=True):
        if state.name != arrived.name:
            state._rename(arrived.name)


#: Of a graph that was partitioned with offloading in mind: the hooks have nothing to add.
NOTHING = Plan(frozenset(), None, "")
