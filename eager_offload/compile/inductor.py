"""How the passes get into what Inductor compiles.

A program that makes an optimizer has torch's compiler half loaded, and then the first ``with`` installs these. What
only a compilation needs, 36 MiB of modules, is imported when one comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from torch.fx import Graph, GraphModule

from eager_offload._torch import (
    CustomGraphPass,
    CustomInferenceAwareGraphPass,
    CustomPartitionerFn,
    configure_inductor,
    inductor_config,
    same_values,
)
from eager_offload.active import configuration_on_top
from eager_offload.compile import ops
from eager_offload.compile.aim import key_of
from eager_offload.compile.aot_hooks import offload_between
from eager_offload.compile.cache_key import cache_key
from eager_offload.compile.cost import bandwidth_of, roofline
from eager_offload.compile.graphs import has_sparse_values
from eager_offload.compile.insert import insert_asynchronous_in_place
from eager_offload.compile.order import (
    between_kernels_in_place,
    pin_in_place,
    prefetch_in_place,
    reload_late_in_place,
    sink_waits_in_place,
)
from eager_offload.compile.regions import keep_operands, name_results
from eager_offload.machine import machine_of
from eager_offload.runtime.base import Direction
from eager_offload.tiers.finalizers import Living
from eager_offload.tiers.forking import ForkSafeLock


class Partitioner(CustomPartitionerFn):
    """Splits a joint graph into forward and backward; for a ``with offload`` it moves what is saved between the two.

    Args:
        inner: what splits, if it is not Inductor itself. Of a partitioner of this kind, what splits for that one.
        text: the configuration, if it is not that of the ``with`` that the compiling thread is in.
    """

    inner: CustomPartitionerFn | None

    def __init__(self, inner: CustomPartitionerFn | None = None, text: str | None = None) -> None:
        self.inner = inner.inner if isinstance(inner, Partitioner) else inner
        self.text = text

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        from eager_offload._torch import min_cut_rematerialization_partition  # Inductor has imported it by now
        from eager_offload.compile.lowering import install_lowerings

        split = self.inner or min_cut_rematerialization_partition
        forward, backward = split(gm, joint_inputs, **kwargs)
        num_outputs: int = kwargs["num_fwd_outputs"]
        text = configuration_on_top() if self.text is None else self.text
        if text is not None and joint_inputs:  # a region that others call has none: what it saves, they save
            install_lowerings()
            parameters = kwargs.get("static_lifetime_input_indices") or ()
            offload_between(forward, backward, num_outputs, text, parameters)
        return forward, backward

    def uuid(self) -> object:
        from eager_offload.compile.lowering import install_lowerings

        install_lowerings()  # what the compiler finds by it in a cache may have to be warned of
        theirs = None
        if self.inner is not None:
            theirs = self.inner.uuid()
            # One without an identity has to be asked anew each time. The compiler takes None for an identity like
            # any other, so there is another one at each look into what it keeps.
            theirs = uuid4().hex if theirs is None else theirs
        return cache_key(), None if self.text is None else key_of(self.text), theirs


class OrderTransfers(CustomInferenceAwareGraphPass):
    """Takes the waiting out of transfers and puts them where they cost least. Their nodes say all that it has to know.

    Args:
        inner: the pass, or passes, that were there before; run first. Of one of this kind, those that it runs first.
    """

    inner: Any

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner.inner if isinstance(inner, OrderTransfers) else inner

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        from eager_offload.compile.lowering import install_lowerings  # Inductor has imported what this needs by now

        for one in self._inner_passes():
            if isinstance(one, CustomInferenceAwareGraphPass):
                one(graph, is_inference)
            else:
                one(graph)
        if any(node.target in (ops.offload, ops.reload) for node in graph.nodes):
            install_lowerings()
            waits = has_sparse_values(graph)
            if not waits:
                name_results(graph)  # of one that our partitioner has not seen
            if graph.find_nodes(op="call_function", target=ops.reload):
                keep_operands(graph)
            if waits:
                reload_late_in_place(graph)
            else:
                with same_values(graph):
                    insert_asynchronous_in_place(graph)
                    self._place(graph)
                    pin_in_place(graph)
            graph.lint()

    def uuid(self) -> object:
        # A pass without an identity has the compiler keep nothing, and one around it must not hide that.
        theirs = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._inner_passes()]
        return None if None in theirs else (cache_key(), *theirs)

    def _place(self, graph: Graph) -> None:
        reloads = graph.find_nodes(op="call_function", target=ops.reload)
        offloads = graph.find_nodes(op="call_function", target=ops.offload)
        if reloads:
            first, device = reloads[0].kwargs, reloads[0].args[1]
            bandwidth = bandwidth_of(device, Direction.IN, first.get("config", ""))
            prefetch_in_place(graph, first.get("window", 0), bandwidth, roofline(machine_of(device)))
        if offloads:
            sink_waits_in_place(graph, offloads[0].kwargs.get("window", 0))
        between_kernels_in_place(graph)

    def _inner_passes(self) -> list[Any]:
        if self.inner is None:
            return []
        several = list(self.inner) if isinstance(self.inner, list | tuple) else [self.inner]
        return [each for one in several for each in (one._inner_passes() if isinstance(one, OrderTransfers) else [one])]


#: By the options of Inductor that they stand in.
_PASSES: dict[str, type[OrderTransfers | Partitioner]] = {
    "post_grad_custom_post_pass": OrderTransfers,
    "custom_partitioner_fn": Partitioner,
}
_users: Living[object] = Living()  # whose callbacks are in C: an `Offload` may go in the midst of anything
_lock = ForkSafeLock()


def install(user: object) -> None:
    """Has Inductor run the passes from now on. Where nothing is to be offloaded they change nothing.

    They stay when a context is left: a backward may be compiled behind it. They go with the last ``user``.
    """
    with _lock.lock:
        _users.add(user)
        for option, ours in _PASSES.items():
            present = getattr(inductor_config, option)
            if not isinstance(present, ours):
                configure_inductor(option, ours(present))


def uninstall(user: object) -> None:
    """``user`` needs them no more. What others have put around ours meanwhile stays."""
    with _lock.lock:
        _users.discard(user)
        if _users:
            return
        for option, ours in _PASSES.items():
            present = getattr(inductor_config, option)
            if isinstance(present, ours):
                configure_inductor(option, present.inner)


def with_passes(options: Mapping[str, Any], text: str | None = None) -> dict[str, Any]:
    """``options`` of Inductor with the passes around those that they name, or that are configured for everyone now.

    Args:
        text: the configuration to offload with; without it, that of the ``with`` that the compiling thread is in.
    """
    given = {name.replace("-", "_"): value for name, value in options.items()}  # Inductor takes either
    order = given.get("post_grad_custom_post_pass", inductor_config.post_grad_custom_post_pass)
    split = given.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn)
    return {
        **given,
        "post_grad_custom_post_pass": OrderTransfers(order),
        "custom_partitioner_fn": Partitioner(split, text),
    }
