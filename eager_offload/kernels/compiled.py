"""Compiled kernels: one for each text, however many kernels come to it, for as long as one of them lives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from eager_offload._torch import flatten_with_names
from eager_offload.errors import CapabilityError
from eager_offload.kernels.signature import Signature

#: A compiled kernel: takes the tensors of a call.
Launch: TypeAlias = Callable[..., object]

#: Those that kernels hold, by the text of all that they depend on; see [Note: finalizers] in ``tiers/forking.py``.
#: Nothing has to be unloaded when one dies: what Inductor has loaded for it torch holds until the process ends.
_kept: dict[str, weakref.ref[Launch]] = {}
_lock = threading.Lock()


def kept(text: str, compile_it: Callable[[], Launch]) -> Launch:
    """The compiled kernel of this text, which ``compile_it`` makes where there is none."""
    with _lock:
        found = _alive(text)
    if found is not None:
        return found
    made = compile_it()
    with _lock:
        found = _alive(text)
        if found is not None:  # another thread was faster
            return found
        for gone in [text for text, reference in _kept.items() if reference() is None]:
            del _kept[gone]
        _kept[text] = weakref.ref(made)
        return made


def _alive(text: str) -> Launch | None:
    reference = _kept.get(text)
    return None if reference is None else reference()


def compiled_by_inductor(name: str, body: Callable[..., object], signature: Signature, tensors: list[Tensor]) -> Launch:
    """The operators that ``body`` runs on such tensors, compiled.

    Raises:
        CapabilityError: nothing compiles here, or the body cannot be traced.
    """
    # An output that is an alias is its input. What else is one tensor in this call may be two in the next: tracing,
    # which goes by the objects, gets one for each.
    aliased = {target: source for source, target in signature.aliases}
    count = len(tensors) - len(flatten_with_names(signature.outputs)[1])
    firsts = [place for place in range(len(tensors)) if place - count not in aliased]
    places = [firsts.index(aliased.get(place - count, place)) for place in range(len(tensors))]
    distinct = [tensors[place].detach() for place in firsts]

    def on_distinct(*given: Tensor) -> None:
        body(*(given[place] for place in places))

    from torch.fx.experimental.proxy_tensor import make_fx  # with the compiler, which takes a second to import

    try:
        graph = make_fx(on_distinct, tracing_mode="fake")(*distinct)
    except Exception as error:
        raise CapabilityError(
            f"{name}: the body cannot be traced ({type(error).__name__}: {error}). A tensor that it does not make "
            "itself has to be one of its inputs, and no value of a tensor may decide what it does; impl='torch' runs "
            "it as it is"
        ) from error
    device = tensors[0].device
    shapes = ", ".join(f"{tuple(one.shape)} {one.dtype}" for one in distinct)
    default = torch.get_default_dtype()  # of tensors that a graph makes without saying
    where = device, _capability(device)
    parts = ("inductor", torch.__version__, *where, default, shapes, places, _code(graph))
    text = "\n".join(map(str, parts))

    def compile_it() -> Launch:
        copies = [one.clone() for one in tensors]  # what is launched writes, also what is ``inout``
        try:
            compiled = _by_inductor(graph, distinct)

            def launch(*given: Tensor) -> None:
                compiled(*(given[place].detach() for place in firsts))

            launch(*copies)
        except Exception as error:
            raise CapabilityError(f"{name}: Inductor has failed here ({type(error).__name__}: {error})") from error
        return launch

    return kept(text, compile_it)


def _by_inductor(graph: Any, given: list[Tensor]) -> Launch:
    """What ``graph`` does, compiled for such tensors."""
    from eager_offload._torch import compile_fx  # with the compiler

    if next(graph.children(), None) is not None:  # branches, which Inductor takes from Dynamo alone
        compiled: Launch = torch.compile(graph, fullgraph=True, dynamic=False)
        return compiled
    # Past Dynamo, whose guards ask at each launch, for 30 us, what `Signature.call` has asked, and for what the caller
    # has set, autocast or hooks of saved tensors, compile anew.
    return cast(Launch, compile_fx(graph, given))


def _capability(device: torch.device) -> str:
    """Returns what ``device`` says that it can do; nothing where its kind does not say."""
    # Not `torch.accelerator.get_device_capability`: that of CUDA raises (to 2.13 at least).
    ask = getattr(torch.get_device_module(device), "get_device_capability", None)
    return "" if ask is None else repr(ask(device))


def _code(graph: Any) -> str:
    """The code of a graph with what it only names: the graphs of branches, and the values of tensors that it makes."""
    graphs = [f"{path}: {inner.code}" for path, inner in graph.named_modules() if hasattr(inner, "code")]
    constants = [
        f"{path}: {one.dtype} {tuple(one.shape)} {one.cpu().contiguous().view(-1).view(torch.uint8).tolist()}"
        for path, one in graph.named_buffers()
    ]
    return "\n".join((*graphs, *constants))
