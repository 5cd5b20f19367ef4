"""When transfers start and where they are waited for, within a graph whose operators run one after another.

insert_asynchronous   offload, wait           wait, use       where transfers may stand at the earliest, or the latest
prefetch                             reload, ..., wait, use     reloads as early as hides them
sink_waits          offload, ..., wait                          waits as late as the window allows
pin                                                             all of that, whatever a compiler reorders
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
from eager_offload.compile.graphs import (
    CONVOLUTIONS,
    nbytes_of,
    on_a_copy,
    storage_of,
    tensor_of,
    written_by,
)
from eager_offload.compile.insert import insert_asynchronous_in_place
from eager_offload.compile.keys import cache_key, key_of
from eager_offload.planning.machine import machine_of
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


class _Leaving(NamedTuple):
    """An offload that has started and that was not waited for yet."""

    host: Node
    wait: Node
    nbytes: int


def sink_waits_in_place(graph: Graph, window_bytes: int) -> None:
    """Waits for offloads as late as the in-flight window allows.

    host = offload(x, wait=False)             host = offload(x, wait=False)
    wait_tensor(host, x)                      y = mm(x, w)
    y = mm(x, w)                              z = mm(y, v)
    z = mm(y, v)                              wait_tensor(host, x)       # no room for z beside x
    other = offload(z, wait=False)            other = offload(z, wait=False)
    wait_tensor(other, z)                     ...
    ...                                       wait_tensor(other, z)
    return host, other                        return host, other

    What has started and was not waited for is never more than ``window_bytes``; one that is larger travels alone. Waits
    come in the order in which the transfers have started, and before anything that uses a host tensor or writes over a
    source; a wait is what keeps its source's memory from being handed on. What fits the window is waited for at the
    end.

    Args:
        window_bytes: ``max_inflight_bytes``.
    """
    waits = _waits(graph, ops.offload)
    sinking = set(waits.values())
    flying, nbytes = deque[_Leaving](), 0
    hosts, sources = dict[Node, _Leaving](), dict[object, _Leaving]()
    for node in list(graph.nodes):
        if node in sinking:
            continue
        coming = _Leaving(node, waits[node], _bytes_of(node.args[0])) if node in waits else None
        needed = [one for one in (hosts.get(each) for each in node.all_input_nodes) if one is not None]
        needed += [one for one in (sources.get(key) for key in _written(node)) if one is not None]
        while flying and (
            node.op == "output"
            or any(one.host in hosts for one in needed)
            or (coming is not None and nbytes + coming.nbytes > window_bytes)
        ):
            over = flying.popleft()
            node.prepend(over.wait)
            nbytes -= over.nbytes
            del hosts[over.host]
        if coming is not None:
            flying.append(coming)
            nbytes += coming.nbytes
            hosts[node] = sources[storage_of(node.args[0])] = coming


sink_waits = on_a_copy(sink_waits_in_place)


def _waits(graph: Graph, operation: OpOverload) -> dict[Node, Node]:
    """The wait of each transfer of that kind that has one."""
    return {
        node.args[0]: node
        for node in graph.find_nodes(op="call_function", target=ops.wait_tensor)
        if isinstance(node.args[0], Node) and node.args[0].target is operation
    }


def _bytes_of(node: object) -> int:
    return 0 if (value := tensor_of(node)) is None else nbytes_of(value)


def _written(node: Node) -> list[object]:
    """The storages that ``node`` writes into, if it is no transfer: what those write to is theirs to order."""
    return [] if node.target in ops.OPERATIONS else written_by(node)


# -- back -------------------------------------------------------------------------------------------------------------


@dataclass
class _Arriving:
    """A reload, by positions among the nodes that stay where they are."""

    reload: Node
    wait: Node
    nbytes: int
    #: Views of it that nothing reads before its first use; they come behind the wait.
    views: list[Node] = field(default_factory=list)
    #: Before which node it is needed, and before which it may start at the earliest.
    needed: int = 0
    earliest: int = 0
    #: Before which it starts.
    start: int = 0
    #: The one, by place in the order of need, that has to be in use before this one starts; -1 for none.
    behind: int = -1


def prefetch_in_place(
    graph: Graph, cap_bytes: int, bandwidth: float, estimate: Estimate, *, margin: float = 1.5
) -> None:
    """Starts reloads as early as it takes to hide them, and waits for each where it is used first.

    def backward(host, other, t):             def backward(host, other, t):
        x = reload(host, wait=False)              u = mul(t, t)
        z = reload(other, wait=False)             z = reload(other, wait=False)    # takes as long as mm(u)
        u = mul(t, t)                             v = mm(u)
        v = mm(u)                                 x = reload(host, wait=False)     # takes as long as mm(v, z)
        wait_tensor(z, other)                     wait_tensor(z, other)
        w = mm(v, z)                              w = mm(v, z)
        wait_tensor(x, host)                      wait_tensor(x, host)
        return mm(w, x)                           return mm(w, x)

    From the first use back, operator by operator, until their time covers the transfer. The link carries one reload
    after another, in the order in which they are needed, so one that is needed soon has those before it start earlier.
    What has started and is not in use yet is never more than ``cap_bytes``; one that is larger comes alone. No reload
    starts before the graph's inputs are there, or before the wait of its own offload, where that is in the same graph.

    Args:
        cap_bytes: ``prefetch_bytes``; with 0 each reload starts where it is needed.
        bandwidth: bytes a second to the device.
        estimate: seconds that a node takes.
        margin: how much longer than that a transfer is taken to need.
    """
    reloads = _waits(graph, ops.reload).items()
    arriving = [_Arriving(reload, wait, _bytes_of(reload), _early_views(reload)) for reload, wait in reloads]
    if not arriving:
        return
    moved = {node for one in arriving for node in (one.reload, one.wait, *one.views)}
    fixed = [node for node in graph.nodes if node not in moved]
    _locate(arriving, fixed)
    arriving.sort(key=lambda one: one.needed)
    began = list(accumulate((estimate(node) for node in fixed), initial=0.0))
    # Where a transfer can be pinned, and of these places the good ones. See [Note: what transfers are pinned to].
    results = [n for n, node in enumerate(fixed) if _is_result(node)]
    ends = _ends_of_products(graph, fixed, results)
    last_results, pins = _last_of(results, len(fixed)), _last_of(ends, len(fixed))
    free = float("inf")
    for one in reversed(arriving):
        free = min(began[one.needed], free) - margin * one.nbytes / bandwidth
        start = max(min(bisect_right(began, free) - 1, one.needed), one.earliest)
        if pins[start] >= one.earliest:
            start = pins[start] + 1
        elif last_results[start] >= one.earliest:  # a product before it reads what the next one reads
            start = one.earliest
        one.start = start
    _hold_back(arriving, cap_bytes)
    for node, place in _merged(arriving):
        fixed[place].prepend(node)


prefetch = on_a_copy(prefetch_in_place)


def _last_of(places: Collection[int], count: int) -> list[int]:
    """For each of so many positions, and the one behind them, the last of ``places`` before it; -1 where none is."""
    found = set(places)
    return list(accumulate((n if n in found else -1 for n in range(count)), max, initial=-1))


def _ends_of_products(graph: Graph, fixed: Sequence[Node], results: Sequence[int]) -> list[int]:
    """Of the positions in ``fixed`` of products' results, those behind which none reads what the one before reads too.

    One kernel makes what both read, in the layout that each of them takes. A reload between the two would have the
    second wait for it, with the part of that kernel that is made for it. What is in memory anyway does not count.
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
        in_memory |= read  # a kernel has made it for a product before
        read = storages
    return [*ends, *results[-1:]]


