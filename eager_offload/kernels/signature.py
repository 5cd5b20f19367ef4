"""The arguments and results of a kernel, and their check before each launch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from eager_offload.errors import KernelError
from eager_offload.torch_private.memory import flatten_with_names, unflatten


def checked_sizes(of: str, name: str, given: Any, least: int) -> tuple[int, ...]:
    """Returns ``given`` as a tuple of whole numbers of at least ``least``; raises ``KernelError`` otherwise."""
    sizes = tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(is_whole(size) and size >= least for size in sizes):
        raise KernelError(
            f"{of}({name}={given!r}) is not accepted: these are whole numbers from {least} on, in a tuple"
        )
    return tuple(map(int, sizes))


def check_dtype(of: str, given: object) -> None:
    if not isinstance(given, torch.dtype):
        raise KernelError(f"{of}(dtype={given!r}) is not accepted: it is a torch.dtype, such as torch.float32")


def is_whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)  # True is an Integral


@dataclass(frozen=True)
class TensorSpec:
    """A contiguous tensor that a kernel takes or returns.

    Args:
        shape: its sizes.
        dtype: of its elements.
        align: the alignment of its address in bytes, a power of two; by default, the size of an element.

    Raises:
        KernelError: a size is not a whole number of at least 0, ``dtype`` is not a ``torch.dtype``, or ``align`` is not
            a power of two.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    align: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_sizes("TensorSpec", "shape", self.shape, 0))
        check_dtype("TensorSpec", self.dtype)
        align = self.align or self.dtype.itemsize
        object.__setattr__(self, "align", align)
        if not is_whole(align) or align & (align - 1):
            raise KernelError(f"TensorSpec(align={align}) is not accepted: it is a power of two, in bytes")

    def __str__(self) -> str:
        return f"a contiguous tensor of {self.shape}, {self.dtype}, at a multiple of {self.align} bytes"


#: Integer dtypes of which torch can make a tensor.
_WHOLE = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


