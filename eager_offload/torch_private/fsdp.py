"""Sharded and wrapped models, and the results of collectives."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from eager_offload.torch_private import if_imported


class ShardedGroup(NamedTuple):
    """Parameters that ``fully_shard`` gathers together."""

    modules: tuple[nn.Module, ...]
    """The modules sharded in one call."""
    parameters: tuple[Tensor, ...]
    """The shards."""
    sizes: tuple[torch.Size, ...]
    """The sizes of the gathered parameters on one device."""
    specs: tuple[Any, ...]
    """The spec of each gathered parameter under tensor parallelism: see ``spec_of``; ``None`` without."""
    shards: int
    """The number of devices over which each parameter is sharded."""
    frees: bool
    """Whether the gathered parameters are freed between forward and backward."""
    policy: Any
    """A ``torch.distributed.fsdp.MixedPrecisionPolicy``."""


def is_distributed(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is a ``DTensor``."""
    kind = if_imported("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def spec_of(tensor: Tensor) -> Any:
    """Returns the mesh, the placements, and the shape, stride and type of a ``DTensor``, without the tensor."""
    return cast(Any, tensor)._spec


def distributed(local: Tensor, spec: Any) -> Tensor:
    """Returns a ``DTensor`` with ``spec`` from the part ``local`` of this rank."""
    kind: Any = if_imported("torch.distributed.tensor", "DTensor")
    made: Tensor = kind.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
    return made


def rules_of_shapes() -> list[tuple[type, str]]:
    """Returns the class and the name of the method by which ``DTensor`` finds the shape of a result: it runs the
    operator on tensors of the whole shapes, without bytes."""
    kind = if_imported("torch.distributed.tensor._sharding_prop", "ShardingPropagator")
    name = "_propagate_tensor_meta_non_cached"
    return [(kind, name)] if hasattr(kind, name) else []


def is_fully_sharded(module: nn.Module) -> bool:
    """Returns whether ``fully_shard`` was called with ``module``."""
    kind = if_imported("torch.distributed.fsdp", "FSDPModule")
    return kind is not None and isinstance(module, kind)


def sharded_groups(model: nn.Module) -> list[ShardedGroup]:
    """Returns the groups of parameters of ``model`` that ``fully_shard`` gathers, in the order of its modules."""
    groups: dict[int, Any] = {}
    for module in model.modules():
        if is_fully_sharded(module):
            group = cast(Any, module)._get_fsdp_state()._fsdp_param_group
            if group is not None:  # None if inner modules hold all parameters
                groups[id(group)] = group
    return [
        ShardedGroup(
            tuple(group.modules),
            tuple(one.sharded_param for one in group.fsdp_params),
            tuple(one._orig_size for one in group.fsdp_params),
            tuple(
                getattr(one, "_unsharded_dtensor_spec", None) or getattr(one, "_tp_spec", None)  # in torch 2.11
                for one in group.fsdp_params
            ),
            group.mesh_info.shard_mesh_size,
            group.post_forward_mesh_info is not None,
            group.mp_policy,
        )
        for group in groups.values()
    ]


def without_sharding(module: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a bare module of the class that ``module`` had before ``fully_shard``, and the attributes of ``module``
    except those of ``fully_shard`` (e.g. its forward hooks)."""
    kept = dict(vars(module))
    kept.pop("_compiled_call_impl", None)  # calls `module`; plans run modules uncompiled
    for name, one in kept.items():
        if isinstance(one, OrderedDict):  # hooks, or states of functions such as `fully_shard`
            kept[name] = OrderedDict(
                (key, value)
                for key, value in one.items()
                if isinstance(value, nn.Module)
                or not str(getattr(value, "__module__", "")).startswith("torch.distributed.fsdp.")
            )
    kind: type[nn.Module] = type(module).__mro__[2]
    return kind.__new__(kind), kept


def pipeline_methods() -> list[tuple[type, str, bool]]:
    """Returns methods of pipeline schedules as class, name and whether it runs a step; the others run each stage to
    find its shapes."""
    found = []
    for kind, prepare in (
        ("PipelineScheduleSingle", "_initialize_stage"),
        ("PipelineScheduleMulti", "_initialize_stages"),
    ):
        schedule = if_imported("torch.distributed.pipelining.schedules", kind)
        found += [(schedule, name, name == "step") for name in ("step", prepare) if hasattr(schedule, name)]
    return found


def wrapped_modules(model: nn.Module, kind: str) -> list[str]:
    """Returns the names of the modules in ``model`` with torch's wrapper ``kind``: ``CheckpointWrapper``, or
    ``OffloadWrapper``, which moves all saves to host memory."""
    wrapper = if_imported("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", kind)
    return [name for name, module in model.named_modules() if wrapper is not None and isinstance(module, wrapper)]


def is_collective(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is the result of a functional collective for which nothing has waited yet."""
    kind = if_imported("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    return kind is not None and isinstance(tensor, kind)


def finish_collective(tensor: Tensor) -> None:
    """Makes the current stream wait for the functional collective that fills ``tensor``, if there is one.

    Every reader of such a tensor waits first; repeated waits do nothing.
    """
    if is_collective(tensor):
        cast(Any, tensor).trigger_wait()
