"""Models that are sharded or wrapped, and the results of collectives."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from eager_offload.torch_private import if_imported


class ShardedGroup(NamedTuple):
    """Parameters that ``fully_shard`` gathers together."""

    modules: tuple[nn.Module, ...]
    """Those that were sharded in one call."""
    parameters: tuple[Tensor, ...]
    """The shards."""
    frees: bool
    """Whether the gathered parameters are freed between forward and backward."""
    policy: Any
    """A ``torch.distributed.fsdp.MixedPrecisionPolicy``."""


def is_distributed(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is a ``DTensor``."""
    kind = if_imported("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


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
            if group is not None:  # modules inside have all of its parameters
                groups[id(group)] = group
    return [
        ShardedGroup(
            tuple(group.modules),
            tuple(one.sharded_param for one in group.fsdp_params),
            group.post_forward_mesh_info is not None,
            group.mp_policy,
        )
        for group in groups.values()
    ]


def without_sharding(module: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a bare module of the class that ``module`` had before ``fully_shard``, and the attributes of ``module``
    without those of ``fully_shard``, its hooks on forward among them."""
    kept = dict(vars(module))
    kept.pop("_compiled_call_impl", None)  # which calls `module`, and a plan runs what it compiles as it is written
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


def wrapped_modules(model: nn.Module, kind: str) -> list[str]:
    """Returns the names of the modules in ``model`` with torch's ``CheckpointWrapper``, or with its ``OffloadWrapper``,
    which moves all their saves to host memory."""
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
