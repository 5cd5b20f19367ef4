"""Replaces verl's activation offloading. Set both

    actor_rollout_ref.model.external_lib=eager_offload.integrations.verl
    actor_rollout_ref.model.enable_activation_offload=True

verl imports this module before it builds a model. Settings come from ``EAGER_OFFLOAD_*``.
"""

from __future__ import annotations

import weakref

from torch import nn

from eager_offload import Offload
from eager_offload.integrations.calls import OffloadedCalls, missing, offload_from, put_everywhere

try:
    import verl.utils.activation_offload as theirs  # type: ignore[import-not-found]  # not a development requirement
except ImportError as error:
    raise missing("verl", error) from error

__all__ = ["enable_activation_offloading"]

_NAME = "enable_activation_offloading"
#: The ``Offload`` and the wrapped calls of each model.
_calls: weakref.WeakKeyDictionary[nn.Module, tuple[Offload, OffloadedCalls]] = weakref.WeakKeyDictionary()


def enable_activation_offloading(model: nn.Module, strategy: str, enable_ckpt: bool = False) -> Offload:
    """Makes training calls of ``model`` offload and returns the ``Offload``. Replaces verl's function of this name.

    A second call with the same model changes nothing.

    Args:
        model: the module as verl's engine wrapped it.
        strategy: ignored; verl's own function takes ``"fsdp"`` and ``"fsdp2"``.
        enable_ckpt: ignored; if the model checkpoints blocks, their inputs move.
    """
    if model not in _calls:
        offload = offload_from(None)
        offload.skip_in(model)
        _calls[model] = offload, OffloadedCalls(model, offload)
    return _calls[model][0]


put_everywhere("verl", _NAME, getattr(theirs, _NAME), enable_activation_offloading)
