"""Bytes of an optimizer's states, from one step on fake tensors.

[Note: trial step]
A table of optimizers would cover torch's own only, and be wrong for factored states and for hyperparameters that add a
state. Instead, the optimizer runs one step on fake parameters, and the tensors in its ``state`` are counted. A user's
instance is not run: a bare object of its class takes its attributes and hyperparameters, and existing states count as
they are. Scalars (e.g. the step count) and temporaries of ``step()`` (e.g. with ``foreach=True``) are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eager_offload.core.selection import logical_bytes
from eager_offload.errors import ConfigError
from eager_offload.planning.numbers import by_itself
from eager_offload.torch_private.calls import OpOverload, TorchDispatchMode, schema_of
from eager_offload.torch_private.inductor import FakeTensorMode
from eager_offload.torch_private.memory import tree_iter

#: An optimizer, or a class or function that makes one from a list of parameters.
Optimizing: TypeAlias = Optimizer | Callable[[list[nn.Parameter]], Optimizer]
#: Options that choose kernels and not states; those kernels may not take fake tensors.
_KERNELS = ("foreach", "fused", "capturable")


class States(NamedTuple):
    name: str
    nbytes: int


def states_of(optimizer: Optimizing, parameters: Sequence[Tensor], shape_of: Callable[[Tensor], torch.Size]) -> States:
    """Returns the states that ``optimizer`` has from its first step on.

    Args:
        optimizer: an instance, whose own parameters count; or a class or function of the list of trained parameters.
        parameters: the model's parameters.
        shape_of: returns the shape of a parameter on this device.

    Raises:
        ConfigError: ``optimizer`` is of another type, or its trial step fails.
    """
    if isinstance(optimizer, Optimizer):
        return _of_instance(optimizer, parameters, shape_of)
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer={optimizer!r} is not accepted: optimizer takes a class such as torch.optim.AdamW, an instance, "
            "a function that makes one of a list of parameters, or None"
        )
    trained = [one for one in parameters if one.requires_grad]
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    with _trying(name):
        if not trained:
            return States(name, 0)
        trial = optimizer(_fakes_of(trained, shape_of))
        if not isinstance(trial, Optimizer):
            raise ConfigError(
                f"optimizer={name} is not accepted: it returns a {type(trial).__name__}, but has to return a "
                "torch.optim.Optimizer"
            )
        return States(type(trial).__name__, _step(trial))


def _of_instance(
    optimizer: Optimizer, parameters: Iterable[Tensor], shape_of: Callable[[Tensor], torch.Size]
) -> States:
    kind = type(optimizer)
    held = [one for group in optimizer.param_groups for one in group["params"]]
    models = {id(one) for one in parameters}
    if not any(id(one) in models for one in held):
        raise ConfigError(
            f"optimizer={kind.__name__} is not accepted: it has no parameter of this model. Make it of the parameters "
            "of the model that is planned, or give its class"
        )
    if any(isinstance(one, Optimizer) for one in tree_iter([*vars(optimizer).values()])):
        raise ConfigError(
            f"optimizer={kind.__name__} is not accepted, since it wraps another one: give that, or optimizer_bytes"
        )
    nbytes = _bytes_of(optimizer.state.get(one, {}) for one in held)
    with _trying(kind.__name__):
        groups = []
        for group in optimizer.param_groups:
            missing = [one for one in group["params"] if one.requires_grad and not optimizer.state.get(one)]
            if missing:
                groups.append({**group, "params": _fakes_of(missing, shape_of)})
        if groups:
            trial = object.__new__(kind)
            containers = (dict, list, set)
            own = {name: copy(one) if isinstance(one, containers) else one for name, one in vars(optimizer).items()}
            own.pop("step", None)  # patched by a scheduler, and bound to `optimizer`
            vars(trial).update(own)
            # As after unpickling: without the hooks of `optimizer`, which are the user's.
            trial.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups})
            nbytes += _step(trial)
    return States(kind.__name__, nbytes)


def _fakes_of(parameters: Iterable[Tensor], shape_of: Callable[[Tensor], torch.Size]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(shape_of(one), dtype=one.dtype)) for one in parameters]


def _step(trial: Optimizer) -> int:
    for group in trial.param_groups:
        group.update((name, False) for name in _KERNELS if name in group)
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    step = type(trial).step
    if getattr(step, "hooked", False):  # torch's wrapper would call the hooks of all optimizers
        step = step.__wrapped__  # type: ignore[attr-defined]  # functools.wraps
    with torch.no_grad():
        step(trial)
    return _bytes_of(trial.state.values())


def _bytes_of(states: Iterable[Mapping[str, Any]]) -> int:
    tensors = (one for state in states for one in tree_iter([*state.values()]) if isinstance(one, Tensor))
    return sum(logical_bytes(one) for one in tensors if one.dim())


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types for it
    """Answers ``item()`` of a fake tensor with 0.5 (an integer with 1): a step may divide by x, log(x) and 1 - x."""

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if schema_of(func).name == "aten::_local_scalar_dense":
            return 0.5 if args[0].dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _trying(name: str) -> Iterator[None]:
    with by_itself(), FakeTensorMode(allow_non_fake_inputs=True), _Answers():  # type: ignore[no-untyped-call]  # as above
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"optimizer={name} is not accepted: its states were not found by a step on tensors without bytes "
                f"({type(error).__name__}: {error}). Give their bytes in optimizer_bytes"
            ) from error
