"""Compiled kernels: one for each text, however many kernels come to it, for as long as one of them lives.

Inductor compiles torch operators, and NVRTC CUDA C++ for the device of the tensors. A kernel in CUDA C++ receives the
address of each tensor, in the order of the call. A number is a tensor of no dimensions there too, so that no argument
loses bits: what torch passes of a Python number is a C `int` or a `double`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from eager_offload.errors import CapabilityError, KernelError
from eager_offload.kernels.signature import Signature
from eager_offload.kernels.staging import LaunchSpec
from eager_offload.torch_private.inductor import compile_cuda
from eager_offload.torch_private.memory import flatten_with_names

#: A compiled kernel: takes the tensors of a call.
Launch: TypeAlias = Callable[..., object]

#: Bytes of shared memory of a block from which on CUDA wants a kernel to be prepared for as many.
_PREPARED_FROM = 48 << 10
#: Those that kernels hold, by the text of all that they depend on. Nothing has to be unloaded when one dies: what
#: Inductor has loaded for it torch holds until the process ends.
_kept: weakref.WeakValueDictionary[str, Launch] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def kept(text: str, compile_it: Callable[[], Launch]) -> Launch:
    """Returns the compiled kernel of ``text``, which ``compile_it`` makes if there is none."""
    if (found := _kept.get(text)) is None:
        found = compile_it()
        with _lock:  # another thread may have been faster
            found = _kept.setdefault(text, found)
    return found


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

    from eager_offload.torch_private.inductor import compile_fx  # likewise

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
    # Not `torch.accelerator.get_device_capability`: that of CUDA raises (to 2.13 at least).
    ask = getattr(torch.get_device_module(device), "get_device_capability", None)
    parts = ("inductor", torch.__version__, device, ask and ask(device), default, shapes, places, _code(graph))
    text = "\n".join(map(str, parts))

    def compile_it() -> Launch:
        copies = [one.clone() for one in tensors]  # what is launched writes, also what is ``inout``
        try:
            if next(graph.children(), None) is not None:  # branches, which Inductor takes from Dynamo alone
                compiled: Launch = torch.compile(graph, fullgraph=True, dynamic=False)
            else:
                # Past Dynamo, whose guards ask at each launch, for 30 us, what `Signature.call` has asked, and for what
                # the caller has set, autocast or hooks of saved tensors, compile anew.
                compiled = cast(Launch, compile_fx(graph, distinct))

            def launch(*given: Tensor) -> None:
                compiled(*(given[place].detach() for place in firsts))

            launch(*copies)
        except Exception as error:
            raise CapabilityError(f"{name}: Inductor has failed here ({type(error).__name__}: {error})") from error
        return launch

    return kept(text, compile_it)


def _code(graph: Any) -> str:
    """The code of a graph with what it only names: the graphs of branches, and the values of tensors that it makes."""
    graphs = [f"{path}: {inner.code}" for path, inner in graph.named_modules() if hasattr(inner, "code")]
    constants = [
        f"{path}: {one.dtype} {tuple(one.shape)} {one.cpu().contiguous().view(-1).view(torch.uint8).tolist()}"
        for path, one in graph.named_buffers()
    ]
    return "\n".join((*graphs, *constants))


def check_cuda(name: str, spec: LaunchSpec) -> None:
    """Raises ``CapabilityError`` where no CUDA kernel can be launched, or not with this ``spec``."""
    missing = ""
    if torch.version.hip is not None:  # torch.cuda is ROCm's there, whose compiler takes HIP C++ and whose warps differ
        missing = "this torch is built for ROCm"
    elif not torch.cuda.is_available():
        missing = "torch finds no CUDA device"
    if missing:
        raise CapabilityError(f"{name}: impl='cuda' needs a CUDA device, and {missing}: take impl='inductor'")
    if spec.cluster != (1, 1, 1):
        raise CapabilityError(f"{name}: cluster={spec.cluster}, and impl='cuda' launches no clusters: leave it out")


def compiled_by_cuda(name: str, source: str, spec: LaunchSpec, tensors: list[Tensor]) -> Launch:
    """Returns what launches the function ``name`` of ``source`` on such tensors, on the current stream.

    A launch that CUDA refuses is a ``KernelError``.

    Raises:
        CapabilityError: the tensors are not on a CUDA device, it gives a block less shared memory, or NVRTC or CUDA's
            headers are not installed.
        KernelError: the source does not compile, or has no such function.
    """
    device = tensors[0].device
    if device.type != "cuda":
        raise CapabilityError(f"{name}: impl='cuda' takes CUDA tensors, and these are on {device}")
    properties = torch.cuda.get_device_properties(device)
    limit = int(getattr(properties, "shared_memory_per_block_optin", _PREPARED_FROM))
    too_much = (
        f"{name}: a block has {spec.shared_bytes:,} bytes of shared memory beside what its source declares, and "
        f"{device} gives it {limit:,} at most: stage less at a time"
    )
    if spec.shared_bytes > limit:
        raise CapabilityError(too_much)

    def make() -> Launch:
        try:
            with torch.cuda.device(device):
                run = compile_cuda(source, name)
        except OSError as error:
            raise CapabilityError(
                f"{name}: impl='cuda' needs NVRTC and CUDA's headers ({error}). Set CUDA_HOME before Python "
                "starts, such as to nvidia/cu13 in the site-packages of a torch that pip has installed"
            ) from error
        except RuntimeError as error:
            raise KernelError(f"{name}: impls['cuda'] does not compile for {device}: {error}") from error
        if spec.shared_bytes >= _PREPARED_FROM:
            try:
                with torch.cuda.device(device):
                    run.set_shared_memory_config(spec.shared_bytes)
            except RuntimeError as error:
                raise CapabilityError(f"{too_much} ({error})") from error

        def launch(*given: Tensor) -> None:
            try:
                with torch.cuda.device(device):
                    run(spec.grid, spec.block, list(given), spec.shared_bytes, torch.cuda.current_stream(device))
            except RuntimeError as error:
                raise KernelError(f"{name}: {device} does not launch it with {spec}: {error}") from error

        return launch

    capability = torch.cuda.get_device_capability(device)
    return kept("\n".join(map(str, ("cuda", torch.__version__, device, capability, spec, name, source))), make)
