"""Inserts transfers into graphs: first blocking ones, which data flow alone keeps correct, then asynchronous ones.

Also hooks the passes into AOTAutograd, for any compiler of its graphs.

[Note: graphs that cannot be offloaded]
A program that compiles without an ``Offload`` must compile with one. So the passes work on copies of the two graphs. If
a pass raises, the copies are dropped and the graphs compile without transfers. A warning reports the defect, and at run
time the bytes that the graphs save are counted as kept, with the reason ``failed``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from eager_offload import contexts
from eager_offload.compile import ops
from eager_offload.compile.decide import is_whole
from eager_offload.compile.graphs import (
    CONVOLUTIONS,
    copied,
    first_use,
    is_static,
    on_a_copy,
    outputs_of,
    positions,
    same_geometry,
    tensor_of,
)
from eager_offload.compile.keys import read_text
from eager_offload.compile.select import Choice, Group, choose, choose_nothing
from eager_offload.config import OffloadConfig, size_text
from eager_offload.contexts import configuration_on_top
from eager_offload.errors import warn
from eager_offload.marks import mark_operator
from eager_offload.stats import KeepReason
from eager_offload.torch_private import Patch
from eager_offload.torch_private.inductor import leave_out_of_precompile, on_bans_of_hooks, on_splits
from eager_offload.torch_private.memory import fake_mode_of, hint
from eager_offload.version import digest

#: The key in the ``meta`` of a host tensor for whether its strides must stay those in the graph, because backward uses
#: them to rebuild views.
EXACT = "eager_offload_exact"
_COPIED_META = ("saved_tensor_with_no_vc_check",)
_aten = torch.ops.aten


class Pair(NamedTuple):
    """The forward and backward graphs of one training graph."""

    forward: Graph
    backward: Graph


def insert_synchronous(
    forward: Graph, backward: Graph, num_outputs: int, choice: Choice, config: OffloadConfig
) -> Pair:
    """Returns copies of the graphs that move the chosen values, with one blocking operation each way.

        forward                                   backward
        x = mm(...)                               def backward(x, tangent):
        return out, x                                 return mm(x, tangent)

        x = mm(...)                               def backward(host, tangent):
        host = offload(x)                             x = reload(host)
        return out, host                              return mm(x, tangent)

    Values that share a storage are copied once; backward rebuilds them as views of the reloaded storage. If their sizes
    are known only at run time, the forward also saves a view of the host tensor, which carries the geometry and takes
    no memory.

        a, b = split(x)                           def backward(host, like_b):
        return out, a, b                              x = reload(host)
                                                      b = as_strided(x, sym_size(like_b), ...)
        host = offload(x)
        like_b = as_strided(host, sym_size(b), ...)

    Args:
        forward: returns ``num_outputs`` outputs of the user, then the saved values.
        backward: takes the saved values as inputs, under the names of their forward nodes.
        num_outputs: the number of user outputs of ``forward``.
        choice: the result of :func:`~eager_offload.compile.choose` for these graphs.
        config: when the graphs run, the active ``Offload`` with this configuration does the work.
    """
    ours, became = copied(forward)
    theirs, _ = copied(backward)
    insert_into_pair(ours, theirs, num_outputs, on_nodes(choice, became.__getitem__), config)
    return Pair(ours, theirs)


def insert_into_pair(forward: Graph, backward: Graph, num_outputs: int, choice: Choice, config: OffloadConfig) -> None:
    output = forward.output_node()
    outputs = outputs_of(forward)
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    top = next((node for node in backward.nodes if node.op != "placeholder"), None)
    assert top is not None
    order = positions(backward)
    became: dict[Node, list[Node]] = {}
    text = config.to_text()
    for number, group in enumerate(choice.groups):
        host = insert_offload(forward, group, text, choice.windows.inflight, None if number else region_of(choice))
        became.update((member, []) for member in group.members)
        first = group.members[0]
        became[first].append(host)
        arrived = _input_for(backward, host, inputs[first.name])
        # Gathered values are spread right before their first use: earlier, the gaps would take memory for longer.
        uses = () if not group.gathered else (first_use(inputs[one.name], order) for one in group.members)
        begin = min(filter(None, uses), key=order.__getitem__, default=top)
        with backward.inserting_before(begin):
            reload = insert_reload(backward, group, arrived, text, choice.windows.prefetch)
        for member in group.members:
            geometry, value = None, cast(Tensor, member.meta["val"])
            if not same_geometry(value, group.base.meta["val"]):
                if not is_static(value):
                    with forward.inserting_before(member.next):
                        geometry = geometry_of(forward, member, value)
                    with forward.inserting_before(output):  # last, because the offload's wait comes before this use
                        like = view_over(forward, host, group, value, geometry, f"{member.name}_like")
                    like.meta = _host_meta(value, member)
                    became[member].append(like)
                    arrived = _input_for(backward, like, inputs[member.name])
                    with backward.inserting_before(begin):
                        geometry = geometry_of(backward, arrived, value)
                else:
                    geometry = geometry_of(backward, None, value)
            with backward.inserting_before(begin):
                again = reload if geometry is None else view_over(backward, reload, group, value, geometry)
            inputs[member.name].replace_all_uses_with(again)
    for member in became:
        backward.erase_node(inputs[member.name])
    _keep_layouts(forward, became)
    saved: list[object] = []
    for node in outputs[num_outputs:]:
        saved += became.get(node, [node]) if isinstance(node, Node) else [node]
    output.args = (cast(Argument, (*outputs[:num_outputs], *saved)),)
    for node in forward.find_nodes(op="call_function", target=mark_operator):
        forward.erase_node(node)  # marks have been read
    forward.lint()
    backward.lint()


def insert_asynchronous_in_place(graph: Graph) -> None:
    """Splits each blocking transfer into a start and a wait: right after an offload, before a reload's first use.

    host = offload(x)                         host = offload(x, wait=False)
                                              wait_tensor(host, x)

    y = reload(host)                          y = reload(host, wait=False)
    ...                                       ...
    z = mm(y, t)                              wait_tensor(y, host)
                                              z = mm(y, t)

    The wait takes the source as keepalive, so that no kernel reuses its memory before the wait.
    """
    order = positions(graph)
    for node in list(graph.nodes):
        if node.target not in (ops.offload, ops.reload) or not node.kwargs.get("wait", True) or is_report(node):
            continue
        node.kwargs = {**node.kwargs, "wait": False}
        user = first_use(node, order) if node.target is ops.reload else None
        with graph.inserting_after(node) if user is None else graph.inserting_before(user):
            wait = graph.call_function(ops.wait_tensor, (node, node.args[0]))
        wait.meta["val"] = None


insert_asynchronous = on_a_copy(insert_asynchronous_in_place)


def _keep_layouts(forward: Graph, leaving: Iterable[Node]) -> None:
    """Makes Inductor keep the strides of ``leaving`` values, as it does for the results of a graph.

    With other strides a matrix product would sum in another order and return other bits. In graphs with convolutions,
    four-dimensional values are left out: Inductor gives them the strides that convolutions prefer, offload or not.
    """
    has_convolutions = any(forward.find_nodes(op="call_function", target=target) for target in CONVOLUTIONS)
    for node in leaving:
        if not has_convolutions or node.meta["val"].dim() != 4:
            node.meta["inductor_realize_to_strides"] = True  # its own strides, for all readers, as for graph outputs


# -- shared by pairs and joint graphs ---------------------------------------------------------------------------------


#: Sizes and strides as node arguments: numbers, or nodes for sizes known only at run time.
Geometry: TypeAlias = tuple[list[int | Node], list[int | Node]]


def insert_offload(graph: Graph, group: Group, text: str, window: int, region: str | None) -> Node:
    """Inserts the offload of ``group`` after its base.

    Args:
        window: see ``order.sink_waits_in_place``.
        region: as in ``region_of``; ``None`` except in a graph's first offload.
    """
    base = group.base
    value: Tensor = base.meta["val"]
    arguments: dict[str, Argument] = {"config": text, "window": window}
    if region is not None:
        arguments["region"] = region  # kept bytes are counted once for each graph
    with graph.inserting_before(base.next):
        if group.gathered:
            base = graph.call_function(_aten.clone.default, (base,), {"memory_format": torch.contiguous_format})
            with fake_mode_of(value):  # the size may be symbolic
                value = torch.empty(value.size(), dtype=value.dtype, device=value.device)
            base.meta["val"] = value
        host = graph.create_node("call_function", ops.offload, (base,), arguments, f"{group.base.name}_on_host")
    host.meta = _host_meta(value, group.members[0])
    host.meta[EXACT] = group.counted or group.members != (group.base,)
    return host


def insert_reload(graph: Graph, group: Group, host: Node, text: str, window: int) -> Node:
    """Inserts the reload of ``group`` at the insertion point.

    Args:
        window: see ``order.prefetch_in_place``.
    """
    value: Tensor = group.base.meta["val"]
    reload = graph.call_function(ops.reload, (host, value.device), {"config": text, "window": window})
    reload.meta = {"val": value}
    if not group.gathered:
        return reload
    like: Tensor = host.meta["val"]
    with fake_mode_of(value):
        reload.meta["val"] = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=value.device)
    spaced = graph.call_function(ops.spread, (reload, list(value.stride()), int(value.storage_offset())))
    spaced.meta = {"val": value}
    return spaced


def geometry_of(graph: Graph, node: Node | None, value: Tensor) -> Geometry:
    """Returns sizes and strides of ``value``; symbolic ones are read from ``node``."""

    def as_argument(number: int | SymInt, operator: object, dim: int) -> int | Node:
        if isinstance(number, int):
            return number
        assert node is not None
        read = graph.call_function(cast(Callable[..., object], operator), (node, dim))
        read.meta["val"] = number
        return read

    return (
        [as_argument(size, _aten.sym_size.int, dim) for dim, size in enumerate(value.size())],
        [as_argument(stride, _aten.sym_stride.int, dim) for dim, stride in enumerate(value.stride())],
    )


def view_over(
    graph: Graph, whole: Node, group: Group, value: Tensor, geometry: Geometry, name: str | None = None
) -> Node:
    """Inserts ``value`` as a view of ``whole``, which has the bytes of ``group``."""
    assert hint(group.base.meta["val"].storage_offset()) == 0  # a reloaded tensor begins at offset 0 of its storage
    arguments = cast(tuple[Argument, ...], (whole, *geometry, hint(value.storage_offset())))
    view = graph.create_node("call_function", _aten.as_strided.default, arguments, name=name)
    view.meta = {"val": value}
    return view


def on_nodes(choice: Choice, became: Callable[[Node], Node]) -> Choice:
    return Choice(
        tuple(replace(one, base=became(one.base), members=tuple(map(became, one.members))) for one in choice.groups),
        choice.windows,
        {became(node): reason for node, reason in choice.kept.items()},
        choice.outcome,
    )


def region_of(choice: Choice) -> str:
    """Returns the text in a graph's first offload: a name for the graph, and its kept bytes as ``reason=bytes,...``.

    The name is a digest of the moved values, equal in each process, so that compilers' caches find the graph.
    """
    moved = ";".join(f"{group.base.name} {tuple(group.base.meta['val'].shape)}" for group in choice.groups)
    kept: dict[KeepReason, int] = {}
    for node, reason in choice.kept.items():
        if (value := tensor_of(node)) is not None:  # an unknown size counts as 1, so that the sum is not too large
            kept[reason] = kept.get(reason, 0) + hint(value.numel(), default=1) * value.itemsize
    return ",".join((digest(moved)[:8], *(f"{reason.value}={nbytes}" for reason, nbytes in sorted(kept.items()))))


def insert_report(graph: Graph, choice: Choice, config: OffloadConfig) -> None:
    """Makes a graph that moves nothing count its kept bytes when it runs, by the offload of an empty tensor."""
    if choice.groups or not choice.kept:
        return
    value = next(iter(choice.kept)).meta["val"]
    with fake_mode_of(value):
        empty = torch.empty(0)
    with graph.inserting_before(graph.output_node()):
        source = graph.call_function(_aten.empty.memory_format, ([0],), {"device": empty.device})
        settings: dict[str, Argument] = {"config": config.to_text(), "region": region_of(choice)}
        host = graph.call_function(ops.offload, (source,), settings)
    source.meta["val"] = host.meta["val"] = empty


def is_report(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and is_static(value) and value.numel() == 0


def _input_for(backward: Graph, saved: Node, before: Node) -> Node:
    with backward.inserting_before(before):
        arrived = backward.placeholder(saved.name)
    assert arrived.name == saved.name  # compilers find it by name
    arrived.meta = dict(saved.meta)
    return arrived


def _host_meta(value: Tensor, member: Node) -> dict[str, object]:
    meta: dict[str, object] = {}
    with fake_mode_of(value):
        meta["val"] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
    meta.update({name: member.meta[name] for name in _COPIED_META if name in member.meta})
    return meta


# -- in the graphs of AOTAutograd --------------------------------------------------------------------------------------

_logger = logging.getLogger("eager_offload.compile")


class _Thread(threading.local):
    text: str | None = None


_thread = _Thread()


@contextmanager
def compiling_for(text: str) -> Iterator[None]:
    """Makes graphs that the calling thread compiles in this context offload by the configuration ``text``, regardless
    of the hooks in force."""
    if not patches():
        warn(f'torch {torch.__version__} does not let backend="eager_offload" offload inside of its graphs')
    contexts.patches.add(patches())
    before, _thread.text = _thread.text, text
    try:
        with contexts.patches.used():
            yield
    finally:
        _thread.text = before


@cache
def patches() -> tuple[Patch, ...]:
    """Returns patches by which AOTAutograd offloads under the library's hooks; none if this torch does not support
    them.

    Transforms of ``torch.func`` are then traced as without hooks: the graph contains their saves.
    """
    splits = on_splits(_offload_between)
    return (*splits, *on_bans_of_hooks(lambda: configuration_on_top() is not None)) if splits else ()


def _offload_between(forward: GraphModule, backward: GraphModule, num_outputs: int, parameters: Sequence[int]) -> bool:
    """Offloads between ``forward`` and ``backward``, in place of AOTAutograd's tracing of hooks into them.

    Args:
        forward, backward, num_outputs: as in :func:`insert_synchronous`.
        parameters: positions of the forward inputs that are parameters and buffers.

    Returns:
        Whether it has replaced the tracing; ``False`` if the library's hooks are not in force.
    """
    text = configuration_on_top() if _thread.text is None else _thread.text
    if text is None:
        return False
    leave_out_of_precompile("eager_offload moves tensors that this graph saves, for one configuration")
    config_key, fraction = read_text(text)
    config = OffloadConfig.from_text(config_key)
    try:
        (ours, _), (theirs, _) = copied(forward.graph), copied(backward.graph)
        whole = is_whole(ours, theirs, num_outputs, parameters)
        choice = choose(ours, theirs, num_outputs, config, fraction=fraction, whole=whole)
        insert_into_pair(ours, theirs, num_outputs, choice, config)
    except Exception as error:  # [Note: graphs that cannot be offloaded]
        warn(
            "a compiled graph is not offloaded, because the pass that inserts transfers raised "
            f"{type(error).__name__}: {error}. Its results are right, but no memory is saved. Please report it, with "
            "TORCH_LOGS=aot_graphs"
        )
        ours, theirs = forward.graph, backward.graph
        choice = choose_nothing(ours, num_outputs)
    _log(choice)
    insert_report(ours, choice, config)
    forward.graph, backward.graph = ours, theirs  # regenerates the code of both modules
    return True


def _log(choice: Choice) -> None:
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    for group in choice.groups:
        names = ", ".join(node.name for node in group.members)
        _logger.debug("%s moves: %d bytes, as the storage of %s", names, group.nbytes, group.base.name)
    for node, reason in choice.kept.items():
        _logger.debug("%s stays: %s", node.name, reason.value)
    if (found := choice.outcome) is not None:
        _logger.debug("expected: a peak of %s, in %.3g s", size_text(found.peak_bytes), found.step_seconds)
    if not choice.groups:
        _logger.debug("nothing of this graph moves")