def _early_views(reload: Node) -> list[Node]:
    """The views of ``reload`` before its first use, in order. They read nothing, so a wait may stand before them."""
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


def _locate(arriving: Sequence[_Arriving], fixed: Sequence[Node]) -> None:
    """Finds where each is needed, and where it may start at the earliest."""
    place = {node: position for position, node in enumerate(fixed)}
    inputs = sum(node.op == "placeholder" for node in fixed)
    for one in arriving:
        own = {one.reload, one.wait, *one.views}
        uses = [place[user] for node in own for user in node.users if user not in own and user in place]
        one.needed = min(uses, default=len(fixed) - 1)
        (host, *others) = one.reload.all_input_nodes
        before = [place[node] for node in (host, *others) if node in place]
        before += [place[user] for user in host.users if user.target is ops.wait_tensor and user.args[0] is host]
        one.earliest = min(max(inputs, *(position + 1 for position in before)), one.needed)


def _hold_back(arriving: Sequence[_Arriving], cap_bytes: int) -> None:
    """Has reloads start late enough for the cap, and in the order in which they are needed."""
    open_bytes, first_open, latest = 0, 0, 0
    for number, one in enumerate(arriving):
        while first_open < number and (open_bytes + one.nbytes > cap_bytes or cap_bytes == 0):
            open_bytes -= arriving[first_open].nbytes
            first_open += 1
        one.behind = first_open - 1
        if one.behind >= 0:
            one.start = max(one.start, arriving[one.behind].needed)
        latest = one.start = one.needed if cap_bytes == 0 else min(max(one.start, latest), one.needed)
        open_bytes += one.nbytes


