"""Kernels of JAX's Pallas on torch tensors, run by its interpreter on a CPU.

On a GPU Pallas has a bridge of its own to torch, which launches on the default stream and takes strided inputs for
contiguous ones. It is not taken here: tensors of a device are an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from eager_offload._torch import flatten_with_names
from eager_offload.errors import CapabilityError
from eager_offload.kernels.compiled import Compiled, kept
from eager_offload.kernels.launch import LaunchSpec
from eager_offload.kernels.signature import Signature

__all__ = ["check_installed", "compiled"]


def check_installed() -> None:
    """Asks for JAX.

    Raises:
        CapabilityError: it is not installed.
    """
    if find_spec("jax") is None:
        raise CapabilityError("impl='pallas' needs JAX, which is not installed: pip install 'eager_offload[pallas]'")


def compiled(
    name: str, body: Callable[..., object], signature: Signature, spec: LaunchSpec, tensors: list[Tensor]
) -> Compiled:
    """What runs a Pallas body on such tensors.

    Raises:
        CapabilityError: they are not on a CPU, or JAX has no such numbers.
    """
    if tensors[0].device.type != "cpu":
        raise CapabilityError(
            f"{name}: impl='pallas' is run by an interpreter, on CPU tensors, and these are on {tensors[0].device}: "
            "take impl='inductor'"
        )
    jax: Any = import_module("jax")  # not by its name: type checkers need not find what is optional
    pallas: Any = import_module("jax.experimental.pallas")

    read = len(flatten_with_names(signature.inputs)[1])
    changed = len(flatten_with_names(signature.inout)[1])
    taken, given = tensors[: read + changed], tensors[read + changed :]
    written = [*given, *tensors[read : read + changed]]  # in the order in which they are copied back
    for tensor in tensors:
        held = jax.dlpack.from_dlpack(torch.empty(1, dtype=tensor.dtype))
        if from_dlpack(held).dtype is not tensor.dtype:
            raise CapabilityError(
                f"{name}: JAX makes {held.dtype} of {tensor.dtype}, silently: set jax_enable_x64, or take "
                "impl='inductor'"
            )

    def on_references(*references: Any) -> None:
        # An interpreter has no memory that is read and written: what is so comes twice, and its second is a copy of it.
        inputs, results = references[:read], references[read + changed :]
        body(*inputs, *results[len(given) :], *results[: len(given)])

    def run(*arrays: Any) -> Any:
        shapes = tuple(jax.ShapeDtypeStruct(tuple(one.shape), _dtype(jax, one)) for one in written)
        aliases = {read + number: len(given) + number for number in range(changed)}
        aliases |= dict(signature.aliases)
        grid = spec.grid if math.prod(spec.grid) > 1 else ()
        call = pallas.pallas_call(
            on_references, out_shape=shapes, grid=grid, interpret=True, input_output_aliases=aliases, name=name
        )
        return call(*arrays)

    arrays = [jax.dlpack.from_dlpack(one) for one in taken]
    text = "\n".join(("pallas", jax.__version__, torch.__version__, repr(spec), str(jax.make_jaxpr(run)(*arrays))))

    def compile_it() -> Callable[..., object]:
        jitted = jax.jit(run)

        def launch(*given_tensors: Tensor) -> None:
            results = jitted(*(jax.dlpack.from_dlpack(one) for one in given_tensors[: read + changed]))
            jax.block_until_ready(results)  # what it reads may be changed from here on
            targets = (*given_tensors[read + changed :], *given_tensors[read : read + changed])
            for target, result in zip(targets, results, strict=True):
                target.copy_(from_dlpack(result))

        return launch

    return kept(text, compile_it)


def _dtype(jax: Any, tensor: Tensor) -> Any:
    return jax.dlpack.from_dlpack(torch.empty(1, dtype=tensor.dtype)).dtype
