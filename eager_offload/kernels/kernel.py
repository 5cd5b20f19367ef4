"""A kernel, and the function that it is called as."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eager_offload.errors import CapabilityError, KernelError, warn
from eager_offload.kernels.compiled import Launch, check_cuda, compiled_by_cuda, compiled_by_inductor
from eager_offload.kernels.signature import Signature
from eager_offload.kernels.staging import LaunchSpec

#: What an implementation may be called.
_BODIES = ("torch", "cuda")
_IMPLS = ("auto", "torch", "inductor", "cuda")


@dataclass(frozen=True, eq=False)
class Kernel:
    """What a kernel takes, how it is launched, and what computes it.

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

    A call checks its arguments first, launches on the current stream of their device, and has no gradient.
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
            out: where the outputs go; new tensors by default. A single one may come bare.

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
            self._launch(call.device, call.tensors)
        return kernel.signature.result(call, arguments)

    def __repr__(self) -> str:
        return f"TorchKernel({self.kernel.name!r}, impl={self.impl!r})"

    def _launch(self, device: torch.device, tensors: list[Tensor]) -> None:
        found = None
        if self.impl != "torch" and device not in self._failed:
            found = self._compiled.get((device, torch.get_default_dtype())) or self._compile(device, tensors)
        run = found or self.kernel.impls["torch"]
        assert callable(run)
        run(*tensors)

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
        check_cuda(kernel.name, kernel.spec)
    return TorchKernel(kernel, impl)
