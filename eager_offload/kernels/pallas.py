"""Kernels of JAX's Pallas on torch tensors, run by its interpreter on a CPU.

On a GPU Pallas has a bridge of its own to torch, which launches on the default stream and takes strided inputs for
contiguous ones. It is not taken here: tensors of a device are an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from eager_offload._torch import flatten_with_names
from eager_offload.errors import CapabilityError
from eager_offload.kernels.compiled import Launch, kept
from eager_offload.kernels.launch import LaunchSpec
from eager_offload.kernels.signature import Signature


def check_installed() -> None:
    """Raises ``CapabilityError`` where JAX is not installed."""
    if find_spec("jax") is None:
        raise CapabilityError("impl='pallas' needs JAX, which is not installed: pip install 'eager_offload[pallas]'")


def compiled(
    name: str, body: Callable[..., object], signature: Signature, spec: LaunchSpec, tensors: list[Tensor]
) -> Launch:
    """What runs a Pallas body on such tensors.

    Raises:
        CapabilityError: they are not on a CPU, or JAX has no such tensors.
    """
    if tensors[0].device.type != "cpu":
        raise CapabilityError(
            f"{name}: impl='pallas' is run by an interpreter, on CPU tensors, and these are on {tensors[0].device}: "
            "take impl='inductor'"
        )
    read = len(flatten_with_names(signature.inputs)[1])
    if not any(tensor.numel() for tensor in tensors[read:]):
        return lambda *_: None
    if not all(tensor.numel() for tensor in tensors):
        raise CapabilityError(
            f"{name}: impl='pallas' takes no empty tensor beside others that are written: take impl='inductor'"
        )
    jax: Any = import_module("jax")  # not by its name: type checkers need not find what is optional
    pallas: Any = import_module("jax.experimental.pallas")
    for dtype in {tensor.dtype for tensor in tensors}:
        _check_dtype(name, jax, dtype)

    def to_jax(given: Sequence[Tensor]) -> list[Any]:
        return [jax.dlpack.from_dlpack(one.detach()) for one in given]  # which takes nothing that requires grad

    def on_references(*references: Any) -> None:
        # An interpreter has no memory that is read and written: what is written comes twice, and its second is a copy
        # of it, so that what the body does not write stays as it is.
        inputs, results = list(references[:read]), references[len(tensors) :]
        for source, target in signature.aliases:
            inputs[source] = results[target]
        body(*inputs, *results)

    def run(*arrays: Any) -> Any:
        call = pallas.pallas_call(
            on_references,
            out_shape=tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in arrays[read:]),
            grid=spec.grid if math.prod(spec.grid) > 1 else (),
            interpret=True,
            input_output_aliases={place: place - read for place in range(read, len(tensors))},
            name=name,
        )
        return call(*arrays)

    text = "\n".join(
        ("pallas", jax.__version__, torch.__version__, repr(spec), str(jax.make_jaxpr(run)(*to_jax(tensors))))
    )

    def compile_it() -> Launch:
        jitted = jax.jit(run)

        def launch(*given: Tensor) -> None:
            results = jitted(*to_jax(given))
            jax.block_until_ready(results)  # what it reads may be changed from here on
            for target, result in zip(given[read:], results, strict=True):
                target.copy_(from_dlpack(result))

        return launch

    return kept(text, compile_it)


def _check_dtype(name: str, jax: Any, dtype: torch.dtype) -> None:
    """Raises ``CapabilityError`` where JAX has no such numbers, or makes others of them."""
    try:
        made = from_dlpack(jax.dlpack.from_dlpack(torch.empty(1, dtype=dtype))).dtype
    except Exception as error:  # of the exchange, which torch and JAX each have their own for
        raise CapabilityError(
            f"{name}: JAX takes no {dtype}: what is accepted are torch.bool, whole numbers of 8 bits and more, "
            "floating ones, and torch.complex64. Take impl='inductor'"
        ) from error
    if made is not dtype:
        raise CapabilityError(
            f"{name}: JAX makes {str(made).removeprefix('torch.')} of {dtype}, silently: set jax_enable_x64, or take "
            "impl='inductor'"
        )
