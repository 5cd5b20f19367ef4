"""Offloading in a joint graph of forward and backward, as ``make_fx`` and AOTAutograd trace it.

Nodes before the *boundary* are forward, the boundary and later nodes are backward. Any node may be the boundary: it
decides which values count as saved, and results are the same for each.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from eager_offload.compile.decide import step_of_joint
from eager_offload.compile.graphs import (
    calls_regions,
    copied,
    counted_from_the_beginning,
    is_static,
    positions,
    same_geometry,
)
from eager_offload.compile.insert import (
    Geometry,
    geometry_of,
    insert_offload,
    insert_reload,
    on_nodes,
    region_of,
    view_over,
)
from eager_offload.compile.select import Choice, choose_among
from eager_offload.config import OffloadConfig
from eager_offload.errors import OffloadError
from eager_offload.torch_private.memory import tree_iter


def boundary_of(graph: Graph, num_outputs: int) -> Node:
    """Returns the first node of the backward.

        x = mm(a, w)                  forward
        loss = sum(x)                 forward: the last node that the first output needs
        one = ones_like(loss)         <- the boundary
        ...
        return loss, grad

    Args:
        num_outputs: the number of outputs, counted flat from the first, that belong to the forward.

    Raises:
        OffloadError: the graph has no backward.
    """
    order, results = positions(graph), list(tree_iter(graph.output_node().args[0]))
    last = max((order[node] for node in results[:num_outputs] if isinstance(node, Node)), default=-1)
    behind = (node for node in order if node.op == "call_function" and order[node] > last)
    found = next(behind, None)
    if found is None:
        raise OffloadError(
            f"no node of the graph comes after its first {num_outputs} outputs: give the number of outputs "
            "of the forward, boundary_of(graph, num_outputs=1), or pass the first node of the backward as the boundary"
        )
    return found


def choose_joint(graph: Graph, boundary: Node, config: OffloadConfig) -> Choice:
    """Chooses among the values that the forward of a joint graph saves for its backward.

        x = mm(a, w)                  moves; a and w are inputs
        loss = sum(x)                 is kept (alive): an output
        g = mul(loss, x)              <- the boundary
        return loss, g

    The graph is not changed. A joint graph does not tell which inputs require grad, so no value is rounded.

    Args:
        boundary: the first node of the backward; see :func:`boundary_of`.
        config: as in :func:`~eager_offload.compile.choose`.

    Raises:
        OffloadError: the graph does not tell which values share a storage.
    """
    order, output = positions(graph), graph.output_node()
    nodes, begin = list(order), order[boundary]
    users = {node: [one for one in node.users if order[one] >= begin and one is not output] for node in nodes[:begin]}
    return choose_among(
        graph,
        {node: some for node, some in users.items() if some},
        order,
        output.all_input_nodes,
        config,
        counted=counted_from_the_beginning(nodes[begin:]),
        step=lambda: step_of_joint(graph, boundary),
        has_regions=calls_regions(nodes),
    )


def insert_synchronous_joint(graph: Graph, boundary: Node, choice: Choice, config: OffloadConfig) -> Graph:
    """Returns a copy of ``graph`` that moves the chosen values, with one blocking operation each way.

        x = mm(a, w)                              x = mm(a, w)
        loss = sum(x)                             host = offload(x)
        g = mul(t, x)                             loss = sum(x)
        return loss, g                            again = reload(host)
                                                  g = mul(t, again)
                                                  return loss, g

    An offload is inserted directly after its source, a reload directly before its first use in backward.

    Args:
        boundary: the first node of the backward.
        choice: the result of :func:`choose_joint` for this graph.
        config: names the ``Offload`` that does the work: the active one with this configuration when the graph runs.
    """
    graph, became = copied(graph)
    choice = on_nodes(choice, became.__getitem__)
    order = positions(graph)
    begin = order[became[boundary]]
    text = config.to_text()
    for number, group in enumerate(choice.groups):
        users = {member: [user for user in member.users if order.get(user, -1) >= begin] for member in group.members}
        geometries: dict[Node, Geometry | None] = dict.fromkeys(group.members)
        for member in group.members:
            value = member.meta["val"]
            if not same_geometry(value, group.base.meta["val"]):
                with graph.inserting_before(member.next):  # only its sizes are read later: frees the member
                    geometries[member] = geometry_of(graph, None if is_static(value) else member, value)
        host = insert_offload(graph, group, text, choice.windows.inflight, None if number else region_of(choice))
        first = min((user for some in users.values() for user in some), key=order.__getitem__)
        with graph.inserting_before(first):
            reload = insert_reload(graph, group, host, text, choice.windows.prefetch)
            again = {
                member: reload if geometry is None else view_over(graph, reload, group, member.meta["val"], geometry)
                for member, geometry in geometries.items()
            }
        for member, some in users.items():
            for user in some:
                user.replace_input_with(member, again[member])
    graph.lint()
    return graph
