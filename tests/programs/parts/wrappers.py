"""Tensor subclasses that wrap others, as quantized and distributed tensors do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from tests.programs import leaf

#: Makes a wrapper of plain tensors that it asks for by number.
Wrap: TypeAlias = Callable[[Callable[[int], Tensor]], Tensor]


class Scaled(Tensor):
    """``values``, a ``scale`` that every result hands on as it is, and a ``unit`` that is text."""

    values: Tensor
    scale: Tensor
    unit: str

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, unit: str) -> Scaled:
        scaled = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device=values.device
        )
        scaled.values, scaled.scale, scaled.unit = values, scale, unit
        return scaled

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["values", "scale"], self.unit

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], unit: str, size: torch.Size, stride: Sequence[int]) -> Scaled:
        raise AssertionError("a wrapper is not built from parts")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, Scaled))
        plain = tree_map_only(Scaled, lambda scaled: scaled.values, (args, kwargs))
        result = func(*plain[0], **plain[1])
        result = tree_map_only(Tensor, lambda values: type(first)(values, first.scale, first.unit), result)
        return return_and_correct_aliasing(func, args, kwargs, result)


class Dissolving(Scaled):
    """Whatever is done to it gives a plain tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Dissolving, lambda wrapper: wrapper.values, (args, kwargs or {}))
        return func(*args, **kwargs)


class Renewed(Scaled):
    """Has a ``detach`` of its own, which starts to count versions anew."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach:
            (wrapper,) = args
            return Renewed(wrapper.values.detach(), wrapper.scale, wrapper.unit)
        return super().__torch_function__(func, types, args, kwargs or {})


class Image(Tensor):
    """A subclass as libraries of images and series have them: attributes, which results are given too."""

    unit: str = "none"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Image):
            result.__dict__.update(next((vars(one) for one in args if isinstance(one, Image)), {}))
        return result


def with_unit(tensor: Any, unit: str = "metres") -> Any:
    """Returns ``tensor`` with an attribute."""
    tensor.unit = unit
    return tensor


def two(make: Callable[[int], Tensor]) -> Tensor:
    """A wrapper of two tensors that differ."""
    return TwoTensor(make(1), make(2))


def wrapped_pair(*size: int, seed: int = 0) -> Tensor:
    """A leaf that wraps two tensors."""
    return two(lambda number: leaf(*size, seed=seed + number, grad=False)).requires_grad_()


def nested_wrapper(make: Callable[[int], Tensor]) -> Tensor:
    """A wrapper of two wrappers."""
    return TwoTensor(two(make), two(lambda seed: make(seed + 10)))


def parts_of(tensor: Tensor | None) -> list[Tensor]:
    """The plain tensors inside, for a comparison bit by bit."""
    if isinstance(tensor, TwoTensor):
        return [*parts_of(tensor.a), *parts_of(tensor.b)]
    if isinstance(tensor, Scaled):
        return [tensor.values.detach(), tensor.scale.detach()]
    if hasattr(tensor, "to_local"):
        return parts_of(tensor.detach().to_local())
    assert type(tensor) is Tensor, type(tensor)
    return [tensor.detach()]


class Kind(NamedTuple):
    name: str
    wrap: Wrap
    #: How many plain tensors are inside that can move.
    inside: int


def scaled(make: Callable[[int], Tensor]) -> Tensor:
    return Scaled(make(1), torch.tensor([0.5]), "metres")


KINDS = [Kind("two tensors", two, 2), Kind("wrappers in a wrapper", nested_wrapper, 4), Kind("one of ours", scaled, 1)]


def wrapped(kind: Kind, *size: int, seed: int = 0, grad: bool = True) -> Tensor:
    """A leaf; inside are plain tensors with values of their own."""
    return kind.wrap(lambda number: leaf(*size, seed=100 * seed + number, grad=False)).requires_grad_(grad)