@dataclass(frozen=True)
class Scalar:
    """A Python number that a kernel takes, passed as a tensor without dimensions on the device of the other arguments.

    Args:
        dtype: of the tensor. It must hold the number: 300 is refused for ``int8``, 0.5 for ``int64``, 1e300 for
            ``float32``, and ``True`` for each dtype but ``bool``. Floating dtypes round.

    Raises:
        KernelError: ``dtype`` is not ``bool``, an integer dtype of 8 bits or more, or a floating one.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_dtype("Scalar", self.dtype)
        one_number = self.dtype.is_floating_point and self.dtype is not torch.float4_e2m1fn_x2
        if not one_number and self.dtype is not torch.bool and self.dtype not in _WHOLE:
            raise KernelError(
                f"Scalar(dtype={self.dtype}) is not accepted: it is torch.bool, whole numbers of 8 bits and more, or "
                "floating ones"
            )

    def __str__(self) -> str:
        return f"a number that {self.dtype} holds"


class LaunchArguments(NamedTuple):
    """The checked arguments of one launch."""

    device: torch.device
    tensors: list[Tensor]
    """In the order of the signature: inputs, ``inout``, outputs."""
    outputs: list[Tensor]


@dataclass(frozen=True)
class Signature:
    """The arguments and results of a kernel.

    A call passes the inputs, then the ``inout`` tensors; it returns the outputs, then the ``inout`` tensors.

    Args:
        inputs: a ``TensorSpec`` or ``Scalar`` for each argument, or tuples, lists and dicts of them.
        outputs: a ``TensorSpec`` for each result, or tuples, lists and dicts of them.
        inout: tensors that are read and written, as in ``inputs``.
        aliases: pairs of an input's and an output's index in the flattened inputs and outputs: the output is written to
            the memory of the input.

    Raises:
        KernelError: a part has another type; there is nothing to write (no outputs and no ``inout``); ``aliases`` and
            ``inout`` are both given; or an alias is out of range, repeated, or of another shape or dtype.
    """

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    inout: Sequence[Any] = ()
    aliases: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        for name, accepted in (("inputs", TensorSpec | Scalar), ("outputs", TensorSpec), ("inout", TensorSpec)):
            given = getattr(self, name)
            if not isinstance(given, tuple | list):
                raise KernelError(f"Signature({name}={given!r}) is not accepted: it is a tuple or a list")
            object.__setattr__(self, name, tuple(given))
            for path, spec in zip(*flatten_with_names(tuple(given))[:2], strict=True):
                if not isinstance(spec, accepted):
                    kinds = "TensorSpec or Scalar" if name == "inputs" else "TensorSpec"
                    raise KernelError(f"Signature has {spec!r} at {name}{path}: it is {kinds}")
        given = cast(Any, self.aliases)
        rows = isinstance(given, tuple | list) and all(isinstance(pair, tuple | list) for pair in given)
        if not rows or not all(len(pair) == 2 and all(map(is_whole, pair)) for pair in given):
            raise self._refused("it is pairs of whole numbers, such as ((0, 0),)")
        object.__setattr__(self, "aliases", tuple((int(source), int(target)) for source, target in given))
        if not self.outputs and not self.inout:
            raise KernelError("Signature(outputs=(), inout=()) is not accepted: a kernel writes something")
        if self.aliases and self.inout:
            raise KernelError(
                "Signature has both aliases and inout: declare tensors that are read and written in one of the ways"
            )
        inputs, outputs = flatten_with_names(self.inputs)[1], flatten_with_names(self.outputs)[1]
        for place, sides in enumerate(zip(*self.aliases, strict=True)):
            if len(set(sides)) != len(sides):
                raise self._refused(f"it names {'an output' if place else 'an input'} twice")
        for source, target in self.aliases:
            if not (0 <= source < len(inputs) and 0 <= target < len(outputs)):
                raise self._refused(f"there are {len(inputs)} inputs and {len(outputs)} outputs, counted from 0")
            one, other = inputs[source], outputs[target]
            if not isinstance(one, TensorSpec) or (one.shape, one.dtype) != (other.shape, other.dtype):
                raise self._refused(f"input {source} is {one}, and output {target} is {other}")

    def _refused(self, why: str) -> KernelError:
        return KernelError(f"Signature(aliases={self.aliases!r}) is not accepted: {why}")

    def call(self, kernel: str, arguments: tuple[Any, ...], out: Any = None) -> LaunchArguments:
        """Returns the arguments of a launch, with new outputs if ``out`` is ``None``."""
        names, leaves, specs = self._matched(kernel, "arguments", (*self.inputs, *self.inout), arguments)
        device = _one_device(kernel, names, leaves, out)
        for name, leaf, spec in zip(names, leaves, specs, strict=True):
            _check(f"{kernel}: the argument {name}", spec, leaf, device)
        tensors = [
            # `float`, because torch refuses integers of more than 64 bits
            leaf
            if isinstance(leaf, Tensor)
            else torch.full((), float(leaf) if spec.dtype.is_floating_point else leaf, dtype=spec.dtype, device=device)
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
        count = len(flatten_with_names(self.inputs)[1])
        outputs, output_names = self._outputs(kernel, out, tensors, device)
        # New outputs have no names, and an alias is its input.
        written = {*range(count, len(tensors) + len(output_names)), *(source for source, _ in self.aliases)}
        everything = [*(f"the argument {name}" for name in names), *(f"the output {name}" for name in output_names)]
        _check_apart(kernel, everything, [*tensors, *outputs[: len(output_names)]], written)
        return LaunchArguments(device, [*tensors, *outputs], outputs)

    def result(self, call: LaunchArguments, arguments: tuple[Any, ...]) -> Any:
        """Returns the results of a launch in the structure of the signature, a single one without a tuple."""
        outputs = unflatten(call.outputs, flatten_with_names(self.outputs)[2])
        results = (*outputs, *arguments[len(self.inputs) :])
        return results[0] if len(results) == 1 else results

    def _matched(
        self, kernel: str, what: str, expected: tuple[Any, ...], given: tuple[Any, ...]
    ) -> tuple[list[str], list[Any], list[Any]]:
        names, specs, structure = flatten_with_names(expected)
        given_names, leaves, given_structure = flatten_with_names(given)
        if structure != given_structure:
            raise KernelError(
                f"{kernel}: expected {len(names)} {what} at {', '.join(names) or 'none'}, and got {len(given_names)} "
                f"at {', '.join(given_names) or 'none'}"
            )
        return names, leaves, specs

    def _outputs(
        self, kernel: str, out: Any, inputs: list[Tensor], device: torch.device
    ) -> tuple[list[Tensor], list[str]]:
        """Returns the outputs, and their paths if the caller passed them."""
        aliased = {target: inputs[source] for source, target in self.aliases}
        if out is None:
            specs = flatten_with_names(self.outputs)[1]
            return [
                aliased[number] if number in aliased else torch.empty(spec.shape, dtype=spec.dtype, device=device)
                for number, spec in enumerate(specs)
            ], []
        if aliased:
            raise KernelError(f"{kernel}: out= is given, but the aliases of the signature already name the outputs")
        if not isinstance(out, tuple | list):
            out = (out,)
        names, leaves, specs = self._matched(kernel, "outputs", tuple(self.outputs), tuple(out))
        for name, leaf, spec in zip(names, leaves, specs, strict=True):
            _check(f"{kernel}: the output {name}", spec, leaf, device)
        return leaves, names


def _one_device(kernel: str, names: list[str], leaves: list[Any], out: Any) -> torch.device:
    """Returns the device of the arguments; without tensors, of the caller's outputs; without both, the CPU."""
    found = {leaf.device: name for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)}
    if len(found) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise KernelError(f"{kernel}: expected all tensors on one device, and got {where}")
    if found:
        return next(iter(found))
    return next((leaf.device for leaf in flatten_with_names(out)[1] if isinstance(leaf, Tensor)), torch.device("cpu"))


