"""What inside of a model moves saved tensors away by hooks of its own: the innermost hooks alone see a tensor."""

from __future__ import annotations

import warnings

from torch import nn

from eager_offload._torch import offloaded_modules

__all__ = ["tell_what_hides"]


def tell_what_hides(model: nn.Module, instead: str) -> None:
    """Warns of modules that torch's ``offload_wrapper`` stands around.

    Those that are checkpointed and no more hide nothing: what is kept of them, their inputs, is offloaded.

    Args:
        model: that is about to train.
        instead: how it is left out in the caller's framework.
    """
    if names := offloaded_modules(model):
        warnings.warn(
            f"eager_offload: offload_wrapper stands around modules of this model ({len(names)}, {names[0]!r} the first "
            f"of them) and hides from us what is saved there. Leave it out: {instead}. What checkpointing keeps, the "
            "inputs of what is checkpointed, we move",
            RuntimeWarning,
            stacklevel=3,
        )
