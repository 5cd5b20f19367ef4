"""Kernels of torch operators, compiled by Inductor.

What Inductor has loaded for one torch holds until the process ends: when a kernel goes nothing is unloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from eager_offload.errors import CapabilityError

#: A compiled kernel: takes the tensors of a call.
Launch: TypeAlias = Callable[..., object]


def compiled_by_inductor(name: str, body: Callable[..., object], tensors: list[Tensor]) -> Launch:
    """The operators that ``body`` runs on such tensors, compiled.

    Raises:
        CapabilityError: nothing compiles here, or the body cannot be traced.
    """
    # What is one tensor in this call may be two in the next: tracing, which goes by the objects, gets one for each.
    distinct = [tensor.detach() for tensor in tensors]

    def on_distinct(*given: Tensor) -> None:
        body(*given)

    from torch.fx.experimental.proxy_tensor import make_fx  # with the compiler, which takes a second to import

    try:
        graph = make_fx(on_distinct, tracing_mode="fake")(*distinct)
    except Exception as error:
        raise CapabilityError(
            f"{name}: the body cannot be traced ({type(error).__name__}: {error}). A tensor that it does not make "
            "itself has to be one of its inputs, and no value of a tensor may decide what it does; impl='torch' runs "
            "it as it is"
        ) from error
    copies = [one.clone() for one in tensors]  # what is launched writes, also what is ``inout``
    try:
        compiled = _by_inductor(graph, distinct)

        def launch(*given: Tensor) -> None:
            compiled(*(one.detach() for one in given))

        launch(*copies)
    except Exception as error:
        raise CapabilityError(f"{name}: Inductor has failed here ({type(error).__name__}: {error})") from error
    return launch


def _by_inductor(graph: Any, given: list[Tensor]) -> Launch:
    """What ``graph`` does, compiled for such tensors."""
    from eager_offload._torch import compile_fx  # with the compiler

    if next(graph.children(), None) is not None:  # branches, which Inductor takes from Dynamo alone
        compiled: Launch = torch.compile(graph, fullgraph=True, dynamic=False)
        return compiled
    # Past Dynamo, whose guards ask at each launch, for 30 us, what `Signature.call` has asked, and for what the caller
    # has set, autocast or hooks of saved tensors, compile anew.
    return cast(Launch, compile_fx(graph, given))