def _merged(arriving: Sequence[_Arriving]) -> Iterator[tuple[Node, int]]:
    """Reloads and waits in one order, each with the position before which it goes.

    They come as they are needed, and each reload behind the wait that it has to follow.
    """
    started = 0
    for number, one in enumerate(arriving):
        while started < len(arriving):
            other = arriving[started]
            if started > number and (other.start > one.needed or other.behind >= number):
                break
            yield other.reload, other.start
            started += 1
        yield one.wait, one.needed
        for view in one.views:
            yield view, one.needed


# -- whatever is reordered --------------------------------------------------------------------------------------------


def pin_in_place(graph: Graph) -> None:
    """Has a compiler that reorders keep transfers where they are.

    v = mm(u)                                 v = mm(u)
    x = reload(host, wait=False)              x = reload(host, wait=False, after=v)
    w = mm(v, z)                              w = control_deps((x,), mm, v, z)
    wait_tensor(x, host)                      wait_tensor(x, host, after=w)
    return mm(w, x)                           return mm(w, x)

    Compilers keep an order only where data flows. A transfer has at most two neighbours that it is pinned to: what runs
    before it, by an argument, and what runs after it, by an operator of Inductor that waits for more than it needs.

    [Note: what transfers are pinned to]
    Only products, attentions and convolutions: a compiler calls them one by one, and their results are in memory
    whatever happens. Anything else it melts together with its neighbours, and a pin would force it apart: slower, and
    with other roundings. In between transfers are free; nothing that takes long is there. A convolution is never made
    to wait: Inductor lays out a graph by the convolutions that it sees, and would not see it any more.

    [Note: what a product is made from does not wait]
    Whatever Inductor has to compute for what a product is given, it has wait with it, unless it was to be in memory
    before. So a product that waits is said to wait for what it is given first. Otherwise what makes that would come
    behind the transfers, and not in the kernel that it would have been a part of.
    """
    nodes = list(graph.nodes)
    dependencies: dict[Node, list[Node]] = {}
    product: Node | None = None  # the last one
    later: set[Node] = set()  # what comes after it because data flows; all, as long as there is none
    pending: list[Node] = []  # what the next product has to come after
    previous: Node | None = None  # the transfer directly before
    for position, node in enumerate(nodes):
        if node.target in ops.OPERATIONS:
            lower = _lower_bound(nodes, position, product, later) if previous is None else _end(previous)
            if lower is not None and lower not in node.all_input_nodes:
                node.kwargs = {**node.kwargs, "after": lower}
            if previous is not None:
                pending.pop()  # it comes before this one
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
    """What the transfer at ``position`` is made to come after; ``None`` if it does already.

    Whatever that is has to stay in memory until then. So where offloads come next, it is what the last of them takes,
    and before the end of the graph it may be what that returns.
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
    """What ``product`` is given that kernels make. See [Note: what a product is made from does not wait]."""
    given = (one for one in product.all_input_nodes if one.op == "call_function" and one.target not in ops.OPERATIONS)
    return [one for one in given if tensor_of(one) is not None]


def _end(transfer: Node) -> Node:
    """The node whose readers come after ``transfer``. Of a wait it is what the wait writes to."""
    return cast(Node, transfer.args[0]) if transfer.target is ops.wait_tensor else transfer


def _is_result(node: Node) -> bool:
    """Whether ``node`` is the (first) tensor that a product returns."""
    if node.target is operator.getitem:
        return bool(node.args[1] == 0) and counts_flops(cast(Node, node.args[0]))
    return counts_flops(node) and tensor_of(node) is not None


# -- in what Inductor compiles -------------------------------------------------------------------------------------
# A program that makes an optimizer has torch's compiler half loaded, and then the first `with` installs the pass. What
# only a compilation needs, 36 MiB of modules, is imported when one comes.


class OrderTransfers(CustomInferenceAwareGraphPass):
    """Takes the waiting out of transfers and puts them where they cost least. Their nodes say all that it has to know.

    Args:
        inner: the pass, or passes, that were there before; run first. Of one of this kind, those that it runs first.
        text: the configuration to offload with, if it is not that of the ``with`` that the compiling thread is in: a
            compiler's caches have to know it.
    """

    inner: Any

    def __init__(self, inner: Any = None, text: str | None = None) -> None:
        self.inner = inner.inner if isinstance(inner, OrderTransfers) else inner
        self.text = text

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        from eager_offload.compile.lowering import install_lowerings  # Inductor has imported what this needs by now

        for one in self._inner_passes():
            if isinstance(one, CustomInferenceAwareGraphPass):
                one(graph, is_inference)
            else:
                one(graph)
        if not any(node.target in (ops.offload, ops.reload) for node in graph.nodes):
            return
        install_lowerings()
        # Behind a pass Inductor computes anew what became of each node with other arguments, and of all that depends on
        # it; it fails where one of those is sparse, and has no storage to compare. Such a graph waits.
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
        # A pass without an identity has the compiler keep nothing, and one around it must not hide that.
        theirs = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._inner_passes()]
        return None if None in theirs else (cache_key(), None if self.text is None else key_of(self.text), *theirs)

    def _inner_passes(self) -> list[Any]:
        if self.inner is None:
            return []
        several = list(self.inner) if isinstance(self.inner, list | tuple) else [self.inner]
        return [each for one in several for each in (one._inner_passes() if isinstance(one, OrderTransfers) else [one])]


#: The option of Inductor that the pass stands in.
_OPTION = "post_grad_custom_post_pass"
_users: Living[object] = Living()  # whose callbacks are in C: an `Offload` may go in the midst of anything
_lock = ForkSafeLock()


def install(user: object) -> None:
    """Has Inductor run the pass from now on. Where nothing is to be offloaded it changes nothing.

    It stays when a context is left: a backward may be compiled behind it. It goes with the last ``user``.
    """
    with _lock.lock:
        _users.add(user)
        present = getattr(inductor_config, _OPTION)
        if not isinstance(present, OrderTransfers):
            configure_inductor(_OPTION, OrderTransfers(present))


def uninstall(user: object) -> None:
    """``user`` needs it no more. What others have put around ours meanwhile stays."""
    with _lock.lock:
        _users.discard(user)
        if not _users and isinstance(present := getattr(inductor_config, _OPTION), OrderTransfers):
            configure_inductor(_OPTION, present.inner)


def with_pass(options: Mapping[str, Any], text: str | None = None) -> dict[str, Any]:
    """``options`` of Inductor with the pass around those that they name, or that are configured for everyone now.

    Args:
        text: the configuration to offload with; without it, that of the ``with`` that the compiling thread is in.
    """
    given = {name.replace("-", "_"): value for name, value in options.items()}  # Inductor takes either
    present = given.get(_OPTION, getattr(inductor_config, _OPTION))
    return {**given, _OPTION: OrderTransfers(present, text)}


class OffloadedModule(OptimizedModule):
    """What ``torch.compile`` makes of a module, in a ``with`` around each call.

    torch makes a copy of such a module anew, from what was compiled and how, and so this one makes it with a copy of
    the ``Offload``.
    """

    def __reduce__(self) -> Any:
        (inside,) = self.children()
        return _made_anew, (inside, self.dynamo_ctx, vars(self)["eager_offload"])


def serve(compiled: nn.Module, offload: Any) -> nn.Module:
    """Has the calls of ``compiled``, which ``torch.compile`` has made, run in a ``with offload``."""
    compiled.__class__ = OffloadedModule
    vars(compiled)["eager_offload"] = offload  # what is set on such a module is set on the one inside
    compiled.forward = offload.around(compiled.forward)
    return compiled


def _made_anew(module: nn.Module, compiler: Any, offload: Any) -> nn.Module:
    offload.skip_in(module)
    return serve(OptimizedModule(module, compiler), offload)
