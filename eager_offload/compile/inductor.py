"""How the pass that orders transfers gets into what Inductor compiles.

A program that makes an optimizer has torch's compiler half loaded, and then the first ``with`` installs it. What
only a compilation needs, 36 MiB of modules, is imported when one comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph

from eager_offload.compile import ops
from eager_offload.compile.cache_key import cache_key, key_of
from eager_offload.compile.cost import bandwidth_of, roofline
from eager_offload.compile.graphs import has_sparse_values
from eager_offload.compile.insert import insert_asynchronous_in_place
from eager_offload.compile.order import pin_in_place, prefetch_in_place, sink_waits_in_place
from eager_offload.planning.machine import machine_of
from eager_offload.runtime.base import Direction
from eager_offload.tiers.forking import ForkSafeLock, Living
from eager_offload.torch_private.inductor import (
    CustomGraphPass,
    CustomInferenceAwareGraphPass,
    configure_inductor,
    inductor_config,
)


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
        if not has_sparse_values(graph):
            insert_asynchronous_in_place(graph)
            self._place(graph)
            pin_in_place(graph)
            graph.lint()

    def uuid(self) -> object:
        # A pass without an identity has the compiler keep nothing, and one around it must not hide that.
        theirs = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._inner_passes()]
        return None if None in theirs else (cache_key(), None if self.text is None else key_of(self.text), *theirs)

    def _place(self, graph: Graph) -> None:
        reloads = graph.find_nodes(op="call_function", target=ops.reload)
        offloads = graph.find_nodes(op="call_function", target=ops.offload)
        if reloads:
            first, device = reloads[0].kwargs, reloads[0].args[1]
            bandwidth = bandwidth_of(device, Direction.IN, first.get("config", ""))
            prefetch_in_place(graph, first.get("window", 0), bandwidth, roofline(machine_of(device)))
        if offloads:
            sink_waits_in_place(graph, offloads[0].kwargs.get("window", 0))

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
