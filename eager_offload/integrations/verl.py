"""verl: ``actor_rollout_ref.model.external_lib=eager_offload.integrations.verl``, and its own switch,
``actor_rollout_ref.model.enable_activation_offload=True``, has this library underneath.

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
#: By model, what its calls run in; a further call for the same model changes nothing.
_calls: weakref.WeakKeyDictionary[nn.Module, tuple[Offload, OffloadedCalls]] = weakref.WeakKeyDictionary()


def enable_activation_offloading(model: nn.Module, strategy: str, enable_ckpt: bool = False) -> Offload:
    """Has training calls of ``model`` offload, in place of verl's function of this name, and returns the ``Offload``.

    Args:
        model: as the engine has wrapped it.
        strategy: any; verl's own takes ``"fsdp"`` and ``"fsdp2"``.
        enable_ckpt: changes nothing: checkpointing stays as the model has it, and its inputs move.
    """
    if model not in _calls:
        offload = offload_from(None)
        offload.skip_in(model)
        _calls[model] = offload, OffloadedCalls(model, offload)
    return _calls[model][0]


put_everywhere("verl", _NAME, getattr(theirs, _NAME), enable_activation_offloading)
