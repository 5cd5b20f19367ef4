"""Functions of torch that may save other tensors on the device than a trace without that device writes down.

torch chooses between kernels by device, type and shape. A trace for CUDA has its operators for some of them (target.py)
and those of a CPU for the others. A plan names both kinds where a step calls them, and the first steps on the device
tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eager_offload.torch_private.calls import schema_of

_FUSED = "attention (written down as the kernel of CUDA that torch's rules choose)"
_BATCH_NORM = "batch norm (cuDNN may save a reserve besides)"
_RECURRENT = "recurrent layers (cuDNN saves one reserve, for oneDNN's workspace or each step's tensors)"
#: What is said of a function, by its name in torch.
_GUESSED = {
    "_scaled_dot_product_flash_attention": _FUSED,
    "_scaled_dot_product_efficient_attention": _FUSED,
    "_scaled_dot_product_attention_math": "attention (written down in parts: no fused kernel of CUDA takes it)",
    "native_dropout": "dropout (written down as CUDA's kernel, which saves a mask of one byte an element)",
    "cudnn_batch_norm": "batch norm (written down as cuDNN's, which may save a reserve besides)",
    **dict.fromkeys(("batch_norm", "native_batch_norm", "instance_norm"), _BATCH_NORM),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _RECURRENT),
    **dict.fromkeys(
        ("lstm_cell", "gru_cell"), "recurrent cells (one kernel saves a workspace, for each gate's tensors)"
    ),
    "ctc_loss": "CTC loss (cuDNN saves its gradient, for the probabilities of paths)",
    "_weight_norm": "weight norm (one kernel, which saves the norms, for the tensors of several operators)",
}


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function of torch, whichever of its forms that is."""
    schema = schema_of(function)
    return getattr(function, "__name__", "") if schema is None else schema.name.partition("::")[2]


def guessed_name(function: Callable[..., Any]) -> str | None:
    """What a plan says of ``function``; ``None`` where it saves the same on each device."""
    return _GUESSED.get(name_of(function))
