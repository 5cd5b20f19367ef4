"""How long each operator of a small model takes, were it the large one that it stands for.

Every real tensor is smaller than the one that it stands for by one factor, so that one number scales all bytes; how
many operations stand for one depends on the operator, because matrix products and attention grow differently. The
virtual clock counts the large model's seconds: bytes on the simulated links are scaled by slowing the links.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from eager_offload._torch import OpOverload, TorchDispatchMode
from eager_offload.compile.cost import Call, flops_of, is_single, traffic_of
from eager_offload.machine import MACHINES, Machine
from eager_offload.simulation.simulated import SimulatedRuntime

__all__ = ["H200", "Clock", "Op", "OperatorClock", "Scale"]


#: What an H200 and its host reach, but for its memory, of which the data sheet's figure is taken. An operator takes as
#: long as its bytes and operations do; the host's calls are counted by themselves.
H200 = replace(MACHINES["h200"], memory=4.8e12)


@dataclass(frozen=True)
class Scale:
    """How much larger than the tensors at hand those are that they stand for."""

    tokens: float
    width: float

    @property
    def nbytes(self) -> float:
        """Of an activation, (tokens, width)."""
        return self.tokens * self.width

    @property
    def product_flops(self) -> float:
        """Of a product of tokens, and of its two backward products: (tokens, width) by (width, width)."""
        return self.tokens * self.width**2

    @property
    def attention_flops(self) -> float:
        return self.tokens**2 * self.width


class Op(NamedTuple):
    """An operator that ran."""

    name: str
    seconds: float


class Clock(TorchDispatchMode):
    """Gives each operator its time on the compute stream of a simulated runtime, perturbed.

    Args:
        jitter: an operator takes its time multiplied by a number from ``1 - jitter`` to ``1 + jitter``.
        seed: of that number.
    """

    def __init__(self, runtime: SimulatedRuntime, machine: Machine, jitter: float, seed: int) -> None:
        super().__init__()
        #: All that has run, in order.
        self.ops: list[Op] = []
        self._runtime = runtime
        self._machine = machine
        self._jitter = jitter
        self._random = random.Random(seed)

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        seconds = self.seconds_of(func, args, named, result)
        if seconds > 0:
            seconds *= 1 + self._random.uniform(-self._jitter, self._jitter)
            name = func._schema.name.removeprefix("aten::")
            self.ops.append(Op(name, seconds))
            self._runtime.advance(self._runtime.default_stream, seconds, name)
        return result

    def seconds_of(
        self, func: OpOverload[..., Any], args: tuple[Any, ...], named: dict[str, Any], result: object
    ) -> float:
        """As the planner believes."""
        call = Call(func, args, named, result)
        nbytes = traffic_of(call)
        return self._machine.seconds(flops_of(call), nbytes, single=is_single(call)) if nbytes else 0.0


class OperatorClock(Clock):
    """An operator takes as long as that of the large model that it stands for."""

    sees_offloading = True

    def __init__(self, runtime: SimulatedRuntime, machine: Machine, scale: Scale, jitter: float, seed: int) -> None:
        super().__init__(runtime, machine, jitter, seed)
        self._scale = scale

    def seconds_of(
        self, func: OpOverload[..., Any], args: tuple[Any, ...], named: dict[str, Any], result: object
    ) -> float:
        name = func._schema.name.removeprefix("aten::")
        if name in _FREE or _is_view(func):
            return 0.0
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        traffic = sum(tensor.nbytes for tensor in tensors) * self._scale.nbytes / self._machine.memory
        count = _FLOPS.get(name)
        if count is None:
            return traffic
        per_flop = self._scale.product_flops if count is _product else self._scale.attention_flops
        return max(count(args) * per_flop / self._machine.flops, traffic if count is not _product else 0.0)


def _is_view(func: OpOverload[..., Any]) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _product(args: tuple[Any, ...]) -> float:
    left, right = args[0], args[1]
    return 2.0 * left.shape[0] * left.shape[1] * right.shape[1]


def _attention(args: tuple[Any, ...]) -> float:
    """Causal: half of the products of queries and keys, and of those with the values."""
    batch, heads, length, width = args[0].shape
    return 2.0 * batch * heads * length * length * width


def _attention_backward(args: tuple[Any, ...]) -> float:
    """Five products where forward has two."""
    return 2.5 * _attention(args[1:])


_FLOPS: dict[str, Callable[[tuple[Any, ...]], float]] = {
    "mm": _product,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
#: They move no bytes on a device: metadata, or memory that is not filled.
_FREE = (
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "is_same_size",
)