def _check_apart(kernel: str, names: list[str], tensors: list[Tensor], written: set[int]) -> None:
    begins = [one.data_ptr() for one in tensors]
    ends = [begin + math.prod(one.shape) * one.dtype.itemsize for begin, one in zip(begins, tensors, strict=True)]
    for place in written:
        for other in range(len(tensors)):
            # Tensors on ``meta`` and empty tensors have address 0.
            if other != place and 0 < begins[place] < ends[other] and begins[other] < ends[place]:
                raise KernelError(
                    f"{kernel}: {names[place]} is written, and shares memory with {names[other]}: give each its own, "
                    "or declare in the signature that they are one (inout: read and written; aliases: an output that "
                    "is an input)"
                )


def _check(what: str, spec: TensorSpec | Scalar, value: Any, device: torch.device) -> None:
    if isinstance(spec, Scalar):
        if not _holds(spec.dtype, value):
            raise KernelError(f"{what}: expected {spec}, and got {value!r}")
        return
    if not isinstance(value, Tensor):
        raise KernelError(f"{what}: expected {spec}, and got {type(value).__name__} {value!r}")
    if value.is_nested:
        raise KernelError(f"{what}: expected {spec}, and got a nested one")
    if value.layout is not torch.strided:
        raise KernelError(f"{what}: expected {spec}, and got one of layout {value.layout}")
    fits = tuple(value.shape) == spec.shape and value.dtype is spec.dtype and value.is_contiguous()
    off = value.data_ptr() % spec.align
    if not fits or off or value.device != device:
        raise KernelError(
            f"{what}: expected {spec}, on {device}, and got one of {tuple(value.shape)}, {value.dtype}, strides "
            f"{value.stride()}, {off} bytes behind a multiple of {spec.align}, on {value.device}"
        )
    if value.is_neg() or value.is_conj():  # the memory holds other numbers
        raise KernelError(
            f"{what}: expected {spec}, and got one that is negated or conjugated when it is read: pass its "
            "resolve_neg() or resolve_conj()"
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise KernelError(
            f"{what} requires grad, and a kernel has no backward: detach it, or call under torch.no_grad()"
        )


def _holds(dtype: torch.dtype, value: Any) -> bool:
    if isinstance(value, bool) or dtype is torch.bool:
        return isinstance(value, bool) and dtype is torch.bool
    if dtype.is_floating_point and isinstance(value, int | float):
        if isinstance(value, int) or math.isfinite(value):
            return abs(value) <= torch.finfo(dtype).max
        # Some dtypes of eight bits have no infinity.
        return repr(torch.tensor(value, dtype=dtype).item()) == repr(float(value))
    return isinstance(value, int) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
