"""What stands for the tensors of a model and of its inputs while a step is traced: see the notes in trace.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eager_offload._torch import (
    is_fake,
    is_plain_fake,
    is_wrapper,
    storage_key,
    tree_iter,
    tree_map,
    without_dispatch_modes,
)
from eager_offload.errors import PlanError

#: Bytes of a tensor whose numbers are known; a larger one is fake.
MOST_KNOWN = 64 << 20


class StandIns:
    """What stands for the tensors of a model and its inputs."""

    def __init__(self, has: Callable[[Tensor], None]) -> None:
        #: Is called with each.
        self._has = has
        self._wholes: dict[int, Tensor] = {}
        self._found: dict[int, Tensor] = {}
        self._owners: list[object] = []  # no key is used twice

    def of_inputs(self, inputs: object) -> Any:
        return tree_map(lambda one: self._of(one) if isinstance(one, Tensor) else one, inputs)

    def copy_of(
        self, model: nn.Module, loss: Callable[[Any], Tensor] | None
    ) -> tuple[nn.Module, Callable[[Any], Tensor] | None]:
        """The model, and the loss if that is a module, with stand-ins for all tensors; raises ``PlanError`` where it
        cannot."""
        found: dict[int, Any] = {}
        for name, module in model.named_modules():
            for value in vars(module).values():
                for one in tree_iter(value):
                    if isinstance(one, Tensor):
                        try:
                            self._of(one)
                        except PlanError as error:
                            raise PlanError(f"{name or 'the model'}: {error}") from error
                    elif isinstance(one, torch.Generator) and id(one) not in found:
                        with without_dispatch_modes():  # its state is a tensor
                            found[id(one)] = one.clone_state()
        try:
            return copy.deepcopy((model, loss), {**found, **self._found})
        except Exception as error:
            raise PlanError(
                f"the model cannot be copied, which tracing it takes ({type(error).__name__}: {error}). Give the "
                "module inside of what wraps it"
            ) from error

    def _of(self, tensor: Tensor) -> Tensor:
        if (known := self._found.get(id(tensor))) is not None:
            return known
        if is_wrapper(tensor) or not (type(tensor) in (Tensor, nn.Parameter) or is_plain_fake(tensor)):
            raise PlanError(f"a {type(tensor).__name__} is none of the tensors that a plan can be made for")
        if tensor.layout is not torch.strided:
            raise PlanError(f"a tensor of the layout {tensor.layout} is none that a plan can be made for")
        if _is_known(tensor):
            with without_dispatch_modes(), torch.no_grad():
                made = tensor.detach().to("cpu", copy=True)
        else:
            made = self._fake(tensor)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        elif tensor.requires_grad:
            made.requires_grad_()
        self._found[id(tensor)] = made
        self._owners.append(tensor)
        self._has(made)
        return made

    def _fake(self, tensor: Tensor) -> Tensor:
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        storage = tensor.untyped_storage()
        whole = self._wholes.get(storage_key(storage))
        if whole is None or whole.dtype != dtype:
            if tensor.nbytes == storage.nbytes():
                made = self._wholes[storage_key(storage)] = torch.empty_strided(size, stride, dtype=dtype)
                return made
            whole = torch.empty(storage.nbytes() // dtype.itemsize, dtype=dtype)
            self._wholes[storage_key(storage)] = whole
        return whole.as_strided(size, stride, tensor.storage_offset())


def _is_known(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are there: see [Note: known numbers]."""
    return (
        not is_fake(type(tensor))
        and tensor.device.type != "meta"
        and not tensor.dtype.is_floating_point
        and not tensor.dtype.is_complex
        and tensor.nbytes <= MOST_KNOWN
    )
