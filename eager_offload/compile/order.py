"""Places the starts and waits of transfers in a graph whose operators run one after another.

insert_asynchronous   splits transfers: an offload's wait directly follows it, a reload's precedes the first use
prefetch              starts reloads just early enough to be hidden
sink_waits            moves the waits of offloads as late as the window allows
pin                   keeps this order when a compiler reorders
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.fx import Graph, Node

from eager_offload.compile import ops
from eager_offload.compile.decide import Estimate, bandwidth_of, counts_flops, roofline
from eager_offload.compile.graphs import CONVOLUTIONS, nbytes_of, on_a_copy, storage_of, tensor_of, written_by
from eager_offload.compile.insert import insert_asynchronous_in_place
from eager_offload.compile.keys import cache_key, key_of
from eager_offload.planning.measuring import machine_of
from eager_offload.runtime.base import Direction
from eager_offload.tiers.forking import ForkSafeLock, Living
from eager_offload.torch_private.calls import OpOverload
from eager_offload.torch_private.inductor import (
    CustomGraphPass,
    CustomInferenceAwareGraphPass,
    OptimizedModule,
    configure_inductor,
    inductor_config,
    preserve_node_ordering,
)

# -- out --------------------------------------------------------------------------------------------------------------


class _InFlight(NamedTuple):
    host: Node
    wait: Node
    nbytes: int


def sink_waits_in_place(graph: Graph, window_bytes: int) -> None:
    """Moves the waits of offloads as late as the in-flight window allows.

    host = offload(x, wait=False)             host = offload(x, wait=False)
    wait_tensor(host, x)                      y = mm(x, w)
    y = mm(x, w)                              z = mm(y, v)
    z = mm(y, v)                              wait_tensor(host, x)       # no room in the window for z
    other = offload(z, wait=False)            other = offload(z, wait=False)
    wait_tensor(other, z)                     ...
    ...                                       wait_tensor(other, z)
    return host, other                        return host, other

    Waits come in the order of the offloads, each before

    1. an offload with which more than ``window_bytes`` would be in flight (a larger one is in flight alone);
    2. a use of its host tensor, or a write to its source;
    3. the end of the graph.

    Until its wait, the memory of a source is not reused.

    Args:
        window_bytes: ``max_inflight_bytes``.
    """
    waits = _waits(graph, ops.offload)
    sunk = set(waits.values())
    in_flight, nbytes = deque[_InFlight](), 0
    hosts, sources = dict[Node, _InFlight](), dict[object, _InFlight]()
    for node in list(graph.nodes):
        if node in sunk:
            continue
        started = _InFlight(node, waits[node], _bytes_of(node.args[0])) if node in waits else None
        needed = [one for one in (hosts.get(each) for each in node.all_input_nodes) if one is not None]
        needed += [one for one in (sources.get(key) for key in _written(node)) if one is not None]
        while in_flight and (
            node.op == "output"
            or any(one.host in hosts for one in needed)
            or (started is not None and nbytes + started.nbytes > window_bytes)
        ):
            over = in_flight.popleft()
            node.prepend(over.wait)
            nbytes -= over.nbytes
            del hosts[over.host]
        if started is not None:
            in_flight.append(started)
            nbytes += started.nbytes
            hosts[node] = sources[storage_of(node.args[0])] = started


sink_waits = on_a_copy(sink_waits_in_place)


def _waits(graph: Graph, operation: OpOverload) -> dict[Node, Node]:
    return {
        node.args[0]: node
        for node in graph.find_nodes(op="call_function", target=ops.wait_tensor)
        if isinstance(node.args[0], Node) and node.args[0].target is operation
    }


def _bytes_of(node: object) -> int:
    return 0 if (value := tensor_of(node)) is None else nbytes_of(value)


def _written(node: Node) -> list[object]:
    """Returns the storages that ``node`` writes to; none for transfers, which order their own writes."""
    return [] if node.target in ops.OPERATIONS else written_by(node)


# -- back -------------------------------------------------------------------------------------------------------------


@dataclass
class _Reload:
    """A reload; positions count the nodes that do not move."""

    reload: Node
    wait: Node
    nbytes: int
    #: Views before its first use; they move behind the wait.
    views: list[Node] = field(default_factory=list)
    #: The position of its first use, and the earliest position at which it may start.
    needed: int = 0
    earliest: int = 0
    start: int = 0
    #: The index, in order of use, of the last reload whose use must come before this one starts; -1 for none.
    behind: int = -1


def prefetch_in_place(
    graph: Graph, cap_bytes: int, bandwidth: float, estimate: Estimate, *, margin: float = 1.5
) -> None:
    """Starts reloads just early enough to be hidden, and waits for each right before its first use.

    def backward(host, other, t):             def backward(host, other, t):
        x = reload(host, wait=False)              u = mul(t, t)
        z = reload(other, wait=False)             z = reload(other, wait=False)    # takes as long as mm(u)
        u = mul(t, t)                             v = mm(u)
        v = mm(u)                                 x = reload(host, wait=False)     # takes as long as mm(v, z)
        wait_tensor(z, other)                     wait_tensor(z, other)
        w = mm(v, z)                              w = mm(v, z)
        wait_tensor(x, host)                      wait_tensor(x, host)
        return mm(w, x)                           return mm(w, x)

    1. Go back from the last use to the first. The link carries one reload at a time, in order of use, so a reload must
       end before its own use and before the next reload starts.
    2. Start each reload before the operators whose time covers its copy, if possible at a place to which it can be
       pinned.
    3. Delay starts until at most ``cap_bytes`` are reloaded and not in use yet (a larger reload is alone).

    No reload starts before the graph's inputs, or before the wait of its own offload if that is in the same graph.

    Args:
        cap_bytes: ``prefetch_bytes``; with 0 each reload starts at its first use.
        bandwidth: bytes/s to the device.
        estimate: returns the seconds that a node takes.
        margin: factor on the time of a copy.
    """
    waits = _waits(graph, ops.reload).items()
    reloads = [_Reload(reload, wait, _bytes_of(reload), _early_views(reload)) for reload, wait in waits]
    if not reloads:
        return
    moved = {node for one in reloads for node in (one.reload, one.wait, *one.views)}
    fixed = [node for node in graph.nodes if node not in moved]
    _locate(reloads, fixed)
    reloads.sort(key=lambda one: one.needed)
    began = list(accumulate((estimate(node) for node in fixed), initial=0.0))
    # Transfers can be pinned to ``results``; at ``ends``, that splits no kernel. See ``_ends_of_products`` and
    # [Note: pins of transfers].
    results = [n for n, node in enumerate(fixed) if _is_result(node)]
    ends = _ends_of_products(graph, fixed, results)
    last_results, pins = _last_of(results, len(fixed)), _last_of(ends, len(fixed))
    free = float("inf")
    for one in reversed(reloads):
        free = min(began[one.needed], free) - margin * one.nbytes / bandwidth
        start = max(min(bisect_right(began, free) - 1, one.needed), one.earliest)
        if pins[start] >= one.earliest:
            start = pins[start] + 1
        elif last_results[start] >= one.earliest:  # every pin is between products that share an input
            start = one.earliest
        one.start = start
    _hold_back(reloads, cap_bytes)
    for node, place in _merged(reloads):
        fixed[place].prepend(node)


prefetch = on_a_copy(prefetch_in_place)


def _last_of(places: Collection[int], count: int) -> list[int]:
    """Returns, for each position up to ``count``, the last of ``places`` before it; -1 for none."""
    found = set(places)
    return list(accumulate((n if n in found else -1 for n in range(count)), max, initial=-1))


def _ends_of_products(graph: Graph, fixed: Sequence[Node], results: Sequence[int]) -> list[int]:
    """Returns the positions of products' results after which the next product shares no input with the last.

    If two products share a computed input, one kernel computes it in the layouts of both, and a reload between the
    products would split this kernel. Inputs that are in memory anyway do not count.
    """
    made = (node for node in graph.nodes if node.target in ops.OPERATIONS or node.op == "placeholder")
    in_memory = {storage_of(node) for node in (*made, *[fixed[place] for place in results])} | {None}
    ends, read = list[int](), set[object]()
    for before, place in pairwise([-1, *results]):
        node = fixed[place]
        product = cast(Node, node.args[0]) if node.target is operator.getitem else node
        storages = {storage_of(one) for one in _made_before(product)} - in_memory
        if before >= 0 and read.isdisjoint(storages):
            ends.append(before)
        in_memory |= read  # computed by a kernel for an earlier product
        read = storages
    return [*ends, *results[-1:]]


def _early_views(reload: Node) -> list[Node]:
    """Returns the views of ``reload`` before its first use. They read no bytes, so they may move behind the wait."""
    key = storage_of(reload)
    views, pending, first = list[Node](), [reload], None
    while pending:
        for user in pending.pop().users:
            if user.target is ops.wait_tensor:
                continue
            if key is not None and storage_of(user) == key and not _written(user):
                if user not in views:
                    views.append(user)
                    pending.append(user)
            elif first is None or user < first:
                first = user
    return sorted(view for view in views if first is None or view < first)


def _locate(reloads: Sequence[_Reload], fixed: Sequence[Node]) -> None:
    place = {node: position for position, node in enumerate(fixed)}
    inputs = sum(node.op == "placeholder" for node in fixed)
    for one in reloads:
        own = {one.reload, one.wait, *one.views}
        uses = [place[user] for node in own for user in node.users if user not in own and user in place]
        one.needed = min(uses, default=len(fixed) - 1)
        (host, *others) = one.reload.all_input_nodes
        before = [place[node] for node in (host, *others) if node in place]
        before += [place[user] for user in host.users if user.target is ops.wait_tensor and user.args[0] is host]
        one.earliest = min(max(inputs, *(position + 1 for position in before)), one.needed)


def _hold_back(reloads: Sequence[_Reload], cap_bytes: int) -> None:
    """Delays starts to keep within the cap and in order of use."""
    open_bytes, first_open, latest = 0, 0, 0
    for number, one in enumerate(reloads):
        while first_open < number and (open_bytes + one.nbytes > cap_bytes or cap_bytes == 0):
            open_bytes -= reloads[first_open].nbytes
            first_open += 1
        one.behind = first_open - 1
        if one.behind >= 0:
            one.start = max(one.start, reloads[one.behind].needed)
        latest = one.start = one.needed if cap_bytes == 0 else min(max(one.start, latest), one.needed)
        open_bytes += one.nbytes


def _merged(reloads: Sequence[_Reload]) -> Iterator[tuple[Node, int]]:
    """Yields reloads, waits and views in one order, each with the position before which it goes.

    Waits come in order of use, each reload after the wait that it must follow.
    """
    started = 0
    for number, one in enumerate(reloads):
        while started < len(reloads):
            other = reloads[started]
            if started > number and (other.start > one.needed or other.behind >= number):
                break
            yield other.reload, other.start
            started += 1
        yield one.wait, one.needed
        for view in one.views:
            yield view, one.needed


# -- pins -------------------------------------------------------------------------------------------------------------


def pin_in_place(graph: Graph) -> None:
    """Adds dependencies that keep transfers in place when a compiler reorders.

    v = mm(u)                                 v = mm(u)
    x = reload(host, wait=False)              x = reload(host, wait=False, after=v)
    w = mm(v, z)                              w = control_deps((x,), mm, v, z)
    wait_tensor(x, host)                      wait_tensor(x, host, after=w)
    return mm(w, x)                           return mm(w, x)

    Compilers keep only the order of data flow. A transfer is pinned to at most two neighbours: to an earlier node by
    its argument ``after``, to a later node by Inductor's operator ``control_deps``.

    [Note: pins of transfers]
    Transfers are pinned only to matrix products, attentions and convolutions (all called products here): a compiler
    calls these one by one, with results in memory. Other operators are fused; a pin would split the fusion, which would
    be slower and round differently. Between two products a transfer may move, because nothing slow runs there.
    Convolutions never get ``control_deps``: Inductor chooses the layout of a graph by its convolutions, and would not
    find a wrapped one.

    [Note: inputs of pinned products]
    If a product is delayed, Inductor also delays the computation of its inputs, unless they are in memory already. So
    the ``control_deps`` of a product name its inputs before the transfers. Otherwise the inputs would be computed after
    the transfers, outside of the kernel that they would be fused into.
    """
    nodes = list(graph.nodes)
    dependencies: dict[Node, list[Node]] = {}
    product: Node | None = None  # the last product
    later: set[Node] = set()  # nodes that depend on ``product``; all nodes before the first product
    pending: list[Node] = []  # transfers to finish before the next product
    previous: Node | None = None  # the transfer directly before, if any
    for position, node in enumerate(nodes):
        if node.target in ops.OPERATIONS:
            lower = _lower_bound(nodes, position, product, later) if previous is None else _end(previous)
            if lower is not None and lower not in node.all_input_nodes:
                node.kwargs = {**node.kwargs, "after": lower}
            if previous is not None:
                pending.pop()  # this transfer depends on the previous one
            pending.append(_end(node))
            previous = node
        elif node.op == "call_function":
            if counts_flops(node):
                if node.target not in CONVOLUTIONS:
                    if beyond := [one for one in pending if one not in node.all_input_nodes]:
                        dependencies[node] = list(dict.fromkeys((*_made_before(node), *beyond)))
                    pending = []
                product, later = None, {node}
            if product is None and _is_result(node):
                product = node
            if product is None or not later.isdisjoint(node.all_input_nodes):
                later.add(node)
            previous = None
    preserve_node_ordering(graph, cast(Any, dependencies))


pin = on_a_copy(pin_in_place)


def _lower_bound(nodes: Sequence[Node], position: int, product: Node | None, later: set[Node]) -> Node | None:
    """Returns the node that the transfer at ``position`` must come after; ``None`` if data flow alone ensures that.

    The pin keeps this node in memory until the transfer. So a node that stays in memory anyway is preferred: the source
    of the last offload in a row of transfers, or a returned value if the row ends the graph.
    """
    given = nodes[position].all_input_nodes
    found = None if product is None or not later.isdisjoint(given) else product
    for node in islice(nodes, position, None):
        if node.op == "output":
            returned = later.intersection(node.all_input_nodes)
            made = (one for one in reversed(nodes[:position]) if one in returned and tensor_of(one) is not None)
            found = next(made, found)
        if node.target not in ops.OPERATIONS:
            return found
        if node.target is ops.offload and node.args[0] in later:
            found = cast(Node, node.args[0])
    return found


def _made_before(product: Node) -> list[Node]:
    """Returns the computed inputs of ``product``: see [Note: inputs of pinned products]."""
    given = (one for one in product.all_input_nodes if one.op == "call_function" and one.target not in ops.OPERATIONS)
    return [one for one in given if tensor_of(one) is not None]


def _end(transfer: Node) -> Node:
    """Returns the node that later nodes depend on to come after ``transfer``: for a wait, the tensor it writes to."""
    return cast(Node, transfer.args[0]) if transfer.target is ops.wait_tensor else transfer


def _is_result(node: Node) -> bool:
    if node.target is operator.getitem:
        return bool(node.args[1] == 0) and counts_flops(cast(Node, node.args[0]))
    return counts_flops(node) and tensor_of(node) is not None


# -- Inductor's pass --------------------------------------------------------------------------------------------------
# Creating an optimizer imports half of torch's compiler, and the next `with` then imports this module and installs the
# pass. So this module does not import what only a compilation needs (36 MiB); the first compilation does.


class OrderTransfers(CustomInferenceAwareGraphPass):
    """Inductor's pass: makes transfers asynchronous and places them. Configured by the transfers' own arguments.

    Args:
        inner: the passes that were configured before; they run first. An ``OrderTransfers`` stands for its own inner
            passes.
        text: the configuration to offload with, a part of the key in compilers' caches; ``None`` if the ``with`` of the
            compiling thread decides.
    """

    inner: Any

    def __init__(self, inner: Any = None, text: str | None = None) -> None:
        self.inner = inner.inner if isinstance(inner, OrderTransfers) else inner
        self.text = text

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        from eager_offload.compile.lowering import install_lowerings  # its imports are loaded by now

        for one in self._inner_passes():
            if isinstance(one, CustomInferenceAwareGraphPass):
                one(graph, is_inference)
            else:
                one(graph)
        if not any(node.target in (ops.offload, ops.reload) for node in graph.nodes):
            return
        install_lowerings()
        # After a pass, Inductor recomputes the fake values of changed nodes and their users, and fails at sparse ones,
        # which have no storage to compare. Transfers of such a graph stay blocking.
        if all(value.layout is torch.strided for value in map(tensor_of, graph.nodes) if value is not None):
            insert_asynchronous_in_place(graph)
            reloads = graph.find_nodes(op="call_function", target=ops.reload)
            offloads = graph.find_nodes(op="call_function", target=ops.offload)
            if reloads:
                first, device = reloads[0].kwargs, reloads[0].args[1]
                bandwidth = bandwidth_of(device, Direction.IN, first.get("config", ""))
                prefetch_in_place(graph, first.get("window", 0), bandwidth, roofline(machine_of(device)))
            if offloads:
                sink_waits_in_place(graph, offloads[0].kwargs.get("window", 0))
            pin_in_place(graph)
            graph.lint()

    def uuid(self) -> object:
        # Without an identity the compiler caches nothing. If an inner pass has none, this one has none either.
        theirs = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._inner_passes()]
        return None if None in theirs else (cache_key(), None if self.text is None else key_of(self.text), *theirs)

    def _inner_passes(self) -> list[Any]:
        if self.inner is None:
            return []
        several = list(self.inner) if isinstance(self.inner, list | tuple) else [self.inner]
        return [each for one in several for each in (one._inner_passes() if isinstance(one, OrderTransfers) else [one])]


_OPTION = "post_grad_custom_post_pass"
_users: Living[object] = Living()  # weak, without callbacks in Python: an `Offload` may be freed at any point
_lock = ForkSafeLock()  # `_users` and the option change together


def install(user: object) -> None:
    """Adds the pass to Inductor's configuration, until the last ``user`` is gone, because a backward may be compiled
    after its context. The pass changes only graphs with transfers."""
    with _lock.lock:
        _users.add(user)
        present = getattr(inductor_config, _OPTION)
        if not isinstance(present, OrderTransfers):
            configure_inductor(_OPTION, OrderTransfers(present))


def uninstall(user: object) -> None:
    """Removes a user; the last one removes the pass, unless another library has wrapped it."""
    with _lock.lock:
        _users.discard(user)
        if not _users and isinstance(present := getattr(inductor_config, _OPTION), OrderTransfers):
            configure_inductor(_OPTION, present.inner)


def with_pass(options: Mapping[str, Any], text: str | None = None) -> dict[str, Any]:
    """Returns ``options`` of Inductor with the pass around the passes that they name, or else the configured ones.

    Args:
        text: the configuration to offload with; ``None`` if the ``with`` of the compiling thread decides.
    """
    given = {name.replace("-", "_"): value for name, value in options.items()}  # Inductor accepts both
    present = given.get(_OPTION, getattr(inductor_config, _OPTION))
    return {**given, _OPTION: OrderTransfers(present, text)}


class OffloadedModule(OptimizedModule):
    """A module of ``torch.compile`` whose calls run in a ``with offload``. A copy of it is compiled anew, as
    copies of torch's compiled modules are."""

    def __reduce__(self) -> Any:
        (inside,) = self.children()
        return _recompiled, (inside, self.dynamo_ctx, vars(self)["eager_offload"])


def serve(compiled: nn.Module, offload: Any) -> nn.Module:
    compiled.__class__ = OffloadedModule
    vars(compiled)["eager_offload"] = offload  # setattr would go to the inner module
    compiled.forward = offload.around(compiled.forward)
    return compiled


def _recompiled(module: nn.Module, compiler: Any, offload: Any) -> nn.Module:
    offload.skip_in(module)
    return serve(OptimizedModule(module, compiler), offload)
