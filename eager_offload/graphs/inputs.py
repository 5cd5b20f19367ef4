"""What changes between replays: tensors and numbers at addresses that stay."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from eager_offload._torch import flatten_with_names, unflatten
from eager_offload.errors import CaptureInputError, CaptureStateError
from eager_offload.graphs.status import CaptureStatus, capture_status


class DeviceScalar:
    """A number that a graph reads from the device, such as a learning rate, the count of steps or a seed.

    Args:
        value: what it is at first.
        dtype: of ``tensor``; the default dtype for a float, ``int64`` for an int, ``bool`` for a bool.
        device: where it is; the accelerator, or the CPU where there is none.

    Raises:
        CaptureInputError: ``value`` is no number, or ``dtype`` cannot hold it.
        CaptureStateError: in a capture.
    """

    def __init__(
        self, value: float, dtype: torch.dtype | None = None, device: torch.device | str | int | None = None
    ) -> None:
        if dtype is None:
            kinds = {bool: torch.bool, int: torch.int64}
            dtype = kinds.get(type(value), torch.get_default_dtype())
        if device is None:
            device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        _check_number(value, dtype)
        _check_outside("a DeviceScalar was made")
        with torch.inference_mode(False):
            self._tensor = torch.full((), value, dtype=dtype, device=device)

    @property
    def tensor(self) -> Tensor:
        """The number, as a tensor of no dimensions, which is the same object for good: give this to the step."""
        return self._tensor

    def update(self, value: float) -> None:
        """Fills the tensor with ``value``, on the current stream: it comes before what is launched from there.

        Raises:
            CaptureInputError: ``value`` is no number, or the dtype cannot hold it.
            CaptureStateError: in a capture, whose replays would all write this value.
        """
        _check_number(value, self._tensor.dtype)
        _check_outside("DeviceScalar.update was called")
        with torch.no_grad():
            # A fill carries its number along. A copy from host memory would read what the next update puts there.
            self._tensor.fill_(value)

    def __repr__(self) -> str:
        return f"DeviceScalar({self._tensor.dtype}, {self._tensor.device})"


class StaticInputs:
    """Inputs that a captured function reads: copies of tensors, at addresses that stay, in the structure they came in.

    Args:
        inputs: tensors and plain values in tuples, lists and dicts, of any depth. Each tensor is copied to a buffer on
            its own device, which requires no grad; plain values are what each update must repeat.

    Raises:
        CaptureStateError: in a capture.
    """

    def __init__(self, inputs: Any) -> None:
        _check_outside("StaticInputs was made")
        self._names, leaves, self._structure = flatten_with_names(inputs)
        with torch.inference_mode(False), torch.no_grad():
            self._leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    @property
    def values(self) -> Any:
        """The buffers and the plain values, in the structure of the inputs: what is captured is called with these."""
        return unflatten(self._leaves, self._structure)

    def update(self, inputs: Any) -> None:
        """Copies the tensors of ``inputs`` into the buffers on the current stream; nothing is copied where they differ.

        Raises:
            CaptureInputError: structure, shape, dtype, device or a plain value is another one.
            CaptureStateError: in a capture.
        """
        _check_outside("StaticInputs.update was called")
        names, leaves, structure = flatten_with_names(inputs)
        if structure != self._structure:
            raise CaptureInputError(
                f"the inputs were captured with {len(self._names)} values at {', '.join(self._names)}, and are given "
                f"{len(names)} at {', '.join(names)}: {self._structure} and {structure}"
            )
        for name, captured, given in zip(self._names, self._leaves, leaves, strict=True):
            if not _alike(captured, given):
                raise CaptureInputError(
                    f"the input {name} was captured as {_describe(captured)}, and is given as {_describe(given)}"
                )
        with torch.no_grad():
            for captured, given in zip(self._leaves, leaves, strict=True):
                if isinstance(captured, Tensor) and captured is not given:
                    captured.copy_(given, non_blocking=True)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)}, {value.dtype}, {value.device}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _alike(one: object, other: object) -> bool:
    """Whether a tensor fits into the buffer, or a plain value is repeated."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return _describe(one) == _describe(other)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one is other or (type(one) is type(other) and bool(one == other))


def _check_number(value: object, dtype: torch.dtype) -> None:
    if not isinstance(value, bool | int | float):
        raise CaptureInputError(f"a DeviceScalar holds a number, and was given {value!r}")
    if dtype.is_floating_point or dtype.is_complex:
        return
    whole = isinstance(value, int) or value.is_integer()
    lowest, highest = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not whole or not lowest <= value <= highest:
        raise CaptureInputError(f"a DeviceScalar of {dtype} cannot hold {value!r}")


def _check_outside(what: str) -> None:
    if capture_status() is not CaptureStatus.NONE:
        raise CaptureStateError(
            f"{what} while the current stream is being captured: each replay would do it again, with what it is given "
            "now. Do it before the capture, and between replays"
        )
