"""Kernels, their launchers, and the cache of compiled kernels.

[Note: compiled kernels]
Kernels with the same cache text share one compiled kernel, which lives as long as one of its users. Inductor compiles
torch operators; NVRTC compiles CUDA C++ for the device of the tensors. A kernel in CUDA C++ receives the address of
each tensor, in the order of the call. A number is passed as a tensor without dimensions, because torch passes a Python
number as a C `int` or a `double`, which would lose bits.
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

#: Launches a compiled kernel on the tensors of a call.
Launch: TypeAlias = Callable[..., object]

#: Names in ``Kernel.impls``, and names that ``as_torch_kernel`` accepts.
_BODIES = ("torch", "cuda")
_IMPLS = ("auto", "torch", "inductor", "cuda")


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel: its arguments, its launch, and its implementations.

        def halve(x, y):
            y.copy_(x / 2)

        rows = TensorSpec((1024, 64), torch.float32)
        source = "__global__ void halve(const float* x, float* y) {...}"
        signature = Signature(inputs=(rows,), outputs=(rows,))
        spec = LaunchSpec(grid=(512, 1, 1), block=(128, 1, 1))
        kernel = Kernel("halve", signature, spec, {"torch": halve, "cuda": source})
        y = as_torch_kernel(kernel)(torch.ones(1024, 64))

    Args:
        name: names the kernel in errors; the name of the function in CUDA C++.
        signature: the arguments and results.
        spec: the grid, block and shared memory of a launch.
        impls: the implementations by name. Each is called with the flattened inputs, ``inout`` arguments and outputs,
            and writes the outputs; its return value is ignored.

            - ``"torch"``, required: the reference, torch operators on tensors. ``torch.compile`` must be able to trace
              it: each tensor that it reads must be an argument, or made inside. ``"inductor"`` is this implementation,
              compiled.
            - ``"cuda"``: CUDA C++ source of a ``__global__`` function ``name`` that takes the addresses of the tensors.

    Raises:
        KernelError: ``"torch"`` is missing, a name is unknown, or a value is of another type.
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
                f"{self.name}: impls has {', '.join(map(repr, self.impls)) or 'nothing'}; accepted are 'torch', "
                "which is required, and 'cuda'"
            )
        for name, body in self.impls.items():
            if name == "cuda" and not isinstance(body, str):
                raise KernelError(f"{self.name}: impls['cuda'] is {body!r}: it is source in CUDA C++, as a text")
            if name != "cuda" and not callable(body):
                raise KernelError(f"{self.name}: impls[{name!r}] is {body!r}, which cannot be called")


class TorchKernel:
    """A kernel as a function of torch tensors, made by :func:`as_torch_kernel`. Thread-safe.

    A call checks its arguments, then launches on the current stream of their device. It has no gradient. Functions with
    the same operators, shapes, versions, device and, for CUDA C++, ``spec`` share a compiled kernel; its machine code
    stays loaded until the process ends. Keep the function and its arguments for as long as a captured graph of them is
    replayed. On an H100 kernels of Inductor had the bits of torch's operators; ``"cuda"`` has not run on a GPU.
    """

    def __init__(self, kernel: Kernel, impl: str) -> None:
        self.kernel = kernel
        #: The requested implementation.
        self.impl = impl
        self._compiled: dict[tuple[torch.device, torch.dtype], Launch] = {}
        self._failed: set[torch.device] = set()
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any, out: Any = None) -> Any:
        """Launches the kernel.

        Args:
            arguments: the inputs, then the ``inout`` tensors.
            out: tensors for the outputs; new tensors by default. A single output may be passed without a tuple. Parts
                that the body does not write keep their values. A written tensor shares no memory with another one.

        Returns:
            The outputs in their structure, then the ``inout`` tensors; a single result without a tuple.

        Raises:
            KernelError: an argument does not match the signature, CUDA C++ does not compile, or CUDA refuses the
                launch. Nothing was launched.
            CapabilityError: the device or the installation does not support the implementation, or the body cannot be
                traced.
        """
        kernel = self.kernel
        call = kernel.signature.call(kernel.name, arguments, out)
        kind = call.device.type
        # Without autocast: a kernel computes in the dtypes of its signature, and was compiled without autocast.
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
        """Returns the launcher for ``device``; ``None`` if ``impl="auto"`` must run the reference."""
        kernel, place = self.kernel, (device, torch.get_default_dtype())  # a body may make tensors of the default dtype
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
    """Returns a kernel as a function of torch tensors.

    Args:
        impl: the implementation:

            - ``"torch"``: the reference, operator by operator.
            - ``"inductor"``: the reference, compiled at the first call: C++ on a CPU, Triton on a GPU.
            - ``"cuda"``: the CUDA C++ source, compiled by NVRTC at the first call; for CUDA tensors.
            - ``"auto"``: ``"inductor"``; the reference, with one warning, if that cannot compile.

    Raises:
        KernelError: ``impl`` is unknown, or the kernel does not have it.
        CapabilityError: ``impl="cuda"`` without CUDA (ROCm does not count), or with clusters in the ``spec``.
    """
    if impl not in _IMPLS:
        raise KernelError(f"impl={impl!r} is not accepted: it is one of {', '.join(map(repr, _IMPLS))}")
    if impl == "cuda":
        if impl not in kernel.impls:
            raise KernelError(f"{kernel.name}: impl={impl!r} was requested, but impls has no {impl!r}")
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


# -- compiled kernels --------------------------------------------------------------------------------------------------


#: Bytes of shared memory per block from which CUDA requires an attribute of the kernel to be set.
_PREPARED_FROM = 48 << 10
#: Compiled kernels by their cache text. Weak: nothing is unloaded when one dies, because torch keeps Inductor's code
#: loaded until the process ends.
_kept: weakref.WeakValueDictionary[str, Launch] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def kept(text: str, compile_it: Callable[[], Launch]) -> Launch:
    if (found := _kept.get(text)) is None:
        found = compile_it()
        with _lock:  # another thread may have been faster
            found = _kept.setdefault(text, found)
    return found


def compiled_by_inductor(name: str, body: Callable[..., object], signature: Signature, tensors: list[Tensor]) -> Launch:
    """Returns a launcher for the operators that ``body`` runs on tensors like these, compiled."""
    # Tracing identifies tensors by object. Only declared aliases may share one: other arguments that are one tensor in
    # this call may be two in the next.
    aliased = {target: source for source, target in signature.aliases}
    count = len(tensors) - len(flatten_with_names(signature.outputs)[1])
    firsts = [place for place in range(len(tensors)) if place - count not in aliased]
    places = [firsts.index(aliased.get(place - count, place)) for place in range(len(tensors))]
    distinct = [tensors[place].detach() for place in firsts]

    def on_distinct(*given: Tensor) -> None:
        body(*(given[place] for place in places))

    from torch.fx.experimental.proxy_tensor import make_fx  # imports the compiler, which takes a second

    from eager_offload.torch_private.inductor import compile_fx  # likewise

    try:
        graph = make_fx(on_distinct, tracing_mode="fake")(*distinct)
    except Exception as error:
        raise CapabilityError(
            f"{name}: the body cannot be traced ({type(error).__name__}: {error}). It may use only its inputs and "
            "tensors that it makes, and its control flow must not depend on values of tensors; impl='torch' runs "
            "it untraced"
        ) from error
    device = tensors[0].device
    shapes = ", ".join(f"{tuple(one.shape)} {one.dtype}" for one in distinct)
    default = torch.get_default_dtype()  # the dtype of tensors that a graph makes without one
    # Not `torch.accelerator.get_device_capability`: CUDA's raises (up to 2.13 at least).
    ask = getattr(torch.get_device_module(device), "get_device_capability", None)
    parts = ("inductor", torch.__version__, device, ask and ask(device), default, shapes, places, _code(graph))
    text = "\n".join(map(str, parts))

    def compile_it() -> Launch:
        copies = [one.clone() for one in tensors]  # a launch writes to outputs and ``inout``
        try:
            if next(graph.children(), None) is not None:  # branches, which Inductor compiles only through Dynamo
                compiled: Launch = torch.compile(graph, fullgraph=True, dynamic=False)
            else:
                # Without Dynamo, whose guards take 30 us per launch for checks that `Signature.call` has made, and
                # recompile for the caller's state, such as autocast or saved-tensor hooks.
                compiled = cast(Launch, compile_fx(graph, distinct))

            def launch(*given: Tensor) -> None:
                compiled(*(given[place].detach() for place in firsts))

            launch(*copies)
        except Exception as error:
            raise CapabilityError(f"{name}: Inductor has failed here ({type(error).__name__}: {error})") from error
        return launch

    return kept(text, compile_it)


def _code(graph: Any) -> str:
    """Returns the code of a graph with the code of its branches, and the values of its constant tensors."""
    graphs = [f"{path}: {inner.code}" for path, inner in graph.named_modules() if hasattr(inner, "code")]
    constants = [
        f"{path}: {one.dtype} {tuple(one.shape)} {one.cpu().contiguous().view(-1).view(torch.uint8).tolist()}"
        for path, one in graph.named_buffers()
    ]
    return "\n".join((*graphs, *constants))


def compiled_by_cuda(name: str, source: str, spec: LaunchSpec, tensors: list[Tensor]) -> Launch:
    """Returns a launcher for the function ``name`` of ``source``, on the current stream."""
    device = tensors[0].device
    if device.type != "cuda":
        raise CapabilityError(f"{name}: impl='cuda' takes CUDA tensors, and these are on {device}")
    properties = torch.cuda.get_device_properties(device)
    limit = int(getattr(properties, "shared_memory_per_block_optin", _PREPARED_FROM))
    too_much = (
        f"{name}: a block has {spec.shared_bytes:,} bytes of shared memory, in addition to those that its source "
        f"declares, and {device} gives it {limit:,} at most: stage less at a time"
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
