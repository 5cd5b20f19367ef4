"""A kernel, the function that it is called as, and what is compiled for it.

[Note: compiled kernels]
There is one for each text, however many kernels come to it, for as long as one of them lives. Inductor compiles torch
operators, and NVRTC CUDA C++ for the device of the tensors. A kernel in CUDA C++ receives the address of each tensor,
in the order of the call. A number is a tensor of no dimensions there too, so that no argument loses bits: what torch
passes of a Python number is a C `int` or a `double`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from eager_offload.errors import CapabilityError, KernelError, warn
from eager_offload.kernels.signature import Signature
from eager_offload.kernels.staging import LaunchSpec
from eager_offload.torch_private.inductor import compile_cuda
from eager_offload.torch_private.memory import flatten_with_names

#: A compiled kernel: takes the tensors of a call.
Launch: TypeAlias = Callable[..., object]

#: What an implementation may be called.
_BODIES = ("torch", "cuda")
_IMPLS = ("auto", "torch", "inductor", "cuda")


@dataclass(frozen=True, eq=False)
class Kernel:
    """What a kernel takes, how it is launched, and what computes it.

        def halve(x, y):
            y.copy_(x / 2)

        rows = TensorSpec((1024, 64), torch.float32)
        source = "__global__ void halve(const float* x, float* y) {...}"
        signature = Signature(inputs=(rows,), outputs=(rows,))
        spec = LaunchSpec(grid=(512, 1, 1), block=(128, 1, 1))
        kernel = Kernel("halve", signature, spec, {"torch": halve, "cuda": source})
        y = as_torch_kernel(kernel)(torch.ones(1024, 64))

    Args:
        name: what errors call it, and the name of the function in CUDA C++.
        signature: what it takes and gives.
        spec: how it is spread over a device.
        impls: by name, what computes it. Each is given the inputs, what is ``inout``, and the outputs, nesting taken
            away, and writes the outputs; what it returns is not looked at.

            - ``"torch"``, which has to be there, is the reference: torch operators on tensors. ``torch.compile`` has to
              be able to trace it: a tensor that it reads is an input, or made by it. ``"inductor"`` is this one,
              compiled.
            - ``"cuda"``: source in CUDA C++, with a ``__global__`` function ``name`` that takes the addresses of the
              tensors.

    Raises:
        KernelError: there is no ``"torch"``, a name is another one, what stands there cannot be called or is not a
            source, or one of the others is something else.
    """

    name: str
    signature: Signature
    spec: LaunchSpec
    impls: Mapping[str, Callable[..., object] | str]

    def __post_init__(self) -> None:
        for part, kind in (("signature", Signature), ("spec", LaunchSpec), ("impls", Mapping)):
            given = getattr(self, part)
            if not isinstance(given, kind):
                raise KernelError(f"{self.name}: {part}={given!r} is not accepted: it is a {kind.__name__}")
        object.__setattr__(self, "impls", dict(self.impls))
        if "torch" not in self.impls or not set(self.impls) <= set(_BODIES):
            raise KernelError(
                f"{self.name}: impls has {', '.join(map(repr, self.impls)) or 'nothing'}; what is accepted is 'torch', "
                "which has to be there, and 'cuda'"
            )
        for name, body in self.impls.items():
            if name == "cuda" and not isinstance(body, str):
                raise KernelError(f"{self.name}: impls['cuda'] is {body!r}: it is source in CUDA C++, as a text")
            if name != "cuda" and not callable(body):
                raise KernelError(f"{self.name}: impls[{name!r}] is {body!r}, which cannot be called")


class TorchKernel:
    """A kernel as a function of torch tensors; :func:`as_torch_kernel` makes it. Any thread may call it.

    A call checks its arguments first, launches on the current stream of their device, and has no gradient. Functions
    with the same operators, shapes, versions, device and, for CUDA C++, ``spec`` share a compiled kernel; its machine
    code stays loaded until the process ends. Keep the function and its arguments for as long as a captured graph of
    them is replayed. On an H100 kernels of Inductor had the bits of torch's operators; ``"cuda"`` has not run on a GPU.
    """

    def __init__(self, kernel: Kernel, impl: str) -> None:
        #: What it was made of.
        self.kernel = kernel
        #: What computes it, as it was asked for.
        self.impl = impl
        self._compiled: dict[tuple[torch.device, torch.dtype], Launch] = {}
        self._failed: set[torch.device] = set()
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any, out: Any = None) -> Any:
        """Launches the kernel.

        Args:
            arguments: the inputs, and what is ``inout`` behind them.
            out: where the outputs go; new tensors by default. A single one may come bare. Parts that the body does not
                write keep their values. A written tensor shares no memory with another one of the call.

        Returns:
            The outputs, in their structure, and what is ``inout`` behind them; a single result comes bare.

        Raises:
            KernelError: an argument is not what the signature says, CUDA C++ does not compile, or CUDA refuses the
                launch. Nothing was launched.
            CapabilityError: the device, or what is installed, cannot do this, or the body cannot be traced.
        """
        kernel = self.kernel
        call = kernel.signature.call(kernel.name, arguments, out)
        kind = call.device.type
        # A kernel computes in the dtypes of its signature, and what was compiled in no other state than what is called.
        is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        with torch.no_grad(), torch.autocast(kind, enabled=False) if is_cast else nullcontext():
            found, device = None, call.device
            if self.impl != "torch" and device not in self._failed:
                found = self._compiled.get((device, torch.get_default_dtype())) or self._compile(device, call.tensors)
            run = found or kernel.impls["torch"]
            assert callable(run)
            run(*call.tensors)
        return kernel.signature.result(call, arguments)

    def __repr__(self) -> str:
        return f"TorchKernel({self.kernel.name!r}, impl={self.impl!r})"

    def _compile(self, device: torch.device, tensors: list[Tensor]) -> Launch | None:
        """What launches on ``device``; ``None`` where nothing compiles and the reference does as well."""
        kernel, place = self.kernel, (device, torch.get_default_dtype())  # which a body may make tensors of
        with self._lock:
            if place in self._compiled:
                return self._compiled[place]
            try:
                if self.impl == "cuda":
                    source = kernel.impls["cuda"]
                    assert isinstance(source, str)
                    found = compiled_by_cuda(kernel.name, source, kernel.spec, tensors)
                else:
                    body = kernel.impls["torch"]
                    assert callable(body)
                    found = compiled_by_inductor(kernel.name, body, kernel.signature, tensors)
            except CapabilityError as error:
                if self.impl != "auto":
                    raise
                self._failed.add(device)
                warn(f"{error}. It is computed by torch's own operators in its place, which is slower")
                return None
            self._compiled[place] = found
            return found


def as_torch_kernel(kernel: Kernel, impl: str = "auto") -> TorchKernel:
    """A kernel as a function of torch tensors.

    Args:
        impl: what computes it.

            - ``"torch"``: the reference, operator by operator.
            - ``"inductor"``: the reference, compiled when it is first called: C++ on a CPU, Triton on a GPU.
            - ``"cuda"``: the source in CUDA C++, which NVRTC compiles when it is first called: on CUDA tensors.
            - ``"auto"``: ``"inductor"``, and the reference with one warning where that cannot compile.

    Raises:
        KernelError: ``impl`` is none of these, or the kernel has no such implementation.
        CapabilityError: there is no CUDA (ROCm is none), or the ``spec`` has clusters.
    """
    if impl not in _IMPLS:
        raise KernelError(f"impl={impl!r} is not accepted: it is one of {', '.join(map(repr, _IMPLS))}")
    if impl == "cuda":
        if impl not in kernel.impls:
            raise KernelError(f"{kernel.name}: impl={impl!r} is asked for, and impls has no {impl!r}")
        missing = ""
        if torch.version.hip is not None:  # torch.cuda is ROCm's there: its compiler takes HIP C++, its warps differ
            missing = "this torch is built for ROCm"
        elif not torch.cuda.is_available():
            missing = "torch finds no CUDA device"
        if missing:
            raise CapabilityError(f"{kernel.name}: {impl=} needs a CUDA device, and {missing}: take impl='inductor'")
        if (cluster := kernel.spec.cluster) != (1, 1, 1):
            raise CapabilityError(f"{kernel.name}: {cluster=}, and {impl=} launches no clusters: leave it out")
    return TorchKernel(kernel, impl)


# -- what is compiled --------------------------------------------------------------------------------------------------


#: Bytes of shared memory of a block from which on CUDA wants a kernel to be prepared for as many.
_PREPARED_FROM = 48 << 10
#: Those that kernels hold, by the text of all that they depend on. Nothing has to be unloaded when one dies: what
#: Inductor has loaded for it torch holds until the process ends.
_kept: weakref.WeakValueDictionary[str, Launch] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def kept(text: str, compile_it: Callable[[], Launch]) -> Launch:
    if (found := _kept.get(text)) is None:
        found = compile_it()
        with _lock:  # another thread may have been faster
            found = _kept.setdefault(text, found)
    return found


def compiled_by_inductor(name: str, body: Callable[..., object], signature: Signature, tensors: list[Tensor]) -> Launch:
    """Returns what runs the operators that ``body`` runs on such tensors, compiled."""
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


def compiled_by_cuda(name: str, source: str, spec: LaunchSpec, tensors: list[Tensor]) -> Launch:
    """Returns what launches the function ``name`` of ``source`` on such tensors, on the current stream."""
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
